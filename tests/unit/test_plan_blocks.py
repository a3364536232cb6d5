"""Blocks by name in a plan: what is frozen, slowed and computed again, and what a network asks of images."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conftest import make_plan
from paceline.errors import PlanError
from paceline.facts import NetworkFacts

RESNET8 = ["stem", "stage1/unit1", "stage2/unit1", "stage3/unit1", "head"]
NETWORK = NetworkFacts(1, 1, blocks=("stem", *(f"stage1/unit{n}" for n in range(1, 12)), "stage2/unit1", "top", "head"))


def refusal(*words: str) -> str:
    """Why a plan is refused."""
    with pytest.raises(PlanError) as caught:
        make_plan(*words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "blocks"),
    [
        ([], []),
        (["head"], ["head"]),
        (["head", "stem"], ["stem", "head"]),  # in the network's order
        (["stage1/unit1"], ["stage1/unit1"]),  # and not unit10 or unit11
        (["stage1"], [f"stage1/unit{n}" for n in range(1, 12)]),
        (["stage2", "stage2/unit1", "stage2"], ["stage2/unit1"]),
        (["all"], list(NETWORK.blocks)),
        (["all", "stem"], list(NETWORK.blocks)),
    ],
)
def test_names_stand_for_blocks_stages_or_all(names: list[str], blocks: list[str]) -> None:
    assert NETWORK.chosen("freeze", names) == blocks


@pytest.mark.parametrize("name", ["stage", "stage3", "unit1", "stage1/", "stage1/unit", "Stem", ""])
def test_a_wrong_name_lists_the_right_ones(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        NETWORK.chosen("some.key", ["stem", name])
    assert str(caught.value) == f"some.key: the network has no block '{name}'; it has {', '.join(NETWORK.blocks)}"


@pytest.mark.parametrize(
    ("word", "key"),
    [("freeze=[stage9]", "freeze"), ("lr_factors={stage9: 2}", "lr_factors"), ("on.recompute=stage9", "on.recompute")],
)
def test_a_plan_with_a_wrong_block_is_refused_by_its_key(word: str, key: str) -> None:
    assert refusal(word) == f"{key}: the network has no block 'stage9'; it has {', '.join(RESNET8)}"


def test_nothing_is_frozen_slowed_or_recomputed_unless_asked() -> None:
    plan = make_plan()
    assert (plan.frozen, plan.recomputed) == ([], [])
    assert [plan.lr_factor(block) for block in RESNET8] == [1.0] * 5


def test_a_plan_knows_which_blocks_stand_still() -> None:
    assert make_plan("freeze=[stem, stage2]").frozen == ["stem", "stage2/unit1"]
    assert make_plan("freeze=[stage1, stage2, stage3, stem]").frozen == RESNET8[:-1]


@pytest.mark.parametrize("word", ["freeze=[all]", f"freeze=[{', '.join(RESNET8)}]"])
def test_a_network_of_which_nothing_trains_is_refused(word: str) -> None:
    assert refusal(word) == "freeze names every block, so that nothing trains; leave out the head, at least"


def test_a_network_of_another_package_cannot_be_frozen_in_part() -> None:
    assert refusal("model=timm:resnet10t", "freeze=[network]").startswith("freeze names every block")
    assert refusal("model=timm:resnet10t", "freeze=[stem]").endswith("the network has no block 'stem'; it has network")


@pytest.mark.parametrize(
    ("word", "blocks"),
    [
        ("on.recompute=all", RESNET8),
        ("on.recompute=[all]", RESNET8),
        ("on.recompute=stage3", ["stage3/unit1"]),
        ("on.recompute=[head, stage1/unit1]", ["stage1/unit1", "head"]),
        ("on.recompute=[]", []),
        ("on.recompute=none", []),
        ("on.recompute=auto", []),  # it fits
    ],
)
def test_recomputation_cuts_before_the_blocks_that_are_named(word: str, blocks: list[str]) -> None:
    assert make_plan(word).recomputed == blocks


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ({"head": 10.0}, {"stem": 1.0, "stage1/unit1": 1.0, "head": 10.0}),
        ({"stage1": 0.1, "stage1/unit2": 5.0}, {"stage1/unit1": 0.1, "stage1/unit2": 5.0, "stage2/unit1": 1.0}),
        ({"stage1/unit2": 5.0, "stage1": 0.1}, {"stage1/unit1": 0.1, "stage1/unit2": 5.0}),
        ({"all": 0.5, "stage1": 2.0, "stem": 0.0}, {"stem": 0.0, "stage1/unit11": 2.0, "head": 0.5}),
        ({"all": 0.5, "top": 7.0}, {"top": 7.0, "head": 0.5}),  # a block's own name is longer than all, whatever it is
        ({"top": 7.0, "all": 0.5}, {"top": 7.0, "head": 0.5}),
    ],
)
def test_the_longest_name_that_stands_for_a_block_gives_its_factor(
    factors: dict[str, float], expected: dict[str, float]
) -> None:
    plan = make_plan()
    plan = replace(plan, network=NETWORK, recipe=plan.recipe.model_copy(update={"lr_factors": factors}))
    assert {block: plan.lr_factor(block) for block in expected} == expected


@pytest.mark.parametrize(
    ("model", "smallest"),
    [
        ("alexnet", 63),
        ("vgg11", 32),
        ("googlenet", 15),
        ("inception-v4", 75),
        ("inception-resnet-v2", 75),
        ("{name: inception-v3, auxiliary: 0}", 75),
    ],
)
def test_images_too_small_are_refused_with_the_smallest_side(model: str, smallest: int) -> None:
    name = model.removeprefix("{name: ").partition(",")[0]
    words = (f"model={model}", f"data.side={smallest - 1}")
    assert refusal(*words) == (
        f"{name} needs images of at least {smallest} pixels a side, and these have {smallest - 1}"
    )
    assert make_plan(f"model={model}", f"data.side={smallest}").facts.side == smallest


def test_an_auxiliary_head_that_needs_large_images_is_said_to() -> None:
    assert refusal("model=inception-v3", "data.side=298") == (
        "inception-v3 needs images of at least 299 pixels a side, and these have 298; "
        "without its auxiliary head (model.auxiliary=0) smaller ones do"
    )
    assert make_plan("model=inception-v3", "data.side=298", "model.auxiliary=0").network.smallest_side == 75


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data.channels=1",), "data.mean has 3 values, and the images have 1 channels; write as many"),
        (("data.channels=4",), "data.mean has 3 values, and the images have 4 channels; write as many"),
        (("data.mean=[0, 0]",), "data.mean has 2 values, and the images have 3 channels; write as many"),
        (("data.mean=[]",), "data.mean has 0 values, and the images have 3 channels; write as many"),
        (("data.channels=1", "data.mean=[0]"), "data.std has 3 values, and the images have 1 channels; write as many"),
        (("data=shapes", "data.std=[1]"), "data.std has 1 values, and the images have 3 channels; write as many"),
    ],
)
def test_mean_and_spread_have_one_value_for_each_channel(words: tuple[str, ...], message: str) -> None:
    assert refusal(*words) == message


def test_gray_images_are_planned_once_mean_and_spread_fit() -> None:
    plan = make_plan("data.channels=1", "data.mean=[0.5]", "data.std=[0.25]")
    assert (plan.facts.channels, plan.data.mean, plan.data.std) == (1, (0.5,), (0.25,))


@pytest.mark.parametrize(
    ("model", "side", "fits"),
    [
        ("inception-v3", 299, False),  # the last norm of its auxiliary head sees one pixel
        ("{name: inception-v3, auxiliary: 0}", 299, True),
        ("inception-v4", 75, False),
        ("googlenet", 33, False),
        ("vgg11-bn", 32, True),
        ("vgg11", 32, True),
        ("resnet50", 32, False),
        ("{name: resnet50, stem: 3x3}", 32, True),
    ],
)
def test_a_norm_batch_of_one_is_refused_where_a_norm_sees_one_pixel(model: str, side: int, fits: bool) -> None:
    words = (f"model={model}", f"data.side={side}", "norm_batch=1")
    if fits:
        assert make_plan(*words).norm_batch in (1, None)
    else:
        assert refusal(*words).startswith("norm_batch 1 leaves the last norms one number for each channel")


@pytest.mark.parametrize(("model", "norm_batch"), [("alexnet", None), ("vgg11", None), ("vgg11-bn", 4)])
def test_a_network_without_norms_has_no_norm_batch(model: str, norm_batch: int | None) -> None:
    plan = make_plan(f"model={model}", "data.side=64")
    assert plan.norm_batch == norm_batch
    assert plan.norm_total == (0 if norm_batch is None else 4)
    if norm_batch is None:
        assert make_plan(f"model={model}", "data.side=64", "on.micro_batch=2", "on.replicas=3").micro_batch == 2
