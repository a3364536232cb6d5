"""Mutated words, pages and files of runs and data: each is answered in time and in one line, and nothing is lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import SMALL, environment
from image_files import clean_pictures
from paceline import cli
from paceline.settings import shipped
from paceline.settings.addresses import all_addresses
from paceline.visible import visible
from pictures_made import write_folder

SECONDS = 2.0
"""Of the processor, for any answer."""
HANGS = 40
"""Seconds after which nobody waits any longer."""
STATUSES = (0, 1, 2, 75)
Chance = random.Random

NUMBERS = (
    "0", "1", "-1", "2", "3", "7", "64", "1000", "65536", "1e9", "1e12", "1e300", "1e-300", "-0.0", ".5", "nan", "inf",
    "1e999", "0x10", "1_000", "9" * 24, "9" * 30, "9" * 310, "9" * 5000, "1.5.5", "1e", "٣", "²",
)  # fmt: skip
TEXTS = (
    "", "~", "null", "true", "no", "auto", "resnet18", "efficientnet-b0", "inception-resnet-v2", "shapes", "cifar10",
    "images", "generated", "sgd", "adamw", "constant", "stepped", "exponential", "cosine", "polynomial", "[]", "{}",
    "[1, 2, 3]", "{name: sgd}", "{name: x, y: z}", "5 epochs", "1/0 epochs", "0 steps", "2%", "1e9 steps", "3 minutes",
    "1/16 epochs", "0.1 per 256 images", "2^-6 per image", "2^9999 per image", "8 GiB", "9999999999 GiB", "[" * 300,
    "{a: " * 300, "&a [*a]", "*a", "!!python/object:os.system x", "<<: 3", "a: b: c", "\x1b[31mred", "\u202eevil",
    "\udc80",
    "\"\\0\"", "'", '"', "\t", "\n", "a\nb", "#", "---", "...", "? [a]", "x" * 5000, "/", ".", "..", "~nobody/x",
    "/dev/zero",
    "/dev/stdin", "[/bold]", "[red]", ":smile:", "%s%n", "{0}", "timm:", "timm:x", "torchvision:resnet18", "a:b:c",
)  # fmt: skip
VERBS: tuple[list[str], ...] = (
    ["plan"], ["plan", "--json"], ["plan", "--yaml"], ["plan", "cifar10/resnet20"], ["plan", "timm/resnet50-a3"],
    ["plan", "small.yaml"], ["plan", "small.yaml", "--json"], ["models", "resnet50"], ["recipes"], ["plan", "--on"],
    ["data", "show", "pictures"], ["validate", "run", "--checkpoint", "99"], ["replay", "run", "--step"],
    ["average", "run", "--last", "99"], ["average", "run", "--last"], ["validate", "run", "--checkpoint"],
    ["plan", "--data"],
    ["resume"], ["train", "--out"], ["bench", "data"], ["verify", "on.replicas=1"], [],
)  # fmt: skip


def any_value(chance: Chance) -> str:
    return chance.choice(chance.choice((NUMBERS, TEXTS)))


def any_word(chance: Chance) -> str:
    """A setting with any value, or what is no setting at all."""
    kind = chance.random()
    if kind < 0.75:
        return f"{chance.choice(all_addresses())}={any_value(chance)}"
    if kind < 0.85:
        return f"{chance.choice(all_addresses())}.{chance.choice(('name', 'x', '0', '..'))}={any_value(chance)}"
    if kind < 0.95:
        return any_value(chance)
    return chance.choice(("--json", "--data", "--device", "--replicas", "--lr", "--", "-x", "--out")) + any_value(
        chance
    )


def mutated(text: bytes, chance: Chance) -> bytes:
    """A file with a few changes: of a value, a line, or a few bytes."""
    content = bytearray(text)
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(len(content) + 1)
        match chance.randrange(9):
            case 0:
                content[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del content[place : place + chance.choice((1, 2, 30, 1000))]
            case 2:
                content[place:place] = any_value(chance).encode(errors="surrogateescape")
            case 3:
                content[place:place] = chance.choice(
                    (b"\0", b"\xff", b"\x1b[2J", b"\n", b"  ", b": ", b"- ", b"\r\n", b"}")
                )
            case 4:
                content[place:place] = content[place : place + chance.choice((10, 200, 3000))]
            case 5:
                del content[place:]
            case _:
                change_value(content, chance)
    return bytes(content)


def change_value(content: bytearray, chance: Chance) -> None:
    """Another value behind one of the colons."""
    colons = [place for place, byte in enumerate(content) if byte == ord(":")]
    if colons:
        start = chance.choice(colons) + 1
        ends = [end for end in (content.find(mark, start) for mark in (b",", b"\n", b"}")) if end > 0]
        content[start : min(ends, default=len(content))] = b" " + any_value(chance).encode(errors="surrogateescape")


Case = tuple[list[str], Path | None]
"""Words, and the file that was changed for them."""


def of_words(chance: Chance) -> Case:
    words = [*chance.choice(VERBS), *(any_word(chance) for _ in range(chance.choice((0, 1, 1, 1, 2, 3))))]
    if words[:1] in (
        ["train"],
        ["resume"],
        ["verify"],
        ["bench"],
    ):  # which would be busy for long if nothing were wrong
        words += ["epochs=x", "on.replicas=x"]
    return words, None


def change(path: Path, chance: Chance) -> Path:
    path.write_bytes(mutated(path.read_bytes(), chance))
    return path


def of_page(chance: Chance) -> Case:
    page = Path("page.yaml")
    names = shipped.names("recipes")
    page.write_bytes(chance.choice((SMALL, shipped.page("recipes", chance.choice(names))[0])).encode())
    verb = chance.choice((["plan", "page.yaml"], ["plan", "page.yaml", "--yaml"], ["recipes", "page.yaml", "--json"],
                          ["recipes", "page.yaml"], ["plan", "--on", "page.yaml"]))  # fmt: skip
    return verb, change(page, chance)


EARLY = (
    ["validate", "run", "--checkpoint", "99"], ["replay", "run", "--step", "9999"], ["average", "run", "--last", "99"],
    ["resume", "run", "epochs=3"], ["resume", "run", "on.micro_batch=7"],
    ["train", "small.yaml", "--out", "run", "seed=1"],
)  # fmt: skip


def of_plan(chance: Chance) -> Case:
    return chance.choice(EARLY), change(Path("run/plan.yaml"), chance)


def of_manifest(chance: Chance) -> Case:
    step = chance.choice(sorted(Path("run/checkpoints").iterdir()))
    path = chance.choice([step / "manifest.json", *sorted(step.iterdir())])
    return chance.choice((*EARLY, ["resume", "run"])), change(path, chance)


def of_record(chance: Chance) -> Case:
    words = chance.choice((*EARLY, ["validate", "run", "--all"], ["validate", "run", "--checkpoint", "best"],
                           ["resume", "run"], ["replay", "run", "--step", "9999"]))  # fmt: skip
    return words, change(Path("run/record.jsonl"), chance)


def of_data(chance: Chance) -> Case:
    """The fingerprint of a run's data."""
    words = [word.replace("run", "seen") if word == "run" else word for word in chance.choice(EARLY[:5])]
    return words, change(Path("seen/data.json"), chance)


def of_index(chance: Chance) -> Case:
    indices = sorted(path for path in Path("pictures").rglob("*.safetensors"))
    planned = ["plan", "small.yaml", "data={name: images, side: 8}", "augment.pad=0", "--data", "pictures"]
    shown = ["data", "show", "pictures"]
    words = chance.choice((shown, [*shown, "--json"], ["data", "check", "pictures"], planned))
    return words, change(chance.choice(indices), chance)


def of_labels(chance: Chance) -> Case:
    path = Path("labels").with_suffix(chance.choice((".csv", ".json")))
    files = {f"class{number:03d}": f"kind{number}" for number in range(4)}
    path.write_text(json.dumps(files) if path.suffix == ".json" else "".join(f"{a},{b}\n" for a, b in files.items()))
    return ["data", "show", "pictures", f"labels={path}"], change(path, chance)


KINDS: dict[str, tuple[int, Callable[[Chance], Case]]] = {
    "words": (40, of_words), "page": (20, of_page), "plan": (12, of_plan), "manifest": (6, of_manifest),
    "record": (6, of_record), "data": (5, of_data), "index": (6, of_index), "labels": (5, of_labels),
}  # fmt: skip
"""Out of a hundred cases, how many are of each kind."""


def prepare() -> None:
    """What cases start from: two small runs, pictures and their index, and a page."""
    Path("small.yaml").write_text(SMALL)
    write_folder(clean_pictures(24, 4), Path("pictures"), 1 / 4)
    Path("seen.yaml").write_text(
        SMALL.replace("augment: {pad: 1, flip: true}\n", "").replace("images: 96", "images: 24")
    )
    images = ["data={name: images, side: 8}", "--data", "pictures"]
    for words in (
        ["train", "small.yaml", "--out", "run", "on.save=2 steps", "on.keep_last=9"],
        ["train", "seen.yaml", "--out", "seen", *images],
        ["data", "show", "pictures"],
    ):
        status, _, told = answer(words)
        assert status == 0, told


def answer(words: list[str]) -> tuple[int, str, str]:
    """The command line, in this process: its status and what it printed."""
    sys.argv = ["paceline", *words]
    out, told, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), told.getvalue()


def complaints(words: list[str]) -> tuple[int, list[str]]:
    """What is wrong with how words are answered."""
    before = {path for folder in ("run", "seen") for path in Path(folder).rglob("*")}
    start = time.process_time()
    try:
        status, out, told = answer(words)
    except Exception:  # noqa: BLE001 - that is what is looked for
        return -1, [traceback.format_exc(limit=-6)]
    spent = time.process_time() - start
    wrong = [f"{spent:.1f} s"] if spent > SECONDS else []
    wrong += [f"status {status}"] if status not in STATUSES else []
    wrong += ["control characters"] if visible(out + told) != out + told else []
    if status == 2 and told.count("\n") != 1 and not told.startswith("Usage:"):
        wrong.append(f"{told.count(chr(10))} lines")
    wrong += ["a traceback"] if "Traceback" in told else []
    wrong += [f"{len(told)} characters"] if len(told) > 3000 else []
    wrong += [f"{path} is gone" for path in before if not path.exists()]
    if "--json" in words and status == 0 and out and not out.startswith("Usage"):
        try:
            json.loads(out)
        except ValueError:
            wrong.append("no JSON")
    return status, [f"{why}: {told[-500:]}" for why in wrong]


def fuzz(seed: str, count: str) -> None:
    """What a process of its own does: says what it is about, and then what was wrong, and how many ended how."""
    ended: Counter[str] = Counter()
    failed = []
    kinds = [kind for kind, (weight, _) in KINDS.items() for _ in range(weight)]
    with tempfile.TemporaryDirectory() as around:  # where a word names the folder above, all is small there, too
        place = f"{around}/here"
        Path(place).mkdir()
        os.chdir(place)
        os.environ["PACELINE_CACHE"] = place + "/cache"
        prepare()
        kept = Path(place + "-kept")
        shutil.copytree(place, kept)
        for number in range(int(count)):
            chance = Chance(f"{seed} {number}")
            kind = kinds[number % 100] if int(count) >= 100 else chance.choice(kinds)
            words, changed = KINDS[kind][1](chance)
            print(f"{kind} {number}: {words} {changed}".encode(errors="backslashreplace").decode(), file=sys.stderr)
            signal.alarm(HANGS)
            status, wrong = complaints(words)
            signal.alarm(0)
            ended[f"{kind} {status}"] += 1
            failed += [f"{kind} {number}: {[ascii(word[:200]) for word in words]} {changed}: {why}" for why in wrong]
            for name in ("run", "seen", "pictures"):
                if kind not in ("words", "page"):
                    shutil.rmtree(name, ignore_errors=True)
                    shutil.copytree(kept / name, name, copy_function=shutil.copy2)
        os.chdir("/")
        shutil.rmtree(kept)
    print(json.dumps({"ended": ended, "failed": failed}))


def run(seed: str, count: int) -> Counter[str]:
    """How many cases ended how, found out in a process that may die of it."""
    print("seed", seed)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, seed, str(count)], capture_output=True, timeout=1500, check=False,
        env=environment() | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"seed {seed}, status {done.returncode}: {done.stderr.decode()[-3000:]}"
    found = json.loads(done.stdout)
    print(json.dumps(found["ended"], sort_keys=True))
    assert not found["failed"], f"seed {seed}\n" + "\n".join(found["failed"])
    return Counter(found["ended"])


def test_a_few_mutated_words_and_files_are_answered_well() -> None:
    assert run("0", 40).total() == 40


@pytest.mark.long
def test_two_thousand_mutated_words_and_files_are_answered_well() -> None:
    ended = run(os.environ.get("PACELINE_FUZZ_SEED") or str(random.SystemRandom().randrange(10**9)), 2000)
    assert ended.total() == 2000
    assert ended["words 2"] > 100, "some words are refused"
    assert ended["words 0"] + ended["page 0"] > 100, "and some are not"


if __name__ == "__main__":
    fuzz(*sys.argv[1:])
