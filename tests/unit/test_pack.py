"""Packs: the same data set in fewer files, faster to decode, and the way back."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from conftest import Paceline, environment
from paceline.command import data_convert, data_pack
from paceline.data.index.formats import pack as pack_format
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag, Index, Table
from paceline.data.pack import shards, tiles
from paceline.data.pack.convert import to_folder, to_webdataset
from paceline.data.pack.transcode import LossyPreset
from paceline.data.pack.writer import write_pack
from paceline.errors import DataError, SpecError
from paceline.settings.data import Files

DATA = Files(name="images")
SHARD = 10_000
"""Small enough for several shards."""
TILED = Flag.JPEG | Flag.SEQUENTIAL | Flag.TILED


def noise(number: int, height: int = 96, width: int = 128) -> NDArray[np.uint8]:
    generator = np.random.default_rng(number)
    coarse = generator.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return np.ascontiguousarray(coarse.repeat(8, 0).repeat(8, 1)[:height, :width])


def save(path: Path, number: int, form: str = "JPEG", mode: str = "RGB", **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(number)).convert(mode).save(path, form, **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders with ordinary JPEGs and one of every odd kind."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(24):
        part = "val" if number % 4 == 3 else "train"
        save(folder / part / "abc"[number % 3] / f"image{number:02}.JPEG", number, quality=85 + number % 10)
    odd = folder / "train" / "b"
    save(odd / "gray.JPEG", 30, mode="L")
    save(odd / "progressive.JPEG", 31, progressive=True, quality=100)
    save(odd / "four.JPEG", 32, mode="CMYK")
    save(odd / "really_png.JPEG", 33, form="PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    save(odd / "turned.JPEG", 34, exif=exif)
    whole = (folder / "train/a/image00.JPEG").read_bytes()
    (odd / "cut.JPEG").write_bytes(whole[:-300])
    (odd / "empty.JPEG").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def index(source: Path) -> Index:
    return open_index(DATA, source)


@pytest.fixture(scope="module")
def packed(index: Index, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packs") / "pack"
    write_pack(index, out, processes=2, shard_bytes=SHARD)
    return out


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    """The same pack, to be damaged."""
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def content(folder: Path, table: Table, number: int) -> bytes:
    row = table.rows[number]
    whole = (folder / table.shards[int(row["shard"])]).read_bytes()
    return whole[int(row["offset"]) : int(row["offset"]) + int(row["length"])]


def pixels(encoded: bytes) -> bytes:
    """By the fast decoder where it can, else by Pillow, else the bytes themselves."""
    try:
        return bytes(simplejpeg.decode_jpeg(encoded, strict=True).data)
    except ValueError:
        pass
    try:
        return Image.open(io.BytesIO(encoded)).convert("RGB").tobytes()
    except OSError:
        return encoded


def described(index: Index) -> list[tuple[str, int, bytes]]:
    """Key, label and pixels of every image in order."""
    return [
        (table.keys[number], int(table.rows["label"][number]), pixels(content(index.folder, table, number)))
        for table in (index.training, index.validation)
        for number in range(len(table))
    ]


def test_a_pack_is_the_same_data_set_bit_for_bit(index: Index, packed: Path) -> None:
    again = open_index(DATA, packed)
    assert again.kind == "pack"
    assert again.classes == index.classes == ("a", "b", "c")
    assert len(again.training) == len(index.training) == 25
    assert len(again.validation) == len(index.validation) == 6
    assert described(again) == described(index)


def test_what_can_be_tiled_is_and_what_cannot_is_kept_as_it_is(index: Index, packed: Path) -> None:
    table = open_index(DATA, packed).training
    flags = {table.keys[number]: Flag(int(table.rows["flags"][number])) for number in range(len(table))}
    kept = {"four", "really_png", "cut", "empty"}
    assert {key for key, flag in flags.items() if Flag.TILED not in flag} == kept
    assert flags["progressive"] == flags["gray"] == flags["image00"] == TILED
    assert TILED | Flag.TURNED in flags["turned"]
    for number in range(len(table)):
        stored = content(packed, table, number)
        row = table.rows[number]
        if table.keys[number] in kept:
            assert stored == content(index.folder, index.training, number)
        else:
            tiles.cut_tiles(stored, int(row["width"]), int(row["height"]), (20, 20, 10, 10))
        if table.keys[number] == "turned":
            assert Image.open(io.BytesIO(stored)).getexif()[0x0112] == 6


def test_a_pack_of_a_pack_is_the_same_pack(packed: Path, tmp_path: Path) -> None:
    write_pack(open_index(DATA, packed), tmp_path / "again", processes=1, shard_bytes=1 << 20)
    assert described(open_index(DATA, tmp_path / "again")) == described(open_index(DATA, packed))


class Stopped(Exception):
    """Stands for a kill."""


def test_packing_goes_on_where_complete_shards_end(index: Index, packed: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        assert (what, total) == ("packing", 31)
        if done == 17:
            raise Stopped

    with pytest.raises(Stopped):
        write_pack(index, tmp_path / "pack", processes=1, progress=stop, shard_bytes=SHARD)
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "pack").glob("*.pack")}
    assert 0 < len(finished) < len([*packed.glob("*.pack")])
    with pytest.raises(DataError, match="not finished"):
        open_index(DATA, tmp_path / "pack")
    started = []
    made = write_pack(
        index, tmp_path / "pack", processes=1, progress=lambda _, done, __: started.append(done), shard_bytes=SHARD
    )
    assert started[0] > 1
    assert not made.was_complete
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    files = {path.name: path.read_bytes() for path in packed.iterdir() if path.is_file()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "pack").iterdir() if path.is_file()} == files


def test_a_finished_pack_is_not_written_again(index: Index, packed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in packed.glob("*.*")}
    made = write_pack(index, packed, shard_bytes=SHARD)
    assert made.was_complete
    assert made.images == 31
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_another_data_set_is_never_overwritten(index: Index, source: Path, packed: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not empty and holds no pack"):
        write_pack(index, source)
    with pytest.raises(DataError, match="other images, or made with other settings"):
        write_pack(index, packed, LossyPreset(), shard_bytes=SHARD)
    save(tmp_path / "train/a/x.jpg", 1)
    save(tmp_path / "val/a/y.jpg", 2)
    with pytest.raises(DataError, match="other images, or made with other settings"):
        write_pack(open_index(DATA, tmp_path), packed, shard_bytes=SHARD)


def test_a_changed_byte_is_found_and_mended(index: Index, copy: Path) -> None:
    assert shards.verify_pack(copy) == 31
    shard = copy / "training-00001.pack"
    whole = bytearray(shard.read_bytes())
    whole[len(whole) // 2] ^= 1
    shard.write_bytes(whole)
    with pytest.raises(DataError, match=r"1 of 31 images are not what was packed, the first is training-00001.pack at"):
        shards.verify_pack(copy)
    shard.unlink()
    with pytest.raises(DataError, match=r"training-00001.pack: cannot be read"):
        shards.verify_pack(copy)
    write_pack(index, copy, processes=1, shard_bytes=SHARD)
    assert shards.verify_pack(copy) == 31


@pytest.mark.parametrize("damage", ["cut", "changed", "renamed"])
def test_a_damaged_index_is_refused(copy: Path, damage: str) -> None:
    path = shards.index_path(copy, "training")
    whole = bytearray(path.read_bytes())
    if damage == "changed":
        whole[whole.index(b"image00")] ^= 1
    if damage == "renamed":
        whole = bytearray(bytes(whole).replace(rb"\"a\", \"b\"", rb"\"a\", \"x\""))
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else whole)
    with pytest.raises(DataError, match="this index of a pack is damaged, or of an older Paceline"):
        open_index(DATA, copy)


def test_a_pack_of_a_newer_version_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PACK_VERSION", 0)
    with pytest.raises(DataError, match="a pack of version 1, but this Paceline reads 0; update Paceline"):
        shards.read_split(copy, "training")


def test_a_folder_without_a_pack_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no finished pack here"):
        shards.verify_pack(tmp_path)
    assert not pack_format.recognize(tmp_path)


def test_the_smaller_preset_bounds_sides_and_bytes(index: Index, tmp_path: Path) -> None:
    made = write_pack(index, tmp_path / "small", LossyPreset(max_side=64, quality=80), processes=1)
    again = open_index(DATA, tmp_path / "small")
    assert made.bytes < 0.7 * made.source_bytes
    assert [row[:2] for row in described(again)] == [row[:2] for row in described(index)]
    for number, row in enumerate(again.training.rows):
        key = again.training.keys[number]
        if key not in {"cut", "empty"}:
            assert (int(row["width"]), int(row["height"])) == (64, 48)
            assert int(row["flags"]) & TILED == TILED
            stored = Image.open(io.BytesIO(content(again.folder, again.training, number)))
            assert stored.size == (64, 48)
            assert stored.getexif().get(0x0112, 1) == (6 if key == "turned" else 1)


def test_without_libjpeg_a_smaller_pack_is_offered(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.pack.libjpeg.available", lambda: False)
    with pytest.raises(DataError, match="--max-side 500 --quality 90"):
        write_pack(index, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_data_without_a_validation_part_stay_whole(tmp_path: Path) -> None:
    for number in range(20):
        save(tmp_path / "source" / "ab"[number % 2] / f"{number}.jpg", number)
    whole = open_index(DATA, tmp_path / "source", whole=True)
    assert (len(whole.training), len(whole.validation)) == (20, 0)
    assert [*whole.training.keys] == sorted(whole.training.keys)
    write_pack(whole, tmp_path / "pack", processes=1)
    part = Files(name="images", validation=0.3)
    assert described(open_index(part, tmp_path / "pack")) == described(open_index(part, tmp_path / "source"))
    to_webdataset(open_index(DATA, tmp_path / "pack", whole=True), tmp_path / "tars", samples=7)
    assert max(path.name for path in (tmp_path / "tars").glob("*.tar")) == "all-000002.tar"
    assert described(open_index(part, tmp_path / "tars")) == described(open_index(part, tmp_path / "source"))


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_share_of_data_without_a_validation_part_is_packed_whole(count: int, tmp_path: Path) -> None:
    for number in range(count):
        save(tmp_path / "source" / "ab"[number % 2] / f"{number}.jpg", number)
    assert len(open_index(DATA, tmp_path / "source", whole=True).training) == count
    some = open_index(Files(name="images", fraction=0.25), tmp_path / "source", whole=True)
    assert (len(some.training), len(some.validation)) == (max(min(count, 2), count // 4), 0)
    assert write_pack(some, tmp_path / "pack", processes=1).images == len(some.training)
    assert described(open_index(DATA, tmp_path / "pack", whole=True)) == described(some)


def test_what_a_jpeg_cannot_hold_or_show_is_kept_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "source" / "a"
    folder.mkdir(parents=True)
    Image.new("RGB", (70_000, 4)).save(folder / "wide.png")
    Image.fromarray(np.full((40, 30), 0.5, np.float32)).save(folder / "numbers.tiff")
    Image.fromarray(np.full((40, 30), 40_000, np.uint16)).save(folder / "gray.png", compress_level=0)
    source = open_index(DATA, tmp_path / "source", whole=True)
    write_pack(source, tmp_path / "pack", LossyPreset(max_side=None, quality=90), processes=1)
    found = open_index(DATA, tmp_path / "pack", whole=True)
    by_key = {key: content(found.folder, found.training, number) for number, key in enumerate(found.training.keys)}
    assert by_key["wide"] == (folder / "wide.png").read_bytes()
    assert by_key["numbers"] == (folder / "numbers.tiff").read_bytes()
    assert by_key["gray"][:2] == b"\xff\xd8"
    assert abs(np.frombuffer(pixels(by_key["gray"]), np.uint8).astype(int) - (40_000 >> 8)).max() <= 1


@pytest.mark.parametrize("turn", [1, 6])
def test_a_tiff_is_upright_in_a_smaller_pack(turn: int, tmp_path: Path) -> None:
    (tmp_path / "source" / "a").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.fromarray(noise(3)).save(tmp_path / "source" / "a" / "x.tif", exif=exif)
    write_pack(
        open_index(DATA, tmp_path / "source", whole=True), tmp_path / "pack", LossyPreset(max_side=32), processes=1
    )
    found = open_index(DATA, tmp_path / "pack", whole=True)
    row = found.training.rows[0]
    assert (int(row["width"]), int(row["height"])) == ((24, 32) if turn == 6 else (32, 24))
    assert not int(row["flags"]) & (Flag.TURNED | Flag.ACROSS)
    stored = Image.open(io.BytesIO(content(found.folder, found.training, 0)))
    assert stored.getexif().get(0x0112, 1) == 1


def test_a_pack_becomes_files_again(index: Index, packed: Path, tmp_path: Path) -> None:
    made = to_folder(open_index(DATA, packed, whole=True), tmp_path / "files")
    again = open_index(DATA, tmp_path / "files")
    assert made["splits"] == {"train": 25, "val": 6}
    assert again.classes == index.classes
    assert described(again) == described(index)
    assert (tmp_path / "files/train/b/really_png.png").is_file()
    assert b"paceline" not in (tmp_path / "files/train/a/image00.jpg").read_bytes()


@pytest.mark.parametrize("shuffle", [None, 7])
def test_a_pack_becomes_tars(index: Index, packed: Path, tmp_path: Path, shuffle: int | None) -> None:
    to_webdataset(open_index(DATA, packed, whole=True), tmp_path / "tars", samples=10, shuffle=shuffle)
    with tarfile.open(tmp_path / "tars/train-000000.tar") as tar:
        names = tar.getnames()
    assert len(names) == 20
    assert names[0].rpartition(".")[0] == names[1].rpartition(".")[0]
    assert (names[::2] == sorted(names[::2], key=lambda name: name.rpartition("/")[2])) == (shuffle is None)
    said = json.loads((tmp_path / "tars/metadata.json").read_text())
    assert said["splits"] == {"train": {"samples": 25, "shards": 3}, "validation": {"samples": 6, "shards": 1}}
    assert said["classes"] == ["a", "b", "c"]
    assert open_index(DATA, tmp_path / "tars").classes == ("a", "b", "c")
    assert described(open_index(DATA, tmp_path / "tars")) == described(index)


def test_conversion_needs_an_empty_folder(index: Index, source: Path) -> None:
    with pytest.raises(DataError, match="not empty"):
        to_folder(index, source)
    with pytest.raises(DataError, match="not empty"):
        to_webdataset(index, source)


def test_images_with_one_name_stay_apart(tmp_path: Path) -> None:
    for number, name in enumerate(["x/1.jpg", "y/1.jpg", "a.b.jpg", "a_b.jpg"]):
        save(tmp_path / "source/train/a" / name, number)
    save(tmp_path / "source/val/a/1.jpg", 9)
    found = open_index(DATA, tmp_path / "source")
    to_webdataset(found, tmp_path / "tars")
    to_folder(found, tmp_path / "files")
    everything = sorted(row[2] for row in described(found))
    for out in ("tars", "files"):
        assert sorted(row[2] for row in described(open_index(DATA, tmp_path / out))) == everything


def test_class_folders_keep_the_numbers_of_classes(tmp_path: Path) -> None:
    for number in range(12):
        save(tmp_path / f"source/train/{number}.jpg", number)
        save(tmp_path / f"source/val/{number}.jpg", number)
    (tmp_path / "source/labels.csv").write_text("".join(f"{number},{number}\n" for number in range(12)))
    found = open_index(Files(name="images", labels="labels.csv"), tmp_path / "source")
    assert found.classes == tuple(map(str, range(12)))
    to_folder(found, tmp_path / "files")
    assert described(open_index(DATA, tmp_path / "files")) == described(found)


@pytest.mark.long
def test_packing_and_converting_by_hand(paceline: Paceline, source: Path) -> None:
    done = paceline("data", "pack", str(source), "out", "--processes", "1", "--json")
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert (said["images"], said["in_tiles"], said["kept_as_they_are"], said["verified"]) == (31, 27, 4, True)
    done = paceline("data", "convert", "out", "tars", "--to", "webdataset", "--samples", "20", "--shuffle", "1")
    assert (done.stderr, done.returncode) == ("", 0)
    assert "25 samples in 2 tars" in done.stdout


def test_a_pack_is_verified_on_its_own(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_pack.run(packed, None, [], None, None, None, verify=True, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"pack": str(packed), "images": 31, "verified": True}


def test_faults_of_the_command_line_say_what_to_write(source: Path, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match="there is no such folder; write the folder that holds the images"):
        data_pack.run(tmp_path / "nowhere", out, [], None, None, None, False, False)
    with pytest.raises(SpecError, match="where to"):
        data_pack.run(source, None, [], None, None, None, False, False)
    with pytest.raises(SpecError, match="--verify reads one pack"):
        data_pack.run(packed, out, [], None, None, None, True, False)
    with pytest.raises(DataError, match="made with other settings; write a new folder"):
        data_pack.run(source, packed, [], None, 50, None, False, False)
    with pytest.raises(SpecError, match="labels"):
        data_pack.run(source, out, ["data.lables=x.csv"], None, None, None, False, False)
    with pytest.raises(SpecError, match="--shuffle is for --to webdataset"):
        data_convert.run(source, out, [], "folder", 10, 1, False)


@pytest.mark.long
def test_a_killed_packing_goes_on(tmp_path: Path) -> None:
    for number in range(120):
        save(tmp_path / "source" / ("val" if number % 6 == 0 else "train") / "a" / f"{number}.jpg", number)
    program = (
        "import sys; from pathlib import Path; from paceline.data.pack.writer import write_pack\n"
        "from paceline.data.index.scan import open_index; from paceline.settings.data import Files\n"
        "if __name__ == '__main__':\n"
        " index = open_index(Files(name='images'), Path(sys.argv[1]), whole=True)\n"
        " write_pack(index, Path(sys.argv[2]), shard_bytes=40_000)\n"
    )
    (tmp_path / "program.py").write_text(program)
    words = [sys.executable, "program.py", "source"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment()}
    subprocess.run([*words, "whole"], check=True, timeout=120, **options)
    for count in (1, 3, 5):
        running = subprocess.Popen([*words, "killed"], **options)
        while len([*(tmp_path / "killed").glob("*.rows")]) < count and running.poll() is None:
            time.sleep(0.002)
        running.send_signal(signal.SIGKILL)
        running.wait()
    subprocess.run([*words, "killed"], check=True, timeout=120, **options)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "killed").iterdir()} == whole
