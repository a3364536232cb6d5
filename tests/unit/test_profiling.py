"""Tables of a profile say what a trace gives, and nothing that it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import make_plan
from paceline.training.profiling import device_peaks, host_rows, kernel_rows, operator_rows

PEAKS = {"copy_bytes_per_second": 4e12, "matrix_flops_per_second": 8e14}


def event(name: str, kind: str, us: float, **details: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": 1.0, "dur": us, "args": details}


TRACE = [
    event("fused_norm", "kernel", 300.0, grid=[1, 1, 1], stream=7),
    event("fused_norm", "kernel", 500.0, grid=[1, 1, 1], stream=7),
    event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 100.0, bytes=200_000_000),
    event("Memset (Device)", "gpu_memset", 100.0, bytes=0),
    event("aten::conv2d", "cpu_op", 9000.0),
    event("cudaLaunchKernel", "cuda_runtime", 9000.0),
    {"ph": "i", "cat": "kernel", "name": "an instant"},
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
]


def test_a_kernel_table_adds_up_what_the_device_did() -> None:
    rows = kernel_rows(TRACE, steps=2, peaks=PEAKS)
    assert [row["name"] for row in rows] == ["fused_norm", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)"]
    first, copy, fill = rows
    assert (first["calls_per_step"], first["ms_per_step"], first["share"]) == (1.0, 0.4, 0.8)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert copy["bytes_per_second"] == pytest.approx(2e12)
    assert copy["share_of_copy_speed"] == pytest.approx(0.5)
    # A trace gives no bytes for a kernel, so nothing is said of them.
    assert first["bytes_per_second"] is first["share_of_copy_speed"] is fill["share_of_copy_speed"] is None


def test_a_trace_without_kernels_has_no_rows() -> None:
    assert kernel_rows(TRACE[4:], 2, PEAKS) == []


def averages() -> list[Any]:
    def row(key: str, us: float, whole: float, device: float, flops: int) -> Any:
        return SimpleNamespace(
            key=key, count=4, self_cpu_time_total=us, cpu_time_total=whole, device_time_total=device, flops=flops
        )

    return [
        row("aten::add", 100.0, 100.0, 10.0, 5), row("aten::conv2d", 50.0, 800.0, 2000.0, 8 * 10**11),
        row("aten::mm", 850.0, 850.0, 0.0, 17 * 10**9),
    ]  # fmt: skip


def test_operators_of_a_cpu_count_without_those_inside() -> None:
    rows = host_rows(averages(), steps=2)
    assert [(row["name"], row["share"]) for row in rows] == [
        ("aten::mm", 0.85), ("aten::add", 0.1), ("aten::conv2d", 0.05),
    ]  # fmt: skip
    assert rows[0]["calls_per_step"] == 2.0


def test_only_operators_that_multiply_matrices_are_compared_with_the_peak() -> None:
    (conv,) = operator_rows(averages(), 2, on_cuda=True, peaks=PEAKS)
    assert (conv["name"], conv["flops_per_second"], conv["share_of_matrix_peak"]) == ("aten::conv2d", 4e14, 0.5)
    on_cpu = operator_rows(averages(), 2, on_cuda=False, peaks=PEAKS)
    assert [row["name"] for row in on_cpu] == ["aten::mm", "aten::conv2d"]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peaks_of_a_device_are_measured(precision: str) -> None:
    peaks = device_peaks(make_plan(f"on.precision={precision}"), torch.device("cpu"))
    assert 1e8 < peaks["copy_bytes_per_second"] < 1e13
    assert 1e7 < peaks["matrix_flops_per_second"] < 1e16
