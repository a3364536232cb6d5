"""Counts what kernels of an EfficientNet-B4 at 380 pixels take on an H200, by compiling them for it without one.

Instructions are those of the largest loop, or of the whole kernel if it has none, divided by the numbers of the wide
tensor that they compute; a tile's columns beyond the last channel count as work. "Memory allows" is how many of them
132 multiprocessors can issue while the kernel's bytes move at 4.3 TB/s; the clock of 1.75 GHz is an assumption. A
kernel with more is limited by arithmetic.

    pip install triton==3.6.0
    python benchmarks/kernel_instructions.py
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]

from paceline.model.kernels import expand_triton, gate_triton, rows_triton
from paceline.model.kernels.gram import WidenedGradient
from paceline.settings.model import Activation

IMAGES = 128
NORMS = ((48, 190), (336, 48))
"""Channels and side of a depthwise convolution's output."""
EXPANSIONS = ((24, 144, 190), (32, 192, 95), (56, 336, 48), (112, 672, 24))
"""Narrow channels, wide channels and side."""
PER_BYTE = 132 * 4 * 32 * 1.75e9 / 4.3e12
"""How many instructions of a thread all multiprocessors issue while memory moves a byte."""
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Launch(NamedTuple):
    """A kernel as it is launched for a shape."""

    label: str
    bytes: int
    """How many bytes it reads and writes for each number of the wide tensor."""
    channels: int
    function: Any
    data: str


class Code(NamedTuple):
    """What a kernel was compiled to."""

    instructions: int
    """Of the largest loop, if there is one."""
    spills: int
    registers: int
    programs: int
    """How many fit a multiprocessor."""


def launches() -> Iterator[Launch]:
    """Every kernel and shape, noted in place of being launched."""
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
        )
    )
    noted: list[tuple[Any, str]] = []

    def note(**launch: Any) -> bool:
        noted.append((launch["fn"].jit_function, launch["compile"]["specialization_data"]))
        return True

    triton.knobs.runtime.jit_cache_hook = note
    for label, size, channels, call in calls():
        noted.clear()
        call()
        function, data = noted[0]  # those after it add up parts
        yield Launch(label, size, channels, function, data)


def calls() -> Iterator[tuple[str, int, int, Callable[[], object]]]:
    """Label, bytes for each number, wide channels, and what launches the kernel on memory that nobody fills."""
    silu: Activation = "silu"
    for n, side in NORMS:
        x, gate, a, at = empty(1, IMAGES * side**2, n), floats(IMAGES, n), floats(1, n), f"{n} channels, side {side}"
        yield f"scale_shift, {at}", 4, n, partial(rows_triton.scale_shift, x, a, a, silu)
        yield f"gradient_sums, {at}", 4, n, partial(rows_triton.gradient_sums, x, x, a, a, silu)
        yield f"norm_gradient, {at}", 6, n, partial(rows_triton.norm_gradient, x, x, a, a, a, a, a, silu)
        yield f"image_means, {at}", 2, n, partial(gate_triton.image_means, x, a, a, silu, IMAGES)
        yield f"gated, {at}", 4, n, partial(gate_triton.gated, x, a, a, silu, gate)
        yield f"gate_sums, {at}", 4, n, partial(gate_triton.gate_sums, x, x, a, a, a, silu, IMAGES)
        gated_gradient = partial(gate_triton.gated_gradient, x, x, a, a, silu, gate, gate, (a, a, a))
        yield f"gated_gradient, {at}", 6, n, gated_gradient
    for c, n, side in EXPANSIONS:
        rows, at = IMAGES * side**2, f"{c} to {n} channels, side {side}"
        x, dy, w, a = empty(1, rows, c), empty(1, rows, n), empty(n, c), floats(1, n)
        back = WidenedGradient(floats(n, c), empty(1, n, c), empty(1, c, c), floats(1, c))
        yield f"expanded, {at}", 2, n, partial(expand_triton.expanded, x, w, a, a, silu)
        yield f"expansion_sums, {at}", 2, n, partial(expand_triton.expansion_sums, dy, x, w, a, a, silu)
        gradient = partial(expand_triton.expansion_gradient, dy, x, w, a, a, silu, back)
        yield f"expansion_gradient, {at}", 2, n, gradient


def empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def floats(*shape: int) -> Tensor:
    return torch.empty(shape)


def compiled(launch: Launch) -> tuple[Code, float]:
    """What a kernel is compiled to, and how many numbers a thread computes by those instructions."""
    kernel = launch.function.preload(launch.data)
    described = json.loads(launch.data)
    names = launch.function.arg_names
    constants = {
        names[key[0]]: value for key, value in zip(described["constant_keys"], described["constant_vals"], strict=True)
    }
    rows, columns = constants.get("BR") or constants["BM"], constants.get("BC") or constants["BN"]
    threads, columns_of_all = kernel.metadata.num_warps * 32, -(-launch.channels // columns) * columns
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage, text = (
            subprocess.run([TOOL, word, file.name], capture_output=True, text=True, check=True).stdout
            for word in ("--dump-resource-usage", "-sass")
        )
    registers = int(re.findall(r"REG:(\d+)", usage)[0])
    programs = min(65536 // (registers * threads), (227 << 10) // max(1, kernel.metadata.shared))
    body = largest_loop(text) if launch.function.__name__ != "product_act_program" else 0  # once for few channels
    count = body or len(instructions(text))
    spills = len(re.findall(r"\b(?:STL|LDL)\b", text))
    numbers = rows * columns / threads
    idle = columns_of_all / launch.channels if "BN" in constants else 1.0
    return Code(count, spills, registers, programs), numbers / idle


def instructions(text: str) -> list[tuple[int, str]]:
    """Address and text of each instruction."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)
    return [(int(address, 16), each) for address, each in found if not each.startswith("NOP")]


def largest_loop(text: str) -> int:
    """How many instructions the longest way back is over."""
    code = instructions(text)
    index = {address: place for place, (address, _) in enumerate(code)}
    longest = 0
    for place, (_, each) in enumerate(code):
        goal = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", each)
        begin = index.get(int(goal[1], 16)) if goal else None
        if begin is not None and begin < place:
            longest = max(longest, place - begin + 1)
    return longest


def main() -> None:
    found = list(launches())
    triton.knobs.runtime.jit_cache_hook = None
    print(
        "| kernel | instructions a number | memory allows | registers | spills | programs |\n|---|---|---|---|---|---|"
    )
    for launch in found:
        code, numbers = compiled(launch)
        print(
            f"| {launch.label} | {code.instructions / numbers:.1f} | {launch.bytes * PER_BYTE:.0f} |"
            f" {code.registers} | {code.spills} | {code.programs} |"
        )


if __name__ == "__main__":
    main()
