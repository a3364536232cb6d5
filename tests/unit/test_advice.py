"""Advice for runs that wait for images: what is suggested, when, and how often."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from conftest import make_plan
from inspect_data import PICTURES, plan_of, table_of
from paceline.data.index.table import Flag, Table
from paceline.data.inspect import advice
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
    assert sentence is not None
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


def test_little_waiting_and_data_without_files_need_no_advice() -> None:
    assert advice.advice(plan_of(), 0.2, 410, JPEGS, 4) is None
    assert advice.advice(plan_of(), 0.201, 410, JPEGS, 4) is not None
    assert advice.advice(make_plan(), 0.9, 410, JPEGS, 4) is None


def test_waiting_is_said_once_and_after_a_whole_interval_that_is_not_the_first(folder: Path) -> None:
    def report(step: int, waiting: float = 0.5) -> dict[str, float]:
        return {"step": step, "waiting": waiting, "images_per_second": 100.0}

    give_advice = advice.InputAdvice(plan_of(), folder, 64)
    assert give_advice(report(2)) is None
    assert give_advice(report(4, waiting=0.1)) is None
    assert give_advice(report(5)) is None  # a part of an interval, as at the end
    sentence = give_advice(report(6))
    assert sentence is not None
    assert "50%" in sentence
    assert "on.loader_workers=64" in sentence
    assert give_advice(report(8)) is None
