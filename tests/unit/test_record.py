"""The run folder: rows that survive a kill, one writer at a time, and a plan that can be read back."""

from __future__ import annotations

import csv
import gc
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conftest import SMALL, make_plan, make_recipe
from paceline.errors import Broken, RunError, SpecError
from paceline.machine import Machine
from paceline.record import (
    PLAN,
    RECORD,
    Row,
    Run,
    json_text,
    latest,
    numbers_of,
    rows_of,
    start_row,
    store_plan,
    stored_plan,
)  # fmt: skip
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, override, parse
from paceline.settings.recipe import Recipe
from paceline.sink.csv import CsvSink
from paceline.sink.log import LOG, LogSink


def test_rows_are_appended_and_read_back(tmp_path: Path) -> None:
    run = Run(tmp_path / "deep" / "run", "own")
    assert run.rows() == []
    assert run.write("start", step=0, text="é\u2028\n", list=[1, None]) == {
        "kind": "start", "step": 0, "text": "é\u2028\n", "list": [1, None],
    }  # fmt: skip
    run.write("end", step=3)
    run.close()
    assert rows_of(run.folder) == [
        {"kind": "start", "step": 0, "text": "é\u2028\n", "list": [1, None]},
        {"kind": "end", "step": 3},
    ]
    assert run.checkpoints.is_dir()


def test_a_folder_without_a_record_has_no_rows(tmp_path: Path) -> None:
    assert rows_of(tmp_path) == []


@pytest.mark.parametrize("torn", ['{"kind": "rep', '{"kind": "report", "step": 3}', "\x00\x00", '{"kind": "é'])
def test_a_last_line_that_a_kill_tore_is_passed_over_and_then_cut(torn: str, tmp_path: Path) -> None:
    run = Run(tmp_path, "own")
    run.write("report", step=1)
    run.write("report", step=2)
    run.close()
    with (tmp_path / RECORD).open("ab") as file:
        file.write(torn.encode()[:-1])
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]
    again = Run(tmp_path, "own")
    again.write("report", step=3)
    again.close()
    assert [json.loads(line)["step"] for line in (tmp_path / RECORD).read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"kind": "rep', b'{"kind": "report", "step": 1}', b"\xc3", b""])
def test_whoever_writes_beside_the_training_does_not_lose_a_row_behind_a_torn_line(torn: bytes, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_bytes(b'{"kind": "report", "step": 0}\n' + torn)
    run = Run(tmp_path, "append")  # as validate and average do, which leave the lock to whoever trains
    run.write("validation", step=2)
    run.write("validation", step=3)
    whole = [1] if torn.endswith(b"}") else []
    assert [row["step"] for row in rows_of(tmp_path)] == [0, *whole, 2, 3]
    assert (tmp_path / RECORD).read_bytes().count(b"\n") == 3 + bool(torn)


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    odd = {"loss": math.nan, "list": [math.inf, 1.5, (-math.inf, 2)], "deep": {"a": math.nan, "b": "NaN"}, "c": None}
    mended = {"loss": None, "list": [None, 1.5, [None, 2]], "deep": {"a": None, "b": "NaN"}, "c": None}
    assert json.loads(json_text(odd)) == mended
    assert json_text({"a": [math.nan]}, indent=1) == '{\n "a": [\n  null\n ]\n}'
    run = Run(tmp_path, "own")
    row = run.write("report", step=1, **odd)
    run.close()
    assert math.isnan(row["loss"])  # who shows it can tell that it is not finite
    assert rows_of(tmp_path) == [{"kind": "report", "step": 1, **mended}]


def test_a_line_that_is_no_row_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_bytes(b'{"kind": "a"}\n\xff\xfe\n[1]\n3\n\n{"kind": "b"}\n')
    assert [row["kind"] for row in rows_of(tmp_path)] == ["a", "b"]


def test_the_latest_row_of_each_step_counts() -> None:
    rows: list[Row] = [
        {"kind": "test", "step": 2, "loss": 1},
        {"kind": "test", "step": 4, "loss": 2},
        {"kind": "validation", "step": 4},
        {"kind": "start", "step": 0},
        {"kind": "test", "step": 2, "loss": 3},
    ]
    assert [(row["step"], row["loss"]) for row in latest(rows, "test")] == [(2, 3), (4, 2)]
    assert latest(rows, "end") == []


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    first = Run(tmp_path, "own")
    with pytest.raises(RunError) as caught:
        Run(tmp_path, "own")
    assert str(caught.value) == f"{tmp_path}: another process is training in this folder"
    del caught
    gc.collect()  # what the refused one had opened must be closed: a file left open is a warning, and so a fault
    reader = Run(tmp_path, "read")
    first.write("start", step=0)
    assert len(reader.rows()) == 1
    first.close()
    Run(tmp_path, "own").close()


def test_a_replica_that_is_not_the_writer_leaves_no_trace(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "read")
    assert run.write("report", step=1) == {"kind": "report", "step": 1}
    run.note("nothing")
    run.close()
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot be written to: Not a directory; choose another folder with --out$"):
        Run(tmp_path / "file" / "run", "own")


def test_a_disk_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path, "own")
    (tmp_path / RECORD).mkdir()
    with pytest.raises(Broken) as caught:
        run.write("report", step=1)
    run.close()
    assert (
        str(caught.value)
        == f"{tmp_path / RECORD}: cannot be written: Is a directory; all checkpoints so far are intact"
    )


def test_a_stored_plan_is_read_back_with_all_its_settings(tmp_path: Path) -> None:
    text = SMALL + "about: '1st: a # b'\n"
    written = parse(text, "mine.yaml")
    override(written, "epochs=2", Recipe)
    recipe = build(Recipe, written)
    asked = Placement(micro_batch=4, save=make_recipe().report)
    plan = make_plan("epochs=2", "on.micro_batch=4", text=text)
    store_plan(tmp_path, plan, asked, Path("some/../data"), written, Tree({}, {("micro_batch",): "'on.x'"}))
    stored = stored_plan(tmp_path)
    assert stored.recipe == recipe
    assert stored.placement == asked
    assert stored.data_folder == str(Path("data").resolve())
    page = (tmp_path / PLAN).read_text()
    for key, place in (
        ("  epochs: 2.0 ", "# 'epochs=2'"),
        ("  seed: 0 ", "# default"),
        ("  norm_batch: 4 ", "# mine.yaml:5"),
    ):
        line = next(line for line in page.splitlines() if line.startswith(key))
        assert line.endswith(place)
    assert "#   total steps: 12\n" in page
    assert sorted(child.name for child in tmp_path.iterdir()) == [PLAN]


def test_a_run_without_a_data_folder_stores_none(tmp_path: Path) -> None:
    plan = make_plan()
    store_plan(tmp_path, plan, Placement(), None, Tree(), Tree())
    assert stored_plan(tmp_path).data_folder is None


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        stored_plan(tmp_path)
    told = str(caught.value)
    assert told.startswith(f"{tmp_path}: this is no run folder ('plan.yaml' is missing); name the folder that ")


def test_a_plan_that_somebody_edited_is_checked_like_any_page(tmp_path: Path) -> None:
    store_plan(tmp_path, make_plan(), Placement(), None, Tree(), Tree())
    page = (tmp_path / PLAN).read_text()
    (tmp_path / PLAN).write_text(page.replace("  epochs: 1.0", "  epoch: 1.0"))
    line = next(number for number, text in enumerate(page.splitlines(), 1) if text.startswith("  epochs:"))
    with pytest.raises(SpecError) as caught:
        stored_plan(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / PLAN}:{line}: recipe has no 'epoch'; did you mean 'epochs'?")


def test_the_numbers_of_a_plan_are_its_arithmetic() -> None:
    numbers = numbers_of(make_plan("on.micro_batch=4", "on.replicas=3"))
    assert numbers["micro-batches per step"] == 4
    assert numbers["rounds per step"] == 2
    assert numbers["total images"] == 96
    assert numbers["norm batch"] == 4
    assert numbers_of(make_plan("norm=none"))["norm groups per micro-batch"] is None


def test_a_start_says_what_arithmetic_has_changed_since_the_last_one() -> None:
    machine = Machine(cores=2, memory=1 << 30)
    first = start_row(make_plan("on.cpu_threads=1"), machine, 0, [], ["train"])
    assert first["arithmetic_changed"] == {}
    before: list[Row] = [{"kind": "start", **first}, {"kind": "report", "step": 5}]
    plan = make_plan("on.cpu_threads=1", "on.precision=fp64", "on.micro_batch=4", "on.keep_last=9")
    again = start_row(plan, machine, 5, before, ["resume", "run"])
    changed = ("precision", "weights", "communication")
    assert again["arithmetic_changed"] == {key: ["fp32", "fp64"] for key in changed}
    assert again["step"] == 5
    assert {"paceline", "python", "torch", "numpy"} <= again["versions"].keys()
    assert again["placement"]["micro_batch"] == 4
    json.dumps(again)


def report(step: int, loss: float = 1.5) -> Row:
    return {
        "kind": "report", "step": step, "epoch": step / 10, "lr": 0.1, "loss": loss, "top1": 0.25, "last_loss": 1.25,
        "last_top1": 0.5, "bad_steps": 0, "images": 16, "step_seconds": 0.5, "images_per_second": 32.0, "waiting": 0.0,
        "total_seconds": 7.0,
    }  # fmt: skip


def validation(step: int) -> Row:
    return {
        "kind": "validation", "step": step, "epoch": step / 10, "loss": 2.0, "top1": 0.75, "top5": 1.0, "images": 37,
        "seconds": 0.5, "images_per_second": 74.0,
    }  # fmt: skip


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def csv_sink(folder: Path, step: int) -> CsvSink:
    """The tables of a run that starts at a step."""
    sink = CsvSink(make_plan(), Run(folder, "read"), Console())
    sink.row({"kind": "start", "step": step})
    return sink


def test_csv_files_have_the_columns_that_older_scripts_read(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    folder.mkdir()
    sink = csv_sink(folder, step=0)
    assert table(folder / "training.csv") == table(folder / "validation.csv") == []
    sink.row(report(3))
    sink.row(validation(3))
    assert table(folder / "training.csv") == [
        {
            "step": "3", "iteration": "3", "epoch": "0.3", "lr": "0.1", "loss_batch": "1.25", "loss_avg": "1.5",
            "train_acc_batch": "50.0", "train_acc_avg": "25.0", "it_time": "0.5", "img_per_sec": "32.0",
            "total_time": "7.0",
        }
    ]  # fmt: skip
    assert table(folder / "validation.csv") == [
        {
            "name": "my-run", "iteration": "3", "epoch": "0.3", "val_acc": "75.0", "val_time": "0.5", "val_size": "37",
            "img_per_sec": "74.0", "latency": "-1", "val_loss": "2.0", "val_acc5": "100.0",
        }
    ]  # fmt: skip


def test_a_resumed_run_has_each_csv_row_once(tmp_path: Path) -> None:
    rows = [report(2), report(4), validation(4), report(6), report(2, loss=9.0), validation(6)]
    (tmp_path / "training.csv").write_text("what an earlier start left\n1,2,3\n")
    (tmp_path / RECORD).write_text("".join(json.dumps(row) + "\n" for row in rows))
    sink = csv_sink(tmp_path, step=4)
    sink.row(report(6, loss=8.0))
    assert [(row["step"], row["loss_avg"]) for row in table(tmp_path / "training.csv")] == [
        ("2", "9.0"),
        ("4", "1.5"),
        ("6", "8.0"),
    ]
    assert [row["iteration"] for row in table(tmp_path / "validation.csv")] == ["4"]


def test_a_csv_file_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "training.csv").mkdir()
    with pytest.raises(Broken, match=r"training.csv: cannot be written: Is a directory; all checkpoints.*intact$"):
        csv_sink(tmp_path, step=0)


class Ear:
    """Notes what a sink is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def row(self, row: Row) -> None:
        self.told.append(row["kind"])

    def progress(self, what: str, done: int, total: int) -> None:
        self.told.append((what, done, total))


def test_every_sink_gets_every_row_and_all_progress(tmp_path: Path) -> None:
    ears = [Ear(), Ear()]
    with Run(tmp_path, "own") as run:
        run.sinks = [*ears]
        run.write("start", step=0)
        run.progress("training", 1, 6)
        run.note("something")
        run.write("end", step=6)
    assert [ear.told for ear in ears] == [["start", ("training", 1, 6), "note", "end"]] * 2
    assert [row["kind"] for row in rows_of(tmp_path)] == ["start", "note", "end"]


def test_the_log_has_a_line_for_each_start_end_failure_and_note(tmp_path: Path) -> None:
    with Run(tmp_path, "own") as run:
        run.sinks = [LogSink(make_plan(), run, Console())]
        run.write("start", step=0)
        run.note("something")
        run.write("report", step=1)
        run.write("failed", why="a disk")
        run.write("interrupted", step=2)
    lines = (tmp_path / LOG).read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "start at step 0 of 6", "something", "failed: a disk", "interrupted at step 2",
    ]  # fmt: skip


def test_the_lock_of_a_run_is_gone_with_its_process(tmp_path: Path) -> None:
    program = "import os, sys, pathlib, paceline.record as r; r.Run(pathlib.Path(sys.argv[1]), 'own'); os._exit(7)"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == 7  # it died without closing
    Run(tmp_path, "own").close()
