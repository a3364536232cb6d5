"""What only a CUDA device can show: the same bits as the host, and exact resumes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import checkpoint, keyed
from paceline.augment.crop import crop, draw_offsets, pad
from paceline.augment.flip import draw_flips
from paceline.settings import shipped
from paceline.settings.build import build
from paceline.settings.recipe import Recipe

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_keyed_numbers_have_the_same_bits_on_cuda() -> None:
    positions = np.concatenate([np.arange(5000), 2**40 + np.arange(5000), np.array([2**62, 2**63 - 1])]).astype(
        np.int64
    )
    key = keyed.key(7, "test")
    host = keyed.words(key, positions, 3)
    device = keyed.words(key, torch.tensor(positions, device="cuda"), 3)
    for a, b in zip(host, device, strict=True):
        assert np.array_equal(a, b.cpu().numpy())
    assert np.array_equal(keyed.uniforms(host[0], host[1]), keyed.uniforms(device[0], device[1]).cpu().numpy())
    assert np.array_equal(keyed.integers(host[2], 1000), keyed.integers(device[2], 1000).cpu().numpy())


def test_crops_on_the_device_have_the_host_pixels() -> None:
    recipe = build(Recipe, shipped.tree("recipes", "cifar10/resnet20"))
    pictures = keyed.words(1, np.arange(20 * 32 * 32 * 3, dtype=np.int64))[0].astype(np.uint8).reshape(20, 32, 32, 3)
    wide, numbers = pad(pictures, recipe.augment), np.arange(19, -1, -1)
    positions = np.arange(100, 120, dtype=np.int64)
    offsets, flipped = draw_offsets(recipe, positions), draw_flips(recipe, positions, positions, positions * 0)
    on_host = crop(wide, numbers, offsets, flipped, np.arange(32))
    put = [torch.tensor(x, device="cuda") for x in (wide, numbers, offsets, flipped, np.arange(32))]
    assert np.array_equal(on_host, crop(*put).cpu().numpy())


def _weights(run: Path) -> str:
    step = checkpoint.saved_steps(run / "checkpoints")[-1]
    files = checkpoint.read(run / "checkpoints" / checkpoint.name_of(step))
    return hashlib.sha256(files["network.safetensors"] + files["optimizer.safetensors"]).hexdigest()


def test_a_deterministic_run_killed_and_resumed_on_cuda_is_bitwise_the_same(tmp_path: Path) -> None:
    words = [
        "train",
        "shapes/resnet8",
        "epochs=2",
        "on.device=cuda",
        "on.deterministic=true",
        "on.save=10 steps",
        "on.keep_last=100",
    ]
    command = [sys.executable, "-m", "paceline"]
    subprocess.run([*command, *words, "--out", str(tmp_path / "whole")], check=True)
    part = subprocess.Popen([*command, *words, "--out", str(tmp_path / "part")])
    while max(checkpoint.saved_steps(tmp_path / "part/checkpoints"), default=0) < 50:
        assert part.poll() is None
        time.sleep(0.02)
    os.kill(part.pid, signal.SIGKILL)
    part.wait()
    subprocess.run([*command, "resume", str(tmp_path / "part")], check=True)
    assert _weights(tmp_path / "whole") == _weights(tmp_path / "part")
