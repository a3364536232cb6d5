"""What the device makes of 8-bit pictures: colors, boxes, sides, normalization; the same in every batch."""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import make_plan, make_recipe
from paceline import keyed, schedule
from paceline.augment import crop
from paceline.augment.color import adjust, contrasted, exact_mean, turned
from paceline.augment.mix import draw as draw_mix
from paceline.augment.mix_pixels import mix
from paceline.augment.pipeline import Pixels, standardized
from paceline.command.verify import shrink
from paceline.data.load.loader import open_loader
from paceline.errors import PlanError, SpecError
from paceline.model.init import initialize, published
from paceline.model.whole import Whole
from paceline.world import World

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SIDE = 8
EVERYTHING = (
    "augment.policy={name: randaugment, layers: 3, form: tensorflow, sampling: bilinear}",
    "augment.color={brightness: 0.1, saturation: [0.5, 1.5], hue: 0.2, contrast: [0.5, 1.5]}",
    "augment.side={0%: 6, 50%: 8}",
    "augment.erase.probability=0.5",
    "augment.cutout=3",
    "mix.mixup=0.5",
    "mix.cutmix=beta",
)


def pictures(count: int, side: int = SIDE) -> Tensor:
    """Keyed 8-bit pictures, channels last in memory as loaders give them."""
    words = keyed.words(keyed.key(3, "pictures"), np.arange(count * side * side * 3, dtype=np.int64))[0]
    return torch.tensor((words >> 24).astype(np.uint8).reshape(count, side, side, 3)).permute(0, 3, 1, 2)


def pixels(*words: str, dtype: torch.dtype = torch.float64) -> Pixels:
    return Pixels(make_plan(*words), CPU, dtype)


def positions(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(count, dtype=np.int64)


@pytest.mark.parametrize("policy", ["autoaugment", "{name: autoaugment, table: cifar10}", None])
@pytest.mark.parametrize("normalize", ["mean-std", "mean", "unit", "image"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_of_16_is_bit_for_bit_four_batches_of_4(dtype: torch.dtype, normalize: str, policy: str | None) -> None:
    words = (f"data.normalize={normalize}", *EVERYTHING, *([f"augment.policy={policy}"] if policy else []))
    plan = make_plan(*words)
    maker, given, labels = Pixels(plan, CPU, dtype), pictures(16), torch.arange(16)

    def mixed(first: int, begin: int, end: int) -> list[Tensor]:
        images = maker.changed(given[begin:end], first + begin)
        numbers = draw_mix(plan.recipe, np.arange(first + begin, first + end, dtype=np.int64), images.shape[2])
        return list(mix(images, labels[begin:end], torch.from_numpy(numbers).to(dtype), plan.recipe.mix.block))

    for step, side in ((0, 6), (5, 8)):
        whole = mixed(16 * step, 0, 16)
        assert whole[0].shape == (16, 3, side, side)
        assert whole[0].isfinite().all()
        quarters = [mixed(16 * step, begin, begin + 4) for begin in range(0, 16, 4)]
        for place, tensor in enumerate(whole):
            assert torch.equal(tensor, torch.cat([quarter[place] for quarter in quarters]))


def test_changed_pictures_stay_channels_last_and_leave_the_loader_s_as_they_were() -> None:
    given = pictures(16)
    before = given.clone()
    made = pixels(*EVERYTHING).changed(given, 0)
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(given, before)
    assert not torch.equal(made, pixels(*EVERYTHING).changed(given, 16))
    assert not torch.equal(made, pixels(*EVERYTHING, "seed=1").changed(given, 0))


def test_without_augmentation_training_sees_what_validation_sees() -> None:
    maker = pixels()
    assert torch.equal(maker.changed(pictures(4), 0), maker.plain(pictures(4)))


def test_validation_images_are_never_changed() -> None:
    judged = []
    for words in ((), EVERYTHING):
        plan = make_plan("on.precision=fp64", *words)
        whole = Whole(plan, World(CPU))
        initialize(whole.module, published(plan.recipe.init, plan.recipe.model), plan.recipe.seed)
        loader = open_loader(plan, None, 0, CPU)
        judged.append(torch.stack([whole.score(batch) for batch in loader.validation()]))
    assert torch.equal(judged[0], judged[1])


def test_normalization_is_what_the_recipe_says() -> None:
    given = pictures(3)
    x = given.double()
    rows = torch.tensor([[0.1, 0.5, 0.9], [0.2, 0.3, 0.4]], dtype=torch.float64)
    mean, std = (row.view(3, 1, 1) for row in rows)
    words = ("data.mean=[0.1, 0.5, 0.9]", "data.std=[0.2, 0.3, 0.4]")
    expected = {
        "mean-std": (x / 255 - mean) / std,
        "mean": x - 255 * mean,
        "unit": x / 255 * 2 - 1,
        "image": torch.stack([(one - one.mean()) / one.std(correction=0) for one in x]),
    }
    for kind, images in expected.items():
        assert torch.allclose(pixels(*words, f"data.normalize={kind}").plain(given), images, rtol=1e-6, atol=1e-6)


def test_an_image_of_one_color_is_standardized_to_zero_and_a_nearly_even_one_by_the_floor() -> None:
    even = torch.full((2, 3, 4, 4), 9.0, dtype=torch.float64)
    even[1, 0, 0, 0] = 9.125
    made = standardized(even)
    assert not made[0].any()
    mean = 0.125 / 48
    assert float(made[1, 0, 0, 0]) == pytest.approx((0.125 - mean) * math.sqrt(48), rel=1e-4)


def test_saturation_and_hue_are_those_of_hue_saturation_and_value() -> None:
    given = pictures(4, 5).double()
    factors, turns = torch.tensor([0.0, 0.5, 1.4, 3.0]), torch.tensor([0.0, 0.2, -0.1, 0.5])
    made = turned(given, factors[:, None, None, None].double(), turns[:, None, None, None].double())
    for image, (factor, turn) in enumerate(zip(factors.tolist(), turns.tolist(), strict=True)):
        for row, column in ((r, c) for r in range(5) for c in range(5)):
            h, s, v = colorsys.rgb_to_hsv(*(given[image, :, row, column] / 255).tolist())
            expected = colorsys.hsv_to_rgb((h + turn) % 1, min(1, s * factor), v)
            assert (made[image, :, row, column] / 255).tolist() == pytest.approx(expected, abs=1e-6)


def test_contrast_moves_each_channel_about_its_own_mean() -> None:
    given = torch.zeros(1, 3, 1, 2, dtype=torch.float64)
    given[0, 0, 0], given[0, 1, 0] = torch.tensor([10.0, 30.0]), torch.tensor([100.0, 100.0])
    made = contrasted(given, torch.full((1, 1, 1, 1), 1.5, dtype=torch.float64))
    assert made[0, :, 0].tolist() == [[5.0, 35.0], [100.0, 100.0], [0.0, 0.0]]


def test_colors_come_in_the_drawn_order_and_are_clipped_only_at_the_end() -> None:
    given = pictures(2).double()
    drawn = torch.tensor([[40.0, 40.0], [1.3, 1.3], [0.1, 0.1], [1.4, 1.4], [0.0, 1.0]], dtype=torch.float64)
    saturation, hue, contrast = (row[:1, None, None, None] for row in drawn[1:4])
    late = contrasted(turned(given[:1] + 40, saturation, hue), contrast)
    early = turned(contrasted(given[1:] + 40, contrast), saturation, hue)
    assert float(late.max()) > 255
    made = adjust(given, drawn, turns=True)
    assert torch.allclose(made, torch.cat([late, early]).clamp(0, 255), rtol=1e-12)
    assert not torch.allclose(late, contrasted(given[:1] + 40, contrast), atol=1)


def test_colors_are_drawn_within_their_ranges_and_both_orders_as_often() -> None:
    recipe = make_recipe("augment.color={brightness: 0.2, saturation: [0.5, 1.25], hue: 0.1, contrast: [0.75, 2]}")
    rows = crop.colors(recipe, positions(20_000))
    for row, (low, high) in zip(rows[:4], ((-51, 51), (0.5, 1.25), (-0.1, 0.1), (0.75, 2)), strict=True):
        assert low <= row.min() < low + 0.01 * (high - low)
        assert high >= row.max() > high - 0.01 * (high - low)
        assert abs(row.mean() - (low + high) / 2) < 0.02 * (high - low)
    assert abs(rows[4].mean() - 0.5) < 0.02
    assert np.abs(np.corrcoef(rows) - np.eye(5)).max() < 0.03


def test_erased_boxes_have_the_wanted_area_and_shape_and_lie_inside() -> None:
    recipe = make_recipe("augment.erase={probability: 0.25, area: [0.1, 0.4], aspect: [0.5, 2]}")
    side = 100
    top, left, bottom, right = crop.boxes(recipe, positions(20_000), side)[:4]
    height, width = bottom - top, right - left
    erased = height > 0
    assert abs(erased.mean() - 0.25) < 0.01
    assert min(top.min(), left.min()) >= 0
    assert max(bottom.max(), right.max()) <= side
    area, aspect = (height * width)[erased] / side**2, (height / np.maximum(width, 1))[erased]
    assert 0.095 < area.min() < 0.11
    assert 0.39 < area.max() < 0.41
    assert 0.48 < aspect.min() < 0.55
    assert 1.9 < aspect.max() < 2.1
    assert abs((aspect > 1).mean() - 0.5) < 0.03  # each doubling is as likely
    assert {0, side} <= {*top[erased], *bottom[erased]}


def test_a_box_that_never_fits_erases_nothing() -> None:
    recipe = make_recipe("augment.erase={probability: 1, area: [1, 1], aspect: [1, 1]}")
    assert not crop.boxes(recipe, positions(100), 32)[:4].any()


def test_cutout_is_centered_on_every_pixel_alike_and_cut_at_the_border() -> None:
    rows = crop.boxes(make_recipe("augment.cutout=4"), positions(20_000), SIDE)[4:]
    centers = {}
    for center in range(SIDE):
        centers[(max(0, center - 2), min(SIDE, center + 2))] = 0
    for top, left, bottom, right in rows.T.astype(int).tolist():
        assert (left, right) in centers
        centers[(top, bottom)] += 1
    assert min(centers.values()) > 20_000 / SIDE * 0.9


def test_boxes_become_zero_after_normalization_and_nothing_else_changes() -> None:
    words = ("augment.erase.probability=0.7", "augment.cutout=3")
    given = pictures(32)
    made, plain = pixels(*words).changed(given, 64), pixels().plain(given)
    edges = crop.boxes(make_recipe(*words), np.arange(64, 96, dtype=np.int64), SIDE).astype(int)
    expected = plain.clone()
    for image, (a, b, c, d, e, f, g, h) in enumerate(edges.T.tolist()):
        expected[image, :, a:c, b:d] = 0
        expected[image, :, e:g, f:h] = 0
    assert torch.equal(made, expected)
    assert 0.1 < float((made == 0).double().mean()) < 0.6


def test_the_image_side_follows_the_step_and_validation_does_not() -> None:
    plan = make_plan("augment.side={20%: 4, 3 steps: 6}", "epochs=1")
    assert plan.steps == 6
    assert [schedule.side(plan, step) for step in range(6)] == [8, 8, 4, 6, 6, 6]
    maker = Pixels(plan, CPU, torch.float64)
    assert [maker.changed(pictures(4), 16 * step).shape[2] for step in range(4)] == [8, 8, 4, 6]
    halved = pixels("augment.side={0%: 4}", "data.normalize=mean", "data.mean=[0, 0, 0]").changed(pictures(1), 0)
    # Every second pixel of a picture smoothed by (1, 3, 3, 1) / 8, whose weights are renewed at the border.
    weights = torch.zeros(4, 8, dtype=torch.float64)
    for row in range(4):
        for offset, weight in zip(range(-1, 3), (1, 3, 3, 1), strict=True):
            if 0 <= 2 * row + offset < 8:
                weights[row, 2 * row + offset] = weight
    weights /= weights.sum(1, keepdim=True)
    assert torch.allclose(halved[0], weights @ pictures(1)[0].double() @ weights.T, rtol=1e-10)


def test_exact_means_are_means() -> None:
    given = pictures(2).double()
    assert torch.allclose(exact_mean(given, (2, 3)), given.mean((2, 3), keepdim=True), rtol=1e-12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("augment.erase.area=[0.5, 0.1]",), "augment.erase.area: expected the smaller bound first, so [0.1, 0.5]"),
        (("augment.erase.aspect=[3, 0.3]",), "augment.erase.aspect: expected the smaller bound first"),
        (("augment.color.saturation=[1.5, 0.5]",), "augment.color.saturation: expected the smaller bound first"),
        (("augment.color.contrast=[2, 1]",), "augment.color.contrast: expected the smaller bound first"),
        (("mix.cutmix={name: uniform, low: 0.9, high: 0.2}",), "mix.cutmix: expected the smaller bound first"),
        (("augment.alternate_flip=true",), "augment: flip and alternate_flip exclude each other"),
        (("augment.side={0 seconds: 4}",), "augment.side"),
        (("augment.side={0%: 4.5}",), "augment.side: expected whole pixels a side from 0% on, such as 24, found 4.5"),
        (("augment.side=24",), "augment.side: expected times and pixels, such as {0%: 24, 50%: 32}"),
        (("augment.policy=autoargument",), "did you mean 'autoaugment'?"),
        (("augment.policy={name: randaugment, magnitude: 11}",), "augment.policy.magnitude"),
        (("data.normalize=median",), "data.normalize: expected mean-std or mean or unit or image, found 'median'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_recipe(*words)
    assert message in str(caught.value)


GRAY = ("data.channels=1", "data.mean=[0.5]", "data.std=[0.5]")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("augment.cutout=9",), "augment.cutout 9 is larger than images of 8 pixels a side; write less"),
        (("augment.cutout=7", "augment.side={0%: 6}"), "augment.cutout 7 is larger than images of 6 pixels a side"),
        (("augment.policy=randaugment", *GRAY), "augment.policy is for images of three channels, and these have 1"),
        (("augment.color.hue=0.1", *GRAY), "augment.color is for images of three channels, and these have 1"),
        (("augment.side={0%: 9}",), "augment.side from 0% on is 9; resnet8 and these images allow 1 to 8"),
        (
            ("model=inception-v4", "data.side=80", "augment.side={0%: 74}"),
            "augment.side from 0% on is 74; inception-v4 and these images allow 75 to 80",
        ),
        (("norm_batch=1", "augment.side={0%: 4}"), "norm_batch 1 leaves images of 4 pixels a side too little"),
    ],
)
def test_plans_refuse_what_the_images_cannot_have(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(*words)
    assert message in str(caught.value)


def test_gray_images_may_be_erased_cut_out_and_made_smaller() -> None:
    plan = make_plan(*GRAY, "augment.erase.probability=1", "augment.cutout=2", "augment.side={0%: 6}")
    made = Pixels(plan, CPU, torch.float32).changed(pictures(4)[:, :1], 0)
    assert made.shape == (4, 1, 6, 6)


def test_a_proof_on_smaller_images_shrinks_what_is_given_in_pixels() -> None:
    wanted = make_recipe("data.side=224", "augment.side={0%: 160, 50%: 224}", "augment.cutout=112")
    small, told = shrink(wanted)
    assert told == ["image side 224 -> 32"]
    assert (small.augment.side, small.augment.cutout) == ({"0%": 23, "50%": 32}, 16)
    assert small.augment.flip
