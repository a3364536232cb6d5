"""The learning rate of each step, against the published formulas and golden lists."""

from __future__ import annotations

import math

import pytest

from conftest import make_plan
from paceline import schedule
from paceline.planning import Plan

PEAK = 0.5


def plan_of(text: str, steps: int = 100, lr: object = PEAK) -> Plan:
    """A plan of so many steps, ten of them an epoch."""
    plan = make_plan("data.images=160", f"epochs={steps / 10}", f"optimizer.lr={lr}", f"schedule={text}")
    assert plan.steps == steps
    return plan


def rates(plan: Plan) -> list[float]:
    return [schedule.lr(plan, step) for step in range(plan.steps)]


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("constant", lambda i: 1.0),
        ("{name: stepped, drops: [50%, 75%]}", lambda i: 0.1 ** ((i > 50) + (i > 75))),
        ("{name: stepped, drops: [3 epochs, 60 steps, 1280 images], factor: 0.2}", lambda i: 0.2 ** sum(
            i > drop for drop in (30, 60, 80)
        )),
        ("{name: stepped, drops: []}", lambda i: 1.0),
        ("cosine", lambda i: (1 + math.cos(math.pi * i / 100)) / 2),
        ("{name: cosine, end: 0.1}", lambda i: 0.2 + 0.8 * (1 + math.cos(math.pi * i / 100)) / 2),
        ("{name: exponential, factor: 0.97, every: 2.4 epochs}", lambda i: 0.97 ** (i // 24)),
        ("{name: exponential, factor: 0.5, every: 10%}", lambda i: 0.5 ** (i // 10)),
        ("{name: polynomial, power: 1}", lambda i: 1 - i / 100),
        ("{name: polynomial, power: 3, end: 0.1}", lambda i: 0.8 * (1 - i / 100) ** 3 + 0.2),
    ],
)  # fmt: skip
def test_a_schedule_without_warm_up_is_its_formula(text: str, factor: object) -> None:
    assert callable(factor)
    assert rates(plan_of(text)) == pytest.approx([PEAK * factor(i) for i in range(100)], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("constant", ""),
        ("stepped", ", drops: [5 steps, 50%]"),
        ("cosine", ""),
        ("exponential", ", every: 3 steps"),
    ],
)
def test_warm_up_masks_a_schedule_that_runs_on_underneath(name: str, rest: str) -> None:
    without = rates(plan_of(f"{{name: {name}{rest}}}"))
    masked = rates(plan_of(f"{{name: {name}{rest}, warmup: 2 epochs}}"))
    assert masked == pytest.approx([lr * min(1, i / 20) for i, lr in enumerate(without)], rel=1e-12)
    assert masked[0] == 0
    assert masked[20] == without[20]


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("constant", ""), ("stepped", ", drops: [5 steps, 50%]"), ("cosine", ", end: 0.01"),
        ("exponential", ", every: 3 steps"), ("polynomial", ""),
    ],
)  # fmt: skip
def test_warm_up_climbs_from_where_it_starts_to_where_it_would_climb_from_zero(name: str, rest: str) -> None:
    from_zero = rates(plan_of(f"{{name: {name}{rest}, warmup: 2 epochs}}"))
    started = rates(plan_of(f"{{name: {name}{rest}, warmup: 2 epochs, start: 0.2}}"))
    assert started == pytest.approx([lr + 0.2 * max(0, 1 - i / 20) for i, lr in enumerate(from_zero)], rel=1e-12)
    assert started[0] == 0.2
    assert started[20:] == from_zero[20:]


def test_a_cosine_after_warm_up_starts_when_warm_up_ends() -> None:
    after = rates(plan_of("{name: cosine, warmup: 20 steps, after_warmup: true}"))
    assert after[:20] == pytest.approx([PEAK * i / 20 for i in range(20)], rel=1e-12)
    assert after[20:] == pytest.approx([PEAK * (1 + math.cos(math.pi * i / 80)) / 2 for i in range(80)], rel=1e-12)


GOLDEN_TENSORFLOW = [
    0, 2.625, 5.25, 7.875, 10.5, 8.29631728395, 6.35189135802, 4.66672222222, 3.24080987654, 2.07415432099,
    1.16675555556, 0.518613580247, 0.129728395062,
]  # fmt: skip
GOLDEN_NVIDIA = [
    2.625, 5.25, 7.875, 10.5, 8.0390859375, 5.90629375, 4.1016234375, 2.625075, 1.4766484375, 0.65634375, 0.1641609375,
    0.0001,
]  # fmt: skip


@pytest.mark.parametrize(
    ("rest", "golden"), [("first: 0, extra_steps: 1", GOLDEN_TENSORFLOW), ("first: 1", GOLDEN_NVIDIA)]
)
def test_the_polynomial_is_that_of_mlperf(rest: str, golden: list[float]) -> None:
    plan = plan_of(f"{{name: polynomial, end: 0.0001, warmup: 4 steps, {rest}}}", steps=12, lr=10.5)
    assert [schedule.lr(plan, step) for step in range(len(golden))] == pytest.approx(golden, abs=1e-9)


def test_warm_up_as_long_as_the_run_only_climbs() -> None:
    for name in ("constant", "polynomial"):
        plan = plan_of(f"{{name: {name}, warmup: 100%}}", steps=10)
        assert rates(plan) == pytest.approx([PEAK * i / 10 for i in range(10)], rel=1e-12)


@pytest.mark.parametrize("name", ["constant", "cosine", "polynomial", "{name: cosine, after_warmup: true}"])
def test_the_first_step_of_a_schedule_without_warm_up_is_the_peak(name: str) -> None:
    assert schedule.lr(plan_of(name), 0) == PEAK


def test_a_rate_per_image_peaks_at_rate_times_global_batch() -> None:
    assert rates(plan_of("constant", lr="2^-6 per image"))[0] == 16 / 64


def test_warm_up_that_is_no_whole_number_of_steps_is_cut() -> None:
    plan = plan_of("{name: constant, warmup: 0.25 epochs}")
    assert plan.warm_steps == 2
    assert rates(plan)[:4] == [0, PEAK / 2, PEAK, PEAK]
