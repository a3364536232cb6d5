"""How long the stages of a pipeline wait, by played times."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import make_plan
from paceline.model.staged import Staged
from paceline.pipelining import StageTimes
from paceline.training import train_speed


def test_the_time_of_passes_is_that_between_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0]), StageTimes(torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr("paceline.pipelining.time.perf_counter", lambda: next(clock))
        with times.noting(times.steps):
            for _ in range(2):
                with times.noting(times.passes):
                    pass
    assert times.seconds() == (10.0, 7.0)


def test_a_stage_waits_when_it_has_no_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("on.stages=2", "on.replicas=2", "on.micro_batch=4")
    everyone = [[8.0, 6.0], [10.0, 5.0], [9.0, 8.0], [9.0, 4.0]]  # two replicas of two stages: steps, and passes
    monkeypatch.setattr(train_speed, "over_replicas", lambda _world, _values: everyone)

    network = Staged.__new__(Staged)
    monkeypatch.setattr(Staged, "timed", lambda _: nullcontext(StageTimes(torch.device("cpu"))))
    world = SimpleNamespace(device=torch.device("cpu"))
    session: Any = SimpleNamespace(plan=plan, world=world, state=SimpleNamespace(network=network))
    steps: list[int] = []
    found = train_speed.idle_shares(session, lambda: steps.append(1))
    assert found == {"measured": pytest.approx(0.425), "of_each": pytest.approx([0.3, 0.55]), "predicted": 1 / 3}
    assert len(steps) == train_speed.TIMED_STEPS


def test_a_network_in_one_piece_has_no_stages_that_wait() -> None:
    session: Any = SimpleNamespace(plan=make_plan(), world=None, state=SimpleNamespace(network=None))
    assert train_speed.idle_shares(session, pytest.fail) is None
