"""All augmentations in their order: the same images in every batch, and validation images untouched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import make_plan, make_recipe
from paceline import keyed, schedule
from paceline.augment import pipeline
from paceline.augment.erase import draw_cutout, draw_erase
from paceline.augment.pipeline import Augmentation, draw_each
from paceline.command.verify_layouts import shrink
from paceline.data.load.loader import open_loader
from paceline.errors import PlanError, SpecError
from paceline.model.init import initialize, published
from paceline.model.whole import Whole
from paceline.numpy_types import Int64s
from paceline.planning import Plan
from paceline.settings.recipe import Recipe
from paceline.world import World

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


def augmented(plan: Plan, given: Tensor, first: int, labels: Tensor | None = None) -> list[Tensor]:
    """Images as the network sees them, the first of them at position `first`; their labels, and the labels' weights."""
    augment, labels = Augmentation(plan, CPU), torch.zeros(len(given), dtype=torch.int64) if labels is None else labels
    (draws,) = draw_each(plan, [np.arange(first, first + len(given), dtype=np.int64)], CPU)
    draws = draws.to(CPU)
    return [tensor for tensor in augment(augment.prepare(given, draws), labels, draws) if tensor is not None]


def changed(given: Tensor, first: int, *words: str) -> Tensor:
    return augmented(make_plan("on.precision=fp64", *words), given, first)[0]


@pytest.mark.parametrize("policy", ["autoaugment", "{name: autoaugment, table: cifar10}", None])
@pytest.mark.parametrize("normalize", ["mean-std", "mean", "unit", "image"])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_batch_of_16_is_bit_for_bit_four_batches_of_4(precision: str, normalize: str, policy: str | None) -> None:
    words = (f"data.normalize={normalize}", *EVERYTHING, *([f"augment.policy={policy}"] if policy else []))
    plan, given, labels = make_plan(*words, f"on.precision={precision}"), pictures(16), torch.arange(16)

    def mixed(first: int, begin: int, end: int) -> list[Tensor]:
        return augmented(plan, given[begin:end], first + begin, labels[begin:end])

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
    made = changed(given, 0, *EVERYTHING[:-2])
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(given, before)
    assert not torch.equal(made, changed(given, 16, *EVERYTHING[:-2]))
    assert not torch.equal(made, changed(given, 0, *EVERYTHING[:-2], "seed=1"))


def test_without_augmentation_training_sees_what_validation_sees() -> None:
    normalize = Augmentation(make_plan("on.precision=fp64"), CPU).normalize
    assert torch.equal(changed(pictures(4), 0), normalize(pictures(4)))


def test_validation_images_are_never_changed() -> None:
    judged = []
    for words in ((), EVERYTHING):
        plan = make_plan("on.precision=fp64", *words)
        whole = Whole(plan, World(CPU))
        initialize(whole.module, published(plan.recipe.init, plan.recipe.model), plan.recipe.seed)
        loader = open_loader(plan, None, 0, CPU)
        judged.append(torch.cat([whole.answers(batch).loss for batch in loader.validation()]))
    assert torch.equal(judged[0], judged[1])


def test_boxes_become_zero_after_normalization_and_nothing_else_changes() -> None:
    words = ("augment.erase.probability=0.7", "augment.cutout=3")
    given = pictures(32)
    made, plain = changed(given, 64, *words), changed(given, 64)
    drawn = [draw(make_recipe(*words), np.arange(64, 96, dtype=np.int64), SIDE) for draw in (draw_erase, draw_cutout)]
    edges = np.vstack([rows for rows in drawn if rows is not None]).astype(int)
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
    assert [augmented(plan, pictures(4), 16 * step)[0].shape[2] for step in range(4)] == [8, 8, 4, 6]
    halved = changed(pictures(1), 0, "augment.side={0%: 4}", "data.normalize=mean", "data.mean=[0, 0, 0]")
    # Every second pixel of a picture smoothed by (1, 3, 3, 1) / 8, whose weights are renewed at the border.
    weights = torch.zeros(4, 8, dtype=torch.float64)
    for row in range(4):
        for offset, weight in zip(range(-1, 3), (1, 3, 3, 1), strict=True):
            if 0 <= 2 * row + offset < 8:
                weights[row, 2 * row + offset] = weight
    weights /= weights.sum(1, keepdim=True)
    assert torch.allclose(halved[0], weights @ pictures(1)[0].double() @ weights.T, rtol=1e-10)


def test_numbers_are_drawn_for_the_side_of_the_images_that_they_act_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: dict[str, int] = {}

    def note(name: str) -> Callable[[Recipe, Int64s, int], None]:
        return lambda _recipe, _positions, side: sides.update({name: side})

    for name in ("color", "erase", "mix"):
        monkeypatch.setitem(pipeline._DRAWN, name, note(name))
    augmented(make_plan("augment.side={0%: 4}"), pictures(4), 0)
    assert sides == {"color": 8, "erase": 4, "mix": 4}


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
    (made, *_) = augmented(plan, pictures(4)[:, :1], 0)
    assert made.shape == (4, 1, 6, 6)


def test_a_proof_on_smaller_images_shrinks_what_is_given_in_pixels() -> None:
    wanted = make_recipe("data.side=224", "augment.side={0%: 160, 50%: 224}", "augment.cutout=112")
    small, told = shrink(wanted)
    assert told == ["image side 224 -> 32"]
    assert (small.augment.side, small.augment.cutout) == ({"0%": 23, "50%": 32}, 16)
    assert small.augment.flip
