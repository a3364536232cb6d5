"""Formats: how images lie in folders, TFRecords and tars, and what is said when they do not."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.index.formats import split_of, tfrecord
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag, Index
from paceline.errors import DataError
from paceline.settings.data import Files
from pictures_made import class_name, make_pictures, member, tfrecord_record, write_tars, write_tfrecord

PICTURES = [picture for picture in make_pictures(54, 4) if not picture.odd]
JPEG = PICTURES[0].bytes


def files(**settings: Any) -> Files:
    return Files.model_validate({"name": "images", **settings})


def put(folder: Path, *names: str) -> Path:
    """The same image under many names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(JPEG)
    return folder


def labels(index: Index) -> list[dict[str, str]]:
    """The class name of every key, in training and in validation."""
    return [
        {key: index.classes[label] for key, label in zip(table.keys, table.rows["label"].tolist(), strict=True)}
        for table in (index.training, index.validation)
    ]


@pytest.mark.parametrize("part", ["val", "validation", "test", "Val"])
def test_class_folders_lie_in_parts(tmp_path: Path, part: str) -> None:
    put(tmp_path, "train/dog/1.jpg", "train/cat/deep/er/2.JPEG", f"{part}/dog/3.png", "extra/bird/4.jpg", "5.jpg")
    index = open_index(files(), tmp_path)
    assert index.classes == ("cat", "dog")
    assert labels(index) == [{"1": "dog", "2": "cat"}, {"3": "dog"}]


def test_a_test_part_is_only_judged_where_there_is_no_validation_part(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "val/a/2.jpg", "test/3.jpg")
    assert labels(open_index(files(), tmp_path)) == [{"1": "a"}, {"2": "a"}]


def test_hidden_and_other_files_are_no_images(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "train/a/.2.jpg", "train/.a/3.jpg", "train/a/4.txt", "train/a/5.WebP", "val/a/6.gif")
    assert labels(open_index(files(), tmp_path)) == [{"1": "a", "5": "a"}, {"6": "a"}]


def test_tars_beside_class_folders_are_what_they_were_unpacked_from(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "val/a/2.jpg", "ILSVRC2012_img_train.tar")
    assert open_index(files(), tmp_path).kind == "folder"


def test_data_without_a_validation_part_say_what_to_write(tmp_path: Path) -> None:
    put(tmp_path, *(f"{name}/{number}{name}.jpg" for name in "ab" for number in range(20)))
    with pytest.raises(DataError, match=r"no validation images; .* write data\.validation=10%"):
        open_index(files(), tmp_path)
    index = open_index(files(validation="25%"), tmp_path)
    assert len(index.training) + len(index.validation) == 40
    assert index.classes == ("a", "b")
    put(tmp_path, "stray.png")
    index = open_index(files(validation="25%"), tmp_path)
    assert len(index.training) + len(index.validation) == 40
    assert index.notes == ("1 image outside class folders is skipped",)


def test_a_share_is_not_taken_from_data_with_a_validation_part(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "val/a/2.jpg")
    with pytest.raises(DataError, match=r"leave data\.validation out"):
        open_index(files(validation=0.1), tmp_path)


def test_a_validation_class_that_training_lacks_is_named(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "val/a/2.jpg", "val/b/3.jpg")
    with pytest.raises(DataError, match=r"val/b/3\.jpg: class 'b' has no training images"):
        open_index(files(), tmp_path)


def test_validation_alone_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "one", "val/a/1.jpg")
    with pytest.raises(DataError, match="there are no training images; add them in train/"):
        open_index(files(), tmp_path / "one")
    write_tars(PICTURES, tmp_path / "two")
    for shard in (tmp_path / "two").glob("train*"):
        shard.unlink()
    with pytest.raises(DataError, match="no training images"):
        open_index(files(), tmp_path / "two")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.csv", "file,class\n1.jpg,cat\n2.jpg,dog\nx/3.jpg,cat\n4,dog\n"),
        ("labels.csv", '\ufeff1.jpg,cat,more\n"2.jpg",dog\n\n3.jpg, cat\n4.jpg,dog'),
        ("labels.json", '{"1.jpg": "cat", "2": "dog", "x/3": "cat", "4.jpg": "dog"}'),
    ],
)
def test_a_file_of_labels_names_the_class_of_each_file(tmp_path: Path, name: str, text: str) -> None:
    put(tmp_path, "1.jpg", "2.jpg", "x/3.jpg", "x/4.jpg")
    (tmp_path / name).write_text(text, encoding="utf-8")
    index = open_index(files(labels=name, validation=0.4), tmp_path)
    training, validation = labels(index)
    assert training | validation == {"1": "cat", "2": "dog", "3": "cat", "4": "dog"}
    assert index.classes == ("cat", "dog")


def test_a_file_of_labels_that_changes_makes_another_index(tmp_path: Path) -> None:
    put(tmp_path, "train/a/1.jpg", "train/b/2.jpg", "val/3.jpg")
    (tmp_path / "val.csv").write_text("3.jpg,a")
    assert labels(open_index(files(labels="val.csv"), tmp_path))[1] == {"3": "a"}
    (tmp_path / "val.csv").write_text("3.jpg,b")
    assert labels(open_index(files(labels="val.csv"), tmp_path)) == [{"1": "a", "2": "b"}, {"3": "b"}]
    (tmp_path / "val.csv").write_text("3.jpg,0")
    assert labels(open_index(files(labels="val.csv"), tmp_path))[1] == {"3": "a"}


def test_folders_may_be_given_other_class_names_or_numbers(tmp_path: Path) -> None:
    put(tmp_path, "train/n01/1.jpg", "train/n02/2.jpg", "train/n03/3.jpg", "val/n03/4.jpg")
    (tmp_path / "names.json").write_text('{"n01": "tench", "n02": "goldfish", "n03": "tench"}')
    index = open_index(files(labels="names.json"), tmp_path)
    assert index.classes == ("goldfish", "tench")
    assert labels(index) == [{"1": "tench", "2": "goldfish", "3": "tench"}, {"4": "tench"}]
    (tmp_path / "numbers.json").write_text('{"n01": 12, "n02": 11, "n03": 10}')
    index = open_index(files(labels="numbers.json", first_label=10), tmp_path)
    assert index.training.rows["label"].tolist() == [2, 1, 0]
    assert index.classes == ("10", "11", "12")


def test_flat_images_without_labels_say_what_to_write(tmp_path: Path) -> None:
    put(tmp_path / "flat", "1.jpg", "2.jpg")
    with pytest.raises(DataError, match=r"no image has a label; write data\.labels=FILE"):
        open_index(files(validation=0.5), tmp_path / "flat")
    put(tmp_path / "half", "train/a/1.jpg", "val/2.jpg")
    with pytest.raises(DataError, match=r"validation images lie in no class folders; .*data\.labels=FILE"):
        open_index(files(), tmp_path / "half")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.csv", None, r"missing\.csv: the file of labels \(data\.labels\) cannot be read"),
        ("a.csv", "1.jpg,cat\nonly one\n", r"a\.csv:2: expected 'file,class', found 'only one'"),
        ("a.csv", "", "is empty"),
        ("a.json", "[1, 2]", "expected a JSON map"),
        ("a.json", "{", "expected a JSON map"),
    ],
)
def test_a_file_of_labels_that_is_wrong_is_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    put(tmp_path, "train/a/1.jpg", "val/a/2.jpg")
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        open_index(files(labels=name), tmp_path)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("train-00000-of-01024", "training"), ("validation-00000-of-00128", "validation"), ("val/0.tar", "validation"),
        ("imagenet1k-train-0001.tar", "training"), ("training_3.tar", "training"), ("trainer.tar", "all"),
        ("train/test-like.tar", "validation"), ("0.tar", "all"), ("TRAIN.tar", "training"), ("value.tar", "all"),
    ],
)  # fmt: skip
def test_the_name_of_a_shard_says_its_part(name: str, part: str) -> None:
    assert split_of(name) == part


@pytest.mark.parametrize("write", [write_tfrecord, write_tars])
def test_labels_outside_the_classes_are_flagged_when_rare_and_refused_when_common(tmp_path: Path, write: Any) -> None:
    wrong = make_pictures(54, 4)
    write(wrong, tmp_path / "a")
    with pytest.raises(DataError, match=r"only 5 of the labels up to 4004 occur, .* write data\.classes=4\b"):
        open_index(files(), tmp_path / "a")
    index = open_index(files(classes=4), tmp_path / "a")
    assert [key for key, row in zip(index.training.keys, index.training.rows, strict=True) if row["flags"] & 32] == [
        picture.key for picture in wrong if picture.wrong_label is not None
    ]
    with pytest.raises(DataError, match=r"images have label ., but classes go from . to .; write data\.classes=4\b"):
        open_index(files(classes=3), tmp_path / "a")


def test_tfrecords_that_count_from_0_are_told_apart(tmp_path: Path) -> None:
    write_tfrecord(PICTURES, tmp_path)
    assert open_index(files(), tmp_path).classes == ("1", "2", "3", "4")
    with pytest.raises(DataError, match=r"have label 1, but classes go from 2 to .; write data\.first_label=1"):
        open_index(files(first_label=2), tmp_path)
    index = open_index(files(first_label=0), tmp_path)
    assert len(index.classes) == 5
    assert index.training.rows["label"].min() == 1


def test_damage_in_a_tfrecord_names_file_and_byte(tmp_path: Path) -> None:
    write_tfrecord(PICTURES, tmp_path, shards=1)
    shard = tmp_path / "train-00000-of-00001"
    good = shard.read_bytes()
    second = 16 + int.from_bytes(good[:8], "little")
    length = int.from_bytes(good[second : second + 8], "little")
    lie = struct.pack("<Q", 1 << 50)
    cases = {
        "the checksum of a record is wrong": good[: second + 900] + b"?" + good[second + 901 :],
        "the checksum of a record's length is wrong": good[:second] + lie + good[second + 8 :],
        "the file is cut": good[: second + 5],
        "the file is cut, or a record is not": good[: second + length],
        "is no tf.train.Example": good[:second] + tfrecord_record(b"\x0a\xff\xff\x03abc"),
        r"has no image \('image/encoded'\)": good[:second] + tfrecord_record(b""),
    }
    for message, content in cases.items():
        shard.write_bytes(content)
        with pytest.raises(DataError, match=rf"train-00000-of-00001 at byte {second:,}: .*{message}"):
            open_index(files(), tmp_path)


def test_a_length_that_lies_is_never_believed(tmp_path: Path) -> None:
    write_tfrecord(PICTURES, tmp_path, shards=1)
    length = struct.pack("<Q", 1 << 60)
    masked = tfrecord._checksum()
    assert masked is not None
    value = masked(length)
    head = length + struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)
    (tmp_path / "train-00000-of-00001").write_bytes(head + bytes(100))
    with pytest.raises(DataError, match=r"at byte 0: the file is cut, or a record is not 1,152,921,504,606,846,976"):
        open_index(files(), tmp_path)


def test_without_checksums_the_index_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord, "_checksum", lambda: None)
    write_tfrecord(PICTURES, tmp_path)
    index = open_index(files(), tmp_path)
    assert len(index.notes) == 1
    assert "were not tested" in index.notes[0]


def test_plain_feature_names_are_read(tmp_path: Path) -> None:
    write_tfrecord(PICTURES, tmp_path, shards=1)
    rows = open_index(files(), tmp_path).training.rows

    def entry(name: bytes, kind: int, body: bytes) -> bytes:
        return field(1, field(1, name) + field(2, field(kind, field(1, body))))

    content = field(1, entry(b"image", 1, JPEG) + entry(b"label", 3, b"\x03"))
    (tmp_path / "train-00000-of-00001").unlink()
    (tmp_path / "train.tfrecord").write_bytes(tfrecord_record(content) * 3)
    index = open_index(files(classes=4), tmp_path)
    assert index.training.rows["label"].tolist() == [2, 2, 2]
    assert set(index.training.rows["width"]) <= set(rows["width"])
    assert list(index.training.keys) == [f"train.tfrecord-{number:08d}" for number in range(3)]


def field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer."""
    length, digits = len(content), bytearray()
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *digits, length]) + content


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_every_kind_are_read(tmp_path: Path, form: int) -> None:
    folders = "a/" * 60 if form != tarfile.USTAR_FORMAT else f"{'a' * 80}/{'b' * 40}/"
    for part in ("train", "val"):
        with tarfile.open(tmp_path / f"{part}.tar", "w", format=form) as archive:
            below = tarfile.TarInfo("a folder")
            below.type = tarfile.DIRTYPE
            archive.addfile(below)
            for number, ending in enumerate(("jpg", "jpeg", "PNG", "JPG")):
                for name, content in (
                    (f"./{folders}größe{number}.{ending}", JPEG + bytes(number)),
                    (f"./{folders}größe{number}.seg.png", b"a mask"),
                    (f"./{folders}größe{number}.json", json.dumps({"cls": number, "bbox": [0, 0, 0.5, 1]}).encode()),
                ):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    index = open_index(files(), tmp_path)
    assert list(index.training.keys) == [f"größe{number}" for number in range(4)]
    assert index.training.rows["label"].tolist() == [0, 1, 2, 3]
    assert (index.training.rows["length"] - len(JPEG)).tolist() == [0, 1, 2, 3]
    assert index.validation.objects_of(2).tolist() == [[0, 0, 0.5, 1]]
    content = (tmp_path / "train.tar").read_bytes()
    assert all(content[offset : offset + 2] == b"\xff\xd8" for offset in index.training.rows["offset"].tolist())


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_samples_whose_image_is_a_link_are_noted_however_the_index_is_opened(tmp_path: Path, kind: bytes) -> None:
    for part in ("train", "val"):
        with tarfile.open(tmp_path / f"{part}.tar", "w") as archive:
            for number in range(4):
                header = tarfile.TarInfo(f"{number}.jpg")
                if number > 1:
                    header.type, header.linkname = kind, "0.jpg"
                header.size = 0 if number > 1 else len(JPEG)
                archive.addfile(header, io.BytesIO(JPEG))
                header = tarfile.TarInfo(f"{number}.cls")
                header.size = 1
                archive.addfile(header, io.BytesIO(str(number % 2).encode()))
            header = tarfile.TarInfo("about.json")
            header.size = 2
            archive.addfile(header, io.BytesIO(b"{}"))
    for _ in range(2):
        index = open_index(files(), tmp_path)
        assert index.notes == ("4 samples have a label and no image: links in tars are not followed",)
        assert len(index.training) == len(index.validation) == 2


def test_tars_described_without_classes_have_those_of_their_labels(tmp_path: Path) -> None:
    write_tars(PICTURES, tmp_path)
    (tmp_path / "metadata.json").write_text(json.dumps({"classes": []}))
    assert len(open_index(files(), tmp_path).classes) == 4


def test_one_key_in_two_folders_is_two_images(tmp_path: Path) -> None:
    names = [("a/1.jpg", JPEG), ("b/1.jpg", JPEG), ("b/1.cls", b"1"), ("a/1.cls", b"0\n"), ("a/._1.jpg", b"of a Mac")]
    for part in ("train", "val"):
        (tmp_path / f"{part}.tar").write_bytes(b"".join(member(name, content) for name, content in names))
    index = open_index(files(), tmp_path)
    assert list(index.training.keys) == ["1", "1"]
    assert index.training.rows["label"].tolist() == [0, 1]
    assert np.diff(index.training.rows["offset"].astype(np.int64)) > 0


def test_a_label_that_says_nothing_is_a_label_outside(tmp_path: Path) -> None:
    labels = [(f"{number}.cls", str(number % 2).encode()) for number in range(60)]
    labels[7], labels[8] = ("7.cls", b"cat"), ("8.json", b'{"label": [')
    for part in ("train", "val"):
        content = b"".join(member(name, text) + member(f"{name.split('.')[0]}.jpg", JPEG) for name, text in labels)
        (tmp_path / f"{part}.tar").write_bytes(content)
    index = open_index(files(), tmp_path)
    strays = index.training.rows["flags"] & Flag.OTHER_LABEL > 0
    assert [key for key, stray in zip(index.training.keys, strays, strict=True) if stray] == ["7", "8"]


def test_damage_in_a_tar_names_file_and_byte(tmp_path: Path) -> None:
    write_tars(PICTURES, tmp_path, shards=1)
    shard = tmp_path / "train-000000.tar"
    first = member("a.cls", b"1") + member("a.jpg", JPEG)
    place = f"{len(first):,}"
    huge = bytearray(member("b.jpg", JPEG, "base256"))
    huge[125:136] = b"\x7f" * 11
    huge[148:156] = b"%06o\0 " % (sum(huge[:148]) + sum(huge[156:512]) + 256)
    sparse = bytearray(member("b.jpg", JPEG))
    sparse[156:157], sparse[148:156] = b"S", b"%06o\0 " % (sum(sparse[:148]) + sum(sparse[157:512]) + ord("S") + 256)
    cases = {
        "the tar is cut, or a file in it is not": first + member("b.jpg", JPEG)[:900],
        "the tar is cut; ": first + b"b.jpg",
        "the tar is cut, or a file in it is not [0-9,]{30}": first + bytes(huge),
        "the checksum of a header is wrong": first + b"?" + member("b.jpg", JPEG)[1:],
        "files with holes are not read": first + bytes(sparse),
    }
    for message, content in cases.items():
        shard.write_bytes(content)
        with pytest.raises(DataError, match=rf"train-000000\.tar at byte {place}: {message}"):
            open_index(files(), tmp_path)


@pytest.mark.parametrize("name", ["train-0.tar.gz", "train-0.tgz", "train-00000-of-00001.gz", "train.tfrecord.gz"])
def test_compressed_shards_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=rf"{name}: images in a compressed .* cannot be read at random; unpack it"):
        open_index(files(), tmp_path)


def test_shards_may_lie_in_folders_named_after_their_parts(tmp_path: Path) -> None:
    write_tars(PICTURES, tmp_path / "made")
    for part in ("train", "val"):
        (tmp_path / "data" / part).mkdir(parents=True)
        for number, shard in enumerate(sorted((tmp_path / "made").glob(f"{part}*"))):
            shard.rename(tmp_path / "data" / part / f"{number:04d}.tar")
    index = open_index(files(), tmp_path / "data")
    assert (index.kind, len(index.training) + len(index.validation)) == ("webdataset", len(PICTURES))
    assert index.validation.name(0).startswith("val/0000.tar at byte ")


def test_the_classes_of_imagenet_are_a_thousand(tmp_path: Path) -> None:
    write_tfrecord(PICTURES, tmp_path)
    assert len(open_index(files(name="imagenet"), tmp_path).classes) == 1000


def test_class_folders_beyond_the_classes_given_are_refused(tmp_path: Path) -> None:
    put(tmp_path, *(f"{part}/{class_name(label)}/1.jpg" for part in ("train", "val") for label in range(3)))
    assert len(open_index(files(classes=3), tmp_path).classes) == 3
    with pytest.raises(DataError, match=r"3 classes are here, but data\.classes says 2"):
        open_index(files(classes=2), tmp_path)
