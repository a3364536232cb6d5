"""Advice for runs that wait for images: what is suggested, when, and how often."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest

from conftest import make_plan
from inspect_data import PICTURES, plan_of, table_of
from paceline.data.index.table import Flag, Table
from paceline.data.inspect import advice
from paceline.planning import Plan
from paceline.record import Run
from paceline.sink.advice import AdviceSink
from pictures_made import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(PICTURES, tmp_path_factory.mktemp("pictures"))


JPEGS = table_of(*3 * [{"flags": Flag.JPEG | Flag.SEQUENTIAL, "width": 800, "height": 600}])
PNGS = table_of(*3 * [{"flags": 0, "width": 300, "height": 200}])
TILES = table_of(*3 * [{"flags": Flag.JPEG | Flag.SEQUENTIAL | Flag.TILED, "width": 800, "height": 600}])
SMALL_TILES = table_of(*3 * [{"flags": Flag.JPEG | Flag.SEQUENTIAL | Flag.TILED, "width": 500, "height": 400}])


def remedies(table: Table, cores: int, *words: str) -> str:
    sentence = advice.advice(plan_of(*words), 0.38, 410.4, table, cores)
    assert sentence.startswith("38% of the time is spent waiting for images (410 images/s with on.loader_workers=")
    assert sentence.endswith("; paceline bench data measures it")
    return sentence.split("; ")[1]


def test_advice_names_only_what_is_not_done_yet() -> None:
    pack, smaller = (
        "a lossless pack (paceline data pack SOURCE OUT)",
        "a smaller pack (paceline data pack SOURCE OUT --max-side",
    )
    one, all_ = "on.loader_workers=1", "on.loader_workers=4"
    assert remedies(JPEGS, 4, one) == f"what may help: on.loader_workers=4, or {pack}"
    assert remedies(JPEGS, 4, all_) == f"what may help: {pack}"
    assert remedies(TILES, 4, all_).startswith(f"what may help: {smaller}")
    assert remedies(PNGS, 4, all_).startswith(f"what may help: {smaller}")
    assert remedies(SMALL_TILES, 4, all_) == "more cores would help"
    assert "on.decoder=fast" in remedies(JPEGS, 4, all_, "on.decoder=pillow")
    assert remedies(SMALL_TILES, 8, "on.replicas=2", all_) == "more cores would help"  # four cores for each replica


def test_advice_names_the_accelerator_only_where_it_can_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = ["on.device=cuda", "on.loader_workers=4", "on.replicas=1"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    assert remedies(SMALL_TILES, 4, *cuda) == "what may help: on.decoder=gpu"
    assert remedies(SMALL_TILES, 4, "on.loader_workers=4") == "more cores would help"
    assert remedies(SMALL_TILES, 4, *cuda, "augment.python=mine:change") == "more cores would help"
    assert remedies(JPEGS, 4, *cuda, "on.decoder=gpu").startswith("what may help: a smaller pack")  # not by tiles
    assert remedies(SMALL_TILES, 4, *cuda, "on.decoder=gpu") == "more cores would help"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert remedies(SMALL_TILES, 4, *cuda) == "more cores would help"


def noted(plan: Plan, tmp_path: Path, folder: Path, *reports: tuple[int, float]) -> list[tuple[int, str]]:
    """What is noted after reports of a step and a fraction of waiting: the step before each note, and its text."""
    run = Run(tmp_path, "append")
    run.sinks = [AdviceSink(plan, run, folder, 64)]
    for step, waiting in reports:
        run.write("report", step=step, waiting=waiting, images_per_second=100.0)
    rows = run.rows()
    return [(before["step"], row["text"]) for before, row in pairwise(rows) if row["kind"] == "note"]


def test_little_waiting_and_data_without_files_need_no_advice(tmp_path: Path, folder: Path) -> None:
    assert noted(plan_of(), tmp_path, folder, (2, 0.5), (4, 0.2)) == []
    assert noted(make_plan("report=2 steps"), tmp_path, folder, (2, 0.5), (4, 0.9)) == []


def test_waiting_is_said_once_and_after_a_whole_interval_that_is_not_the_first(tmp_path: Path, folder: Path) -> None:
    # Step 5 ends a part of an interval, as the end of a run does.
    ((step, text),) = noted(plan_of(), tmp_path, folder, (2, 0.5), (4, 0.2), (5, 0.5), (6, 0.5), (8, 0.5))
    assert step == 6
    assert "50%" in text
    assert "on.loader_workers=64" in text
