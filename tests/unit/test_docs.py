"""The documents are true: links lead somewhere, key tables are current, and every name in backticks exists."""

from __future__ import annotations

import ast
import html
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import paceline
from paceline.settings import shipped
from paceline.settings.addresses import fields_at

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/paceline"
ROOTS = (ROOT, SOURCE, ROOT / "docs", ROOT / "benchmarks")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

FOREIGN = {
    "BatchNorm2d",
    "torch.export.load",
    "TarInfo.offset_data",
    "torch.var_mean",
    "validate_dataset.py",
    "host_benchmark.py",
    "demo_resnet50_hvd.sh",
}
"""Names of torch, of Python's library and of older systems that look like ours."""
WRITTEN = {
    "plan.yaml", "data.json", "average.json", "state.json", "manifest.json", "metadata.json", "paceline-pack.json",
    "trace.json", "memory.pickle", "preprocess.json", "preprocess.py", "model.onnx", "model.pt2",
    *(f"paceline.{name}" for name in paceline.__all__),
    "report.html", "results.png", "samples.json", "relabel.csv", "plotly.min.js",
    "log.txt", "mlperf.log", "training.csv", "validation.csv", "training.index", "validation.index", "plan.recipe",
    "plan.placement", "recipe.mix", "machine.cores", "machine.numa_nodes", "machine.memory", "machine.host",
    "machine.system",
    "machine.processor", "machine.accelerator", "machine.accelerators", "machine.accelerator_memory",
    "machine.bf16",
}  # fmt: skip
"""Dotted words that are no settings: files that Paceline writes, its functions, attributes and fields of the record."""
ELSEWHERE = {
    "averaged/", "validation/", "test/", "test/quarantine.jsonl", "train/", "val/", "stage1/unit1.conv1.weight",
    "stage1/unit1.conv1.weight.momentum", "tensorboard/", "wandb/", "mlflow.db", "training/loss", "validation/top1",
    "average/top1", "weights/stem.conv.weight", "gradients/stem.conv.weight",
    "samples/images",
}  # fmt: skip
"""Paths in the folders of runs and of users' images, names of parameters, and keys in trackers."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    shown = [(target, "") for target in re.findall(r'(?:src|srcset)="([^"]*)"', text)]
    for target, heading in [*re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text), *shown]:
        if not target.startswith("http"):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not heading or heading in headings(linked), f"{page.name} links to {target}#{heading}"


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_figures_of_the_readme_stand_in_the_records_that_they_link_to() -> None:
    row = r"^\| (.*) \| (.*) \| \[.*?\]\((docs/results/.*?\.md)(?:#.*?)?\) \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 5
    for _, result, page in rows:
        record = (ROOT / page).read_text()
        figures = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?", result)
        assert figures
        assert [figure for figure in figures if figure not in record] == []


def test_pictures_are_small() -> None:
    pictures = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".svg", ".png")]
    assert {path.name: path.stat().st_size for path in pictures if path.stat().st_size > 300_000} == {}
    drawn = [path.read_text() for path in pictures if path.suffix == ".svg"]
    assert not any("@font-face" in text for text in drawn), "a page would ask another host for a font"


def test_the_picture_of_verify_shows_the_layouts_of_its_record() -> None:
    picture = html.unescape((ROOT / "docs/pictures/verify.svg").read_text()).replace("\xa0", " ")
    table = (ROOT / "docs/results/verify.md").read_text().partition("\nlayout ")[2].partition("\n\n")[0]
    layouts = [line.partition("  ")[0] for line in table.splitlines()[1:]]
    assert len(layouts) >= 10
    assert [layout for layout in layouts if layout not in picture] == [], "run: python docs/pictures.py verify"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_recipes_that_exist(page: Path) -> None:
    verbs = "train|plan|verify|recipes|bench (?:data|train|infer)"
    name = r"(?!runs/)([a-z0-9]+/[a-z0-9-]+)\b(?!\nerror:)"
    for word in re.findall(f"paceline (?:{verbs}) {name}", page.read_text()):
        assert word in shipped.names("recipes"), f"{page.name} speaks of {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_names_and_settings_exist(page: Path) -> None:
    assert faults(page.read_text()) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        "the unions `Optimiser` and `Schedule`", "`optimisation.py`", "refuse it in `plan.py`", "`optim/descent.py`",
        "`Slabs` in `optim/flat.py`", "`ema.rate`", "`on.micro`", "`on.micro_size=8`", "`tests/unit/test_nothing.py`",
        "`take_off(session)`", "`Whole.learn`", "`State` in `record.py`", "`take_step` of `training/loop.py`",
        "`optimizer.trust=1`", "`keep_whole` says", "`_fall`", "a case in `lr` of\n`training/step.py`",
        "`augmenting/`", "`data/formats`", "`nvidia/resnet51`",
    ],
)  # fmt: skip
def test_what_does_not_exist_would_be_found(wrong: str) -> None:
    assert faults(wrong)


def faults(text: str) -> dict[str, str]:
    """What is wrong with each name in backticks that looks like one of ours."""
    prose = re.sub(r"```.*?```|^ {4}.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = {word: fault for word in re.findall(r"`([^`\n]+)`", prose) if (fault := fault_of(word))}
    for name, path in re.findall(r"`([\w.]+)(?:\(\w*\))?`\s(?:in|of)\s`([\w/]+\.py)`", prose):
        file = SOURCE / path
        if file.is_file() and name.split(".")[0] not in defined_in(file):
            found[f"{name} in {path}"] = "it is not there"
    return found


def fault_of(word: str) -> str:
    """What is wrong with one word, or nothing."""
    if re.search(r"[<>|*\s]|\.\.\.|^[-~$.\"/]|[A-Z]{3,}$", word):
        return ""
    if word in FOREIGN | WRITTEN | ELSEWHERE:
        return ""
    if re.fullmatch(r"[\w./-]+\.(py|md|toml)|constraints.txt|[\w.-]+/[\w./-]*", word):
        known = word in {*shipped.names("recipes"), *shipped.names("placements")}
        return "" if known or any((root / word).exists() for root in ROOTS) else "no such file"
    if re.fullmatch(r"_?[a-z]\w*\([\w, ]*\)", word):
        return "" if word.partition("(")[0] in names() or word in CALLS else "no such function"
    if re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)?(\(\))?", word):
        owner, _, member = word.removesuffix("()").partition(".")
        return "" if owner in names() and (not member or member in names()) else "no such class"
    if re.fullmatch(r"_[a-z]+|_?[a-z]+(_[a-z]+)+", word):
        return "" if word in words() else "no such name"
    key, equals, _ = word.partition("=")
    if re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)+", key) and not re.search(r"\.(safetensors|jsonl|yaml|csv|pth|tar)$", key):
        return "" if fields_at(key) or (not equals and key in modules()) else "no such setting"
    return ""


CALLS = {"block(x, batch)", "norm(x, batch, shortcut)", "make_norm(channels, activation, role)", "backward()"}
"""Calls of arguments and of torch's methods."""


@cache
def modules() -> set[str]:
    """Every module of ours and each of its names, dotted: keyed.words."""
    return {f"{file.stem}.{name}" for file in SOURCE.rglob("*.py") for name in defined_in(file)}


@cache
def words() -> set[str]:
    """Every word of the source: names of settings, of fields in the record and of functions alike."""
    files = [*SOURCE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    return {word for file in files for word in re.findall(r"\w+", file.read_text())}


@cache
def names() -> set[str]:
    """Every name that is defined somewhere in the source."""
    return {name for file in SOURCE.rglob("*.py") for name in defined_in(file)}


@cache
def defined_in(file: Path) -> frozenset[str]:
    """The functions, classes, methods, constants and fields that a file defines."""
    return frozenset(_definitions(ast.parse(file.read_text())))


def _definitions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("page", ["recipes", "placements"])
def test_key_tables_are_what_the_code_says(page: str) -> None:
    spec = importlib.util.spec_from_file_location("keys", ROOT / "docs/keys.py")
    assert spec is not None
    assert spec.loader is not None
    keys = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(keys)
    text = (ROOT / f"docs/{page}.md").read_text()
    rows = keys.recipe_rows() if page == "recipes" else keys.placement_rows()
    assert keys.renewed(text, rows) == text, "run: python docs/keys.py"


@pytest.mark.parametrize("page", ["recipes", "placements"])
def test_key_tables_speak_of_settings_and_not_of_python(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    assert not re.search(r"Undefined|typing\.|Annotated|<class|from_", text)
