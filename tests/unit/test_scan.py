"""The index: every format scanned once into the same rows, kept, and opened again when nothing changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.index import scan
from paceline.data.index.formats import ScanUnit, UnitImages
from paceline.data.index.formats import folder as folders
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag, Index, Table
from paceline.errors import DataError
from paceline.settings.data import Files
from pictures_made import class_name, make_pictures, split, write_folder, write_tars, write_tfrecord

PICTURES = make_pictures(120, 5)
WRITERS: dict[str, Callable[..., Path]] = {
    "folder": write_folder,
    "tfrecord": write_tfrecord,
    "webdataset": write_tars,
}


def files(**settings: Any) -> Files:
    return Files.model_validate({"name": "images", **settings})


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pictures in every format; tests read it only."""
    place = tmp_path_factory.mktemp("made")
    for kind, write in WRITERS.items():
        write(PICTURES, place / kind)
        write(PICTURES, place / f"{kind}-whole", validation=0)
    return place


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the folders of images that are scanned from here on."""
    names: list[str] = []
    original = folders.scan

    def counted(folder: Path, unit: ScanUnit) -> UnitImages:
        names.append(unit.name)
        return original(folder, unit)

    monkeypatch.setattr(folders, "scan", counted)
    return names


def content(index: Index, table: Table, number: int) -> bytes:
    row = table.rows[number]
    with (index.folder / table.shards[int(row["shard"])]).open("rb") as file:
        file.seek(int(row["offset"]))
        return file.read(int(row["length"]))


def same(one: Index, other: Index) -> bool:
    """Whether two indexes say the same, bit for bit."""
    return (one.kind, one.classes, one.notes) == (other.kind, other.classes, other.notes) and all(
        np.array_equal(mine.rows, yours.rows)
        and np.array_equal(mine.objects, yours.objects)
        and list(mine.keys) == list(yours.keys)
        and list(mine.shards) == list(yours.shards)
        for mine, yours in ((one.training, other.training), (one.validation, other.validation))
    )


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_images_in_the_same_order(made: Path, kind: str) -> None:
    index = open_index(files(classes=5), made / kind)
    assert index.kind == kind
    assert len(index.classes) == 5
    for table, part in zip((index.training, index.validation), split(PICTURES, 0.1), strict=True):
        pictures = sorted(part, key=lambda picture: picture.key)
        assert list(table.keys) == [picture.key for picture in pictures]
        assert [content(index, table, number) for number in range(len(table))] == [p.bytes for p in pictures]
        said = [p.label if p.wrong_label is None or kind == "folder" else p.wrong_label for p in pictures]
        assert table.rows["label"].tolist() == said
        unreadable = [p.key for p, row in zip(pictures, table.rows, strict=True) if row["flags"] & Flag.UNREADABLE]
        assert unreadable == [p.key for p in pictures if p.odd == "empty"]
        strays = [p.key for p, row in zip(pictures, table.rows, strict=True) if row["flags"] & Flag.OTHER_LABEL]
        assert strays == [p.key for p in pictures if p.wrong_label is not None and kind != "folder"]


@pytest.mark.parametrize("kind", ["tfrecord", "webdataset"])
def test_sizes_and_flags_are_those_of_the_files(made: Path, kind: str) -> None:
    index, other = (open_index(files(classes=5), made / name) for name in (kind, "folder"))
    for mine, yours in ((index.training, other.training), (index.validation, other.validation)):
        for column in ("length", "width", "height"):
            assert np.array_equal(mine.rows[column], yours.rows[column])
        assert np.array_equal(mine.rows["flags"] & ~np.uint16(Flag.OTHER_LABEL), yours.rows["flags"])


@pytest.mark.parametrize("kind", ["tfrecord", "webdataset"])
def test_objects_belong_to_their_images(made: Path, kind: str) -> None:
    table = open_index(files(classes=5), made / kind).training
    objects = {picture.key: picture.objects for picture in PICTURES}
    for number, key in enumerate(table.keys):
        assert np.allclose(table.objects_of(number), np.array(objects[key]).reshape(-1, 4))
    assert len(table.objects) == sum(len(objects[key]) for key in table.keys)


def test_shares_are_chosen_by_key_and_label_and_so_alike_in_every_format(tmp_path: Path) -> None:
    right = [picture for picture in PICTURES if picture.wrong_label is None]  # which folders cannot say otherwise
    for kind, write in WRITERS.items():
        write(right, tmp_path / kind, validation=0)
    indexes = [open_index(files(validation="20%", fraction="50%"), tmp_path / kind) for kind in WRITERS]
    judged = [set(index.validation.keys) for index in indexes]
    trained = [set(index.training.keys) for index in indexes]
    assert judged[0] == judged[1] == judged[2]
    assert trained[0] == trained[1] == trained[2]
    assert not judged[0] & trained[0]
    assert np.bincount(indexes[0].validation.rows["label"]).tolist() == [5, 5, 5, 5, 5]
    assert np.abs(np.bincount(indexes[0].training.rows["label"]) - 9.5).max() <= 0.5
    assert trained[0] < set(open_index(files(validation="20%"), tmp_path / "folder").training.keys)


@pytest.mark.parametrize(("share", "judged"), [("20%", [0, 1, 1, 8]), ("90%", [0, 1, 2, 36]), ("1%", [0, 1, 1, 1])])
def test_each_class_gives_its_share_and_keeps_an_image(tmp_path: Path, share: str, judged: list[int]) -> None:
    for label, count in enumerate((1, 2, 3, 40)):
        for number in range(count):
            place = tmp_path / "data" / class_name(label) / f"{label}-{number}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(PICTURES[20].bytes)
    index = open_index(files(validation=share), tmp_path / "data")
    assert np.bincount(index.validation.rows["label"], minlength=4).tolist() == judged
    less = open_index(files(validation=share, fraction="2%"), tmp_path / "data")
    assert np.bincount(less.training.rows["label"]).tolist() == [1, 1, 1, 1]
    assert same(less, open_index(files(validation=share, fraction="2%"), tmp_path / "data"))


def test_classes_of_one_image_each_cannot_be_judged(tmp_path: Path) -> None:
    for label in range(3):
        (tmp_path / class_name(label)).mkdir()
        (tmp_path / class_name(label) / f"{label}.jpg").write_bytes(PICTURES[20].bytes)
    with pytest.raises(DataError, match="no class has two images"):
        open_index(files(validation="50%"), tmp_path)


def test_images_of_one_name_in_every_class_are_split_one_by_one(tmp_path: Path) -> None:
    for label in range(20):
        for number in range(10):
            place = tmp_path / "data" / class_name(label) / f"{number}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(PICTURES[20].bytes)
    index = open_index(files(validation="25%"), tmp_path / "data")
    assert len(set(index.validation.keys)) == 10
    assert np.isin(np.bincount(index.validation.rows["label"]), (2, 3)).all()
    for key in set(index.validation.keys):
        assert sum(key == other for other in index.validation.keys) < 20
    ranks = list(zip(index.training.keys, index.training.rows["label"], strict=True))
    assert ranks == sorted(ranks)


def test_an_index_is_opened_again_without_scanning(made: Path, scanned: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(made / "folder", tmp_path / "data", ignore=shutil.ignore_patterns(".*"))
    told: list[tuple[str, int, int]] = []
    first = open_index(files(), folder, lambda *progress: told.append(progress))
    assert [done for _, done, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, _, total in told} == {len(told)} == {len(scanned)}
    scanned.clear()
    assert same(first, open_index(files(), folder))
    assert scanned == []
    assert not first.training.rows.flags.writeable


def test_only_the_folder_that_changed_is_scanned_again(made: Path, scanned: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(made / "folder", tmp_path / "data", ignore=shutil.ignore_patterns(".*"))
    before = open_index(files(), folder)
    scanned.clear()
    (folder / "train" / class_name(3) / "added.png").write_bytes(PICTURES[1].bytes)
    after = open_index(files(), folder)
    assert scanned == [f"train/{class_name(3)}"]
    assert len(list((folder / ".paceline").glob("index-*.safetensors"))) == 1
    assert set(after.training.keys) - set(before.training.keys) == {"added"}
    scanned.clear()
    (folder / "train" / class_name(3) / "added.png").unlink()
    (folder / "train" / "new class" / "deep").mkdir(parents=True)
    (folder / "train" / "new class" / "deep" / "x.jpg").write_bytes(PICTURES[20].bytes)
    third = open_index(files(), folder)
    assert sorted(scanned) == ["train", f"train/{class_name(3)}", "train/new class", "train/new class/deep"]
    assert third.classes == (*before.classes, "new class")
    assert third.training.name(len(third.training) - 1) == "train/new class/deep/x.jpg"
    shutil.rmtree(folder / ".paceline")
    assert same(third, open_index(files(), folder))


@pytest.mark.parametrize("kind", ["tfrecord", "webdataset"])
def test_a_shard_that_is_replaced_is_seen(made: Path, kind: str, tmp_path: Path) -> None:
    folder = shutil.copytree(made / kind, tmp_path / "data", ignore=shutil.ignore_patterns(".*"))
    before = open_index(files(classes=5), folder)
    changed = sorted(folder.glob("train*"))[1]
    WRITERS[kind](make_pictures(150, 5)[120:], tmp_path / "more", validation=0, shards=1)
    shutil.copy(next((tmp_path / "more").glob("train*")), changed)
    after = open_index(files(classes=5), folder)
    assert len(after.training) != len(before.training)
    shutil.rmtree(folder / ".paceline")
    assert same(after, open_index(files(classes=5), folder))


def test_other_settings_make_another_index_from_the_same_scan(made: Path, scanned: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(made / "folder", tmp_path / "data", ignore=shutil.ignore_patterns(".*"))
    whole = open_index(files(), folder)
    scanned.clear()
    half = open_index(files(fraction=0.5), folder)
    assert len(half.training) < len(whole.training)
    assert half.classes == whole.classes
    assert scanned == []
    assert same(open_index(files(side=64, max_bad=0.5), folder), whole)
    assert len(list((folder / ".paceline").glob("index-*.safetensors"))) == 2


def test_a_scan_is_kept_where_the_settings_are_refused(made: Path, scanned: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(made / "folder-whole", tmp_path / "data")
    with pytest.raises(DataError, match=r"write data\.validation=10%"):
        open_index(files(), folder)
    assert len(scanned) == 6
    open_index(files(validation=0.1), folder)
    assert len(scanned) == 6


def test_one_process_scans_and_the_others_wait(made: Path, scanned: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(made / "folder", tmp_path / "data", ignore=shutil.ignore_patterns(".*"))
    together = threading.Barrier(4)
    indexes: list[Index] = []

    def one() -> None:
        together.wait()
        indexes.append(open_index(files(), folder))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(indexes) == 4
    assert all(same(index, indexes[0]) for index in indexes)
    assert len(scanned) == len(set(scanned))


def test_data_that_cannot_be_written_to_are_indexed_in_the_cache(
    made: Path, scanned: list[str], tmp_path: Path
) -> None:
    folder = shutil.copytree(made / "folder", tmp_path / "data", ignore=shutil.ignore_patterns(".*"))
    (folder / ".paceline").write_text("a file where the folder would be")
    first = open_index(files(), folder)
    assert len(list((tmp_path / "cache").rglob("index-*.safetensors"))) == 1
    scanned.clear()
    assert same(first, open_index(files(), folder))
    assert scanned == []


def test_where_nothing_else_can_be_written_the_index_lies_among_temporary_files(
    made: Path, scanned: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(made / "folder", tmp_path / "data", ignore=shutil.ignore_patterns(".*"))
    expected = open_index(files(), folder)
    shutil.rmtree(folder / ".paceline")
    (folder / ".paceline").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("PACELINE_CACHE", str(folder / ".paceline" / "below a file"))
    for _ in range(2):
        assert same(open_index(files(), folder), expected)
    assert len(scanned) == 2 * len(set(scanned))  # once each time that the index was made


def test_a_damaged_index_is_made_again(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "folder", tmp_path / "data", ignore=shutil.ignore_patterns(".*"))
    expected = open_index(files(), folder)
    for kept in (folder / ".paceline").glob("*.safetensors"):
        content = kept.read_bytes()
        kept.unlink()  # what is open stays as it is
        kept.write_bytes(content[:-7])
        assert same(open_index(files(), folder), expected)
    (folder / ".paceline" / "left-over.part").write_text("of a killed process")
    (folder / "train" / class_name(0) / "more.jpg").write_bytes(PICTURES[20].bytes)
    open_index(files(), folder)
    assert not list((folder / ".paceline").glob("*.part"))


@pytest.mark.parametrize("name", ["index-*.safetensors", "scan.safetensors"])
def test_no_flipped_bit_of_an_index_goes_unnoticed(
    name: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without the indexes of other settings, which other tests may have left.
    folder = Path(shutil.copytree(made / "folder", tmp_path / "data", ignore=shutil.ignore_patterns(".paceline")))
    expected = all_of(open_index(files(), folder))
    path = next(folder.rglob(name))
    intact = path.read_bytes()
    random = np.random.default_rng(0)
    for place in [*range(0, len(intact), max(1, len(intact) // 60)), len(intact) - 1]:
        changed = bytearray(intact)
        changed[place] ^= 1 << int(random.integers(8))
        path.write_bytes(changed)
        if name.startswith("scan"):  # it is read whole only when an index is made from it
            for index in path.parent.glob("index-*"):
                index.unlink()
        assert all_of(open_index(files(), folder)) == expected, place
        said = capsys.readouterr().err
        assert said == f"{path}: this index was damaged; it is made again\n", (place, said)
        path.write_bytes(intact)


def all_of(index: Index) -> list[Any]:
    tables = [index.training, index.validation]
    content = [(table.rows.tobytes(), [*table.shards], [*table.keys], table.objects.tobytes()) for table in tables]
    return [index.classes, index.notes, *content]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    assert not scan.holds_images(tmp_path)
    with pytest.raises(DataError, match="no images are here; expected class folders"):
        open_index(files(), tmp_path)


LOOK_AGAIN = """
import sys, time
from pathlib import Path
from paceline.data.index.scan import open_index
from paceline.settings.data import Files
import numpy, json, hashlib, concurrent.futures

def memory():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))

before, start = memory(), time.perf_counter()
index = open_index(Files(name="images"), Path(sys.argv[1]))
took = time.perf_counter() - start
table = index.training
for array in (table.rows, table.keys.blob, table.keys.ends, table.shards.blob, table.shards.ends):
    array.view(numpy.uint8).sum()  # every page was looked at
print(len(index.training), (memory() - before) / 1024, took)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its memory from /proc")
def test_an_index_of_100_000_files_opens_again_in_little_memory(tmp_path: Path) -> None:
    picture = next(picture.bytes for picture in PICTURES if picture.odd == "tiny")
    for label in range(1001):
        place = tmp_path / ("train" if label < 1000 else "val") / f"n{label % 1000:08d}"
        place.mkdir(parents=True)
        for number in range(100):
            file = os.open(place / f"n{label:08d}_{number}.JPEG", os.O_WRONLY | os.O_CREAT)
            os.write(file, picture)
            os.close(file)
    start = time.perf_counter()
    assert len(open_index(files(), tmp_path).training) == 100_000
    first = time.perf_counter() - start
    again = subprocess.run(
        [sys.executable, "-c", LOOK_AGAIN, str(tmp_path)], capture_output=True, text=True, check=True, timeout=100
    )
    images, added, took = again.stdout.split()
    print(f"100,000 files: scanned in {first:.2f} s; opened again in {float(took):.3f} s with {added} MB more")
    assert images == "100000"
    assert float(added) < 50


def test_no_folder_is_made_beside_class_folders(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "folder-whole", tmp_path / "classes")
    before = sorted(path.name for path in folder.iterdir())
    open_index(files(validation=0.2), folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert list((tmp_path / "cache").rglob("index-*.safetensors"))


def test_a_class_of_trains_is_no_training_part(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "folder-whole", tmp_path / "classes")
    (folder / class_name(2)).rename(folder / "train")
    index = open_index(files(validation=0.2), folder)
    assert "train" in index.classes
    assert len(index.classes) == 5
