"""Headers: the size of an image and who decodes it, from its first bytes."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from PIL import Image

from paceline.data.index.image_header import HEADER_BYTES, parse_header
from paceline.data.index.table import Flag
from pictures_made import Made, make_pictures

PICTURES = make_pictures(60, 10)
FAST = Flag.JPEG | Flag.SEQUENTIAL
EXPECTED = {
    "cmyk": Flag(0), "png": Flag(0), "gif": Flag(0), "alpha": Flag(0), "palette": Flag(0), "gray": FAST,
    "turned": FAST | Flag.TURNED | Flag.ACROSS, "truncated": FAST, "corrupt": FAST, "damaged": FAST,
    "progressive": Flag.JPEG,
    "line": FAST, "tiny": FAST, "empty": Flag.UNREADABLE, "wrong": FAST, "": FAST,
}  # fmt: skip


def reader(content: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, count: content[offset : offset + count]


def size_of(content: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(content)) as image:
        return image.size


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.odd or picture.key)
def test_size_and_decoder_of_every_kind_of_image_are_known(picture: Made) -> None:
    width, height, flags = parse_header(picture.bytes[:HEADER_BYTES], reader(picture.bytes))
    assert flags == EXPECTED[picture.odd]
    assert (width, height) == ((0, 0) if picture.odd == "empty" else size_of(picture.bytes))


@pytest.mark.parametrize("kind", ["BMP", "WEBP", "TIFF", "PPM"])
def test_other_formats_are_left_to_pillow(kind: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (31, 17)).save(buffer, kind)
    assert parse_header(buffer.getvalue()[:HEADER_BYTES], reader(buffer.getvalue())) == (31, 17, Flag(0))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("turn", [1, 2, 6, 8, 9])
def test_an_image_that_its_exif_data_turns_is_flagged(kind: str, turn: int) -> None:
    exif = Image.Exif()
    exif[0x010E] = "a longer text before it"
    exif[0x0112] = turn
    buffer = io.BytesIO()
    Image.new("RGB", (31, 17)).save(buffer, kind, exif=exif)
    width, height, flags = parse_header(buffer.getvalue())
    assert (width, height) == (31, 17)
    assert bool(flags & Flag.TURNED) == (2 <= turn <= 8)
    assert bool(flags & Flag.ACROSS) == (5 <= turn <= 8)


def test_a_size_behind_large_segments_is_read_on_demand() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (31, 17)).save(buffer, "JPEG", icc_profile=bytes(200_000))
    content, asked = buffer.getvalue(), []

    def read_more(offset: int, count: int) -> bytes:
        asked.append(count)
        return content[offset : offset + count]

    assert parse_header(content[:HEADER_BYTES], read_more) == (31, 17, FAST)
    assert sum(asked) < 200
    assert parse_header(content[:HEADER_BYTES]) == (0, 0, Flag.UNREADABLE)


def frame(kind: int, precision: int, components: int, height: int = 17) -> bytes:
    body = bytes([precision, 0, height, 0, 31, components]) + bytes([1, 0x11, 0] * components)
    return b"\xff\xd8\xff" + bytes([kind]) + (len(body) + 2).to_bytes(2, "big") + body


@pytest.mark.parametrize(
    ("content", "flags"),
    [
        (frame(0xC0, 8, 3), FAST),
        (frame(0xC1, 8, 1), FAST),
        (frame(0xC2, 8, 3), Flag.JPEG),
        (frame(0xC1, 12, 3), Flag(0)),
        (frame(0xC0, 8, 4), Flag(0)),
        (frame(0xC3, 8, 3), Flag(0)),
        (frame(0xC9, 8, 3), Flag(0)),
        (b"\xff\xd8\xff\xff" + frame(0xC0, 8, 3)[2:], FAST),
        (b"\xff\xd8\xff\xe0\0\2stray\xff\0" + bytes(2 * HEADER_BYTES) + frame(0xC0, 8, 3)[2:], FAST),
    ],
)
def test_jpegs_beyond_the_fast_decoder_are_told_apart(content: bytes, flags: Flag) -> None:
    assert parse_header(content) == (31, 17, flags)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff", b"not an image at all", bytes(5000), b"\xff\xd8\xff\xe0\x00\x00",
        b"\xff\xd8\xff\xe0\x00\x01" * 100, b"\xff\xd8" + b"\xff\xd0" * 9000, b"\xff\xd8\xff\xd9", b"GIF89a\1",
        b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n" + bytes(40), frame(0xC0, 8, 3, height=0), frame(0xC0, 8, 3)[:8],
    ],
)  # fmt: skip
def test_what_says_no_size_is_unreadable(content: bytes) -> None:
    assert parse_header(content[:HEADER_BYTES], reader(content)) == (0, 0, Flag.UNREADABLE)


def test_no_cut_and_no_flipped_byte_makes_it_raise() -> None:
    for picture in PICTURES[:16]:
        head = picture.bytes[:700]
        for place in range(0, len(head), 3):
            mutated = head[:place] + bytes([head[place] ^ (0x41 + place) & 0xFF]) + head[place + 1 :]
            for content in (head[:place], mutated):
                width, height, flags = parse_header(content, reader(content))
                assert (width == 0) == (height == 0) == bool(flags & Flag.UNREADABLE)


def gif(screen: tuple[int, int], place: int = 0) -> bytes:
    """One frame of 31 x 17 pixels on a screen of any size."""
    buffer = io.BytesIO()
    Image.new("P", (31, 17)).save(buffer, "GIF")
    content = bytearray(buffer.getvalue())
    content[6:10] = b"".join(side.to_bytes(2, "little") for side in screen)
    frame = content.index(b",", 13 + 3 * 2 ** ((content[10] & 7) + 1))
    content[frame + 1 : frame + 3] = place.to_bytes(2, "little")
    return bytes(content)


@pytest.mark.parametrize(
    ("screen", "place", "size"), [((0, 0), 0, (31, 17)), ((9, 40), 4, (35, 40)), ((50, 60), 0, (50, 60))]
)
def test_a_gif_is_as_large_as_what_is_decoded_of_it(screen: tuple[int, int], place: int, size: tuple[int, int]) -> None:
    content = gif(screen, place)
    assert parse_header(content[:HEADER_BYTES], reader(content)) == (*size, Flag(0))
    assert size_of(content) == size


def test_a_gif_that_pillow_cannot_open_has_the_size_that_its_header_says() -> None:
    assert parse_header(b"GIF89a" + bytes([31, 0, 17, 0])) == (31, 17, Flag(0))


@pytest.mark.parametrize("turn", [3, 6])
def test_a_tiff_is_upright_as_pillow_reads_it(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    buffer = io.BytesIO()
    Image.new("RGB", (31, 17)).save(buffer, "TIFF", exif=exif)
    assert parse_header(buffer.getvalue()) == ((17, 31) if turn == 6 else (31, 17)) + (Flag(0),)
