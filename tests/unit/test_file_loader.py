"""Images in files on their way to a batch: the right pixels, replacements for bad ones, and faults in one line."""

from __future__ import annotations

import errno
import os
import platform
import sys
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from conftest import make_plan
from image_files import (
    BAD_BYTES,
    Pixels,
    clean_pictures,
    file_plan,
    judged,
    keys_of,
    loading,
    marking,
    same,
    spoilt,
    trained,
)
from paceline import keyed
from paceline.augment.flip import draw_flips
from paceline.augment.resized_crop import evaluation_boxes, training_boxes
from paceline.data.index.fingerprint import digest_of
from paceline.data.index.image_header import parse_header
from paceline.data.load import image_files
from paceline.data.load.cache import Cache
from paceline.data.load.decode import decode_into
from paceline.data.load.files import EvaluationCrops, FileLoader, open_decoder
from paceline.data.load.image_files import ImageFiles, open_splits
from paceline.data.load.loader import open_loader
from paceline.data.load.order import training_order
from paceline.data.load.quarantine import quarantined
from paceline.data.load.workers import Chunk, Processes
from paceline.errors import DataError, PlanError, ReadFailed, SpecError
from paceline.planning import Plan
from paceline.settings.data import Files
from paceline.world import World
from pictures_made import Made, split, write_folder, write_tars

PICTURES = clean_pictures(40)
TRAINING, VALIDATION = (sorted(part, key=lambda picture: picture.key) for part in split(PICTURES, 1 / 7))
WORDS = ("on.loader_workers=2", "on.micro_batch=8", "norm=none", "norm_batch=null")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(PICTURES, tmp_path_factory.mktemp("files"), 1 / 7)


def alone(plan: Plan, picture: Made, position: int, number: int, side: int) -> Pixels:
    """One training picture, cut, resized and mirrored by itself."""
    assert isinstance(plan.data, Files)
    width, height, flags = parse_header(picture.bytes)
    place = np.array([position])
    box = training_boxes(plan.recipe.seed, plan.recipe.augment.crop, place, np.array([width]), np.array([height]))[0]
    mirrored = draw_flips(plan.recipe, place, np.array([number]), place // plan.epoch_images)
    out = np.zeros((side, side, 3), np.uint8)
    decode_into(picture.bytes, flags, width, height, box, bool(mirrored[0]), plan.data.resize, out)
    return out


def spoil(folder: Path, *which: int, how: str = "empty", part: int = 0) -> Path:
    """The same data with the images of these numbers spoilt."""
    ranked = (TRAINING, VALIDATION)[part]
    chosen = {ranked[number].key for number in which}
    return write_folder(
        [spoilt(picture, how) if picture.key in chosen else picture for picture in PICTURES], folder, 1 / 7
    )


@pytest.mark.parametrize(
    "words", [(), ("augment.flip=false",), ("data.resize=bicubic", "augment.alternate_flip=true", "augment.flip=false")]
)
def test_every_position_shows_its_image_cut_and_mirrored_by_its_own_numbers(
    folder: Path, words: tuple[str, ...]
) -> None:
    plan = file_plan(folder, *WORDS, *words)
    pixels, labels = trained(plan, folder, 0, 3)
    numbers = training_order(plan).images(np.arange(48))
    for position, number in enumerate(numbers.tolist()):
        assert np.array_equal(pixels[position], alone(plan, TRAINING[number], position, number, 16)), position
        assert labels[position] == TRAINING[number].label
    assert len({pixels[position].tobytes() for position in range(48)}) == 48


def test_every_validation_image_is_judged_once_in_order(folder: Path) -> None:
    plan = file_plan(folder, *WORDS, "data.evaluation_side=20", "data.evaluation.short=24")
    assert isinstance(plan.data, Files)
    pixels, labels = judged(plan, folder)
    assert len(pixels) == len(VALIDATION)
    for picture, found, label in zip(VALIDATION, pixels, labels, strict=True):
        width, height, flags = parse_header(picture.bytes)
        box = evaluation_boxes(plan.data.evaluation, 20, np.array([width]), np.array([height]))[0]
        out = np.zeros((20, 20, 3), np.uint8)
        decode_into(picture.bytes, flags, width, height, box, False, "bilinear", out)
        assert np.array_equal(found, out)
        assert label == picture.label


def test_a_turned_image_is_upright_only_where_the_data_says_so(tmp_path: Path) -> None:
    folder = write_folder(PICTURES, tmp_path, 1 / 7)
    number = next(number for number, picture in enumerate(TRAINING) if picture.odd == "turned")
    plans = [
        file_plan(folder, *WORDS, f"data.orientation={how}", "augment.crop.area=[1, 1]") for how in ("ignore", "honor")
    ]
    ignored, honored = (trained(plan, folder, 0, 3) for plan in plans)
    differ = [place for place in range(48) if not np.array_equal(ignored[0][place], honored[0][place])]
    where = np.flatnonzero(training_order(plans[0]).images(np.arange(48)) == number)
    assert differ == where.tolist()


def test_both_decoders_show_nearly_the_same(folder: Path) -> None:
    fast, pillow = (
        trained(file_plan(folder, *WORDS, f"on.decoder={name}"), folder, 0, 3) for name in ("fast", "pillow")
    )
    assert np.array_equal(fast[1], pillow[1])
    assert np.abs(fast[0].astype(int) - pillow[0]).mean() < 0.5


@pytest.mark.parametrize("how", BAD_BYTES)
def test_a_bad_image_is_replaced_by_the_next_good_one_cut_for_its_own_place(tmp_path: Path, how: str) -> None:
    folder = spoil(tmp_path, 4, 5, len(TRAINING) - 1, how=how)
    plan = file_plan(folder, *WORDS)
    run = tmp_path / "run"
    run.mkdir()
    pixels, labels = trained(plan, folder, 0, 3, run)
    numbers = training_order(plan).images(np.arange(48)).tolist()
    instead = {4: 6, 5: 6, len(TRAINING) - 1: 0}
    assert set(instead) <= set(numbers)
    for position, number in enumerate(numbers):
        shown = instead.get(number, number)
        assert np.array_equal(pixels[position], alone(plan, TRAINING[shown], position, shown, 16)), (position, number)
        assert labels[position] == TRAINING[shown].label
    assert sorted(int(row["image"]) for row in quarantined(run)) == sorted(instead)
    for row in quarantined(run):
        assert (
            row["path"]
            == row["name"]
            == f"train/class{TRAINING[int(row['image'])].label:03d}/{TRAINING[int(row['image'])].key}.JPEG"
        )
        assert row["offset"] == 0
        assert row["reason"]


def test_a_bad_image_that_is_met_on_the_way_to_a_replacement_is_listed_too(folder: Path, tmp_path: Path) -> None:
    first = set(training_order(file_plan(folder, *WORDS)).images(np.arange(16)).tolist())
    number = next(number for number in range(len(TRAINING) - 1) if number in first and number + 1 not in first)
    data = spoil(tmp_path / "data", number, number + 1)
    trained(file_plan(data, *WORDS), data, 0, 1, tmp_path)
    assert sorted(int(row["image"]) for row in quarantined(tmp_path)) == [number, number + 1]


def test_a_header_that_claims_any_size_is_refused_by_what_it_claims(tmp_path: Path) -> None:
    folder = spoil(tmp_path, 1, how="bomb")
    run = tmp_path / "run"
    run.mkdir()
    trained(file_plan(folder, *WORDS), folder, 0, 3, run)
    [row] = quarantined(run)
    assert "65,500 x 65,500 pixels" in str(row["reason"])


def test_a_wrong_label_is_replaced_too(tmp_path: Path) -> None:
    wrong = TRAINING[9].key
    made = [replace(picture, wrong_label=4321) if picture.key == wrong else picture for picture in PICTURES]
    folder = write_tars(made, tmp_path / "tars", 1 / 7)
    run = tmp_path / "run"
    run.mkdir()
    plan = file_plan(folder, *WORDS)
    pixels, labels = trained(plan, folder, 0, 3, run)
    number = keys_of(folder)[0].index(wrong)
    [row] = quarantined(run)
    assert (row["image"], row["reason"]) == (number, "its label 4321 is none of the 10 classes")
    assert int(row["offset"]) > 0
    assert str(row["path"]).endswith(".tar")
    assert labels.max() < 10
    for position in np.flatnonzero(training_order(plan).images(np.arange(48)) == number).tolist():
        shown = (number + 1) % len(TRAINING)
        assert np.array_equal(pixels[position], alone(plan, TRAINING[shown], position, shown, 16))


def test_bad_validation_images_are_replaced_and_listed_as_such(tmp_path: Path) -> None:
    folder = spoil(tmp_path, 0, len(VALIDATION) - 1, part=1)
    run = tmp_path / "run"
    run.mkdir()
    pixels, labels = judged(file_plan(folder, *WORDS), folder, run)
    assert np.array_equal(pixels[0], pixels[1])
    assert np.array_equal(pixels[-1], pixels[1])
    assert labels[0] == labels[-1] == VALIDATION[1].label
    assert [(row["split"], row["image"]) for row in quarantined(run)] == [
        ("validation", 0), ("validation", len(VALIDATION) - 1)
    ]  # fmt: skip


def test_data_of_which_nothing_can_be_decoded_is_refused(tmp_path: Path) -> None:
    folder = spoil(tmp_path, *range(len(TRAINING)), how="truncated")  # the headers are whole
    with pytest.raises(DataError, match=f"none of the {len(TRAINING)} training images can be decoded"):
        trained(file_plan(folder, *WORDS, "data.max_bad=1"), folder, 0, 1)


def test_data_of_which_no_header_can_be_read_are_refused_in_the_plan(tmp_path: Path) -> None:
    folder = spoil(tmp_path, *range(len(TRAINING)))
    with pytest.raises(DataError, match="none of the training images can be read; `paceline data check"):
        file_plan(folder, *WORDS, "data.max_bad=1")


def test_too_many_bad_images_end_it(tmp_path: Path) -> None:
    folder = spoil(tmp_path, 1, 5, 9)
    allowed = file_plan(folder, *WORDS, f"data.max_bad={2.5 / len(PICTURES)}")
    trained(allowed, folder, 0, 3)
    with pytest.raises(DataError, match=r"with it 3 images cannot be decoded, and data\.max_bad allows 2"):
        trained(file_plan(folder, *WORDS, f"data.max_bad={2 / len(PICTURES)}"), folder, 0, 3)


def test_images_come_at_the_side_that_the_schedule_says(folder: Path) -> None:
    plan = file_plan(folder, *WORDS, "epochs=2", "augment.side={0%: 8, 50%: 12}", "data.evaluation_side=16")
    half = plan.steps // 2
    order = training_order(plan)
    with loading(plan, folder) as loader, closing(loader.training(0)) as shares:
        for step, share in enumerate(islice(shares, plan.steps)):
            side = 8 if step < half else 12
            for batch in share:
                assert batch.images.shape[2:] == (side, side)
                assert batch.positions is not None
                position = int(batch.positions[0])
                number = int(order.images(np.array([position]))[0])
                expected = alone(plan, TRAINING[number], position, number, side)
                assert np.array_equal(batch.images[0].permute(1, 2, 0).numpy(), expected)
    assert judged(plan, folder)[0].shape[1:] == (16, 16, 3)


OWN = """
import numpy as np
seen = []
def invert(picture, words):
    assert words.dtype == np.uint32 and words.shape == (4,)
    seen.append(tuple(int(word) for word in words))
    return 255 - picture if words[0] & 1 else picture
def smaller(picture, words):
    return picture[1:]
def fails(picture, words):
    return picture[int(words[0]) // 0]
def nothing(picture, words):
    pass
not_a_function = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of one's own in the working folder."""
    (tmp_path / "mine_here.py").write_text(OWN)
    (tmp_path / "broken_here.py").write_text("import numpy\nthis is no Python")
    (tmp_path / "falls_here.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("mine_here", "broken_here", "falls_here"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("own")
def test_a_function_of_ones_own_changes_images_by_words_keyed_to_their_place(folder: Path) -> None:
    plain = trained(file_plan(folder, *WORDS), folder, 0, 3)
    changed = trained(file_plan(folder, *WORDS, "augment.python=mine_here:invert"), folder, 0, 3)
    assert np.array_equal(plain[1], changed[1])
    words = keyed.words(keyed.key(0, "python"), np.arange(48))
    expected = [255 - picture if words[0][place] & 1 else picture for place, picture in enumerate(plain[0])]
    assert np.array_equal(np.stack(expected), changed[0])
    assert 10 < sum(int(word) & 1 for word in words[0]) < 38
    later = trained(file_plan(folder, *WORDS, "augment.python=mine_here:invert", "on.micro_batch=2"), folder, 1, 2)
    assert same(later, (changed[0][16:], changed[1][16:]))


@pytest.mark.usefixtures("own")
def test_a_replacement_is_changed_by_it_too(tmp_path: Path) -> None:
    folder = spoil(tmp_path / "data", *range(0, len(TRAINING), 2))
    words = (*WORDS, "data.max_bad=1")
    plain = trained(file_plan(folder, *words), folder, 0, 3)
    changed = trained(file_plan(folder, *words, "augment.python=mine_here:invert"), folder, 0, 3)
    first = keyed.words(keyed.key(0, "python"), np.arange(48))[0]
    expected = [255 - picture if first[place] & 1 else picture for place, picture in enumerate(plain[0])]
    assert same((np.stack(expected), plain[1]), changed)


@pytest.mark.usefixtures("own")
def test_validation_images_are_left_alone_by_it(folder: Path) -> None:
    assert same(
        judged(file_plan(folder, *WORDS), folder),
        judged(file_plan(folder, *WORDS, "augment.python=mine_here:invert"), folder),
    )


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "fault", "told"),
    [
        ("not_there:f", SpecError, "No module named 'not_there'"),
        ("mine_here:absent", SpecError, "mine_here has no function or class 'absent'"),
        ("mine_here:not_a_function", SpecError, "mine_here has no function or class 'not_a_function'"),
        ("mine_here", SpecError, "write module:name"),
        (":invert", SpecError, "write module:name"),
        ("broken_here:f", SpecError, "broken_here.py, line 2"),
        ("falls_here:f", SpecError, "division by zero"),
        ("mine_here:smaller", DataError, r"gave uint8 \(15, 16, 3\); it should give uint8 \(16, 16, 3\)"),
        ("mine_here:nothing", DataError, "gave NoneType"),
        ("mine_here:fails", DataError, r"failed: ZeroDivisionError: .*mine_here\.py:11\)"),
    ],
)
def test_what_is_wrong_with_it_is_told_in_one_line(folder: Path, name: str, fault: type[Exception], told: str) -> None:
    with pytest.raises(fault, match=told) as found:
        trained(file_plan(folder, *WORDS, f"augment.python={name}"), folder, 0, 1)
    assert str(found.value).startswith(f"augment.python={name}")
    assert "\n" not in str(found.value)
    assert "" not in sys.path


def test_pictures_in_files_are_cropped_and_those_of_one_size_may_be_padded(folder: Path) -> None:
    with pytest.raises(
        PlanError, match=r"augment\.pad is for pictures of one size, and these come in files; write augment\.crop"
    ):
        file_plan(folder, *WORDS, "augment.pad=2")
    for word in ("augment.crop.tries=3", "augment.python=mine:f"):
        assert make_plan(word).recipe.augment.pad == 1  # what is made comes at its size, and `plan` says so


def test_a_validation_crop_larger_than_what_it_is_cut_out_of_is_refused(folder: Path) -> None:
    with pytest.raises(PlanError, match=r"write data\.evaluation\.short=20 or more"):
        file_plan(folder, *WORDS, "data.evaluation_side=20")


def test_a_disk_that_is_gone_ends_the_loader_without_waiting_for_what_is_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_files, "PAUSES", (0.01,) * 5)
    plan = file_plan(folder, *WORDS, "global_batch=64", "on.micro_batch=64")
    attempts = [0]
    real = os.pread

    def gone(file: int, count: int, offset: int) -> bytes:
        attempts[0] += 1
        if attempts[0] > 3:
            raise OSError(errno.EIO, "gone")
        return real(file, count, offset)

    monkeypatch.setattr(os, "pread", gone)
    with loading(plan, folder) as loader, pytest.raises(ReadFailed), closing(loader.training(0)) as shares:
        next(shares)
    assert attempts[0] < 120  # six for each of about eighty chunks ahead would be many more


def test_a_closed_loader_leaves_no_threads(folder: Path) -> None:
    before = threading.active_count()
    with loading(file_plan(folder, *WORDS), folder) as loader, closing(loader.training(0)) as shares:
        next(shares)
    assert threading.active_count() == before


def test_a_cache_changes_nothing(folder: Path) -> None:
    plain = file_plan(folder, *WORDS)
    for budget in (10_000, 1 << 24):
        cached = file_plan(folder, *WORDS, f"on.cache={budget}")
        assert same(trained(cached, folder, 0, 6), trained(plain, folder, 0, 6))
        assert same(judged(cached, folder), judged(plain, folder))


def test_replicas_of_a_host_share_one_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = ImageFiles._read

    def counted(files: ImageFiles, index: int) -> bytes:
        reads.append(index)
        return read(files, index)

    monkeypatch.setattr(ImageFiles, "_read", counted)
    store = HashStore()
    for budget, kept in ((0, False), (1 << 24, True)):
        plan = file_plan(folder, *WORDS, f"on.cache={budget}")
        worlds = [World(torch.device("cpu"), replica, 2, PrefixStore(str(budget), store)) for replica in range(2)]
        loaders = [
            open_loader(plan, folder, world.replica, world.device, share=partial(world.first_on_host, "cache"))
            for world in worlds
        ]
        first, second = (loader._training for loader in loaders if isinstance(loader, FileLoader))
        reads.clear()
        for number in range(first.count):
            assert first.read(number) == second.read(number)
        assert len(reads) == first.count * (1 if kept else 2)
        for loader in loaders:
            assert isinstance(loader, FileLoader)
            loader.close()


def test_replicas_of_other_hosts_have_caches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    caches = []
    for replica in range(4):
        monkeypatch.setattr(platform, "node", partial("host{}".format, replica // 2))
        caches.append(World(torch.device("cpu"), replica, 4, store).first_on_host("cache", Cache(1000, (4, 4))))
    caches[0].put("training", 1, b"one")
    assert [cache.get("training", 1) for cache in caches] == [b"one", b"one", None, None]


def test_a_worker_process_may_fill_the_cache_of_its_replica_alone(folder: Path) -> None:
    plan = file_plan(folder, *WORDS, f"on.cache={sum(len(picture.bytes) for picture in PICTURES)}")
    assert isinstance(plan.data, Files)
    opens = partial(open_splits, plan, plan.data, folder)
    splits = opens()
    made = open_decoder(plan, opens, digest_of(*(part.table for part in splits)), splits[0].cache)
    for part in splits:
        numbers = np.arange(part.count)
        boxes, mirrored = EvaluationCrops(plan, part).boxes(numbers, numbers)
        into = np.empty((part.count, 16, 16, 3), np.uint8)
        assert made(Chunk(part.split, numbers, boxes, mirrored, None), into) == []
        assert all(part.cache.get(part.split, number) == part._read(number) for number in range(part.count))


def test_data_that_change_before_worker_processes_open_them_are_refused(tmp_path: Path) -> None:
    folder = write_folder(PICTURES, tmp_path / "data", 1 / 7)
    plan = file_plan(folder, *WORDS, "on.loader_workers=5")
    with loading(plan, folder) as loader:
        first = next((folder / "train").iterdir())
        (first / "a new one.JPEG").write_bytes(PICTURES[-1].bytes)
        told = f"^{folder}: the data have changed since the run began; start again$"
        with pytest.raises(DataError, match=told), closing(loader.training(0)) as shares:
            next(shares)


@pytest.mark.parametrize("replicas", [1, 2])
def test_images_that_were_mended_before_a_resume_do_not_count(tmp_path: Path, replicas: int) -> None:
    """Those of this kind keep their length when they are mended."""
    words = (*WORDS, f"data.max_bad={2 / len(PICTURES)}", f"on.replicas={replicas}")
    run = tmp_path / "run"
    run.mkdir()
    folders = [spoil(tmp_path / str(number), *which, how="corrupt") for number, which in enumerate([(1, 5), (5, 9)])]
    for folder in folders:
        trained(file_plan(folder, *words), folder, 0, 3, run)
    assert sorted(int(row["image"]) for row in quarantined(run)) == [1, 5, 9]
    folder = spoil(tmp_path / "worse", 5, 9, 12, how="corrupt")
    with pytest.raises(DataError, match=r"with it 3 images cannot be decoded, and data\.max_bad allows 2"):
        trained(file_plan(folder, *words), folder, 0, 3, run)


def test_batches_of_worker_processes_may_grow_and_shrink() -> None:
    workers = Processes(marking, 1, torch.device("cpu"))
    for count, mark in ((1, 3), (5, 7), (2, 9), (20, 11), (1, 13)):
        batch = workers.batch((count, 40, 40, 3))
        numbers = np.full(count, mark)
        chunk = Chunk("training", numbers, np.zeros((count, 4)), np.zeros(count, bool), None)
        assert batch.decode(chunk, 0)() == []
        made = batch.to_device()
        assert made.shape == (count, 40, 40, 3)
        assert bool((made == mark).all())
    workers.close()
