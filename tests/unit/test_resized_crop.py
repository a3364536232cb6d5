"""Random boxes by keyed numbers, and the boxes that evaluation looks at."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.augment.resized_crop import evaluation_boxes, training_boxes
from paceline.data.index.table import ROW
from paceline.numpy_types import Int64s
from paceline.settings.augment import Crop
from paceline.settings.data import Center, Squash

TORCH = Crop()
TENSORFLOW = Crop(area=(0.05, 1.0), distribution="uniform", otherwise="whole", tries=100)
MANY = np.arange(20_000, dtype=np.int64)
CENTER = Center(name="center")


def sizes(width: int, height: int, count: int) -> tuple[Int64s, Int64s]:
    return np.full(count, width, np.int64), np.full(count, height, np.int64)


def rows(counts: list[int]) -> NDArray[Any]:
    """Rows of an index whose images have so many objects each."""
    made = np.zeros(len(counts), ROW)
    made["objects"] = counts
    made["first_object"] = np.cumsum(counts) - counts
    return made


@pytest.mark.parametrize("crop", [TORCH, TENSORFLOW, Crop(tries=1, otherwise="whole"), Crop(area=(1, 1))])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_boxes_lie_inside_the_image_and_hold_a_pixel(crop: Crop, data: st.DataObject) -> None:
    edges = st.one_of(st.integers(1, 3), st.integers(1, 65_535))
    pairs = data.draw(st.lists(st.tuples(edges, edges), min_size=1, max_size=20))
    widths, heights = np.array(pairs, np.int64).T
    start = data.draw(st.integers(0, 2**50))
    top, left, tall, wide = training_boxes(7, crop, start + np.arange(len(pairs)), widths, heights).T
    assert (np.minimum(top, left) >= 0).all()
    assert (np.minimum(tall, wide) >= 1).all()
    assert (top + tall <= heights).all()
    assert (left + wide <= widths).all()


@pytest.mark.parametrize("crop", [TORCH, TENSORFLOW])
def test_a_box_depends_on_its_position_and_not_on_its_batch(crop: Crop) -> None:
    widths, heights = 50 + MANY[:300] % 97, 30 + MANY[:300] % 211
    whole = training_boxes(3, crop, MANY[:300], widths, heights)
    alone = [training_boxes(3, crop, MANY[[n]], widths[[n]], heights[[n]])[0] for n in range(0, 300, 7)]
    assert np.array_equal(whole[::7], alone)
    assert not np.array_equal(whole, training_boxes(4, crop, MANY[:300], widths, heights))


def test_torch_boxes_have_any_area_and_each_doubling_of_the_shape() -> None:
    top, left, tall, wide = training_boxes(0, TORCH, MANY, *sizes(4000, 4000, len(MANY))).T
    area = tall * wide / 4000**2
    logarithm = np.log(wide / tall)
    assert area.min() == pytest.approx(0.08, abs=0.002)
    assert abs(logarithm).max() == pytest.approx(math.log(4 / 3), abs=0.002)
    # Boxes that do not fit are drawn again: they are the large ones that are not square.
    small = area < 0.5
    assert np.histogram(area[small], 6, (0.08, 0.5))[0] / small.sum() == pytest.approx([1 / 6] * 6, abs=0.015)
    assert np.histogram(logarithm[small], 6)[0] / small.sum() == pytest.approx([1 / 6] * 6, abs=0.015)
    assert (top / np.maximum(4000 - tall, 1)).mean() == pytest.approx(0.5, abs=0.01)
    assert (left / np.maximum(4000 - wide, 1)).mean() == pytest.approx(0.5, abs=0.01)


def test_tensorflow_boxes_have_any_shape_and_then_any_height() -> None:
    _, _, tall, wide = training_boxes(0, TENSORFLOW, MANY, *sizes(3000, 3000, len(MANY))).T
    aspect, area = wide / tall, tall * wide / 3000**2
    assert np.histogram(aspect, 5, (0.75, 4 / 3))[0] / len(MANY) == pytest.approx([0.2] * 5, abs=0.01)
    assert area.min() == pytest.approx(0.05, abs=0.001)
    square = np.abs(aspect - 1) < 0.02
    heights = tall[square] / 3000
    assert np.histogram(heights, 4, (math.sqrt(0.05), 1))[0] / square.sum() == pytest.approx([0.25] * 4, abs=0.05)


def reference_box(width: int, height: int, area: float, aspect: float) -> tuple[int, int]:
    """Height and width as torchvision computes them."""
    target = width * height * area
    return round(math.sqrt(target / aspect)), round(math.sqrt(target * aspect))


def test_a_single_area_and_shape_gives_the_box_that_torchvision_computes() -> None:
    for area, aspect in ((0.3, 1.2), (0.08, 0.75), (0.5, 1.0)):
        crop = Crop(area=(area, area), aspect=(aspect, aspect))
        found = training_boxes(0, crop, MANY[:50], *sizes(500, 375, 50))
        assert {tuple(pair) for pair in found[:, 2:].tolist()} == {reference_box(500, 375, area, aspect)}


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [
        (100, 10, [0, 43, 10, 13]),
        (10, 100, [43, 0, 13, 10]),
        (1, 500, [249, 0, 1, 1]),
        (500, 1, [0, 249, 1, 1]),
        (100, 100, [0, 0, 100, 100]),
    ],
)
def test_after_the_last_try_torch_takes_the_center_and_tensorflow_the_whole(
    width: int, height: int, box: list[int]
) -> None:
    impossible = Crop(area=(1.0, 1.0), aspect=(0.75, 4 / 3), tries=3)
    never = training_boxes(0, impossible, MANY[:20], *sizes(width, height, 20))
    if width != height:
        assert never.tolist() == [box] * 20
    assert training_boxes(0, Crop(tries=1), MANY[:2000], *sizes(width, height, 2000)).tolist().count(box) > 0
    whole = impossible.model_copy(update={"otherwise": "whole"})
    if width != height:
        assert training_boxes(0, whole, MANY[:20], *sizes(width, height, 20)).tolist() == [[0, 0, height, width]] * 20


@pytest.mark.parametrize("crop", [TORCH, TENSORFLOW])
def test_a_box_holds_the_asked_share_of_one_object(crop: Crop) -> None:
    crop = crop.model_copy(update={"object_fraction": 0.6, "tries": 500, "area": (0.05, 0.3)})
    corner = np.array([[0.0, 0.0, 0.25, 0.25], [0.75, 0.75, 1.0, 1.0]], np.float32)
    index = rows([2] * 300)
    index["first_object"] = 0
    top, left, tall, wide = training_boxes(0, crop, MANY[:300], *sizes(300, 200, 300), index, corner).T
    first = np.clip(50 - top, 0, tall) * np.clip(75 - left, 0, wide) >= 0.6 * 50 * 75 - 1e-3
    second = np.clip(top + tall - 150, 0, tall) * np.clip(left + wide - 225, 0, wide) >= 0.6 * 50 * 75 - 1e-3
    assert (first | second).all()
    assert first.any()
    assert second.any()


def test_images_without_objects_are_cut_as_if_nothing_was_asked() -> None:
    crop = TORCH.model_copy(update={"object_fraction": 0.9})
    empty = np.array([[0.5, 0.5, 0.5, 0.5], [0.9, 0.9, 0.1, 0.1], [np.nan, 0, 1, 1], [0, 0, 0.1, 0.1]], np.float32)
    plain = training_boxes(0, TORCH, MANY[:4], *sizes(300, 200, 4))
    found = training_boxes(0, crop, MANY[:4], *sizes(300, 200, 4), rows([0, 3, 0, 1]), empty)
    assert np.array_equal(found[:3], plain[:3])


def test_the_objects_of_one_image_do_not_move_the_box_of_another() -> None:
    crop = TORCH.model_copy(update={"object_fraction": 0.5})
    table = np.tile(np.array([[0.1, 0.1, 0.4, 0.4]], np.float32), (5, 1))
    together = training_boxes(0, crop, MANY[:3], *sizes(300, 200, 3), rows([2, 0, 3]), table)
    index = rows([2, 0, 3])
    for n in range(3):
        alone = training_boxes(0, crop, MANY[[n]], *sizes(300, 200, 1), index[[n]], table)
        assert np.array_equal(alone[0], together[n])


def test_boxes_are_the_same_on_every_machine() -> None:
    """Golden numbers: only exact operations are used, so another processor that differs has found a fault."""
    widths, heights = 100 + 37 * MANY[:6], 500 - 61 * MANY[:6]
    assert training_boxes(1, TORCH, 10**12 + MANY[:6], widths, heights).tolist() == GOLDEN_TORCH
    assert training_boxes(1, TENSORFLOW, 10**12 + MANY[:6], widths, heights).tolist() == GOLDEN_TENSORFLOW


GOLDEN_TORCH = [
    [173, 16, 84, 78],
    [101, 33, 92, 70],
    [159, 10, 91, 111],
    [100, 55, 121, 108],
    [111, 82, 83, 99],
    [21, 50, 104, 138],
]
GOLDEN_TENSORFLOW = [
    [30, 3, 101, 95],
    [92, 25, 136, 104],
    [177, 16, 58, 72],
    [87, 1, 230, 209],
    [126, 97, 59, 72],
    [28, 63, 75, 100],
]


def torchvision_center(width: int, height: int, short: int, side: int) -> tuple[float, ...]:
    """Where Resize(short) and CenterCrop(side) look, in the image's own pixels."""
    shorter, longer = min(width, height), max(width, height)
    long = int(short * longer / shorter)
    new_width, new_height = (short, long) if width <= height else (long, short)
    top, left = round((new_height - side) / 2.0), round((new_width - side) / 2.0)
    return (top * height / new_height, left * width / new_width, side * height / new_height, side * width / new_width)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 300), st.integers(0, 100))
def test_evaluation_looks_where_torchvision_looks(width: int, height: int, side: int, more: int) -> None:
    how = Center(name="center", short=side + more)
    box = evaluation_boxes(how, side, np.array([width]), np.array([height]))[0]
    assert tuple(box) == pytest.approx(torchvision_center(width, height, side + more, side), rel=1e-12, abs=1e-9)
    assert box.min() >= 0
    assert box[0] + box[2] <= height * (1 + 1e-12)
    assert box[1] + box[3] <= width * (1 + 1e-12)


@pytest.mark.parametrize(("side", "short"), [(224, 256), (32, 37), (64, 73), (1, 1)])
def test_a_center_is_seven_eighths_of_the_edge_at_any_side(side: int, short: int) -> None:
    assert CENTER.shorter(side) == short
    _, _, height, width = evaluation_boxes(CENTER, side, np.array([500]), np.array([400]))[0]
    assert (height, width) == pytest.approx((400 * side / short, 500 * side / (500 * short // 400)))


def test_a_side_beyond_the_resized_edge_sees_that_edge_whole() -> None:
    box = evaluation_boxes(Center(name="center", short=256), 288, np.array([500]), np.array([400]))[0]
    assert box.tolist() == pytest.approx([0, 50, 400, 400])


def test_squash_keeps_its_share_of_both_edges() -> None:
    box = evaluation_boxes(Squash(name="squash", fraction=0.875), 224, np.array([800]), np.array([160]))[0]
    assert box.tolist() == [10, 50, 140, 700]


def test_images_without_a_size_get_a_box_that_nobody_will_read() -> None:
    nothing = np.zeros(2, np.int64)
    assert training_boxes(0, TORCH, MANY[:2], nothing, nothing).tolist() == [[0, 0, 1, 1]] * 2
    assert np.isfinite(evaluation_boxes(CENTER, 224, nothing, nothing)).all()
