"""paceline validate and average on a run that is damaged, has diverged, or goes on training meanwhile."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from conftest import SMALL, Paceline, environment, validation_row
from paceline import checkpoint
from paceline.command import average, validate
from paceline.errors import RunError
from paceline.record import Row, Run, Sink, rows_of
from paceline.sink import SINKS
from paceline.training.selection import Selection, step_in_words
from runs_made import write_run

ONE = ["on.cpu_threads=1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which the tests copy."""
    folder = tmp_path_factory.mktemp("validate")
    (folder / "small.yaml").write_text(SMALL)
    words = ["train", "small.yaml", "epochs=3", "--out", "run", "on.keep_last=9", "on.save=6 steps"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=folder, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def place(run: Path, step: int) -> Path:
    return run / "checkpoints" / checkpoint.name_of(step)


def damage(run: Path, step: int) -> None:
    (place(run, step) / "network.safetensors").write_bytes(b"damaged")


def strict(text: str) -> Any:
    """What a reader of JSON makes of it that knows no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def judge(run: Path, which: str | None = None, every: bool = False, as_json: bool = True) -> None:
    assert validate.run(run, ONE, Selection(which, every), None, as_json) == 0


def blend(run: Path, last: int | None = None, as_json: bool = True) -> None:
    assert average.run(run, ONE, last, None, None, None, as_json) == 0


def test_a_loss_that_is_not_finite_is_null_in_all_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = checkpoint.read(place(run, 18))
    network = load(files["network.safetensors"])
    network["head.dense.weight"][:] = torch.nan
    checkpoint.write(run / "checkpoints", 18, files | {"network.safetensors": save(network)})
    judge(run)
    assert strict(capsys.readouterr().out)[0]["loss"] is None
    blend(run)
    assert strict(capsys.readouterr().out)["loss"] is None
    assert strict((run / "averaged" / "average.json").read_text())["loss"] is None
    judge(run, as_json=False)
    assert " nan " in capsys.readouterr().out


def test_rows_are_not_lost_behind_a_torn_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "record.jsonl").open("a") as file:
        file.write('{"kind": "rep')
    judge(run)
    judged = json.loads(capsys.readouterr().out)[0]
    assert rows_of(run)[-1] == {"kind": "validation", **judged}
    with (run / "record.jsonl").open("a") as file:
        file.write('{"kind": "rep')
    blend(run)
    assert rows_of(run)[-1] == {"kind": "average", **json.loads(capsys.readouterr().out)}


def test_the_newest_checkpoint_is_the_newest_whole_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 18)
    judge(run)
    said = capsys.readouterr()
    assert [row["step"] for row in json.loads(said.out)] == [12]
    assert said.err.startswith(f"passed over: {place(run, 18) / 'network.safetensors'}: has 7 bytes")
    with pytest.raises(RunError, match=r"has 7 bytes.*; choose another with --checkpoint: 0, 6, 12$"):
        judge(run, which="18")
    for step in (0, 6, 12):
        damage(run, step)
    with pytest.raises(RunError, match=r"step-000000018.*has 7 bytes.*; no other one is intact$"):
        judge(run)


def test_damaged_checkpoints_are_no_part_of_an_average(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 12)
    blend(run)
    said = capsys.readouterr()
    assert json.loads(said.out)["steps"] == [6, 18]
    assert said.err.startswith(f"passed over: {place(run, 12) / 'network.safetensors'}: has 7 bytes")
    damage(run, 18)
    blend(run)
    assert json.loads(capsys.readouterr().out)["steps"] == [6]
    damage(run, 6)
    with pytest.raises(RunError, match=r"no checkpoint of a trained step is intact; continue with: paceline resume"):
        blend(run)


def move(run: Path, old: int, new: int) -> None:
    """What a run with on.keep_last=1 does: a newer checkpoint, and the older one is gone."""
    files = checkpoint.read(place(run, old))
    state = json.dumps(json.loads(files["state.json"]) | {"step": new}).encode()
    checkpoint.write(run / "checkpoints", new, files | {"state.json": state})
    shutil.rmtree(place(run, old))


@pytest.mark.parametrize("verb", [validate, average])
def test_checkpoints_are_chosen_when_nothing_slow_comes_any_more(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: Any
) -> None:
    run_verb = verb.run_verb

    def moves_first(*words: Any, **more: Any) -> Any:
        move(run, 18, 17)
        return run_verb(*words, **more)

    monkeypatch.setattr(verb, "run_verb", moves_first)  # about where torch is loaded
    (judge if verb is validate else blend)(run)
    found = json.loads(capsys.readouterr().out)
    assert (found[0]["step"] == 17) if verb is validate else (found["steps"] == [6, 12, 17])


def moving_once(run: Path, old: int, new: int) -> Callable[[Path], dict[str, bytes]]:
    """Reads checkpoints beside a run that removes one just before it is read."""
    read = checkpoint.read

    def reads(path: Path) -> dict[str, bytes]:
        if path == place(run, old) and path.is_dir():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(checkpoint, "read", read)
                move(run, old, new)
        return read(path)

    return reads


@pytest.mark.parametrize("which", [None, "best"])
def test_a_checkpoint_that_is_removed_before_it_is_read_gives_way_to_the_newest(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, which: str | None
) -> None:
    rows = [validation_row(step, top1) for step, top1 in ((6, 0.2), (12, 0.1), (18, 0.3))]
    (run / "record.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(checkpoint, "read", moving_once(run, 18, 17))
    monkeypatch.setattr("paceline.sink.csv.write_tables", lambda *_: None)
    judge(run, which)
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["step"] == (17 if which is None else 6)
    assert said.err == ""


def test_a_checkpoint_that_was_named_and_is_removed_is_refused_with_what_there_is(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "read", moving_once(run, 18, 17))
    with pytest.raises(RunError, match=r"there is no checkpoint of step '18'; there is 0, 6, 12, 17$"):
        judge(run, "18")


@pytest.mark.parametrize(("last", "steps"), [(None, [6, 12, 17]), (2, [12, 17])])
def test_an_average_of_which_one_is_removed_is_begun_anew(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, last: int | None, steps: list[int]
) -> None:
    monkeypatch.setattr(checkpoint, "read", moving_once(run, 18, 17))
    blend(run, last)
    said = capsys.readouterr()
    assert json.loads(said.out)["steps"] == steps
    assert said.err == ""


class KeepingSink(Sink):
    """Keeps the rows that it gets."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def row(self, row: Row) -> None:
        self._rows.append(row)

    def progress(self, what: str, done: int, total: int) -> None:
        pass


def test_rows_of_validate_and_average_go_to_the_sinks(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Row] = []
    monkeypatch.setitem(SINKS, "log", lambda *_: KeepingSink(rows))
    judge(run)
    json.loads(capsys.readouterr().out)  # nothing but the row: the console is for training
    blend(run)
    assert [row["kind"] for row in rows] == ["validation", "average"]
    assert rows == rows_of(run)[-2:]


def test_a_table_that_no_sink_writes_is_not_written(run: Path) -> None:
    for name in ("training.csv", "validation.csv"):
        (run / name).unlink()
    assert validate.run(run, [*ONE, "on.sinks=[console, log]"], Selection(), None, as_json=True) == 0
    assert not list(run.glob("*.csv"))


def test_a_table_has_a_step_once_and_gets_what_is_evaluated_beside_a_training(run: Path) -> None:
    table = run / "validation.csv"
    lines = table.read_text().splitlines()
    for _ in range(2):
        judge(run)
        assert len(table.read_text().splitlines()) == len(lines)
    with Run(run, "own"):
        judge(run)
        assert len(table.read_text().splitlines()) == len(lines) + 1
        table.unlink()
        judge(run)
        assert table.read_text().splitlines()[0] == lines[0]
    with Run(run, "own"):  # nobody holds the folder any more
        pass


@pytest.mark.long
def test_replicas_judge_what_the_first_one_read(paceline: Paceline, run: Path) -> None:
    damage(run, 18)
    done = paceline("validate", "run", "--json", "on.replicas=2", "on.micro_batch=4")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("passed over") == 1
    (row,) = json.loads(done.stdout)
    before = [row for row in rows_of(run) if row["kind"] == "validation" and row["step"] == 12]
    assert row["loss"] == pytest.approx(before[0]["loss"], rel=1e-4)
    damage(run, 12)
    done = paceline("validate", "run", "--all", "--json", "on.replicas=2", "on.micro_batch=4")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in json.loads(done.stdout)] == [0]
    done = paceline("validate", "run", "--checkpoint", "18", "on.replicas=2", "on.micro_batch=4")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "choose another with --checkpoint: 0, 6, 12" in done.stderr


def test_a_step_is_told_with_what_makes_it_the_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=[validation_row(3, 0.9), validation_row(6, 0.5)])
    for step in (3, 5, 6):
        checkpoint.write(run / "checkpoints", step, {})
    assert step_in_words(run, 6) == "step 6, the newest checkpoint (best: step 3)"
    assert step_in_words(run, 3) == "step 3, the best checkpoint (newest: step 6)"
    assert step_in_words(run, 5) == "step 5 (newest: step 6, best: step 3)"
    (run / "record.jsonl").write_text("")
    assert step_in_words(run, 6) == "step 6, the newest checkpoint"
    (run / "record.jsonl").write_text(json.dumps(validation_row(6, 0.5)) + "\n")
    assert step_in_words(run, 6) == "step 6, the newest and best checkpoint"


def test_tables_fit_a_terminal_and_show_accuracies_in_percent(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge(run, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("evaluated on cpu in fp32: step 18, the newest ")
    assert lines[1].split() == ["step", "epoch", "top-1", "top-5", "loss", "images", "seconds", "images/s"]
    row = rows_of(run)[-1]
    assert lines[2].split()[:6] == [
        "18",
        "3.00",
        f"{row['top1']:.2%}",
        f"{row['top5']:.2%}",
        f"{row['loss']:.4f}",
        "37",
    ]
    balanced = f"balanced accuracy {row['balanced_accuracy']:.2%}"
    assert lines[3] == f"unequal classes: {balanced}; the largest is {row['majority']:.2%} of the images"
    assert average.run(run, ONE, None, 0.999, 20, None, as_json=False) == 0
    lines += capsys.readouterr().out.splitlines()[:-1]
    assert lines[5].startswith("last checkpoint ")
    assert lines[6].startswith("exponential, decay 0.999  6, 12, 18 ")
    assert lines[8] == "Running statistics are those of 32 training images."
    assert max(map(len, lines)) <= 80


def test_the_table_of_a_long_run_with_an_average_fits_too(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "step": 450_360, "epoch": 90.0, "loss": 0.9876, "top1": 0.7654, "top5": 1.0, "images": 50_000, "averaged": True,
        "seconds": 1234.5, "images_per_second": 12_345.6, "device": "cuda", "precision": "fp16",
    }  # fmt: skip
    validate._show([row, row | {"averaged": False}], Path("run"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == [
        "450,360",
        "90.00",
        "76.54%",
        "100.00%",
        "0.9876",
        "50,000",
        "1,234.50",
        "12,346",
        "EMA",
    ]
    assert lines[3].split()[-1] == "plain"
    assert max(map(len, lines)) <= 80


def test_a_checkpoint_that_is_removed_while_all_are_judged_is_passed_over(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "record.jsonl").unlink()
    monkeypatch.setattr(checkpoint, "read", moving_once(run, 12, 11))
    judge(run, every=True)
    said = capsys.readouterr()
    assert [row["step"] for row in json.loads(said.out)] == [0, 6, 18]
    assert said.err == "passed over: step 12, whose checkpoint was removed meanwhile\n"


def test_one_checkpoint_is_said_to_be_no_average(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blend(run, as_json=False)
    assert "alone" not in capsys.readouterr().out
    blend(run, last=1, as_json=False)
    assert "the checkpoint of step 18 alone; to average several, write a larger --last." in capsys.readouterr().out
    for step in (6, 12):
        shutil.rmtree(place(run, step))
    blend(run, as_json=False)
    said = capsys.readouterr().out
    assert "the checkpoint of step 18 alone; to average several, train with a larger on.keep_last." in said


def test_many_steps_are_shown_by_the_first_and_the_last() -> None:
    assert average._steps([6, 12, 18]) == "6, 12, 18"
    assert average._steps([400_000, 425_000, 450_000]) == "400000 to 450000 (3)"


def evaluated(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> Row:
    """What comes out of the newest checkpoint."""
    assert validate.run(run, [*ONE, *words], Selection(), None, as_json=True) == 0
    (row,) = json.loads(capsys.readouterr().out)
    return dict(row)


@pytest.mark.parametrize("size", [3, 1000])
def test_any_micro_batch_evaluates_every_image(run: Path, capsys: pytest.CaptureFixture[str], size: int) -> None:
    """Three of a norm batch of four, or more than a step has, could not train."""
    expected = evaluated(capsys, run)
    found = evaluated(capsys, run, f"on.micro_batch={size}")
    assert (found["images"], found["top1"]) == (37, expected["top1"])
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_replicas_evaluate_by_a_micro_batch_that_could_not_train(run: Path, paceline: Paceline) -> None:
    done = paceline("validate", str(run), "on.replicas=2", "on.micro_batch=3", "--json", *ONE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["images"] == 37


def test_a_part_of_the_images_is_evaluated_and_said_to_be_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = evaluated(capsys, run, "evaluate.limit=10 images")
    assert (row["images"], row["partial"], row["of_images"]) == (10, True, 37)
    assert validate.run(run, [*ONE, "evaluate.limit=1 steps"], Selection(), None, as_json=False) == 0
    assert "evaluated a part, 16 of 37 images, on cpu" in capsys.readouterr().out
