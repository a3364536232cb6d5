"""How a plan's numbers reach its device: in which precision, and without the host waiting for the copy."""

from __future__ import annotations

import resource
import sys
from functools import cache
from threading import RLock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.planning import Plan


@cache
def load_programs_one_by_one() -> None:
    """Let no two threads of this process load Triton programs at the same time.

    What launches programs are modules of one name, and Python gives two threads that load such modules at the same time
    the same one: a program would be launched with the arguments of another.
    """
    try:
        from triton.compiler import CompiledKernel  # type: ignore[import-not-found]  # noqa: PLC0415 - not on a CPU
    except ImportError:
        return
    load, loading = getattr(CompiledKernel, "_init_handles", None), RLock()
    if load is None:  # another version of Triton
        return

    def load_alone(kernel: Any) -> None:
        with loading:
            load(kernel)

    CompiledKernel._init_handles = load_alone


def float_dtype(plan: Plan) -> torch.dtype:
    """The precision of images, losses and gradients outside 16-bit layers."""
    return torch.float64 if plan.placement.precision == "fp64" else torch.float32


def pinned(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Host values in memory that the device can copy from while the host goes on."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Host values on the device, without waiting until they are there."""
    return pinned(values, device).to(device, non_blocking=True)


def widest_float(device: torch.device) -> torch.dtype:
    """The widest float of a device, for sums over many images."""
    return torch.float32 if device.type == "mps" else torch.float64


def pci_address(device: torch.device) -> str | None:
    """Where an accelerator is plugged in, as Linux writes it; None for a CPU, and where torch does not say."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def peak_memory(device: str) -> int:
    """The most bytes that this process's tensors took on a CUDA device, or that the process took elsewhere; without
    waiting for the device, because the allocator counts on the host."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
