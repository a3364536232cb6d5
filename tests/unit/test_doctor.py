"""The doctor of data in files: what it finds wrong, what it says there is, what it advises, and what it measures."""

from __future__ import annotations

import itertools
import struct
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import make_plan
from paceline.command import bench_data
from paceline.data.index.scan import open_index
from paceline.data.index.table import ROW, Flag, Index, Strings, Table
from paceline.data.inspect import check, measure
from paceline.data.inspect.measure import Rates, Sample
from paceline.data.load.decode import decode_into
from paceline.data.load.files import FileLoader
from paceline.data.load.image_files import open_splits
from paceline.data.load.order import training_order
from paceline.data.load.quarantine import Quarantine
from paceline.data.pack.libjpeg import available
from paceline.data.pack.transcode import Smaller, read_bytes
from paceline.data.pack.writer import open_source
from paceline.errors import DataError
from paceline.planning import Plan
from paceline.settings.data import Files
from paceline.settings.placement import MOST_THREADS
from pictures_made import BAD, make_pictures, write_folder, write_tars, write_tfrecord

PAGE = """
model: resnet8
data: {name: images, side: 16, images: 55, validation_images: 5, classes: 4, max_bad: 1}
global_batch: 8
norm_batch: 4
epochs: 2
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
schedule: constant
augment: {flip: true}
report: 2 steps
"""
PICTURES = make_pictures(60, 4)
DATA = Files(name="images", side=16, classes=4)
CPU = torch.device("cpu")


def plan_of(*words: str) -> Plan:
    return make_plan(*words, text=PAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(PICTURES, tmp_path_factory.mktemp("pictures"))


def keys_of(index: Index, faults: list[check.Fault]) -> list[str]:
    tables = {"training": index.training, "validation": index.validation}
    return [tables[fault.split].keys[fault.image] for fault in faults]


def table_of(*rows: dict[str, Any], keys: list[str] | None = None) -> Table:
    made = np.zeros(len(rows), ROW)
    for number, row in enumerate(rows):
        for name, value in row.items():
            made[name][number] = value
    named = keys or [f"k{number}" for number in range(len(rows))]
    return Table(made, Strings.of(["shard"]), Strings.of(named), np.zeros((0, 4), np.float32))


@pytest.mark.parametrize("write", [write_folder, write_tfrecord, write_tars])
def test_exactly_the_bad_pictures_are_found_in_every_format(write: Any, tmp_path: Path) -> None:
    index = open_source(DATA, write(PICTURES, tmp_path / "data"))
    faults = list(check.examine(index, DATA, threads=2))
    bad = {"truncated": "damaged", "corrupt": "damaged", "empty": "empty"}
    assert set(bad) == set(BAD)
    if write is not write_folder:  # a folder cannot hold a label that is none
        bad["wrong"] = "label outside the classes"
    expected = {picture.key: bad[picture.odd] for picture in PICTURES if picture.odd in bad}
    assert dict(zip(keys_of(index, faults), [fault.kind for fault in faults], strict=True)) == expected
    assert keys_of(index, faults) == sorted(expected)
    assert all(fault.split == "training" and fault.name == index.training.name(fault.image) for fault in faults)
    assert all(fault.reason for fault in faults)


def test_what_is_called_bad_is_what_training_puts_aside(folder: Path) -> None:
    plan = plan_of("drop_last=true", "on.micro_batch=8")
    assert isinstance(plan.data, Files)
    bad = Quarantine(None, most=99)
    loader = FileLoader(plan, partial(open_splits, plan, plan.data, folder), 0, CPU, bad)
    with closing(loader), closing(loader.training(0)) as shares:
        for _ in itertools.islice(shares, 4 * 55 // 8):  # dropped tails leave no image out of four epochs
            pass
    found = check.examine(open_index(DATA, folder), DATA, threads=1)
    assert bad._bad == {(fault.split, fault.image) for fault in found}
    assert len(bad) == 3


def test_faults_are_the_same_whoever_looks_and_progress_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_CHUNK", 7)
    index, told = open_index(DATA, folder), []
    alone = list(check.examine(index, DATA, 1, lambda *what: told.append(what)))
    assert list(check.examine(index, DATA, 5)) == alone
    assert told[-1] == ("decoding", 60, 60)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})


def test_a_header_that_is_none_and_one_that_claims_too_much_are_told_apart(tmp_path: Path) -> None:
    write_folder(PICTURES[20:40], tmp_path)
    (tmp_path / "train/class000/text.JPEG").write_bytes(b"no picture at all")
    claim = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBBI", 13, b"IHDR", 100_000, 100_000, 8, 2, 0, 0, 0, 0)
    (tmp_path / "train/class001/bomb.png").write_bytes(claim)
    found = {fault.name: fault for fault in check.examine(open_index(DATA, tmp_path), DATA, 1)}
    assert found["train/class000/text.JPEG"].kind == "no image header"
    assert found["train/class001/bomb.png"].kind == "too large"
    assert "100,000 x 100,000" in found["train/class001/bomb.png"].reason
    assert len(found) == 2


def test_a_file_that_cannot_be_read_is_listed_and_does_not_end_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_PAUSE", 0)
    write_folder(PICTURES[20:40], tmp_path)
    index = open_index(DATA, tmp_path)
    gone = tmp_path / index.training.name(3)
    gone.unlink()
    (fault,) = check.examine(index, DATA, 2)
    assert (fault.image, fault.kind, fault.reason) == (3, "cannot be read", "cannot be read: No such file or directory")


def test_a_read_that_fails_once_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_PAUSE", 0)
    index = open_index(DATA, write_folder(PICTURES[20:40], tmp_path))
    failed: set[Path] = set()

    def read(path: Path, offset: int, length: int) -> bytes:
        if path not in failed:
            failed.add(path)
            raise DataError(f"{path}: cannot be read: for now")
        return read_bytes(path, offset, length)

    monkeypatch.setattr(check, "read_bytes", read)
    assert list(check.examine(index, DATA, 1)) == []
    assert len(failed) == 20


def test_turned_images_are_judged_turned_where_the_data_say_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, boxes = DATA.model_copy(update={"orientation": "honor"}), []

    def decode(encoded: bytes, flags: int, width: int, height: int, box: Any, *rest: Any, turn: bool) -> None:
        boxes.append((turn, bool(flags & Flag.ACROSS), (width, height), tuple(box[2:])))
        decode_into(encoded, flags, width, height, box, *rest, turn=turn)

    monkeypatch.setattr(check, "decode_into", decode)
    assert len(list(check.examine(open_index(data, folder), data, 1))) == 3
    assert [across for _, across, _, _ in boxes].count(True) == 1
    for turn, across, size, box in boxes:
        assert turn
        assert box == (size if across else size[::-1])


def test_images_with_the_key_and_label_of_another_are_counted() -> None:
    rows = [{"label": label} for label in (0, 0, 1, 1, 1, 1)]
    assert check.repeated(table_of(*rows, keys=["a", "a", "a", "b", "b", "b"])) == 3
    assert check.repeated(table_of(*rows, keys=["a", "b", "c", "d", "e", "f"])) == 0
    assert check.repeated(table_of()) == 0


def test_classes_are_counted_without_labels_that_are_none() -> None:
    table = table_of(*({"label": label} for label in (2, 0, 2, -1, 3, 99)))
    index = Index("folder", Path(), ("a", "b", "c"), table, table_of())
    assert check.images_of(index, table).tolist() == [1, 0, 2]


def test_a_survey_says_what_there_is(folder: Path) -> None:
    found = check.survey(open_index(DATA, folder))
    assert (found["format"], found["training images"], found["validation images"]) == ("folder", 55, 5)
    assert found["classes"] == 4
    assert found["bytes"] == sum(len(picture.bytes) for picture in PICTURES)
    others = ("cmyk", "png", "gif", "alpha", "palette")
    assert found["encodings"] == {
        "JPEG in tiles": 0,
        "sequential JPEG": 60 - len(others) - 2,
        "progressive JPEG": 1,
        "other": len(others),
        "no image header": 1,
    }
    assert found["turned by EXIF"] == 1
    assert found["width"]["smallest"] == 1
    assert found["height"]["smallest"] == 2
    assert 48 <= found["width"]["median"] <= found["width"]["largest"] == 117


def test_a_survey_tells_tiles_and_wrong_labels() -> None:
    tiled = {"flags": Flag.JPEG | Flag.SEQUENTIAL | Flag.TILED, "width": 9, "height": 5, "length": 3_000_000_000}
    table = table_of(tiled, tiled, {"flags": Flag.OTHER_LABEL, "width": 1, "height": 1, "objects": 2})
    found = check.survey(Index("pack", Path("x"), ("a",), table, table_of({"flags": Flag.UNREADABLE})))
    assert found["encodings"]["JPEG in tiles"] == 2
    assert found["encodings"]["sequential JPEG"] == 0
    assert found["encodings"]["no image header"] == 1
    assert (found["labels outside the classes"], found["with objects"]) == (1, 1)
    assert found["bytes"] == 6_000_000_000  # more than a row's own type holds
    assert found["width"] == {"smallest": 1, "median": 9, "largest": 9}


JPEGS = table_of(*3 * [{"flags": Flag.JPEG | Flag.SEQUENTIAL, "width": 800, "height": 600}])
PNGS = table_of(*3 * [{"flags": 0, "width": 300, "height": 200}])
TILES = table_of(*3 * [{"flags": Flag.JPEG | Flag.SEQUENTIAL | Flag.TILED, "width": 800, "height": 600}])
SMALL_TILES = table_of(*3 * [{"flags": Flag.JPEG | Flag.SEQUENTIAL | Flag.TILED, "width": 500, "height": 400}])


def remedies(table: Table, cores: int, *words: str) -> str:
    said = check.advice(plan_of(*words), 0.38, 410.4, table, cores)
    assert said is not None
    assert said.startswith("38% of the time is spent waiting for images (410 images/s with on.loader_workers=")
    assert said.endswith("; paceline bench data measures it")
    return said.split("; ")[1]


def test_advice_names_only_what_is_not_done_yet() -> None:
    pack, smaller = "a pack (paceline data pack SOURCE OUT)", "a smaller pack (paceline data pack SOURCE OUT --max-side"
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
    monkeypatch.setattr(check, "has_torchvision", lambda: True)
    assert remedies(SMALL_TILES, 4, *cuda) == "what may help: on.decoder=gpu"
    assert remedies(SMALL_TILES, 4, "on.loader_workers=4") == "more cores would help"
    assert remedies(SMALL_TILES, 4, *cuda, "augment.python=mine:change") == "more cores would help"
    assert remedies(JPEGS, 4, *cuda, "on.decoder=gpu").startswith("what may help: a smaller pack")  # not by tiles
    assert remedies(SMALL_TILES, 4, *cuda, "on.decoder=gpu") == "more cores would help"
    monkeypatch.setattr(check, "has_torchvision", lambda: False)
    assert remedies(SMALL_TILES, 4, *cuda) == "more cores would help"


def test_little_waiting_and_data_without_files_need_no_advice() -> None:
    assert check.advice(plan_of(), 0.2, 410, JPEGS, 4) is None
    assert check.advice(plan_of(), 0.201, 410, JPEGS, 4) is not None
    assert check.advice(make_plan(), 0.9, 410, JPEGS, 4) is None


def test_waiting_is_said_once_and_after_a_whole_interval_that_is_not_the_first(folder: Path) -> None:
    def report(step: int, waiting: float = 0.5) -> dict[str, float]:
        return {"step": step, "waiting": waiting, "images_per_second": 100.0}

    watch = check.Watch(plan_of(), folder, 64)
    assert watch.heard(report(2)) is None
    assert watch.heard(report(4, waiting=0.1)) is None
    assert watch.heard(report(5)) is None  # a part of an interval, as at the end
    said = watch.heard(report(6))
    assert said is not None
    assert "50%" in said
    assert "on.loader_workers=64" in said
    assert watch.heard(report(8)) is None


def test_the_limit_is_what_takes_the_most_time() -> None:
    assert Rates(2, read=1e4, decode=500, whole=400).limit == "decode"
    assert Rates(2, read=1e2, decode=90, whole=80).limit == "reading"
    assert Rates(2, read=1e4, decode=5000, whole=400).limit == "crop and resize"
    assert measure.best([Rates(2, 1, 5, 3), Rates(2, 2, 4, 6)]) == Rates(2, 2, 5, 6)


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
    found = measure.measure(sample, threads=2, seconds=0.001)
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
    presets = [(bench_data.PACK, None), (bench_data.PRESET, Smaller())]
    assert bench_data._presets(sample) == presets
    assert bench_data._presets(packed) == presets[1:]


@pytest.mark.skipif(not available(), reason="packing without loss needs libjpeg")
def test_a_pack_is_judged_as_its_source_is(folder: Path, tmp_path: Path) -> None:
    index = open_index(DATA, folder)
    packed = Sample.of(plan_of(), index, 55, tmp_path / "few").packed(tmp_path / "pack", None, processes=1)
    same = Index("pack", packed.folder, index.classes, packed.open()[0].table, table_of())
    found = [*check.examine(same, DATA, 1)]
    assert keys_of(same, found) == keys_of(index, [*check.examine(index, DATA, 1)])
    assert len(found) == 3
    assert check.survey(same)["encodings"]["JPEG in tiles"] > 40


@pytest.mark.long
def test_more_workers_than_threads_are_processes(sample: Sample) -> None:
    found = measure.measure(sample, threads=MOST_THREADS + 1, seconds=0.01)
    assert min(found.read, found.decode, found.whole) > 0


def test_transfer_counts_images() -> None:
    assert measure.transfer_rate(plan_of(), CPU, 0.001) > 0


@pytest.mark.parametrize(
    ("cores", "threads", "counts"),
    [(1, 1, [1]), (2, 2, [1, 2]), (6, 4, [1, 2, 4, 6]), (16, 5, [1, 5, 8, 16]), (4, 16, [1, 2, 4, 16])],
)
def test_one_half_and_all_of_the_cores_are_measured(cores: int, threads: int, counts: list[int]) -> None:
    assert bench_data.sweep(cores, threads) == counts


def test_a_busy_machine_is_warned_of() -> None:
    assert "load 4.3 on 2 cores" in bench_data.busy(4.3, 2)
    assert bench_data.busy(0.4, 2) == ""


def rates_row(what: str, threads: int, whole: float, limit: str | None = "decode") -> dict[str, Any]:
    return {"images": what, "threads": threads, "read": 9e9, "decode": 9e9, "whole": whole, "limit": limit}


def test_the_sentence_names_the_limit_and_what_was_measured_to_help() -> None:
    rows = [
        rates_row(bench_data.AS_IT_IS, 1, 210), rates_row(bench_data.AS_IT_IS, 2, 410),
        rates_row(bench_data.PACK, 2, 861),
        rates_row(bench_data.PRESET, 2, 1394), rates_row(bench_data.DEVICE, 2, 4100, None),
    ]  # fmt: skip
    facts = {"rates": rows, "threads": 2, "limit": "decode", "transfer": None, "remedies": bench_data.remedies(rows, 2)}
    assert bench_data.sentence(facts) == (
        "decode limits: 410 images/s on 2 threads; a pack would give 2.1x, "
        "a pack with --max-side 500 --quality 90 would give 3.4x, on.decoder=gpu would give 10.0x"
    )
    one = facts | {"threads": 1, "remedies": bench_data.remedies(rows[:2], 1)}
    assert bench_data.sentence(one) == "decode limits: 210 images/s on 1 thread; on.loader_workers=2 would give 2.0x"


def test_what_does_not_help_is_not_advised() -> None:
    rows = [rates_row(bench_data.AS_IT_IS, 2, 410), rates_row(bench_data.PACK, 2, 420)]
    facts = {"rates": rows, "threads": 2, "limit": "decode", "transfer": None, "remedies": bench_data.remedies(rows, 2)}
    assert bench_data.sentence(facts).endswith("; nothing that was measured would give more")
    rows[1]["whole"] = 4000
    slow = facts | {"limit": "transfer", "transfer": 99.0, "remedies": bench_data.remedies(rows, 2)}
    assert bench_data.sentence(slow) == ("transfer limits: 99 images/s; nothing that was measured would give more")
