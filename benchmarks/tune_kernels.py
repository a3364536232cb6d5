"""Finds the fastest tiles of the matrix kernels on this device, and writes them where Paceline reads them.

Each kernel is timed for the shapes of a ResNet-50 and a ResNeXt-50 at 224 pixels. Candidates are compiled by several
processes first, then timed one by one; the median of several calls counts.

    python benchmarks/tune_kernels.py --batch 512 --jobs 14
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from paceline.model.kernels import gram_triton, tiles
from paceline.model.kernels.gram import WidenedGradient
from paceline.model.kernels.tiles import Tile

PAGE = Path(tiles.__file__).with_name("tiles.json")
PRODUCTS = [
    Tile(*row)
    for row in (
        (128, 64, 64, 4, 3), (128, 64, 64, 4, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (64, 128, 64, 4, 3),
        (64, 128, 64, 4, 4), (128, 256, 64, 8, 3), (64, 256, 64, 4, 3), (64, 64, 64, 4, 4), (64, 128, 64, 8, 3),
    )
]  # fmt: skip
STREAMED = ("product_norm", "product_moments", "input_gradient_masked", "input_gradient_added")
"""Kernels that can have all inner columns in a tile; up to MOST of them pay."""
MOST = 256
STREAMS = [
    (32, 64, 4, 3, 4),
    (32, 64, 4, 3, 3),
    (32, 64, 4, 3, 2),
    (32, 128, 4, 3, 2),
    (64, 64, 4, 3, 3),
    (64, 128, 8, 3, 2),
]
"""Rows, columns, warps, stages and programs of such tiles."""
SCATTERS = [Tile(rows, 0, 0, warps, 3) for rows, warps in ((32, 4), (64, 4), (128, 4), (64, 8), (128, 8))]
Case = tuple[str, int, int, int]
"""A kernel, its columns, its inner columns and its rows."""


def cases(batch: int, networks: int = 2) -> list[Case]:
    """Every kernel and shape of a step of the first so many networks."""
    found: dict[tuple[str, int, int], int] = {}
    for widths in ((64, 128, 256, 512), (128, 256, 512, 1024))[:networks]:
        inputs = 64
        for stage, width in enumerate(widths):
            outputs, side = 256 << stage, 56 >> stage
            out, into = batch * side * side, batch * (side * 2) ** 2 if stage else batch * side * side
            for first, source, rows in ((True, inputs, into), (False, outputs, out)):
                found.setdefault(("product_moments", width, source), rows)
                found.setdefault(("input_gradient_added", source, width), rows)
                if first:
                    found.setdefault(("product_norm_projected", outputs, width), out)
                    found.setdefault(("input_gradient", source, outputs), out)
            found.setdefault(("product_norm", outputs, width), out)
            found.setdefault(("input_gradient_masked", width, outputs), out)
            if width <= gram_triton.WIDEST:
                found.setdefault(("relu_scatter", width, 0), out)
            inputs = outputs
    return [(*key, rows) for key, rows in found.items()]


def candidates(case: Case) -> list[Tile]:
    """The tiles worth a try for a case."""
    kernel, columns, inner, _ = case
    if kernel == "relu_scatter":
        return SCATTERS
    streams = STREAMS if kernel in STREAMED and inner <= MOST else []
    tiles = PRODUCTS + [Tile(rows, width, inner, *rest) for rows, width, *rest in streams]
    return [t for t in tiles if columns % t.columns == 0]


def call(case: Case) -> Callable[[], Any]:
    """The operation of a case, on random numbers."""
    kernel, n, k, rows = case

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)

    wide = torch.float32
    match kernel:
        case "product_moments":
            x, w = make(1, rows, k), make(n, k)
            return lambda: gram_triton.product_moments(x, w)
        case "input_gradient_added":
            d, w, added, x = make(1, rows, k), make(k, n), make(1, rows, n), make(1, rows, n)
            return lambda: gram_triton.input_gradient_added(d, w, added, x, 56)
        case "product_norm":
            a, w, s, r = make(1, rows, k), make(n, k), make(1, n, dtype=wide), make(1, rows, n)
            return lambda: gram_triton.product_norm(a, w, s, s, r)
        case "product_norm_projected":
            inputs = 64 if n == 256 else n // 2
            a, w, s, x = make(1, rows, k), make(n, k), make(1, n, dtype=wide), make(1, rows, inputs)
            v = make(1, n, inputs)
            return lambda: gram_triton.product_norm_projected(a, w, s, s, x, v)
        case "input_gradient" | "input_gradient_masked":
            d, a = make(1, rows, k), make(1, rows, n)
            g = WidenedGradient(d, make(1, k, n), make(1, n, n), make(1, n, dtype=wide))
            if kernel == "input_gradient":
                return lambda: gram_triton.input_gradient(d, a, g)
            x = make(1, rows, n)
            return lambda: gram_triton.input_gradient_masked(d, a, g, x)
        case _:
            x, s = make(1, rows, n), make(1, n, dtype=wide)
            return lambda: gram_triton.relu_scatter(x, s, s)


def compile_all(jobs: list[tuple[Case, Tile]]) -> None:
    """Compile kernels into Triton's cache; what does not compile is left out later, too."""
    for case, tile in jobs:
        use(tile)
        try:
            call((*case[:3], 1024))()  # rows do not change the code, as long as the same powers of two divide them
        except Exception as fault:  # noqa: BLE001 - too much shared memory, say
            print(case, tile, str(fault).partition("\n")[0][:80], flush=True)
    torch.cuda.synchronize()


def use(tile: Tile) -> None:
    """Let the kernels take this tile, whatever the shape."""
    gram_triton.tile = lambda *_: tile  # type: ignore[attr-defined]


def time_of(function: Callable[[], Any]) -> float:
    """Milliseconds of a call on the device."""
    for _ in range(2):
        function()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 4)
    return float(sorted(times)[2])


def best_tiles(batch: int, networks: int) -> Iterator[tuple[Case, Tile, float]]:
    """For each case the fastest tile and its time."""
    for case in cases(batch, networks):
        function, times = call(case), {}
        for tile in candidates(case):
            use(tile)
            try:
                times[tile] = time_of(function)
            except Exception:  # noqa: BLE001 - as above
                times[tile] = float("inf")
        tile = min(times, key=lambda tile: times[tile])
        yield case, tile, times[tile]
        del function
        torch.cuda.empty_cache()


def write(found: dict[str, Tile]) -> None:
    """Put these tiles in the place of the file's own of the same name."""
    rows = json.loads(PAGE.read_text()) | {name: list(tile) for name, tile in found.items()}
    lines = ",\n".join(f'  "{name}": {numbers}' for name, numbers in sorted(rows.items()))
    PAGE.write_text(f"{{\n{lines}\n}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--networks", type=int, default=2, help="1: ResNet-50 only")
    options = parser.parse_args()
    jobs = [(case, tile) for case in cases(options.batch, options.networks) for tile in candidates(case)]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        list(pool.map(compile_all, [jobs[i :: options.jobs] for i in range(options.jobs)]))
    found: dict[str, Tile] = {}
    for case, tile, time in best_tiles(options.batch, options.networks):
        found[" ".join(map(str, case[:3]))] = tile
        print(f"{case} {tuple(tile)} {time:.3f} ms", flush=True)
        write(found)


if __name__ == "__main__":
    main()
