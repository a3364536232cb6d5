"""Trackers of real runs: TensorBoard, Weights & Biases, MLflow and the tables hold the same numbers, each once."""

from __future__ import annotations

import csv
import json
import math
import sqlite3
import struct
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import Training, newest_step, write_small

from paceline.record import latest, rows_of
from paceline.sink.csv import TRAINING, VALIDATION
from paceline.sink.tracked import SECTIONS, tracked

Numbers = dict[tuple[str, int], float]
CLOCK = {"step_seconds", "images_per_second", "waiting", "total_seconds", "seconds", "memory"}
"""Fields that differ when steps are trained again: a tracker keeps the first, the record counts the last."""


def gathered(pairs: Iterator[tuple[str, int, float]]) -> Numbers:
    """Numbers by key and step, none of which may come twice."""
    numbers: Numbers = {}
    for key, step, value in pairs:
        assert (key, step) not in numbers, f"{key} of step {step} is there twice"
        numbers[key, step] = value
    return numbers


def of_record(run: Path) -> Iterator[tuple[str, int, float]]:
    for kind in SECTIONS:
        for row in latest(rows_of(run), kind):
            one = tracked(row)
            assert one is not None
            yield from ((key, one.step, value) for key, value in one.numbers.items())


def of_tables(run: Path) -> Iterator[tuple[str, int, float]]:
    for name, columns in (("training", TRAINING), ("validation", VALIDATION)):
        with (run / f"{name}.csv").open() as file:
            for line in csv.DictReader(file):
                for column, field in columns.items():
                    if field not in ("step", "name", "latency"):
                        percent = 100 if field in ("last_top1", "top1", "top5") else 1
                        yield f"{name}/{field}", int(line["iteration"]), float(line[column]) / percent


def of_tensorboard(run: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in (run / "tensorboard").iterdir():
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag != "settings":
                    yield value.tag, event.step, value.simple_value


def of_mlflow(run: Path) -> Iterator[tuple[str, int, float]]:
    database = sqlite3.connect(run / "mlflow.db")
    assert database.execute("SELECT run_uuid FROM runs").fetchall() == [((run / "mlflow.id").read_text().strip(),)]
    yield from database.execute("SELECT key, step, value FROM metrics")
    database.close()


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: blocks of 32 KiB with pieces of them, each after its checksum, length and type."""
    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last piece
            yield record
            record = b""


def of_wandb(run: Path) -> Iterator[tuple[str, int, float]]:
    record_type = import_module("wandb.proto.wandb_internal_pb2").Record  # made when it is imported, so without a type
    name = json.loads((run / "wandb.json").read_text())["id"]
    for path in sorted((run / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")):
        for content in wandb_records(path):
            record = record_type.FromString(content)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                row = {key: json.loads(value) for key, value in items.items()}
                yield from ((key, row["step"], row[key]) for key in row if "/" in key)


READERS = {"csv": of_tables, "tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}


def check_same(run: Path, names: list[str], lost: int = 0) -> None:
    """Every sink holds what the record says; what the clock says may be that of the first time.

    So many rows, as the docs say of Weights & Biases, may have been on their way there in the moment of a kill.
    """
    whole = gathered(of_record(run))
    assert {key.partition("/")[0] for key, _ in whole} == {"training", "validation"}
    for name in names:
        numbers = gathered(READERS[name](run))
        if name != "csv":
            assert set(numbers) <= set(whole)
            missing = {(key.partition("/")[0], step) for key, step in set(whole) - set(numbers)}
            assert len(missing) <= lost, missing
        for (key, step), value in numbers.items():
            if key.partition("/")[2] not in CLOCK:
                assert math.isclose(value, whole[key, step], rel_tol=1e-6, abs_tol=1e-9), (name, key, step)


def start(folder: Path, names: list[str]) -> Training:
    recipe = write_small(folder, epochs="8", report="2 steps")
    sinks = f"on.sinks=[{', '.join(names)}]"
    return Training(folder, "train", recipe, "--out", "run", "on.save=7 steps", "on.cpu_threads=1", sinks)


def test_tensorboard_holds_the_numbers_of_the_tables(tmp_path: Path) -> None:
    names = ["csv", "tensorboard"]
    status, _, errors = start(tmp_path, names).end()
    assert (status, errors) == (0, "")
    check_same(tmp_path / "run", names)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_has_each_number_once_after_a_kill_and_a_resume(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_spec(name), f"make test-all installs {name}"
    monkeypatch.setenv("WANDB_MODE", "offline")
    names, run = ["csv", name], tmp_path / "run"
    recipe = write_small(tmp_path, epochs="4000", report="25 steps")
    words = ["train", recipe, "--out", "run", "on.save=35 steps", "on.cpu_threads=1", "evaluate.every=50 steps"]

    def tracks() -> bool:
        """Whether the tracker has got reports that come after the newest checkpoint."""
        try:
            steps = [step for _, step, _ in READERS[name](run)]
        except (OSError, sqlite3.Error, AssertionError, struct.error):
            return False
        return max(steps, default=0) > 100 and max(steps) > newest_step(run)

    killed = Training(tmp_path, *words, f"on.sinks=[{', '.join(names)}]")
    killed.wait_until(tracks)
    killed.kill()
    again = Training(tmp_path, "resume", "run", f"on.time_limit={5 if name == 'tensorboard' else 40} seconds")
    status, out, errors = again.end()
    assert (status, errors) == (75, "")
    assert "lacks" not in out
    check_same(run, names, lost=int(name == "wandb"))
