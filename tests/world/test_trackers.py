"""Trackers of real runs: TensorBoard, Weights & Biases, MLflow and the tables hold the same, each number once."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sqlite3
import struct
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image
from processes import Training, newest_step, write_small

from paceline.record import latest, rows_of
from paceline.sink.csv import TRAINING, VALIDATION
from paceline.sink.tracked import TRACKED, tracked

Value = float | list[int] | str
"""A number, the counts of a histogram, or what stands for the pixels of a picture."""
Item = tuple[str, int, Value]
Numbers = dict[tuple[str, int], Value]
CLOCK = {"step_seconds", "images_per_second", "waiting", "total_seconds", "seconds", "memory"}
"""Fields that differ when steps are trained again: a tracker keeps the first, the record counts the last."""


def gathered(items: Iterator[Item]) -> Numbers:
    """Numbers by key and step, none of which may come twice."""
    numbers: Numbers = {}
    for key, step, value in items:
        assert (key, step) not in numbers, f"{key} of step {step} is there twice"
        numbers[key, step] = value
    return numbers


def pixels(content: bytes) -> str:
    with Image.open(io.BytesIO(content)) as image:
        return hashlib.sha256(image.convert("RGB").tobytes()).hexdigest()


def of_record(run: Path) -> Iterator[Item]:
    for kind in TRACKED:
        for row in latest(rows_of(run), kind):
            for one in tracked(row, run):
                yield from ((key, one.step, value) for key, value in one.numbers.items())
                yield from ((key, one.step, histogram.counts) for key, histogram in one.histograms.items())
                yield from ((key, one.step, pixels(each.path.read_bytes())) for key, each in one.pictures.items())


def of_tables(run: Path) -> Iterator[Item]:
    for name, columns in (("training", TRAINING), ("validation", VALIDATION)):
        with (run / f"{name}.csv").open() as file:
            for line in csv.DictReader(file):
                for column, field in columns.items():
                    if field not in ("step", "name", "latency"):
                        percent = 100 if field in ("last_top1", "top1", "top5") else 1
                        yield f"{name}/{field}", int(line["iteration"]), float(line[column]) / percent


def of_tensorboard(run: Path) -> Iterator[Item]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in (run / "tensorboard").iterdir():
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("histo"):
                    yield value.tag, event.step, [int(count) for count in value.histo.bucket]
                elif value.HasField("image"):
                    yield value.tag, event.step, pixels(value.image.encoded_image_string)
                elif value.tag != "settings":
                    yield value.tag, event.step, value.simple_value


def of_mlflow(run: Path) -> Iterator[Item]:
    database = sqlite3.connect(run / "mlflow.db")
    assert database.execute("SELECT run_uuid FROM runs").fetchall() == [((run / "mlflow.id").read_text().strip(),)]
    yield from database.execute("SELECT key, step, value FROM metrics")
    database.close()
    for path in run.glob("mlflow/*/artifacts/*/step-*.json"):
        for key, histogram in json.loads(path.read_text()).items():
            yield key, int(path.stem.removeprefix("step-")), histogram["counts"]
    for path in run.glob("mlflow/*/artifacts/images/*.png"):
        key, _, step, *_ = path.name.split("+")
        yield key.replace("~", "/"), int(step), pixels(path.read_bytes())


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


def of_wandb(run: Path) -> Iterator[Item]:
    record_type = import_module("wandb.proto.wandb_internal_pb2").Record  # made when it is imported, so without a type
    name = json.loads((run / "wandb.json").read_text())["id"]
    for path in sorted((run / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb")):
        for content in wandb_records(path):
            record = record_type.FromString(content)
            if record.WhichOneof("record_type") == "history":
                row = {(item.key, *item.nested_key): json.loads(item.value_json) for item in record.history.item}
                for (_, key, *field), value in row.items():
                    if "/" in key and field in ([], ["values"]):  # of a histogram
                        yield key, row["", "step"], value
                    elif field == ["path"]:  # of a picture
                        yield key, row["", "step"], pixels((path.parent / "files" / value).read_bytes())


READERS = {"csv": of_tables, "tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}


def check_same(run: Path, names: list[str], lost: int = 0) -> None:
    """Every sink holds what the record says; what the clock says may be that of the first time.

    As the docs say of Weights & Biases, rows of so many steps may have been on their way there when a kill came.
    """
    whole = gathered(of_record(run))
    sections = {"training", "validation", "weights", "gradients", "samples"}
    assert {key.partition("/")[0] for key, _ in whole} == sections
    for name in names:
        numbers = gathered(READERS[name](run))
        if name != "csv":
            assert set(numbers) <= set(whole)
            missing = {step for _, step in set(whole) - set(numbers)}
            assert len(missing) <= lost, missing
        for (key, step), value in numbers.items():
            if key.partition("/")[2] not in CLOCK:
                expected = whole[key, step]
                near = pytest.approx(expected, rel=1e-6, abs=1e-9) if isinstance(expected, float) else expected
                assert value == near, (name, key, step)


def start(folder: Path, names: list[str]) -> Training:
    recipe = write_small(folder, epochs="8", report="2 steps")
    sinks = f"on.sinks=[{', '.join(names)}]"
    shown = ("on.histograms=2 epochs", "on.samples=2 epochs")
    return Training(folder, "train", recipe, "--out", "run", "on.save=7 steps", "on.cpu_threads=1", *shown, sinks)


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
    words += ["on.histograms=25 steps", "on.samples=75 steps"]

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
