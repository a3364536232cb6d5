"""Verifies every shipped recipe on generated images, two steps each, and fills the table of docs/results/verify.md.

Recipes that are in the table already are skipped, and the table is written after each one, so the script can be stopped
and started again. Remove a row to have its recipe verified anew. A recipe that could not be verified is told and left
out; the others go on.

    python benchmarks/verify_recipes.py
    python benchmarks/verify_recipes.py --jobs 8 nvcnn/vgg16 timm/resnet50-a3
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from paceline.command.verify_layouts import MOST_REPLICAS, shrink
from paceline.job import read_recipe
from paceline.model import tables
from paceline.settings import shipped
from paceline.settings.data import Made, Shapes

PAGE = Path(__file__).parents[1] / "docs/results/verify.md"
HEAD = "| recipe | result | largest difference of a step | amplification |\n|---|---|---|---|\n"
STEPS = 2
LARGE_BATCH = 32
"""Global batches above it are shrunk."""
HUGE = 100_000_000
"""Networks with more parameters could fill the memory: one runs after the other, on images of 64 pixels, which leave
their parameters as they are, and in steps of three images, which at most three replicas can share."""
SECONDS = 3600
"""After which a recipe counts as hung."""


def words(name: str) -> list[str]:
    """The words that make a recipe small and let it draw its own images."""
    if isinstance(read_recipe(name, [])[0].data, Made | Shapes):
        return []
    added = ["data=generated", "data.images=256", "data.validation_images=8", "data.classes=10"]
    if read_recipe(name, [])[0].init.from_ is not None:
        added += ["init.from=null"]  # published weights need a package or the network
    if _parameters(name) > HUGE:
        return [*added, "data.side=64", "global_batch=3", "norm_batch=3"]
    recipe, _ = read_recipe(name, added)
    small, _ = shrink(recipe, above=LARGE_BATCH)
    if small.global_batch != recipe.global_batch:
        added += [f"global_batch={small.global_batch}", f"norm_batch={small.norm_batch}"]
    return added


def verified(name: str) -> str:
    """The row of a recipe."""
    options = ["--steps", str(STEPS), "--no-whole-runs", "--json"]
    command = [sys.executable, "-m", "paceline", "verify", name, *words(name), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if not done.stdout.startswith("{"):
        raise RuntimeError((done.stderr.strip() or f"status {done.returncode}").splitlines()[-1])
    found = json.loads(done.stdout)
    amplified = f"{found['amplification']:.2g}"
    if found["amplification"] > 1e3:
        amplified += f" ({found['amplified']})"
    result = "pass" if found["passed"] else "FAIL"
    return f"| {name} | {result} | {found['largest_difference']:.1e} | {amplified} |"


def read_rows() -> dict[str, str]:
    """The rows of the page, by recipe."""
    table = PAGE.read_text().partition(HEAD)[2].partition("\n\n")[0]
    return {line.split("|")[1].strip(): line for line in table.splitlines()}


def write_rows(rows: dict[str, str]) -> None:
    """Put these rows, by recipe, in the place of the page's own."""
    before, _, after = PAGE.read_text().partition(HEAD)
    rest = after[len(after.partition("\n\n")[0]) :].strip("\n")
    table = HEAD + "".join(rows[name] + "\n" for name in sorted(rows))
    PAGE.write_text(f"{before}{table}\n{rest}\n" if rest else before + table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; all of them if none is named")
    parser.add_argument("--jobs", type=int, default=1, help="how many recipes at a time")
    options = parser.parse_args()
    if HEAD not in PAGE.read_text():
        raise SystemExit(f"{PAGE} has no table to fill")
    missing = [name for name in options.names or shipped.names("recipes") if name not in read_rows()]
    missing.sort(key=_parameters, reverse=True)  # the longest first, so that none is left for the end
    huge = [name for name in missing if _parameters(name) > HUGE]
    lock, failed = Lock(), list[str]()

    def fill(names: list[str]) -> None:
        for name in names:
            begin = time.monotonic()
            try:
                row = verified(name)
            except (RuntimeError, subprocess.TimeoutExpired) as fault:
                print(f"{name}: {fault}", flush=True)
                failed.append(name)
                continue
            with lock:
                write_rows(read_rows() | {name: row})
                print(f"{row} {time.monotonic() - begin:.0f} s", flush=True)

    turns = itertools.count()
    with ThreadPoolExecutor(options.jobs, initializer=lambda: _take_cores(next(turns))) as pool:
        for _ in pool.map(fill, [huge, *([name] for name in missing if name not in huge)]):
            pass
    if failed:
        raise SystemExit(f"not verified: {', '.join(failed)}")


def _take_cores(turn: int) -> None:
    """Give this thread's commands so few neighboring cores that `verify` takes one thread for each process."""
    cores = sorted(os.sched_getaffinity(0))
    share = min(len(cores), 2 * MOST_REPLICAS - 1)
    os.sched_setaffinity(0, {cores[(turn + index) % len(cores)] for index in range(share)})


def _parameters(name: str) -> int:
    return tables.member(read_recipe(name, [])[0].model.name).parameters


if __name__ == "__main__":
    main()
