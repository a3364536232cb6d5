"""Damaged images, TFRecords and tars of every kind: each decodes, is found bad, or is refused; nothing else happens."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conftest import environment
from paceline.augment.resized_crop import evaluation_boxes
from paceline.data.index.image_header import parse_header
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag, Table
from paceline.data.load.decode import Decoder, Undecodable, decode_into
from paceline.data.load.image_files import ImageFiles
from paceline.data.pack import tiles, writer
from paceline.errors import DataError
from paceline.settings.data import Center, Files
from pictures_made import Made, example, make_pictures, sample, tfrecord_record, write_folder

MEMORY = 4 << 30
"""Bytes of address space that everything must do with, libraries included."""
SECONDS = 30
"""After this long, one of them hangs."""
DATA = Files(name="images", classes=10, validation=0.3, max_bad=1.0)
Chance = random.Random
Change = Callable[[bytearray, Chance], None]


def flip_bits(content: bytearray, chance: Chance) -> None:
    for _ in range(chance.choice((1, 2, 8, 40))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def flip_early(content: bytearray, chance: Chance) -> None:
    """Headers are at the beginning."""
    for _ in range(chance.choice((1, 3))):
        content[chance.randrange(min(len(content), 700))] ^= 1 << chance.randrange(8)


def cut(content: bytearray, chance: Chance) -> None:
    del content[chance.randrange(len(content)) :]


def cut_out(content: bytearray, chance: Chance) -> None:
    start = chance.randrange(len(content))
    del content[start : start + chance.choice((1, 2, 17, 300))]


def put_in(content: bytearray, chance: Chance) -> None:
    start = chance.randrange(len(content))
    content[start:start] = chance.choice((b"\xff\xd9", b"\xff\xd0", b"\xff", b"\0" * 64, chance.randbytes(50)))


def blank(content: bytearray, chance: Chance) -> None:
    start = chance.randrange(len(content))
    count = min(chance.choice((1, 4, 64, 1000)), len(content) - start)
    content[start : start + count] = bytes([chance.choice((0, 255))]) * count


def repeat(content: bytearray, chance: Chance) -> None:
    start = chance.randrange(len(content))
    content[start:start] = content[start : start + chance.choice((10, 200))]


def lie_about_size(content: bytearray, chance: Chance) -> None:
    """Width and height of a JPEG's frame header, or of a PNG's or GIF's."""
    place = next((content.find(bytes([0xFF, kind])) + 5 for kind in (0xC0, 0xC2) if bytes([0xFF, kind]) in content), 16)
    if place + 4 <= len(content):
        for at in (place, place + 2):
            if chance.random() < 0.7:
                content[at : at + 2] = struct.pack(">H", chance.choice((0, 1, 3, 500, 5000, 11_000, 32_768, 65_535)))


def lie_about_length(content: bytearray, chance: Chance) -> None:
    """The length of a segment of a JPEG."""
    places = [place for place in range(len(content) - 4) if content[place] == 0xFF and content[place + 1] > 0xBF]
    if places:
        at = chance.choice(places) + 2
        content[at : at + 2] = struct.pack(">H", chance.choice((0, 1, 2, 3, 100, 65_535)))


ANY: tuple[Change, ...] = (flip_bits, flip_early, cut, cut_out, put_in, blank, repeat)
OF_IMAGES: tuple[Change, ...] = (*ANY, lie_about_size, lie_about_size, lie_about_length)


def changed(content: bytes, chance: Chance, changes: tuple[Change, ...]) -> bytes:
    made = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2))):
        if made:
            chance.choice(changes)(made, chance)
    return bytes(made)


def bases() -> list[bytes]:
    """Images of every kind, some of them in tiles as packs hold them."""
    made = [picture.bytes for picture in make_pictures(30, 10) if picture.bytes]
    return made + [tiled for content in made[15:] if (tiled := tiles.retile(content)) is not None]


def outcome(content: bytes, flags: Flag, width: int, height: int, box: NDArray[Any], decoder: Decoder) -> str:
    out = np.zeros((16, 16, 3), np.uint8)
    try:
        decode_into(content, int(flags), width, height, box, False, "bilinear", out, decoder=decoder)
    except Undecodable as fault:
        told = str(fault)
    else:
        return "decoded"
    assert told
    assert "\n" not in told
    return "bad"


def fuzz_image(number: int, originals: list[bytes]) -> str:
    """Both decoders, for training and for evaluation, agree on whether an image is bad."""
    chance = Chance(f"image {number}")
    original = originals[number % len(originals)]
    content = changed(original, chance, OF_IMAGES)
    width, height, flags = parse_header(content)
    tall, wide = (chance.randint(1, max(1, size)) for size in (height, width))
    top, left = chance.randint(0, max(0, height - tall)), chance.randint(0, max(0, width - wide))
    cropped = np.array([top, left, tall, wide])
    judged = evaluation_boxes(Center(name="center", short=18), 16, np.array([width]), np.array([height]))[0]
    decoders: tuple[Decoder, ...] = ("fast", "pillow")
    found = {
        (decoder, box.dtype.kind): outcome(content, flags, width, height, box, decoder)
        for decoder in decoders
        for box in (cropped, judged)
    }
    assert len(set(found.values())) == 1, (number, found)
    first_width, first_height, _ = parse_header(original)
    # A pack says what an image was when it was packed, whatever became of its bytes since.
    packed = Flag.JPEG | Flag.SEQUENTIAL | Flag.TILED
    top, left = top % first_height, left % first_width
    inside = np.array([top, left, max(1, (first_height - top) // 2), max(1, (first_width - left) // 2)])
    outcome(content, packed, first_width, first_height, inside, "fast")
    return next(iter(found.values()))


def ends(folder: Path, table: Table) -> list[str]:
    """How the reading and decoding of each image ends."""
    split, found = ImageFiles(table, folder, "training"), []
    for number, row in enumerate(table.rows):
        width, height = int(row["width"]), int(row["height"])
        box = np.array([0, 0, max(1, height), max(1, width)])
        found.append(outcome(split.read(number), Flag(int(row["flags"])), width, height, box, "fast"))
        assert table.name(number)
    return found


def fuzz_shard(number: int, name: str, content: bytes) -> str:
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / name).write_bytes(content)
        try:
            index = open_index(DATA, Path(place))
            found = [end for table in (index.training, index.validation) for end in ends(index.folder, table)]
            return "decoded" if "decoded" in found else "bad"
        except DataError as fault:
            told = str(fault)
    assert told.startswith(place), told
    assert "\n" not in told
    return "refused"


def few(chance: Chance) -> list[Made]:
    return chance.sample(make_pictures(30, 10), 8)


def fuzz_tfrecord(number: int) -> str:
    """Half of them have right checksums: then it is the records inside that are damaged."""
    chance = Chance(f"tfrecord {number}")
    records = [example(picture) for picture in few(chance)]
    if number % 2:
        which = chance.randrange(len(records))
        records[which] = changed(records[which], chance, (*ANY, flip_bits, flip_bits, flip_early, blank))
        content = b"".join(map(tfrecord_record, records))
    else:
        content = changed(b"".join(map(tfrecord_record, records)), chance, (*ANY, lie_about_record))
    return fuzz_shard(number, "all.tfrecord", content)


def lie_about_record(content: bytearray, chance: Chance) -> None:
    """The first record's length, with a right checksum."""
    length = struct.pack("<Q", chance.choice((0, 1, 700, 2**31, 2**40, 2**64 - 1, len(content))))
    content[:12] = length + tfrecord_record(length)[-4:]


def fuzz_tar(number: int) -> str:
    """Half of them have right checksums in their headers."""
    chance = Chance(f"tar {number}")
    content = b"".join(sample(picture, place) for place, picture in enumerate(few(chance))) + bytes(1024)
    made = bytearray(changed(content, chance, (*ANY, lie_in_header)))
    if number % 2:
        for place in range(0, len(made) - 511, 512):
            if made[place + 257 : place + 262] == b"ustar":
                total = sum(made[place : place + 148]) + sum(made[place + 156 : place + 512]) + 8 * 32
                made[place + 148 : place + 156] = b"%06o\0 " % total
    return fuzz_shard(number, "all.tar", bytes(made))


def lie_in_header(content: bytearray, chance: Chance) -> None:
    """Sizes, kinds and names in a header of a tar."""
    places = [place for place in range(0, len(content) - 511, 512) if content[place + 257 : place + 262] == b"ustar"]
    if not places:
        return
    at = chance.choice(places)
    sizes = (
        b"77777777777\0",
        b"\x80" + b"\xff" * 11,
        b"\xff" * 12,
        b"\0" * 12,
        b"99999999999\0",
        b"00000000001\0",
        b"-0000000001\0",
    )
    if chance.random() < 0.6:
        content[at + 124 : at + 136] = chance.choice(sizes)
    else:
        content[at + 156] = chance.choice(b"01234567xgLKSDM\0")


def fuzz(*asked: str) -> None:
    """What a process of its own does, asked for kind=count; it says what it is about, then how many ended how."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    originals = bases()
    one: dict[str, Callable[[int], str]] = {
        "image": lambda number: fuzz_image(number, originals), "tfrecord": fuzz_tfrecord, "tar": fuzz_tar
    }  # fmt: skip
    ended: Counter[str] = Counter()
    for word in asked:
        kind, _, count = word.partition("=")
        for number in range(int(count)):
            print(f"{kind} {number}", file=sys.stderr, flush=True)
            signal.alarm(SECONDS)
            ended[one[kind](number)] += 1
        signal.alarm(0)
    # The peak of this program alone: getrusage's is also that of the process which started it, before it was this one.
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = int(told["VmHWM"].split()[0]) // 1024
    print(json.dumps({**ended, "megabytes": memory}))


def run(*asked: str) -> dict[str, int]:
    """How many ended how, found out in a process that may die of it."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, *asked], capture_output=True, text=True, timeout=1500, check=False,
        env=environment() | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
    )  # fmt: skip
    assert found.returncode == 0, f"status {found.returncode}: {found.stderr[-3000:]}"
    print(*asked, found.stdout)
    ended: dict[str, int] = json.loads(found.stdout)
    assert ended.pop("megabytes") < 2500
    return ended


def test_a_few_damaged_files_end_well() -> None:
    assert sum(run("image=40", "tfrecord=10", "tar=10").values()) == 60


@pytest.mark.long
@pytest.mark.parametrize(("kind", "count"), [("image", 1400), ("tfrecord", 300), ("tar", 300)])
def test_two_thousand_damaged_files_end_well(kind: str, count: int) -> None:
    ended = run(f"{kind}={count}")
    assert sum(ended.values()) == count
    assert ended["decoded"] > count // 20, "some damage does not matter"
    assert ended.get("bad", 0) + ended.get("refused", 0) > count // 10, "some does"


@pytest.mark.long
def test_damaged_images_are_packed_as_they_are_by_workers_that_may_die_of_them(tmp_path: Path) -> None:
    originals, made = bases(), []
    for number, picture in enumerate(make_pictures(200, 10)[50:]):
        content = changed(originals[number % len(originals)], Chance(f"pack {number}"), OF_IMAGES)
        made.append(replace(picture, bytes=content))
    source = Files(name="images", max_bad=1.0)
    found = open_index(source, write_folder(made, tmp_path / "data", 1 / 7))
    writer.write_pack(found, tmp_path / "pack", processes=2)
    packed = open_index(source, tmp_path / "pack")
    for mine, yours in ((found.training, packed.training), (found.validation, packed.validation)):
        assert list(mine.keys) == list(yours.keys)
        assert ends(found.folder, mine) == ends(packed.folder, yours)


if __name__ == "__main__":
    fuzz(*sys.argv[1:])
