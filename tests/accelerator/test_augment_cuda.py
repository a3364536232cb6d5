"""Augmentation on an accelerator: policies make the host's bytes, everything else its numbers, and no step waits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from conftest import make_plan
from paceline import keyed
from paceline.augment.pipeline import Augmentation, draw_each
from paceline.augment.policy import draw_policy
from paceline.augment.policy_ops import PolicyDraws, apply_policy

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

POLICIES = [
    "{name: autoaugment, table: imagenet}",
    "{name: autoaugment, table: cifar10, form: tensorflow, sampling: bilinear}",
    "{name: randaugment, layers: 3, form: tensorflow, sampling: bilinear}",
]


def pictures(count: int, side: int) -> torch.Tensor:
    words = keyed.words(keyed.key(3, "pictures"), np.arange(count * side * side * 3, dtype=np.int64))[0]
    return torch.tensor((words >> 24).astype(np.uint8).reshape(count, side, side, 3)).permute(0, 3, 1, 2)


@contextmanager
def waits_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch notes that its debug mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("words", POLICIES)
def test_policies_make_the_same_bytes_on_host_and_device(words: str) -> None:
    recipe = make_plan("data.side=32", f"augment.policy={words}").recipe
    layers, given = draw_policy(recipe, np.arange(256, dtype=np.int64), 32), pictures(256, 32)
    assert recipe.augment.policy is not None
    for sampling in ("nearest", "bilinear"):
        policy = recipe.augment.policy.model_copy(update={"sampling": sampling})
        results = []
        for device in (torch.device("cpu"), torch.device("cuda")):
            draws = PolicyDraws.of(layers, device)
            assert draws is not None
            results.append(apply_policy(policy, given.to(device), draws.to(device)).cpu())
        assert torch.equal(*results)


@pytest.mark.parametrize("normalize", ["mean-std", "image"])
def test_everything_together_agrees_with_the_host_and_does_not_wait(normalize: str) -> None:
    words = (
        "data.side=32",
        f"data.normalize={normalize}",
        f"augment.policy={POLICIES[2]}",
        "augment.color={brightness: 0.1, saturation: [0.5, 1.5], hue: 0.2, contrast: [0.5, 1.5]}",
        "augment.side={0%: 24}",
        "augment.erase.probability=0.5",
        "augment.cutout=8",
    )
    plan, given = make_plan(*words, "on.precision=fp64"), pictures(64, 32)
    results = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        images, labels, augment = given.to(device), torch.arange(64, device=device), Augmentation(plan, device)
        with waits_are_errors():
            draws = draw_each(plan, [np.arange(64, dtype=np.int64)], device)[0].to(device)
            results.append(augment(augment.prepare(images, draws), labels, draws)[0])
    assert torch.allclose(results[0], results[1].cpu(), atol=1e-6)
