"""Data sets on disk: CIFAR's published layout is found, checked and read; what is wrong is said in one line."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import make_plan
from paceline import keyed
from paceline.data.index import locate
from paceline.data.load.arrays import Source, choose_part, open_source
from paceline.errors import DataError
from paceline.settings.data import Cifar, Made, Shapes

PUBLISHED_SIZES = dict(locate.CIFAR_SIZES)
RECORDS = 6
"""Images in each file of these small copies."""


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, label_bytes in {"data_batch": 1, "test_batch": 1, "train": 2, "test": 2}.items():
        monkeypatch.setitem(locate.CIFAR_SIZES, key, RECORDS * (label_bytes + 3072))
    for name in ("DATA_DIR", "DATASETS_DIR"):
        monkeypatch.delenv(name, raising=False)


def planes(file: str) -> NDArray[np.uint8]:
    """Red, green and blue planes of each image of a file: random, but its own."""
    words = keyed.words(keyed.key(0, "planes", file), np.arange(RECORDS * 3072, dtype=np.int64))[0]
    return (words >> 24).astype(np.uint8).reshape(RECORDS, 3, 32, 32)


def labels_of(file: str, name: str) -> NDArray[np.uint8]:
    classes = 10 if name == "cifar10" else 100
    words = keyed.words(keyed.key(1, "labels", file), np.arange(RECORDS, dtype=np.int64))[0]
    return keyed.integers(words, classes).astype(np.uint8)


def write_cifar(folder: Path, name: str) -> Path:
    """The published files: label byte (CIFAR-100: coarse, then fine), then the three planes."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in itertools.chain(*locate.CIFAR_FILES[name]):
        columns = [labels_of(file, name)[:, None], planes(file).reshape(RECORDS, -1)]
        if name == "cifar100":
            columns.insert(0, np.full((RECORDS, 1), 255, np.uint8))  # no class: it must not be read
        (folder / file).write_bytes(np.concatenate(columns, axis=1).tobytes())
    return folder


def cifar(name: str) -> Cifar:
    return Cifar.model_validate({"name": name})


def read(name: str, folder: Path) -> Source:
    return open_source(make_plan(f"data={name}"), folder)


def message_of(wanted: Cifar | None, folder: Path | None) -> str:
    with pytest.raises(DataError) as caught:
        locate.locate(wanted, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_s_planes_become_pictures_and_labels_their_fine_class(name: str, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "data", name)
    source = read(name, folder)
    for split, files in zip((source.training, source.validation), locate.CIFAR_FILES[name], strict=True):
        expected = np.concatenate([planes(file) for file in files])
        assert split.count == len(expected) == len(split.images)
        for plane in range(3):
            assert np.array_equal(split.images[..., plane], expected[:, plane])
        assert split.labels.tolist() == np.concatenate([labels_of(file, name) for file in files]).tolist()


def test_the_expected_sizes_are_those_of_the_published_records() -> None:
    assert PUBLISHED_SIZES == {
        "data_batch": 10_000 * 3073,
        "test_batch": 10_000 * 3073,
        "train": 50_000 * 3074,
        "test": 10_000 * 3074,
    }


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("given", [".", "..", "below"])
def test_a_folder_one_level_too_high_or_low_is_found(name: str, given: str, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "set", name)
    (folder / "below").mkdir()
    (tmp_path / "another").mkdir()
    data, found = locate.locate(cifar(name), folder / given)
    assert data == cifar(name)
    assert found is not None
    assert found.resolve() == folder.resolve()


def test_the_folder_above_is_found_from_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_cifar(tmp_path / "set", "cifar10")
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    _, found = locate.locate(cifar("cifar10"), Path())
    assert found is not None
    assert found.resolve() == folder.resolve()


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("given", [".", ".."])
def test_a_data_set_that_the_recipe_leaves_open_is_recognized(name: str, given: str, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "set", name)
    data, found = locate.locate(None, folder / given)
    assert data == cifar(name)
    assert found is not None
    assert found.resolve() == folder.resolve()


def test_built_in_and_made_up_images_need_no_folder() -> None:
    for data in (Shapes(name="shapes"), Made(name="generated")):
        assert locate.locate(data, None) == (data, None)
        assert locate.locate(data, Path("/nowhere")) == (data, None)


def test_the_folder_comes_from_the_flag_then_data_dir_then_datasets_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate.given_folder(None) is None
    monkeypatch.setenv("DATASETS_DIR", "/second")
    assert locate.given_folder(None) == Path("/second")
    monkeypatch.setenv("DATA_DIR", "/first")
    assert locate.given_folder(None) == Path("/first")
    assert locate.given_folder(Path("/flag")) == Path("/flag")
    monkeypatch.setenv("DATA_DIR", "")
    assert locate.given_folder(None) == Path("/second")


def test_no_folder_at_all_is_asked_for() -> None:
    remedy = "write --data FOLDER, or set the DATA_DIR environment variable"
    assert message_of(cifar("cifar10"), None) == f"where is cifar10? {remedy}"
    assert message_of(None, None) == f"where is the data? {remedy}"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert (
        message_of(cifar("cifar10"), gone)
        == f"{gone}: there is no such folder; write the one that holds cifar10, as in --data FOLDER"
    )
    (tmp_path / "file").write_text("x")
    assert message_of(None, tmp_path / "file").startswith(f"{tmp_path / 'file'}: there is no such folder")


def test_a_folder_without_a_data_set_says_what_was_expected(tmp_path: Path) -> None:
    assert message_of(cifar("cifar10"), tmp_path).startswith(f"{tmp_path}: 'data_batch_1.bin' is neither here, nor one")
    assert message_of(None, tmp_path).startswith(f"{tmp_path}: no data set is recognized here; expected CIFAR's binary")


@pytest.mark.parametrize(
    ("name", "file"), [("cifar10", "data_batch_4.bin"), ("cifar10", "test_batch.bin"), ("cifar100", "test.bin")]
)
def test_a_missing_file_is_named(name: str, file: str, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "set", name)
    (folder / file).unlink()
    assert message_of(cifar(name), folder) == f"{folder / file}: this file of {name} is missing; copy it again"


@pytest.mark.parametrize("file", ["data_batch_1.bin", "data_batch_5.bin", "test_batch.bin"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_named_with_both_sizes(file: str, change: int, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "set", "cifar10")
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:change] if change < 0 else content + b"x")
    assert message_of(cifar("cifar10"), folder) == (
        f"{folder / file}: the file has {len(content) + change:,} bytes instead of {len(content):,}; "
        f"it is cut off, or not cifar10: copy it again"
    )


@pytest.mark.parametrize(
    ("name", "file", "title", "binary"),
    [("cifar10", "data_batch_1", "CIFAR-10", "data_batch_1.bin"), ("cifar100", "train", "CIFAR-100", "train.bin")],
)
@pytest.mark.parametrize("given", [".", ".."])
def test_the_python_version_is_recognized_and_refused(
    name: str, file: str, title: str, binary: str, given: str, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / file).write_bytes(b"\x80\x02}q\x01")
    message = message_of(cifar(name), folder / given)
    assert message.endswith(f": this is the Python version of {title}; get the binary version ('{binary}', ...)")
    assert str(folder / given) in message


@pytest.mark.parametrize(
    ("name", "file", "label"), [("cifar10", "data_batch_1.bin", 10), ("cifar100", "test.bin", 100)]
)
def test_a_label_that_is_no_class_is_named_with_its_record(name: str, file: str, label: int, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "set", name)
    content = bytearray((folder / file).read_bytes())
    record = len(content) // RECORDS
    content[3 * record + (name == "cifar100")] = label
    (folder / file).write_bytes(content)
    with pytest.raises(DataError, match=rf"record 3 of {file} .*label {label}; {name} has {label} classes"):
        read(name, folder)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "set", "cifar10")
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_2.bin: cannot be read: No such file or directory"):
        read("cifar10", folder)


def test_made_images_repeat_a_pool_and_count_as_many_as_asked() -> None:
    source = open_source(make_plan("data.images=100000", "data.validation_images=7"), None)
    assert (source.training.count, source.validation.count) == (100_000, 7)
    pool = len(source.training.images)
    assert pool < 100_000
    numbers = np.array([0, pool, 5, pool + 5, 99_999], np.int64)
    taken, labels = source.training.take(numbers), source.training.labels_of(numbers)
    assert taken.shape == (5, 8, 8, 3)
    assert np.array_equal(taken[0], taken[1])
    assert np.array_equal(taken[2], taken[3])
    assert labels[0] == labels[1]
    assert 0 <= labels.min() <= labels.max() < 10
    assert not np.array_equal(taken[0], taken[2])


def test_generated_images_do_not_depend_on_the_placement() -> None:
    words = ("data.images=300", "global_batch=256", "norm_batch=32")
    small, large = (open_source(make_plan(*words, f"on.micro_batch={m}"), None).training for m in (32, 256))
    numbers = np.arange(300, dtype=np.int64)
    assert np.array_equal(small.labels_of(numbers), large.labels_of(numbers))
    assert np.array_equal(small.take(numbers), large.take(numbers))


def test_made_images_depend_on_the_seed_and_the_split() -> None:
    one, other = (open_source(make_plan(f"seed={seed}"), None) for seed in (0, 1))
    first = np.arange(30, dtype=np.int64)
    assert not np.array_equal(one.training.take(first), other.training.take(first))
    assert not np.array_equal(one.training.take(first), one.validation.take(first))
    assert abs(one.training.images.mean() - 127.5) < 3


def test_a_fraction_of_cifar_takes_as_many_images_of_each_class() -> None:
    labels = np.repeat(np.arange(10), 500)[np.argsort(np.arange(5000) * 7919 % 5000)]
    numbers = np.arange(5000, dtype=np.int64)[:, None].view(np.uint8)
    chosen = set[bytes]()
    for count in (10, 50, 55, 4990):
        part, of_part = choose_part(numbers, labels, count)
        found = {row.tobytes() for row in part}
        assert chosen < found
        assert len(found) == len(of_part) == count
        assert np.ptp(np.bincount(of_part, minlength=10)) <= 1
        chosen = found
    assert choose_part(numbers, labels, 5000)[0] is numbers


def test_a_fraction_of_cifar_is_read_from_its_files(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "data", "cifar10")
    plan = make_plan("data=cifar10", "data.fraction=0.0004")  # 20 of the published files' images
    source = open_source(plan, folder)
    assert (plan.facts.images, plan.facts.validation_images) == (20, 10_000)
    assert (source.training.count, source.validation.count) == (20, RECORDS)
