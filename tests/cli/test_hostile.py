"""Words, pages and files that nobody means well by: each is refused in one line at once, and no terminal obeys it."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from rich.progress import Progress

from conftest import SMALL, make_plan
from paceline import cli
from paceline.data.index.fingerprint import trained_classes
from paceline.data.index.scan import open_index
from paceline.errors import DataError, RunError
from paceline.job import make_job, prepare_folder
from paceline.record import Run, rows_of
from paceline.settings.data import Files
from paceline.settings.read import parse
from paceline.sink.console import ConsoleSink
from paceline.sink.log import LogSink
from paceline.terminal import Terminal
from paceline.visible import one_line, visible, visible_output

STEERING = "\x1b[31m\u202eevil\x07\x9b2J\x7f"
"""Turns a terminal red, the text around, rings the bell, and clears the screen by the shorter of two ways."""
SHOWN = "\\x1b[31m\\u202eevil\\x07\\x9b2J\\u007f"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
SECONDS = 2.0
"""Of the processor, for any answer, loading included."""


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that are not what their names say."""
    folder = tmp_path_factory.mktemp("traps")
    (folder / "deep.yaml").write_text("{a: " * 60_000)
    (folder / "laughs.yaml").write_text(LAUGHS)
    (folder / "keys.yaml").write_text("".join(f"key{number}: 1\n" for number in range(700_000)))
    (folder / "fewer.yaml").write_text("".join(f"key{number}: 1\n" for number in range(250_000)))
    os.mkfifo(folder / "pipe.yaml")
    (folder / "loop").symlink_to("loop")
    (folder / "data/train/a").mkdir(parents=True)
    (folder / "data/train/a/1.jpg").write_bytes(b"")
    return folder


def steers(text: str) -> bool:
    """Whether a text holds characters that a terminal obeys, or hides."""
    return visible(text) != text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "global_batch=123456789012345678901234"], "global_batch: input should be less than or equal to"),
        (["plan", "average.last=123456789012345678901234567890"], "average.last: input should be less than"),
        (["plan", "epochs=1e300"], "epochs: input should be less than or equal to"),
        (["plan", "epochs=1e9"], "a run has at most 999,999,999; write fewer epochs or a larger global_batch"),
        (["plan", "optimizer.lr=1e300"], "optimizer.lr: expected a learning rate of at most 1e+30"),
        (["plan", "optimizer.lr=9e29 per image"], "optimizer.lr makes the learning rate grow beyond 1e+30"),
        (["plan", "schedule={name: exponential, every: 1 step, factor: 9}"], "schedule.factor makes the learning rate"),
        (["plan", "augment.pad=100000"], "augment.pad: input should be less than or equal to"),
        (["plan", "augment.pad=1000"], "augment.pad 1000 is more than images of 32 pixels a side have to show; write"),
        (["plan", "model=efficientnet-b0", "model.depth=1e12"], "model.depth: input should be less than or equal to"),
        (["plan", "model=inception-resnet-v2", "model.units=[1000000000, 1, 1]"], "model.units.0: input should be"),
        (["plan", "on.replicas=100000"], "write at most on.replicas="),
        (["plan", "on.cpu_threads=1000000000"], "write at most on.cpu_threads="),
        (["plan", "on.loader_workers=1000000000"], "write at most on.loader_workers="),
        (["plan", "report=" + "9" * 400], "report: expected an amount with its unit"),
        (["plan", "report=" + "9" * 200_00 + "x"], "report: expected an amount with its unit"),
        (["plan", "seed=" + "9" * 30], "seed: input should be less than"),
        (["plan", "about=" + "[" * 50_000], "settings nest too deeply"),
        (["plan", "about=" + "[" * 30_000], "settings nest too deeply"),
        (["plan", "about=" + "[" * 5_000], "settings nest too deeply"),
        (["plan", ".".join("a" * 50_000) + "=1"], "no setting lies so deep"),
        (["plan", "about=\udc80"], "this is not UTF-8 text"),
        (["plan", "x" * 5000], "no recipe is named 'xxx"),
        (["plan", "deep.yaml"], "deep.yaml: settings nest too deeply"),
        (["plan", "laughs.yaml"], "laughs.yaml: has more than 100,000 values, so it is no page of settings"),
        (["plan", "keys.yaml"], "keys.yaml: cannot be read: is larger than 4 MiB"),
        (["plan", "fewer.yaml"], "fewer.yaml: has more than 100,000 values, so it is no page of settings"),
        (["plan", "pipe.yaml"], "pipe.yaml: cannot be read: is not a file"),
        (["plan", "--on", "pipe.yaml"], "pipe.yaml: cannot be read: is not a file"),
        (["plan", "--on", ""], "no placement is named ''"),
        (["data", "show", "data", "labels=pipe.yaml"], "pipe.yaml: the file of labels (data.labels) is not a file"),
        (["train", "--out", ""], "'' names no file or folder; write its path, or . for the folder that you are in"),
        (["resume", ""], "'' names no file or folder"),
        (["train", "cifar10/resnet20", "--data", "loop", "--out", "run"], "loop: there is no such folder"),
    ],
    ids=lambda value: ascii(" ".join(value))[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_would_take_forever_or_fall_over_is_refused_at_once(
    words: list[str], message: str, traps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(traps)
    start = time.process_time()
    status, out, told = call(words, monkeypatch, capsys)
    assert time.process_time() - start < SECONDS
    assert status == 2, told
    assert message in told
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert len(told) < 1500
    assert not out


def call(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The command line, in this process: its status and what it printed."""
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    status = 0
    try:
        cli.main()
    except SystemExit as end:
        status = int(end.code or 0)
    told = capsys.readouterr()
    return status, told.out, told.err


@pytest.mark.parametrize(
    "words",
    [
        ["recipes", "shapes/resnet8", "9" * 5000],
        ["validate", "run", "--checkpoint", "99", "x" * 5000],
        ["--data" + "9" * 5000],
        ["plan", "--" + "x" * 5000],
        ["train", "--lr", "9" * 5000],
        ["average", "run", "--last", "x" * 5000],
        ["x" * 5000],
        ["data", "x" * 5000],
    ],
    ids=lambda words: words[0][:20],
)
def test_a_very_long_word_is_not_repeated_whole(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, told = call(words, monkeypatch, capsys)
    assert status == 2
    assert len(out + told) < 1000


@pytest.mark.parametrize("form", [[], ["--yaml"], ["--json"]])
def test_a_plan_shows_what_would_steer_the_terminal(
    form: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"{STEERING}\n.yaml"
    Path(name).write_text(SMALL)
    words = ["plan", name, f"about={STEERING}", f"model=timm:{STEERING}"]
    status, out, told = call([*words, *form], monkeypatch, capsys)
    assert status == 0, told
    assert not steers(out)
    if form == ["--json"]:
        assert "evil" in json.loads(out)["network"]
    else:
        assert f"{SHOWN}\\n.yaml" in out
    if form == ["--yaml"]:  # the names of files and words are in comments, which must not end
        assert parse(out, "plan.yaml").values["recipe"]["about"] == STEERING


@pytest.mark.parametrize(
    "words",
    [
        ["plan", STEERING],
        ["plan", f"{STEERING}.yaml"],
        ["plan", f"{STEERING}=1"],
        ["plan", f"model={STEERING}"],
        ["plan", f"init.from={STEERING}"],
        ["plan", f"epochs={STEERING}\n2"],
        ["recipes", STEERING],
        ["resume", STEERING],
        ["data", "show", STEERING],
        ["models", STEERING],
        [STEERING],
        ["plan", f"--{STEERING}"],
    ],
)
def test_a_fault_shows_what_would_steer_the_terminal(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, told = call(words, monkeypatch, capsys)
    assert status == 2
    assert not steers(out + told)
    assert SHOWN.removesuffix("\\u007f") in told
    assert told.count("\n") == 1 or told.startswith("Usage:")


def test_names_of_classes_and_images_show_what_would_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    for label in ("cat", STEERING):
        (tmp_path / "data/train" / label).mkdir(parents=True)
        (tmp_path / "data/train" / label / f"{STEERING}\n.jpg").write_bytes(b"no image")
    for verb in ("show", "check"):
        for form in ([], ["--json"]):
            _, out, told = call(["data", verb, str(tmp_path / "data"), *form], monkeypatch, capsys)
            assert not steers(out + told)
            assert json.loads(out) if form else SHOWN in out


def test_the_terminal_of_a_run_and_its_log_show_what_would_steer_a_terminal(tmp_path: Path) -> None:
    (tmp_path / STEERING).mkdir()
    plan, run, out = make_plan(), Run(tmp_path / STEERING, "append"), io.StringIO()
    console = Terminal(file=out, width=200, force_terminal=True)
    sinks = [ConsoleSink(plan, run, console), LogSink(plan, run, Console(quiet=True))]
    for sink in sinks:
        sink.row({"kind": "note", "text": f"{STEERING}\nnext", "warning": False})
        sink.row({"kind": "failed", "why": STEERING})
        sink.row({"kind": "interrupted", "step": 3})
    log = (run.folder / "log.txt").read_text()
    assert not steers(log)
    assert log.count("\n") == 3
    for text in (log, out.getvalue()):
        assert SHOWN in text
        assert "\x1b[31m" not in text
        assert "\u202e" not in text


def test_a_terminal_keeps_its_own_styles() -> None:
    out = io.StringIO()
    Terminal(file=out, force_terminal=True, width=80, color_system="standard").print(f"[bold]{STEERING}[/bold]")
    assert out.getvalue() == f"\x1b[1m{SHOWN}\x1b[0m\n"


def test_a_bar_steers_the_terminal_and_what_is_printed_meanwhile_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with visible_output(), Progress(console=Terminal(force_terminal=True, width=80), refresh_per_second=1) as bar:
        bar.add_task("training", total=3)
        print(STEERING)
    assert "\\x1b[2K" not in out.getvalue()
    assert "\x1b[2K" in out.getvalue()
    assert "evil" in out.getvalue()
    assert not {"\x07", "\x9b", "\u202e"} & set(out.getvalue())


def test_text_stays_what_it_is() -> None:
    for text in ("naïve 画像 \t\n", "Köln → 1e-3", "C:\\x"):
        assert visible(text) == text
    assert one_line("a\nb") == "a\\nb"
    assert visible("\udcff\U000e0041") == "\\udcff\\U000e0041"


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder of a user whom permissions bite, as whom this process acts meanwhile."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        user = os.geteuid()
        if user == 0:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)
            for path in folder.rglob("*"):
                if not path.is_symlink():
                    path.chmod(0o700)


def test_what_may_not_be_read_is_named(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(nobody / "cache"))
    monkeypatch.chdir(nobody)
    Path("small.yaml").write_text(SMALL)
    Path("secret.yaml").write_text(SMALL)
    for folder in ("run/checkpoints", "shut/inside", "pictures/train/cat", "pictures/train/dog", "cifar"):
        Path(folder).mkdir(parents=True)
    Path("pictures/train/cat/1.jpg").symlink_to(nobody / "shut/inside/1.jpg")
    Path("cifar/link").symlink_to(nobody / "shut/inside")
    Path("shut").chmod(0o600)
    Path("secret.yaml").chmod(0)
    cases = [
        (["plan", "secret.yaml"], "secret.yaml: cannot be read: Permission denied"),
        (["plan", "cifar10/resnet20", "--data", "shut/inside"], "shut/inside: cannot be read: Permission denied"),
        (
            ["train", "small.yaml", "--out", "shut/inside/run"],
            "shut/inside/run/plan.yaml: cannot be read: Permission denied; ch",
        ),
        (["resume", "shut/inside"], "shut/inside/plan.yaml: cannot be read: Permission denied"),
        (["validate", "shut/inside"], "shut/inside/plan.yaml: cannot be read: Permission denied"),
        (["data", "show", "shut/inside"], "shut/inside: cannot be read: Permission denied"),
        (["data", "show", "pictures"], "1.jpg: cannot be read: Permission denied; remove the link, or allow"),
        (["plan", "images/resnet18", "--data", "shut"], "shut"),
        (["train", "cifar10/resnet20", "--data", "cifar"], "'data_batch_1.bin' is neither here"),
        (["plan", "data=images", "data.labels=shut/inside/x.csv", "--data", "pictures"], "denied"),
    ]
    for words, message in cases:
        status, _, told = call(words, monkeypatch, capsys)
        assert message in told
        assert (status, told.count("\n")) == (2, 1), told


def test_a_run_whose_parts_may_not_be_read_says_so(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(nobody)
    job = make_job(str(write_page(nobody)), [], None, None, None, "cpu")
    prepare_folder(job, nobody / "run")
    (nobody / "run/checkpoints").mkdir()
    (nobody / "run/checkpoints").chmod(0)
    status, _, told = call(["resume", "run"], monkeypatch, capsys)
    assert (status, told.count("\n")) == (2, 1), told
    assert "run/checkpoints: cannot be read: Permission denied" in told
    (nobody / "run/checkpoints").chmod(0o700)
    (nobody / "run/plan.yaml").chmod(0)
    for words in (["resume", "run"], ["train", "small.yaml", "--out", "run"]):
        status, _, told = call(words, monkeypatch, capsys)
        assert (status, told.count("\n")) == (2, 1), told
        assert "run/plan.yaml: cannot be read: Permission denied" in told


def write_page(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(SMALL)
    return path


def test_what_the_disk_refuses_anywhere_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "a/file")

    monkeypatch.setattr("paceline.command.recipes.run", refuse)
    assert call(["recipes"], monkeypatch, capsys) == (1, "", "error: a/file: Permission denied\n")


def test_weights_are_not_waited_for(tmp_path: Path) -> None:
    from paceline.model.pretrained import read_weights

    os.mkfifo(tmp_path / "weights.safetensors")
    with pytest.raises(DataError, match="is not a file; give a run folder"):
        read_weights(str(tmp_path / "weights.safetensors"))
    with pytest.raises(DataError, match="is not there"):
        read_weights("~nobody-of-this-name/weights.pth")


def test_pipes_in_a_run_folder_are_not_waited_for(tmp_path: Path) -> None:
    for name in (".lock", "record.jsonl", "data.json"):
        os.mkfifo(tmp_path / name)
    for read in (lambda folder: Run(folder, "own"), rows_of, trained_classes):
        with pytest.raises(RunError, match="cannot be"):
            read(tmp_path)


def test_a_pipe_in_the_place_of_an_index_is_not_waited_for(tmp_path: Path) -> None:
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "1.jpg")
    expected = open_index(Files(name="images"), tmp_path).classes
    pipes = list((tmp_path / ".paceline").glob("*.safetensors"))
    for path in pipes:
        path.unlink()
        os.mkfifo(path)
    assert pipes
    assert open_index(Files(name="images"), tmp_path).classes == expected
