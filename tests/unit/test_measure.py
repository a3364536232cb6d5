"""Measuring how fast images are read, decoded and loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inspect_data import CPU, DATA, PICTURES, keys_of, plan_of, table_of
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag, Index
from paceline.data.inspect import check, describe, measure
from paceline.data.inspect.advice import PACK, remedies
from paceline.data.inspect.measure import Rates, Sample
from paceline.data.load.order import training_order
from paceline.data.pack.libjpeg import available
from paceline.settings.placement import MOST_THREADS
from pictures_made import write_folder, write_tars


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(PICTURES, tmp_path_factory.mktemp("pictures"))


def test_the_limit_is_what_takes_the_most_time() -> None:
    assert Rates(2, read=1e4, decode=500, whole=400).limit == "decode"
    assert Rates(2, read=1e2, decode=90, whole=80).limit == "reading"
    assert Rates(2, read=1e4, decode=5000, whole=400).limit == "crop and resize"
    assert measure.best_rates([Rates(2, 1, 5, 3), Rates(2, 2, 4, 6)]) == Rates(2, 2, 5, 6)


@pytest.fixture(scope="module")
def sample(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return Sample.of(plan_of(), open_index(DATA, folder), 24, tmp_path_factory.mktemp("sample") / "new")


def test_a_sample_is_the_first_images_of_the_endless_list_where_they_lie(folder: Path, sample: Sample) -> None:
    whole, (split, _) = open_index(DATA, folder).training, sample.open()
    numbers = sorted(training_order(plan_of()).images(np.arange(24)).tolist())
    assert [split.table.keys[number] for number in range(24)] == [whole.keys[number] for number in numbers]
    assert split.labels_of(np.arange(24)).tolist() == whole.rows["label"][numbers].tolist()
    assert [split.read(place) for place in range(24)] == [
        (folder / whole.name(number)).read_bytes() for number in numbers
    ]


def test_a_sample_has_no_image_without_a_class(tmp_path: Path) -> None:
    index = open_index(DATA, write_tars(PICTURES, tmp_path / "tars"))
    found = Sample.of(plan_of(), index, 999, tmp_path / "new")
    assert found.images == 54
    assert not (found.open()[0].table.rows["flags"] & Flag.OTHER_LABEL).any()
    assert (index.training.rows["flags"] & Flag.OTHER_LABEL).any()


def test_a_sample_is_measured_on_the_loaders_own_way(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    monkeypatch.setattr(measure, "decode_into", lambda *given, **_: decoded.append((given[4], given[7].shape)))
    found = measure.measure_rates(sample, threads=2, seconds=0.001)
    assert found.threads == 2
    assert min(found.read, found.decode, found.whole) > 0
    assert all(shape == (*box[2:], 3) for box, shape in decoded)  # so that nothing is resized
    assert len(decoded) >= 16


def test_the_plan_of_a_sample_keeps_what_the_images_are_and_leaves_the_layout(sample: Sample) -> None:
    plan = sample.plan_for(3)
    assert (plan.facts.images, plan.facts.side, plan.recipe.seed) == (24, 16, plan_of().recipe.seed)
    assert plan.placement.loader_workers == 3
    assert plan.micro_batch == plan.global_batch == 16
    assert sample.plan_for(20).global_batch == 40
    pillow = Sample(plan_of("on.decoder=pillow"), sample.folder, 24)
    assert (plan.placement.decoder, pillow.plan_for(1).placement.decoder) == ("fast", "pillow")


@pytest.mark.skipif(not available(), reason="packing without loss needs libjpeg")
def test_a_packed_sample_is_the_same_images_in_tiles(sample: Sample, tmp_path: Path) -> None:
    packed = sample.packed(tmp_path / "pack", None, processes=1)
    mine, theirs = sample.open()[0].table, packed.open()[0].table
    assert [*theirs.keys] == [*mine.keys]
    assert theirs.rows["label"].tolist() == mine.rows["label"].tolist()
    assert np.count_nonzero(theirs.rows["flags"] & Flag.TILED) > 12
    assert measure.loader_rate(packed, 1, 0.001, CPU) > 0
    assert PACK in remedies(sample.plan, mine, 1)
    assert PACK not in remedies(sample.plan, theirs, 1)


@pytest.mark.skipif(not available(), reason="packing without loss needs libjpeg")
def test_a_pack_is_judged_as_its_source_is(folder: Path, tmp_path: Path) -> None:
    index = open_index(DATA, folder)
    packed = Sample.of(plan_of(), index, 55, tmp_path / "few").packed(tmp_path / "pack", None, processes=1)
    same = Index("pack", packed.folder, index.classes, packed.open()[0].table, table_of())
    found = [*check.find_bad_images(same, DATA, 1)]
    assert keys_of(same, found) == keys_of(index, [*check.find_bad_images(index, DATA, 1)])
    assert len(found) == 3
    assert describe.describe_data(same)["encodings"]["JPEG in tiles"] > 40


@pytest.mark.long
def test_more_workers_than_threads_are_processes(sample: Sample) -> None:
    found = measure.measure_rates(sample, threads=MOST_THREADS + 1, seconds=0.01)
    assert min(found.read, found.decode, found.whole) > 0


def test_transfer_counts_images() -> None:
    assert measure.transfer_rate(plan_of(), CPU, 0.001) > 0
