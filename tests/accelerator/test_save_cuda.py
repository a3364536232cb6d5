"""Saving on a CUDA device: the copy is that of its step, though later steps are already on their way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from conftest import make_plan, make_session
from paceline import checkpoint
from paceline.training.saver import take_snapshot
from paceline.world import World

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_snapshot_is_of_its_step_whatever_comes_after_it(tmp_path: Path) -> None:
    plan = make_plan("on.device=cuda", "model=resnet50", "data.side=32", "on.precision=fp32")
    session = make_session(plan, tmp_path, world=World(torch.device("cuda", 0)))
    module = session.state.network.module
    expected = {name: tensor.cpu().clone() for name, tensor in module.state_dict().items()}
    for _ in range(3):
        snapshot = take_snapshot(session.state)
        assert snapshot.copied is not None
        with torch.no_grad():  # as the next step's update, with nothing in between that waits
            for tensor in module.state_dict().values():
                tensor.add_(1)
        saved = load(snapshot.files()[checkpoint.NETWORK])
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in expected)
        expected = {name: tensor.cpu().clone() for name, tensor in module.state_dict().items()}
