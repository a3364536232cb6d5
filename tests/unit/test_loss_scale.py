"""The loss scale: powers of two that change nothing but rounding, and a dynamic one that follows bad steps."""

from __future__ import annotations

import pytest
import torch

from conftest import make_plan
from paceline.errors import PlanError, SpecError
from paceline.planning import Plan
from paceline.training.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE, SCALE_BOUNDS, LossScale
from paceline.training.restore import load_files
from paceline.training.save import to_files
from paceline.training.state import State, build_state, initialize_state
from paceline.world import init_world

CPU = torch.device("cpu")
GOOD, BAD = torch.zeros(()), torch.ones(())


def scale(*words: str) -> LossScale:
    return LossScale(make_plan(*words), CPU)


def test_float16_scales_dynamically_and_everything_else_not_at_all() -> None:
    assert make_plan("on.precision=fp16").placement.loss_scale == "dynamic"
    for precision in ("bf16", "fp32", "fp64"):
        assert make_plan(f"on.precision={precision}").placement.loss_scale == 1.0
        assert scale(f"on.precision={precision}").now(0) == 1


def test_a_fixed_scale_is_what_was_written() -> None:
    fixed = scale("on.loss_scale=128")
    for step in (0, 7):
        assert float(fixed.now(step)) == 128
        fixed.update(BAD)


def test_a_scheduled_scale_changes_at_its_steps() -> None:
    plan = ("epochs=4", "on.loss_scale={0 epochs: 64, 2 epochs: 512, 75%: 4}")
    scales = [float(scale(*plan).now(step)) for step in (0, 11, 12, 17, 18, 23)]  # 6 steps an epoch
    assert scales == [64, 64, 512, 512, 4, 4]


def test_a_bad_step_halves_a_dynamic_scale_and_many_good_ones_double_it() -> None:
    dynamic = scale("on.loss_scale=dynamic")
    assert float(dynamic.value) == INITIAL_SCALE
    dynamic.update(BAD)
    assert float(dynamic.value) == INITIAL_SCALE / 2
    for _ in range(GROWTH_INTERVAL - 1):
        dynamic.update(GOOD)
    assert float(dynamic.value) == INITIAL_SCALE / 2
    dynamic.update(GOOD)
    assert float(dynamic.value) == INITIAL_SCALE
    assert int(dynamic.good_steps) == 0


def test_a_bad_step_starts_the_counting_anew() -> None:
    dynamic = scale("on.loss_scale=dynamic")
    for _ in range(GROWTH_INTERVAL - 1):
        dynamic.update(GOOD)
    dynamic.update(BAD)
    assert int(dynamic.good_steps) == 0
    dynamic.update(GOOD)
    assert float(dynamic.value) == INITIAL_SCALE / 2


def test_a_dynamic_scale_stays_within_bounds() -> None:
    dynamic = scale("on.loss_scale=dynamic")
    for _ in range(100):
        dynamic.update(BAD)
    assert float(dynamic.value) == SCALE_BOUNDS[0]


def test_a_dynamic_scale_is_resumed_wherever_it_stands() -> None:
    plan = make_plan("on.loss_scale=dynamic")
    state = begin_state(plan)
    state.loss_scale.value.fill_(1.0)
    state.loss_scale.good_steps.fill_(1500)
    again = load_files(build_state(plan, init_world(plan, None)), to_files(state), "test")
    assert float(again.loss_scale.value) == 1
    assert int(again.loss_scale.good_steps) == 1500
    other = make_plan("on.loss_scale=4")
    fixed = load_files(build_state(other, init_world(other, None)), to_files(state), "test")
    assert float(fixed.loss_scale.now(0)) == 4


def begin_state(plan: Plan) -> State:
    state = build_state(plan, init_world(plan, None))
    initialize_state(state, plan)
    return state


def test_a_recipe_that_stops_at_bad_steps_wants_a_fixed_scale() -> None:
    with pytest.raises(PlanError, match="a dynamic loss scale finds its size by bad steps"):
        make_plan("on.precision=fp16", "on_bad_step=stop")


@pytest.mark.parametrize("value", ["100", "0", "-2", "2^30", "true", "{0 epochs: 3}", "{soon: 4}", "33554432"])
def test_a_scale_that_is_no_power_of_two_in_range_is_refused(value: str) -> None:
    with pytest.raises(SpecError, match="loss_scale"):
        make_plan(f"on.loss_scale={value}")


def test_a_precision_that_a_device_does_not_have_is_refused() -> None:
    with pytest.raises(PlanError, match=r"tf32 does not exist on cpu; write on.precision=fp32"):
        make_plan("on.precision=tf32")
