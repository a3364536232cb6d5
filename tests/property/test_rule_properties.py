"""A step depends on the summed gradient alone, however it was gathered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_cases import CLIPS, MANY, OPTIMIZERS, everything, numbers, parameters, plan_of, take_step
from paceline.optim.build import build_optimizer

IMAGES = 12


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@given(cuts=st.sets(st.integers(1, IMAGES - 1)), order=st.permutations(range(IMAGES)))
@settings(max_examples=5, deadline=None)
def test_a_step_does_not_depend_on_how_its_gradient_was_gathered(
    optimizer: str, clip: str, cuts: set[int], order: list[int]
) -> None:
    ends = []
    for shared in ([IMAGES], [b - a for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), IMAGES], strict=True)]):
        weights = parameters(MANY)
        plan = plan_of(optimizer, "weight_decay={rate: 0.02, skip_names: [bias]}", f"clip={clip}", shapes=MANY)
        ours = build_optimizer(weights.items(), plan)
        for step in range(3):
            for name, weight in weights.items():
                images = numbers(f"{name}/{step}", (IMAGES, *weight.shape))
                if len(shared) > 1:
                    images = images[order]
                for part in images.split(shared):
                    gradient = part.sum(0)
                    weight.grad = gradient if weight.grad is None else weight.grad + gradient
            take_step(ours, 0.05, float(IMAGES))
        ends.append(everything(weights, ours))
    for name, tensor in ends[0].items():
        assert torch.allclose(tensor, ends[1][name], rtol=1e-12, atol=1e-12), name
