"""paceline predict, as a user types it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from conftest import run_in
from paceline import checkpoint
from paceline.command import predict
from paceline.errors import RunError, SpecError
from trained_run import CLASSES, train_on_images

ONE = ["on.cpu_threads=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and its images in data/val."""
    folder = tmp_path_factory.mktemp("predict")
    train_on_images(folder, "on.keep_last=9")
    (folder / "bad.jpg").write_bytes(b"nothing")
    return folder


def test_a_table_tells_the_answers_and_what_was_skipped(folder: Path) -> None:
    done = run_in(folder, "predict", "run", "data/val/pear", "bad.jpg", "--top", "2", *ONE)
    assert done.returncode == 0, done.stderr
    first, heading, *lines = done.stdout.splitlines()
    assert re.fullmatch(r"predicted by step \d+, the (newest and )?best checkpoint.*, on cpu in fp32", first)
    assert heading.split() == ["image", "answer", "probability", "others"]
    assert [line.split()[0] for line in lines] == [f"data/val/pear/pear{index}.jpg" for index in range(5)]
    assert all(line.split()[1] in CLASSES for line in lines)
    assert done.stderr.splitlines() == [
        "skipped bad.jpg: its first bytes are not those of an image",
        "1 image of 6 skipped",
    ]


def test_json_csv_and_threshold(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [str(folder / "data/val/plum/*.jpg"), *ONE]
    table = tmp_path / "answers.csv"
    assert predict.run(folder / "run", words, None, 2, 1.0, None, table, "cpu", True) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["predictions"]) == 5
    assert said["skipped"] == []
    assert said["predictions"][0]["answer"] is None
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["answer"] for row in rows] == ["none"] * 5
    for row, told in zip(rows, said["predictions"], strict=True):
        assert (row["image"], row["class1"]) == (told["image"], told["top"][0]["class"])
        assert float(row["probability2"]) == told["top"][1]["probability"]


def test_the_best_checkpoint_is_taken_unless_another_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = checkpoint.saved_steps(folder / "run" / "checkpoints")
    monkeypatch.setattr("paceline.training.selection.best_step", lambda *_: steps[1])
    words = [str(folder / "data/val"), *ONE]
    for which, step in ((None, steps[1]), (str(steps[2]), steps[2])):
        predict.run(folder / "run", words, which, 5, None, None, None, None, True)
        assert json.loads(capsys.readouterr().out)["step"] == step


@pytest.mark.parametrize(
    ("which", "threshold", "fault"),
    [("7777", None, (RunError, "no checkpoint of step '7777'")), (None, 2.0, (SpecError, "--threshold 2: expected"))],
)
def test_what_is_asked_wrongly_is_refused(
    folder: Path, which: str | None, threshold: float | None, fault: tuple[type[Exception], str]
) -> None:
    with pytest.raises(fault[0], match=fault[1]):
        predict.run(folder / "run", [str(folder / "data/val")], which, 5, threshold, None, None, None, True)


@pytest.mark.parametrize(("table", "why"), [("gone/x.csv", "No such file or directory"), ("data", "is a folder")])
def test_a_table_that_cannot_be_written_is_told_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, table: str, why: str
) -> None:
    monkeypatch.setattr(predict, "_predict", lambda *_: pytest.fail("it was predicted"))
    fault = f"{table}: cannot be written: {why}; choose another file with --csv"
    with pytest.raises(RunError, match=fault):
        predict.run(folder / "run", [str(folder / "data/val")], None, 5, None, None, folder / table, None, False)


def test_a_network_whose_scores_are_not_finite_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.training.opened.OpenedRun.scores", lambda *_: torch.full((15, 3), torch.nan))
    with pytest.raises(RunError, match="scores are not finite, so it has no answer; choose another step"):
        predict.run(folder / "run", [str(folder / "data/val"), *ONE], None, 5, None, None, None, None, True)


def test_faults_are_one_line(folder: Path) -> None:
    for words, message in (
        (["run", "gone.jpg"], "error: gone.jpg: there is no such file or folder"),
        (["data", "data/val"], "error: data: this is no run folder ('plan.yaml' is missing); name the folder that"),
        (["run", "bad.jpg", *ONE], "error: none of the images can be read"),
    ):
        done = run_in(folder, "predict", *words)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(message)
