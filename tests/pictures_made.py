"""A small data set of real encoded images, with every oddity found in the wild, written as each format holds it."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Box = tuple[float, float, float, float]

ODD = (
    "cmyk", "png", "gray", "turned", "truncated", "corrupt", "damaged", "progressive", "line", "tiny", "empty", "wrong",
    "gif", "alpha", "palette",
)  # fmt: skip
"""What the first pictures are, one of each; the rest are ordinary JPEGs of several samplings and qualities."""

BAD = ("truncated", "corrupt", "empty")
"""Those that no full decode reads; Pillow makes do with the damaged one, which a strict decoder refuses."""


@dataclass(frozen=True)
class Made:
    """One picture: its key, its class, its encoded bytes, its objects, and what is odd about it."""

    key: str
    label: int
    bytes: bytes
    objects: tuple[Box, ...] = ()
    """Top, left, bottom, right as shares of the picture."""
    odd: str = ""
    wrong_label: int | None = None
    """What TFRecords and tars say instead of the label."""


def make_pictures(count: int, classes: int) -> list[Made]:
    """The same pictures every time; the odd ones are spread over the classes and come first."""
    return [_picture(number, classes) for number in range(count)]


def class_name(label: int) -> str:
    """The folder of a class."""
    return f"class{label:03d}"


def _picture(number: int, classes: int) -> Made:
    # Keys are in no order and labels in every one, so that an index has to sort.
    key, label = f"picture_{number * 7919 % 100_003:06d}", number * 3 % classes
    odd = ODD[number] if number < len(ODD) else ""
    objects = tuple(_box(number + 5 * k) for k in range(number % 3))
    made = Made(key, label, _encoded(number, odd), objects, odd)
    return replace(made, wrong_label=classes + 4000) if odd == "wrong" else made


def _box(number: int) -> Box:
    top, left = number % 4 / 8, number % 5 / 10
    return top, left, top + 0.25 + number % 2 / 8, left + 0.5


def _encoded(number: int, odd: str) -> bytes:
    maker: dict[str, Callable[[int], bytes]] = {
        "cmyk": lambda n: _jpeg(_pixels(n).convert("CMYK"), n),
        "png": lambda n: _saved(_pixels(n), "PNG"),
        "gray": lambda n: _jpeg(_pixels(n).convert("L"), n),
        "turned": lambda n: _jpeg(_pixels(n), n, exif=_orientation(6)),
        "truncated": lambda n: (full := _jpeg(_pixels(n), n))[: len(full) * 3 // 5],
        "corrupt": lambda n: _replaced(_jpeg(_pixels(n), n), b"\xff\xc0"),  # a second frame header
        "damaged": lambda n: _replaced(_jpeg(_pixels(n), n), b"\xff\xd9"),  # an early end
        "progressive": lambda n: _jpeg(_pixels(n), n, progressive=True),
        "line": lambda n: _jpeg(_pixels(n, 1, 83), n),
        "tiny": lambda n: _jpeg(_pixels(n, 3, 2), n),
        "empty": lambda n: b"",
        "gif": lambda n: _saved(_pixels(n).convert("P"), "GIF"),
        "alpha": lambda n: _saved(_pixels(n).convert("RGBA"), "PNG"),
        "palette": lambda n: _saved(_pixels(n).convert("P"), "PNG"),
    }
    return maker[odd](number) if odd in maker else _jpeg(_pixels(number), number)


def _pixels(number: int, width: int = 0, height: int = 0) -> Image.Image:
    """A slope in each color with a disc on it and a little grain, so that no two pictures and no crops are alike."""
    width, height = width or 48 + number * 13 % 70, height or 40 + number * 29 % 60
    down, right = np.mgrid[0:height, 0:width].astype(np.int64)
    grain = (right * 7919 + down * 104_729 + number * 15_485_863) % 251 % 23
    disc = (down - number % height) ** 2 + (right - number * 3 % width) ** 2 < (min(width, height) // 3) ** 2
    red = right * 255 // width + 60 * disc
    green = down * 255 // height + grain
    blue = (right + down) * 2 + number * 11
    colors: NDArray[np.int64] = np.stack([red, green + 90 * disc, blue % 256], axis=2) + grain[..., None]
    return Image.fromarray(np.clip(colors, 0, 255).astype(np.uint8))


def _jpeg(image: Image.Image, number: int, **options: object) -> bytes:
    sampling = {} if image.mode == "L" else {"subsampling": number % 3}
    return _saved(image, "JPEG", quality=75 + number % 21, **sampling, **options)


def _saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _orientation(turn: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = turn
    return exif


def _replaced(content: bytes, marker: bytes) -> bytes:
    """A JPEG with a marker in the middle of its pixels."""
    middle = len(content) * 2 // 3
    return content[:middle] + marker + content[middle + 2 :]


def split(pictures: Sequence[Made], validation: float) -> tuple[list[Made], list[Made]]:
    """Training and validation pictures: every n-th of the ordinary ones is judged, n = 1 / validation."""
    if not validation:
        return list(pictures), []
    every = round(1 / validation)
    judged = [picture for number, picture in enumerate(pictures) if number % every == every - 1 and not picture.odd]
    chosen = {picture.key for picture in judged}
    return [picture for picture in pictures if picture.key not in chosen], judged


def write_folder(pictures: Sequence[Made], folder: Path, validation: float = 0.1) -> Path:
    """train/CLASS/KEY.JPEG and val/CLASS/KEY.JPEG; without validation, CLASS/KEY.JPEG."""
    for part, some in zip(("train", "val"), split(pictures, validation), strict=True):
        for picture in some:
            place = folder / (part if validation else "") / class_name(picture.label) / f"{picture.key}.JPEG"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(picture.bytes)
    return folder


def write_tfrecord(
    pictures: Sequence[Made],
    folder: Path,
    validation: float = 0.1,
    shards: int = 3,
    objects: bool = True,
    wrong_labels: bool = True,
) -> Path:
    """train-00000-of-00003 and validation-00000-of-00001 with labels from 1, checksums, and objects if asked."""
    folder.mkdir(parents=True, exist_ok=True)
    training, judged = split(pictures, validation)
    for part, some, count in (("train", training, shards), ("validation", judged, 1)):
        for shard in range(count if some else 0):
            records = [tfrecord_record(example(picture, objects, wrong_labels)) for picture in some[shard::count]]
            (folder / f"{part}-{shard:05d}-of-{count:05d}").write_bytes(b"".join(records))
    return folder


def example(picture: Made, objects: bool = True, wrong_labels: bool = True) -> bytes:
    """A tf.train.Example with the features of the classic ImageNet files."""
    label = picture.wrong_label if wrong_labels and picture.wrong_label is not None else picture.label
    features = {
        "image/class/label": _feature(3, _varint(label + 1)),
        "image/class/synset": _texts(class_name(picture.label).encode()),
        "image/encoded": _texts(picture.bytes),
        "image/filename": _texts(f"{picture.key}.JPEG".encode()),
        "image/format": _texts(b"JPEG"),
    }
    if objects and picture.objects:
        for side, values in zip(("ymin", "xmin", "ymax", "xmax"), zip(*picture.objects, strict=True), strict=True):
            features[f"image/object/bbox/{side}"] = _feature(2, struct.pack(f"<{len(values)}f", *values))
    entries = [_field(1, _field(1, name.encode()) + _field(2, value)) for name, value in features.items()]
    return _field(1, b"".join(entries))


def tfrecord_record(content: bytes) -> bytes:
    """One record with the checksums of its length and of its content."""
    length = struct.pack("<Q", len(content))
    return length + _masked(length) + content + _masked(content)


def _masked(content: bytes) -> bytes:
    checksum = google_crc32c.value(content)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _feature(kind: int, packed: bytes) -> bytes:
    return _field(kind, _field(1, packed))


def _texts(content: bytes) -> bytes:
    return _field(1, _field(1, content))


def write_tars(
    pictures: Sequence[Made],
    folder: Path,
    validation: float = 0.1,
    shards: int = 3,
    objects: bool = True,
    wrong_labels: bool = True,
) -> Path:
    """train-000000.tar ... and val-000000.tar; the headers take turns at every way to write a name or a size."""
    folder.mkdir(parents=True, exist_ok=True)
    training, judged = split(pictures, validation)
    for part, some, count in (("train", training, shards), ("val", judged, 1)):
        for shard in range(count if some else 0):
            members = [
                sample(picture, number, objects, wrong_labels) for number, picture in enumerate(some[shard::count])
            ]
            (folder / f"{part}-{shard:06d}.tar").write_bytes(b"".join(members) + bytes(1024))
    return folder


def sample(picture: Made, number: int, objects: bool = True, wrong_labels: bool = True) -> bytes:
    """The members of one picture: the image, and its label as .cls or, with objects, as .json."""
    label = picture.wrong_label if wrong_labels and picture.wrong_label is not None else picture.label
    name = f"{'deep/' * (number % 9 * 5)}{picture.key}"
    ending = ("jpg", "jpeg", "JPG", "png")[number % 4]
    style = ("ustar", "gnu", "pax", "base256")[number % 4]
    image = member(f"{name}.{ending}", picture.bytes, style)
    if objects and picture.objects:
        return image + member(f"{name}.json", json.dumps({"label": label, "bbox": picture.objects}).encode(), style)
    return member(f"{name}.cls", str(label).encode(), style) + image


def member(name: str, content: bytes, style: str = "ustar") -> bytes:
    """A file in a tar, its name and size written in one of the four ways."""
    before, size = b"", b"%011o\0" % len(content)
    if style == "gnu" or (style in ("ustar", "base256") and len(name) > 100):
        before = _block("././@LongLink", name.encode() + b"\0", b"L", b"%011o\0" % (len(name) + 1))
    elif style == "pax":
        records = _pax("path", name) + _pax("size", str(len(content)))
        before, size = _block("pax", records, b"x", b"%011o\0" % len(records)), b"%011o\0" % 0
    if style == "base256":
        size = b"\x80" + len(content).to_bytes(11, "big")
    return before + _block(name[-99:] if before else name, content, b"0", size)


def _pax(key: str, value: str) -> bytes:
    body = f" {key}={value}\n"
    length = len(body) + 2
    return f"{length if len(str(length)) == 2 else length + 1}{body}".encode()


def _block(name: str, content: bytes, kind: bytes, size: bytes) -> bytes:
    head = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size + b"00000000000\0"
    tail = kind + bytes(100) + b"ustar\x0000" + bytes(247)
    checksum = sum(head) + sum(tail) + 8 * 32
    return head + b"%06o\0 " % checksum + tail + content + bytes(-len(content) % 512)
