"""Fewer and more replicas between starts: those that fit run, the others wait, and it is the same run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import make_plan
from paceline.errors import PlanError
from paceline.planning import Plan
from paceline.training.trials import Trial, compare_outcomes

Started = Callable[..., Plan]
EXACT = 1e-12
STEPS = 12
WORDS = ("on.precision=fp64", "on.cpu_threads=1", "epochs=2", "optimizer.lr=0.01")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Makes a plan for so many processes that a launcher has started."""

    def plan_for(count: int, *words: str) -> Plan:
        with monkeypatch.context() as patch:
            for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                patch.setenv(name, str(count))
            patch.setenv("RANK", "0")
            patch.setenv("MASTER_ADDR", "127.0.0.1")
            return make_plan(*words)

    return plan_for


@pytest.mark.parametrize(
    ("words", "count", "replicas", "micro_batch"),
    [
        (("on.micro_batch=2",), 8, 8, 2),
        (("on.micro_batch=2",), 7, 6, 2),  # norm groups of 4 span two replicas
        (("on.micro_batch=1",), 7, 4, 1),
        (("norm_batch=16", "on.micro_batch=auto"), 8, 8, 2),
        (("norm_batch=16", "on.micro_batch=auto"), 7, 4, 4),  # not one alone, which takes longer
        (("norm=group",), 7, 7, 4),
        (("norm=group",), 100, 100, 1),
    ],
)
def test_where_a_norm_group_allows_fewer_replicas_the_number_that_is_done_first_runs(
    started: Started, words: tuple[str, ...], count: int, replicas: int, micro_batch: int
) -> None:
    plan = started(count, *words)
    assert (plan.replicas, plan.micro_batch) == (replicas, micro_batch)


def test_a_number_of_replicas_that_is_written_is_never_changed(started: Started) -> None:
    with pytest.raises(PlanError, match=r"which do not divide on\.replicas 7; write on\.replicas=2 or"):
        started(7, "on.micro_batch=2", "on.replicas=7")
    with pytest.raises(PlanError, match="which do not divide"):
        started(7, "norm_batch=16", "on.micro_batch=2")


@pytest.mark.parametrize(
    "counts", [pytest.param((2, 3), id="2-3"), pytest.param((8, 7, 5, 8), id="8-7-5-8", marks=pytest.mark.long)]
)
def test_replicas_that_shrink_and_grow_between_starts_continue_the_same_run(
    tmp_path: Path, started: Started, counts: tuple[int, ...]
) -> None:
    def plan_for(count: int) -> Plan:
        return started(count, *WORDS, "on.micro_batch=2")

    whole, changing = tmp_path / "whole", tmp_path / "changing"
    for folder in (whole, changing):
        folder.mkdir()
    expected = Trial(whole, None, STEPS).finish(make_plan(*WORDS, "on.micro_batch=16"))
    *killed, last = counts
    step = 0
    for count in killed:
        step = Trial(changing, None, STEPS, processes=count).kill_after(plan_for(count), step + 1)
        assert step < STEPS
    found = compare_outcomes(expected, Trial(changing, None, STEPS, processes=last).finish(plan_for(last)))
    assert max(found.values()) <= EXACT, found
