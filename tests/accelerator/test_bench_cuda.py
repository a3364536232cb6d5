"""`paceline bench` on a CUDA device: events, memory, kernels, copies and the timeline of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conftest import SMALL, Paceline

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

WORDS = (
    "model=resnet20",
    "data.name=synthetic",
    "data.side=32",
    "global_batch=128",
    "norm_batch=128",
    "--device",
    "cuda",
)


def test_training_is_measured_with_memory_and_kernels(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    done = paceline("bench", "train", "small.yaml", *WORDS, "--seconds", "10", "--profile", "profile", "--json", env={})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["precision"] == "bf16"
    assert result["images_per_second"] > 1000
    assert 0 < result["peak_memory"] <= result["reserved_memory"]
    profile = result["profile"]
    assert profile["files"] == ["trace.json", "kernels.csv", "operators.csv", "memory.pickle"]
    assert (tmp_path / "profile/memory.pickle").stat().st_size > 0
    assert sum(row["share"] for row in profile["kernels"]) == pytest.approx(1)
    assert profile["copy_bytes_per_second"] > 1e11
    assert profile["matrix_flops_per_second"] > 1e13
    # A step cannot be busy for longer than it takes.
    busy = sum(row["ms_per_step"] for row in profile["kernels"])
    assert 0 < busy < 2 * result["ms_per_step"]
    copies = [row for row in profile["kernels"] if row["name"].startswith("Memcpy HtoD") and row["bytes_per_second"]]
    assert all(0 < row["share_of_copy_speed"] < 1 for row in copies)


def test_an_earlier_result_gives_a_ratio_of_memory(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    for words in (("--out", "before.json"), ("--against", "before.json", "--out", "now.json")):
        done = paceline("bench", "train", "small.yaml", *WORDS, "--seconds", "5", *words, env={})
        assert done.returncode == 0, done.stderr
    ratios = json.loads((tmp_path / "now.json").read_text())["against"]
    assert 0.5 < ratios["images_per_second"] < 2
    assert ratios["peak_memory"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_inference_is_measured_by_batch_size(paceline: Paceline, tmp_path: Path, compiled: str) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    sweep = ("--batch", "1,64", "--repeats", "50", "--seconds", "5", f"on.compile={compiled}", "--json")
    done = paceline("bench", "infer", "small.yaml", *WORDS, *sweep, env={})
    assert done.returncode == 0, done.stderr
    one, many = json.loads(done.stdout)["batches"]
    assert 0 < one["latency_ms"]["p50"] <= one["latency_ms"]["p99"]
    assert many["images_per_second"] > one["images_per_second"]
