"""Boxes of pictures of any size, resized together: as Pillow resizes each of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from paceline import keyed
from paceline.data.load import resample as module
from paceline.data.load.resample import resample

Filter = Literal["bilinear", "bicubic"]
FILTERS: tuple[Filter, ...] = ("bilinear", "bicubic")
SIZES = [(64, 48), (33, 90), (20, 20), (200, 150), (7, 40), (48, 64), (120, 17)]


def picture(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """A slope with grain: smooth enough to be a photograph, and no two pixels alike."""
    down, right = np.mgrid[0:height, 0:width]
    grain = keyed.words(keyed.key(number, "grain"), np.arange(height * width * 3))[0].reshape(height, width, 3) >> 27
    slope = np.stack([right * 255 / width, down * 255 / height, (down + right) * 2 % 256], 2)
    made: NDArray[np.uint8] = np.clip(slope + grain, 0, 255).astype(np.uint8)
    return made


PICTURES = [picture(number, *size) for number, size in enumerate(SIZES)]
BOXES = np.array([[3, 4, 50, 40], [0, 10, 33, 60], [5, 5, 10, 10], [0, 0, 200, 150], [1, 2, 6, 30], [8, 0, 40, 64],
                  [20, 3, 90, 14]], np.float64)  # fmt: skip
FRACTIONS = BOXES + np.array([0.3, 0.25, -0.6, -0.5])


def tensors(pictures: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
    return [torch.from_numpy(some.transpose(2, 0, 1).copy()) for some in pictures]


def resized(
    pictures: Sequence[NDArray[np.uint8]], boxes: NDArray[np.float64], side: int, filter: Filter, inside: bool,
    mirrored: Sequence[bool] | None = None,
) -> NDArray[np.int64]:  # fmt: skip
    flags = np.array(mirrored if mirrored is not None else [False] * len(pictures))
    made = resample(tensors(pictures), boxes, flags, side, filter, inside)
    assert made.dtype == torch.uint8
    assert made.shape == (len(pictures), side, side, 3)
    return made.numpy().astype(np.int64)


def by_pillow(
    some: NDArray[np.uint8], box: NDArray[np.float64], side: int, filter: Filter, inside: bool
) -> NDArray[np.int64]:
    top, left, height, width = box
    resampling = Image.Resampling.BILINEAR if filter == "bilinear" else Image.Resampling.BICUBIC
    image = Image.fromarray(some)
    if inside:
        image = image.crop((int(left), int(top), int(left + width), int(top + height)))
        return np.asarray(image.resize((side, side), resampling)).astype(np.int64)
    edges = left, top, min(left + width, some.shape[1]), min(top + height, some.shape[0])
    return np.asarray(image.resize((side, side), resampling, box=edges)).astype(np.int64)


@pytest.mark.parametrize("side", [16, 24, 224])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("filter", FILTERS)
def test_it_is_what_pillow_makes_of_each_picture(filter: Filter, inside: bool, side: int) -> None:
    boxes = BOXES if inside else FRACTIONS
    made = resized(PICTURES, boxes, side, filter, inside)
    for some, box, found in zip(PICTURES, boxes, made, strict=True):
        difference = np.abs(found - by_pillow(some, box, side, filter, inside))
        assert difference.mean() < 0.3
        # Pillow rounds between its two passes, and cuts what the cubic makes lighter than white or darker than black.
        assert filter == "bicubic" or difference.max() <= 1


@pytest.mark.parametrize("filter", FILTERS)
def test_what_is_not_resized_stays_as_it_is(filter: Filter) -> None:
    some = picture(3, 24, 24)
    whole = np.array([[0, 0, 24, 24]], np.float64)
    for inside in (True, False):
        assert np.array_equal(resized([some], whole, 24, filter, inside)[0], some)
    part = resized([PICTURES[0]], np.array([[10.0, 7.0, 24.0, 24.0]]), 24, filter, True)[0]
    assert np.array_equal(part, PICTURES[0][10:34, 7:31])


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("filter", FILTERS)
def test_a_mirrored_picture_is_the_picture_mirrored(filter: Filter, inside: bool) -> None:
    plain = resized(PICTURES, BOXES, 20, filter, inside)
    which = [number % 2 == 0 for number in range(len(PICTURES))]
    mirrored = resized(PICTURES, BOXES, 20, filter, inside, which)
    for number, turned in enumerate(which):
        expected = plain[number][:, ::-1] if turned else plain[number]
        # The sums over columns are the same numbers in another order.
        assert np.abs(mirrored[number] - expected).max() <= (1 if turned else 0)


@pytest.mark.parametrize("filter", FILTERS)
def test_pixels_outside_a_box_that_was_cut_out_are_never_seen(filter: Filter) -> None:
    changed = [some.copy() for some in PICTURES]
    for some, (top, left, height, width) in zip(changed, BOXES.astype(int), strict=True):
        inner = some[top : top + height, left : left + width].copy()
        some[:] = 255 - some
        some[top : top + height, left : left + width] = inner
    assert np.array_equal(resized(PICTURES, BOXES, 16, filter, True), resized(changed, BOXES, 16, filter, True))
    assert not np.array_equal(resized(PICTURES, BOXES, 16, filter, False), resized(changed, BOXES, 16, filter, False))


@pytest.mark.parametrize(
    ("size", "box"),
    [((1, 83), (0, 5, 1, 60)), ((83, 1), (5, 0, 60, 1)), ((1, 1), (0, 0, 1, 1)), ((50, 50), (20, 0, 1, 50)),
     ((50, 50), (49, 49, 1, 1)), ((3, 2), (0, 0, 3, 2))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("filter", FILTERS)
def test_a_line_of_pixels_is_a_picture_too(filter: Filter, size: tuple[int, int], box: tuple[int, ...]) -> None:
    some, wanted = picture(5, *size), np.array([box], np.float64)
    for inside in (True, False):
        found = resized([some], wanted, 16, filter, inside)[0]
        difference = np.abs(found - by_pillow(some, wanted[0], 16, filter, inside))
        assert difference.mean() < 0.3
        assert filter == "bicubic" or difference.max() <= 1


@pytest.mark.parametrize("filter", FILTERS)
def test_the_smallest_and_largest_values_stay_in_range(filter: Filter) -> None:
    board = (
        np.kron(np.indices((12, 12)).sum(0) % 2, np.ones((3, 3), int)).astype(np.uint8)[..., None].repeat(3, 2) * 255
    )
    whole = np.array([[0.0, 0.0, 36.0, 36.0]])
    found = resized([board], whole, 100, filter, False)[0]
    assert (found.min(), found.max()) == (0, 255)
    assert np.abs(found - by_pillow(board, whole[0], 100, filter, False)).max() < 16, "no number may come round"


@pytest.mark.parametrize("most", [1, 1000, 5000])
@pytest.mark.parametrize("filter", FILTERS)
def test_how_many_are_resized_together_changes_nothing(
    filter: Filter, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored = [number % 3 == 0 for number in range(len(PICTURES))]
    whole = resized(PICTURES, FRACTIONS, 24, filter, False, mirrored)
    groups: list[int] = []
    original = module._product

    def counted(windows: list[Tensor], *given: object) -> Tensor:
        groups.append(len(windows))
        return original(windows, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_product", counted)
    monkeypatch.setattr(module, "PIXELS_AT_ONCE", most)
    apart = resized(PICTURES, FRACTIONS, 24, filter, False, mirrored)
    assert sum(groups) == len(PICTURES)
    assert len(groups) > 1
    # Rows are as long as the longest of a group, so that sums may be rounded in another order.
    assert np.abs(whole - apart).max() <= 1
    assert (whole != apart).mean() < 0.001


def test_every_picture_stands_at_its_own_place_whatever_its_size() -> None:
    flat = [np.full((*size, 3), 30 * number + 5, np.uint8) for number, size in enumerate(SIZES)]
    made = resized(flat, BOXES, 8, "bilinear", True)
    assert [sorted(set(some.ravel().tolist())) for some in made] == [[30 * number + 5] for number in range(len(SIZES))]
