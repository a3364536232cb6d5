"""JPEGs in restart tiles: the same pixels, and any part of them on its own."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from paceline.data.pack import libjpeg, tiles

Pixels = NDArray[np.uint8]

SIZES = [(97, 131), (64, 96), (200, 376), (33, 500), (1, 70), (70, 1), (8, 8), (161, 47)]
"""Heights and widths: odd, even, thin, and with a prime number of units in a row (376 / 8 = 47)."""
SAMPLINGS = ["444", "422", "420", "440", "411", "gray"]


def noise(height: int, width: int) -> Pixels:
    """A picture with edges and texture everywhere, so that a tile in the wrong place shows."""
    generator = np.random.default_rng(height * 1000 + width)
    coarse = generator.integers(0, 256, (height // 12 + 1, width // 12 + 1, 3), dtype=np.uint8)
    picture = coarse.repeat(12, 0).repeat(12, 1)[:height, :width].astype(np.int64)
    return np.ascontiguousarray(np.clip(picture + generator.integers(-30, 30, picture.shape), 0, 255).astype(np.uint8))


def encode(picture: Pixels, sampling: str, **options: object) -> bytes:
    """A JPEG; Pillow writes the rare kinds."""
    if options:
        out = io.BytesIO()
        Image.fromarray(picture).save(out, "JPEG", quality=90, **options)
        return out.getvalue()
    if sampling == "gray":
        encoded: bytes = simplejpeg.encode_jpeg(picture[:, :, :1].copy(), 90, "GRAY", "gray")
    else:
        encoded = simplejpeg.encode_jpeg(picture, 90, "RGB", sampling)
    return encoded


def decode(encoded: bytes) -> Pixels:
    """The pixels; anything that libjpeg warns of is a fault here."""
    pixels: Pixels = simplejpeg.decode_jpeg(encoded, strict=True)
    return pixels


def retiled(encoded: bytes) -> bytes:
    found = tiles.retile(encoded)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def pictures() -> list[tuple[bytes, Pixels]]:
    """Tiled JPEGs of every sampling and size, with all of their pixels."""
    encoded = [encode(noise(*size), sampling) for size in SIZES for sampling in SAMPLINGS]
    return [(retiled(one), decode(one)) for one in encoded]


def test_tiling_keeps_every_pixel(pictures: list[tuple[bytes, Pixels]]) -> None:
    for tiled, pixels in pictures:
        layout = tiles.read_layout(tiled)
        assert layout.tiled
        assert (layout.height, layout.width) == pixels.shape[:2]
        assert np.array_equal(decode(tiled), pixels)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_every_cut_is_that_part_of_the_picture(pictures: list[tuple[bytes, Pixels]], data: st.DataObject) -> None:
    tiled, pixels = pictures[data.draw(st.integers(0, len(pictures) - 1))]
    height, width = pixels.shape[:2]
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    tall, wide = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    cut, above, before = tiles.cut_tiles(tiled, width, height, (top, left, tall, wide))
    found = decode(cut)[top - above : top - above + tall, left - before : left - before + wide]
    assert np.array_equal(found, pixels[top : top + tall, left : left + wide])


def test_a_cut_is_smaller_than_the_picture() -> None:
    tiled = retiled(encode(noise(400, 480), "420"))
    cut, top, left = tiles.cut_tiles(tiled, 480, 400, (200, 240, 60, 60))
    assert len(cut) < len(tiled) / 6
    layout = tiles.read_layout(cut)
    assert layout.height <= 96
    assert layout.width <= 144
    assert top % 16 == left % 16 == 0


def test_a_fractional_box_is_covered() -> None:
    picture = noise(160, 160)
    encoded = encode(picture, "444")
    cut, top, left = tiles.cut_tiles(retiled(encoded), 160, 160, np.array([16.9, 40.0, 30.2, 39.5]))
    layout = tiles.read_layout(cut)
    assert (top, top + layout.height) == (16, 48)
    assert (left, left + layout.width) == (40, 80)


def test_a_box_of_the_whole_picture_gives_the_whole_file() -> None:
    tiled = retiled(encode(noise(97, 131), "420"))
    assert tiles.cut_tiles(tiled, 131, 97, (0, 0, 97, 131)) == (tiled, 0, 0)


def test_a_picture_in_shared_memory_is_cut_alike() -> None:
    tiled = retiled(encode(noise(97, 131), "420"))
    assert tiles.cut_tiles(memoryview(tiled), 131, 97, (40, 50, 9, 9)) == tiles.cut_tiles(
        tiled, 131, 97, (40, 50, 9, 9)
    )


def test_the_lengths_in_the_header_only_save_the_search() -> None:
    tiled = retiled(encode(noise(200, 376), "422"))
    plain = tiles.remove_tile_lengths(tiled)
    assert tiles.read_layout(plain).lengths == (0, 0)
    assert tiles.remove_tile_lengths(plain) == plain
    assert np.array_equal(decode(plain), decode(tiled))
    assert tiles.cut_tiles(plain, 376, 200, (60, 90, 50, 70)) == tiles.cut_tiles(tiled, 376, 200, (60, 90, 50, 70))


@pytest.mark.parametrize("options", [{"progressive": True}, {"optimize": True}, {"restart_marker_blocks": 5}])
def test_every_huffman_jpeg_can_be_tiled(options: dict[str, object]) -> None:
    encoded = encode(noise(120, 200), "420", **options)
    tiled = retiled(encoded)
    assert tiles.read_layout(tiled).kind == 0xC0
    assert np.array_equal(decode(tiled), decode(encoded))


def test_an_rgb_jpeg_stays_rgb() -> None:
    out = io.BytesIO()
    Image.fromarray(noise(64, 64)).save(out, "JPEG", keep_rgb=True, quality=90)
    tiled = retiled(out.getvalue())
    assert np.array_equal(decode(tiled), decode(out.getvalue()))


def test_exif_data_are_kept_when_asked_for() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = encode(noise(64, 96), "420", exif=exif)
    turned = tiles.retile(encoded, keep_exif=True)
    assert turned is not None
    assert Image.open(io.BytesIO(turned)).getexif()[0x0112] == 6
    assert 0x0112 not in Image.open(io.BytesIO(retiled(encoded))).getexif()
    assert tiles.retile(encode(noise(64, 96), "420"), keep_exif=True) is None


def saved(mode: str, form: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(noise(64, 64)).convert(mode).save(out, form)
    return out.getvalue()


REFUSED: dict[str, Callable[[], bytes]] = {
    "four colors": lambda: saved("CMYK", "JPEG"),
    "another format": lambda: saved("RGB", "PNG"),
    "cut short": lambda: encode(noise(64, 64), "420")[:-200],
    "without its end": lambda: encode(noise(64, 64), "420")[:-2],
    "empty": lambda: b"",
    "only a start": lambda: b"\xff\xd8",
    "12 bits": lambda: encode(noise(64, 64), "420").replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
    "arithmetic": lambda: encode(noise(64, 64), "420").replace(b"\xff\xc0\x00\x11", b"\xff\xc9\x00\x11"),
    "no height": lambda: encode(noise(64, 64), "420").replace(b"\x00\x11\x08\x00\x40", b"\x00\x11\x08\0\0"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_tiled_is_left_as_it_is(why: str) -> None:
    assert tiles.retile(REFUSED[why]()) is None


@pytest.mark.parametrize("why", [*REFUSED, "not tiled", "another size"])
def test_only_tiled_pictures_are_cut(why: str) -> None:
    encoded = encode(noise(64, 64), "420")
    content = {"not tiled": encoded, "another size": retiled(encode(noise(64, 96), "420"))}
    with pytest.raises(ValueError, match=r"\w+"):
        tiles.cut_tiles(content[why] if why in content else REFUSED[why](), 64, 64, (10, 10, 20, 20))


def test_damage_makes_a_cut_fail_or_succeed_but_nothing_else() -> None:
    tiled = retiled(encode(noise(97, 131), "420"))
    generator = np.random.default_rng(1)
    for _ in range(500):
        damaged = bytearray(tiled)
        for _ in range(int(generator.integers(1, 5))):
            damaged[int(generator.integers(0, len(damaged) if generator.random() < 0.3 else 700))] = int(
                generator.integers(0, 256)
            )
        try:
            tiles.cut_tiles(bytes(damaged[: int(generator.integers(2, 3 * len(damaged)))]), 131, 97, (40, 50, 30, 30))
        except ValueError:
            continue


@pytest.mark.parametrize("unit", [8, 16, 32])
def test_tiles_divide_every_row(unit: int) -> None:
    for columns in range(1, 400):
        interval = tiles.tile_interval(columns, unit)
        assert columns % interval == 0
        assert interval == columns or 24 <= interval * unit <= 128


def test_a_fault_that_libjpeg_cannot_return_from_ends_the_process_alone() -> None:
    program = "from paceline.data.pack import libjpeg; libjpeg.rewrite(b'no image', 4)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (libjpeg.FATAL, b"", b"")


def test_damage_that_libjpeg_warns_of_is_not_transcoded() -> None:
    assert libjpeg.rewrite(encode(noise(64, 64), "420")[:-200], 4) is None
