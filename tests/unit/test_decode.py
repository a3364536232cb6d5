"""Decoding, cutting and resizing: pixels against Pillow's, and what becomes of every kind of odd or damaged file.

Tolerances are what was found on ImageNet's own JPEGs: bilinear boxes differ from Pillow's by up to 1 level (0.03 in the
mean), evaluation by up to 2 (0.003); bicubic, where a color is clipped between the two passes, by up to 11 (0.04).
"""

from __future__ import annotations

import io
import struct
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from paceline.augment.resized_crop import evaluation_boxes, training_boxes
from paceline.data.index.image_header import parse_header
from paceline.data.index.table import Flag
from paceline.data.load import decode
from paceline.data.load.decode import Decoder, Filter, Undecodable, decode_into
from paceline.settings.augment import Crop
from paceline.settings.data import Center, Squash

SIDE = 64
FILTERS: list[Filter] = ["bilinear", "bicubic"]
DECODERS: list[Decoder] = ["fast", "pillow"]
PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def scene(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with soft shapes, edges and a little noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / random.uniform(5, 40) + c) * np.cos(y / random.uniform(5, 40)) for c in range(3)]
    pixels = 128 + 80 * np.stack(waves, 2) + random.normal(0, 6, (height, width, 3))
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (200, 40, 90)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def saved(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **({"quality": 90} if form == "JPEG" else {}) | options)
    return stream.getvalue()


def opened(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded)).convert("RGB")


def made(
    encoded: bytes, box: Any, resize: Filter = "bilinear", mirrored: bool = False, flags: int = 0, **options: Any
) -> NDArray[np.int64]:
    width, height, found = parse_header(encoded)
    out = np.full((options.pop("side", SIDE),) * 2 + (3,), 99, np.uint8)
    decode_into(encoded, found | flags, width, height, box, mirrored, resize, out, **options)
    return out.astype(np.int64)


def cropped(image: Image.Image, box: Any, resize: Filter = "bilinear", side: int = SIDE) -> NDArray[np.int64]:
    """Pillow's crop and resize."""
    top, left, tall, wide = (int(number) for number in box)
    part = image.crop((left, top, left + wide, top + tall))
    return np.asarray(part.resize((side, side), PILLOW[resize])).astype(np.int64)


def assert_close(found: NDArray[np.int64], expected: NDArray[np.int64], most: int, mean: float = 0.5) -> None:
    difference = np.abs(found - expected)
    assert difference.max() <= most
    assert difference.mean() <= mean


@pytest.mark.parametrize("resize", FILTERS)
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_training_boxes_are_pillows_crop_and_resize(resize: Filter, decoder: Decoder, options: dict[str, Any]) -> None:
    encoded = saved(scene(180, 133), **options)
    boxes = training_boxes(0, Crop(), np.arange(6), np.full(6, 180), np.full(6, 133))
    for box in [*boxes, np.array([0, 0, 133, 180]), np.array([132, 179, 1, 1]), np.array([5, 7, SIDE, SIDE])]:
        expected = cropped(opened(encoded), box, resize)
        assert_close(made(encoded, box, resize, decoder=decoder), expected, 1 if resize == "bilinear" else 12)


def test_both_decoders_give_the_same_pixels() -> None:
    for options in ({}, {"subsampling": 0}, {"progressive": True}):
        encoded = saved(scene(150, 211, 3), **options)
        for box in ([10, 20, 130, 99], [3.5, 1.25, 140.5, 140.5]):
            assert np.array_equal(made(encoded, box), made(encoded, box, decoder="pillow"))


def test_a_box_of_the_asked_size_is_copied_as_it_is() -> None:
    encoded = saved(scene(180, 133))
    whole = np.asarray(opened(encoded)).astype(np.int64)
    assert np.array_equal(made(encoded, [20, 30, SIDE, SIDE]), whole[20:84, 30:94])
    assert np.array_equal(made(encoded, [20.0, 30.0, 64.0, 64.0]), whole[20:84, 30:94])


def torchvision_view(image: Image.Image, short: int, side: int, resize: Filter) -> NDArray[np.int64]:
    """Resize(short) and CenterCrop(side)."""
    width, height = image.size
    long = int(short * max(width, height) / min(width, height))
    wide, tall = (short, long) if width <= height else (long, short)
    top, left = round((tall - side) / 2), round((wide - side) / 2)
    resized = image.resize((wide, tall), PILLOW[resize])
    return np.asarray(resized.crop((left, top, left + side, top + side))).astype(np.int64)


@pytest.mark.parametrize("resize", FILTERS)
@pytest.mark.parametrize(("width", "height"), [(180, 133), (133, 181), (73, 73), (40, 60), (500, 99)])
def test_evaluation_is_torchvisions_resize_and_center_crop(resize: Filter, width: int, height: int) -> None:
    encoded = saved(scene(width, height))
    box = evaluation_boxes(Center(name="center", short=73), SIDE, np.array([width]), np.array([height]))[0]
    expected = torchvision_view(opened(encoded), 73, SIDE, resize)
    assert_close(made(encoded, box, resize), expected, 2 if resize == "bilinear" else 12, mean=0.3)


@pytest.mark.parametrize("resize", FILTERS)
def test_any_other_fractional_box_is_pillows(resize: Filter) -> None:
    encoded = saved(scene(180, 133))
    top, left, tall, wide = box = evaluation_boxes(
        Squash(name="squash", fraction=0.9137), SIDE, np.array([180]), np.array([133])
    )[0]
    edges = (left, top, left + wide, top + tall)
    expected = np.asarray(opened(encoded).resize((SIDE, SIDE), PILLOW[resize], box=edges)).astype(np.int64)
    assert_close(made(encoded, box, resize), expected, 1, mean=0.01)


@pytest.mark.parametrize(("width", "height"), [(1, 3000), (3000, 1), (1, 1), (2, 7), (65_000, 2)])
@pytest.mark.parametrize("resize", FILTERS)
def test_thin_images_are_decoded_too(width: int, height: int, resize: Filter) -> None:
    encoded = saved(scene(width, height))
    sizes = np.full(20, width), np.full(20, height)
    for box in training_boxes(0, Crop(), np.arange(20), *sizes):
        assert_close(made(encoded, box, resize), cropped(opened(encoded), box, resize), 12, mean=1)
    seen = made(encoded, evaluation_boxes(Center(name="center"), SIDE, *sizes)[0], resize)
    assert np.ptp(seen) > 0 or width * height == 1


@pytest.mark.parametrize("box", [[10, 20, 64, 64], [10, 20, 100, 90], [1.5, 2.5, 100.0, 100.0]])
@pytest.mark.parametrize("decoder", DECODERS)
def test_a_mirrored_image_is_the_flipped_one(box: list[float], decoder: Decoder) -> None:
    encoded = saved(scene(180, 133))
    assert np.array_equal(
        made(encoded, box, mirrored=True, decoder=decoder), made(encoded, box, decoder=decoder)[:, ::-1]
    )


def palette_with_transparency() -> bytes:
    image = scene(120, 90).quantize(64)
    return saved(image, "PNG", transparency=bytes(range(64)))


@pytest.mark.parametrize(
    "encoded",
    [
        saved(scene(120, 90).convert("L")),
        saved(scene(120, 90).convert("CMYK")),
        saved(scene(120, 90), "PNG"),
        saved(scene(120, 90).convert("RGBA"), "PNG"),
        saved(scene(120, 90).convert("LA"), "PNG"),
        saved(scene(120, 90).convert("1"), "PNG"),
        saved(scene(120, 90), "GIF"),
        saved(scene(120, 90), "BMP"),
        saved(scene(120, 90), "WEBP", lossless=True),
        saved(scene(120, 90), "TIFF"),
        saved(scene(120, 90), "PPM"),
        palette_with_transparency(),
    ],
    ids=[
        "gray",
        "cmyk",
        "png",
        "alpha",
        "gray-alpha",
        "bits",
        "gif",
        "bmp",
        "webp",
        "tiff",
        "ppm",
        "palette",
    ],
)
@pytest.mark.parametrize("decoder", DECODERS)
def test_every_other_kind_of_file_is_what_pillow_makes_of_it(encoded: bytes, decoder: Decoder) -> None:
    box = np.array([7, 11, 70, 101])
    found = made(encoded, box, decoder=decoder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = cropped(opened(encoded), box)
    assert_close(found, expected, 1)


DEEP = np.linspace(0, 65_535, 120 * 90).reshape(90, 120)
"""Gray levels of 16 bits."""


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_of_16_bits_of_gray_the_higher_8_count(form: str) -> None:
    encoded = saved(Image.fromarray(DEEP.astype(np.uint16)), form)
    expected = saved(Image.fromarray((DEEP.astype(np.uint16) >> 8).astype(np.uint8)), "PNG")
    assert np.array_equal(made(encoded, [7, 11, 70, 101]), made(expected, [7, 11, 70, 101]))


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_numbers_on_no_known_scale_are_no_picture(kind: Any) -> None:
    with pytest.raises(Undecodable, match="32-bit numbers on no known scale; write it with 8 or 16 bits"):
        made(saved(Image.fromarray(DEEP.astype(kind)), "TIFF"), [0, 0, 9, 9])


def test_a_jpeg_with_stray_bytes_between_segments_is_read() -> None:
    encoded = saved(scene(120, 90))
    stray = encoded[:20] + b"stray" + encoded[20:]
    assert encoded[20:21] == b"\xff"
    for decoder in DECODERS:
        assert np.array_equal(made(stray, [7, 11, 70, 90], decoder=decoder), made(encoded, [7, 11, 70, 90]))


def damaged(encoded: bytes) -> bytes:
    """A few bytes in the middle of the coded pixels are others."""
    middle = len(encoded) * 2 // 3
    return encoded[:middle] + b"\x13\x37\xab\xcd" * 4 + encoded[middle + 16 :]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "empty"),
        (b"not an image at all", "first bytes"),
        (saved(scene(120, 90))[:100], "its header is cut short"),
        (saved(scene(120, 90), "PNG")[:15], "its header is cut short"),
        (saved(scene(120, 90))[:3000], "truncated"),
        (saved(scene(120, 90))[:-200], "truncated"),
        (saved(scene(120, 90), progressive=True)[:3000], "truncated"),
        (saved(scene(120, 90), "PNG")[:9000], "truncated"),
        (saved(scene(120, 90), "PNG")[:40] + bytes(5000), "header is damaged"),
        (saved(scene(120, 90), "GIF")[:2000], "Pillow cannot"),
    ],
)
def test_what_no_decoder_reads_is_undecodable_and_says_why(decoder: Decoder, encoded: bytes, reason: str) -> None:
    with pytest.raises(Undecodable, match=reason):
        made(encoded, [10, 10, 60, 60], decoder=decoder)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_scan_damaged_in_the_middle_is_what_pillow_makes_of_it(decoder: Decoder) -> None:
    encoded = damaged(saved(scene(160, 120)))
    assert_close(made(encoded, [10, 10, 90, 90], decoder=decoder), cropped(opened(encoded), [10, 10, 90, 90]), 1)


def claiming(encoded: bytes, width: int, height: int) -> bytes:
    """A JPEG whose header lies about its size."""
    frame = encoded.index(b"\xff\xc0")
    return encoded[: frame + 5] + struct.pack(">HH", height, width) + encoded[frame + 9 :]


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_bomb_is_refused_by_its_header(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_read", None)  # nothing is decoded
    bomb = claiming(saved(scene(64, 64)), 65_000, 65_000)
    with pytest.raises(Undecodable, match=r"65,000 x 65,000 pixels; up to 134,217,728"):
        made(bomb, [0, 0, 100, 100], decoder=decoder)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_file_that_grew_since_it_was_indexed_is_refused_before_it_is_decoded(decoder: Decoder) -> None:
    out = np.zeros((SIDE, SIDE, 3), np.uint8)
    for encoded in (claiming(saved(scene(64, 64)), 65_000, 65_000), saved(scene(65, 64))):
        with pytest.raises(Undecodable, match="pixels"):
            decode_into(encoded, Flag.JPEG, 64, 64, [0, 0, 64, 64], False, "bilinear", out, decoder=decoder)


def test_a_large_picture_within_the_limit_is_decoded_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made(saved(scene(120, 90), "PNG"), [0, 0, 90, 90])
    assert caught == []


@pytest.mark.parametrize("flags", [0, Flag.TILED])
def test_both_decoders_agree_on_what_is_damaged(flags: int) -> None:
    random = np.random.default_rng(5)
    whole = saved(scene(96, 64), restart_marker_blocks=3)
    for _ in range(150):
        changed = bytearray(whole)
        for place in random.integers(200, len(whole), random.integers(1, 4)):
            changed[place] = random.integers(256)
        encoded = bytes(changed[: random.integers(400, len(whole))] if random.random() < 0.2 else changed)
        judged = []
        for decoder in DECODERS:
            try:
                made(encoded, [0, 0, 64, 96], flags=flags, decoder=decoder)
                judged.append("good")
            except Undecodable as fault:
                judged.append(str(fault))
        assert judged[0] == judged[1]


def oriented(image: Image.Image, orientation: int, form: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, form, exif=exif)


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_ignored_unless_it_is_to_be_honored(orientation: int, form: str) -> None:
    encoded = oriented(scene(150, 110), orientation, form)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
    flags = Flag.ACROSS if orientation >= 5 else 0
    box = [20, 10, 80, 95]
    assert_close(made(encoded, box), cropped(opened(encoded), box), 1)
    for mirrored in (False, True):
        found = made(encoded, box, flags=flags, turn=True, mirrored=mirrored)
        assert_close(found, cropped(upright, box)[:, :: -1 if mirrored else 1], 1)
    center = evaluation_boxes(Center(name="center", short=73), SIDE, *(np.array([n]) for n in upright.size))[0]
    expected = torchvision_view(upright, 73, SIDE, "bilinear")
    assert_close(made(encoded, center, flags=flags, turn=True), expected, 2)


@pytest.mark.parametrize("orientation", [3, 6])
def test_a_tiff_is_turned_by_pillow_itself(orientation: int) -> None:
    encoded = oriented(scene(150, 110), orientation, "TIFF")
    width, height, flags = parse_header(encoded)
    across = bool(flags & Flag.ACROSS)
    box = evaluation_boxes(
        Center(name="center", short=73),
        SIDE,
        np.array([height if across else width]),
        np.array([width if across else height]),
    )[0]
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
    assert_close(made(encoded, box, turn=True), torchvision_view(upright, 73, SIDE, "bilinear"), 2)


def test_threads_decode_the_same_pixels() -> None:
    files = [saved(scene(120, 90)), palette_with_transparency(), saved(scene(120, 90).convert("CMYK"))]
    expected = [made(encoded, [5, 6, 80, 80]) for encoded in files]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda number: made(files[number % 3], [5, 6, 80, 80]), range(60))
        assert all(np.array_equal(one, expected[number % 3]) for number, one in enumerate(found))


def test_no_orientation_takes_the_box_out_of_the_image() -> None:
    for orientation in range(1, 9):
        encoded = oriented(scene(150, 40), orientation)
        for across, box in ((0, [0, 100, 40, 50]), (Flag.ACROSS, [100, 0, 50, 40])):
            made(encoded, box, flags=Flag.TURNED | across, turn=True)


def test_tiled_files_give_the_pixels_of_the_whole_file() -> None:
    tiled = saved(scene(192, 128), subsampling=2, restart_marker_blocks=3)
    plain = np.arange(8)
    boxes: list[Any] = [*training_boxes(0, Crop(), plain, np.full(8, 192), np.full(8, 128))]
    boxes += [*evaluation_boxes(Center(name="center", short=73), SIDE, np.array([192]), np.array([128]))]
    boxes += [*evaluation_boxes(Squash(name="squash", fraction=0.4321), SIDE, np.array([192]), np.array([128]))]
    for resize in FILTERS:
        for box in boxes:
            assert np.array_equal(made(tiled, box, resize, flags=Flag.TILED), made(tiled, box, resize))


def test_a_file_that_is_not_tiled_as_it_says_is_decoded_as_a_whole() -> None:
    encoded = saved(scene(192, 128))
    assert np.array_equal(made(encoded, [3, 4, 70, 80], flags=Flag.TILED), made(encoded, [3, 4, 70, 80]))


def test_bytes_may_come_as_a_view_of_mapped_memory() -> None:
    encoded = saved(scene(120, 90))
    for decoder in DECODERS:
        out = np.zeros((SIDE, SIDE, 3), np.uint8)
        view = memoryview(b"before" + encoded + b"after")[6:-5]
        decode_into(view, Flag.JPEG, 120, 90, [0, 0, 90, 90], False, "bilinear", out, decoder=decoder)
        assert np.array_equal(out, made(encoded, [0, 0, 90, 90]))


def test_without_the_fast_decoder_pillow_reads_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = saved(scene(120, 90))
    before = made(encoded, [0, 0, 90, 90])
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert np.array_equal(made(encoded, [0, 0, 90, 90]), before)


def test_resizing_keeps_colors_together_and_starts_no_threads() -> None:
    """torch is three times as slow where it does not see how the colors lie."""
    import torch

    before, counts = torch.get_num_threads(), []
    torch.set_num_threads(4)
    encoded = saved(scene(700, 600))

    def work() -> None:
        counts.append(len(list(Path("/proc/self/task").iterdir())))
        for box in ([10, 20, 500, 600], [0, 0, 600, 700], [3.0, 4.0, 448.0, 448.0]):
            made(encoded, box, mirrored=True, side=224)
        counts.append(len(list(Path("/proc/self/task").iterdir())))

    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert counts[0] == counts[1]
    picture = np.zeros((70, 90, 3), np.uint8)
    assert decode._resize_all(picture, "bilinear", (SIDE, SIDE)).strides == (3 * SIDE, 3, 1)
    assert decode._resize_all(picture[2:-2, 3:-3], "bicubic", (SIDE, SIDE)).strides == (3 * SIDE, 3, 1)
