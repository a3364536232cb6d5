"""The rows that reports make of the sums of a state."""

from __future__ import annotations

import pytest
import torch

from conftest import make_plan
from paceline.training import reports
from paceline.training.reports import Clock
from paceline.training.state import build_state
from paceline.world import World


@pytest.mark.parametrize("names", [("loss", "hits"), ("hits", "loss")])
def test_a_report_reads_sums_by_their_names(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    state = build_state(plan, World(torch.device("cpu")))
    state.step = 2
    sums, last_sums = {"loss": 48.0, "hits": 8.0}, {"loss": 8.0, "hits": 2.0}
    monkeypatch.setattr(reports, "TRAIN_SUMS", names)
    state.sums.copy_(torch.tensor([sums[name] for name in names]))
    state.last_sums.copy_(torch.tensor([last_sums[name] for name in names]))
    row = Clock(plan, [], 0).report(state)
    assert (row["loss"], row["top1"], row["last_loss"], row["last_top1"]) == (1.5, 0.25, 0.5, 0.125)
    assert not state.sums.any()
