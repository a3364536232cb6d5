"""Takes a few steps of every shipped recipe, and prints how blocks are computed and whether CUDA graphs hold the steps.

Batches are shrunk; image sides, networks and all else stay. Recipes that begin with published weights begin with random
ones.

    python benchmarks/recorded_steps.py --jobs 8
    python benchmarks/recorded_steps.py cifar10/resnet20 nvidia/resnet50
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.command.verify_layouts import shrink
from paceline.job import read_recipe
from paceline.record import Row, rows_of
from paceline.settings import shipped

HEAD = "| recipe | network | steps recorded | blocks |\n|---|---|---|---|"
STEPS = 6
"""Three that record, for each shape of micro-batches, and three that replay."""


def words(name: str) -> list[str]:
    """The words that shrink a recipe's batch and let nobody load images."""
    recipe = read_recipe(name, [])[0]
    small = shrink(recipe, above=32)[0]
    added = ["data=synthetic", f"epochs={STEPS} steps", "report=1 steps", "evaluate.every=never"]
    if recipe.stop.patience or recipe.stop.target:
        added += ["stop=null"]
    if recipe.init.from_ is not None:
        added += ["init.from=null"]
    if small.global_batch != recipe.global_batch:
        added += [f"global_batch={small.global_batch}", f"norm_batch={small.norm_batch}"]
    return added


def taken(name: str, device: str) -> str:
    """The row of a recipe, after its steps."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        train = [sys.executable, "-m", "paceline", "train", name, *words(name), f"on.device={device}"]
        done = subprocess.run([*train, "--out", str(run)], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"| {name} | | failed: {(done.stderr.strip() or str(done.returncode)).splitlines()[-1]} | |"
        rows = rows_of(run)
    start = next(row for row in rows if row["kind"] == "start")
    forms = Counter(start["forms"].values())
    blocks = ", ".join(f"{count} {form}" for form, count in forms.most_common())
    return f"| {name} | {read_recipe(name, [])[0].model.name} | {_recorded(start, rows)} | {blocks} |"


def _recorded(start: Row, rows: list[Row]) -> str:
    notes = [row["text"] for row in rows if row["kind"] == "note" and "CUDA graph" in row["text"]]
    if not start["placement"]["graphs"]:
        return f"no: {start['placement']['device']}"
    return f"no: {notes[0].partition(': ')[2]}" if notes else "yes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; all of them if none is named")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=1, help="how many recipes at a time")
    options = parser.parse_args()
    print(HEAD, flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda name: taken(name, options.device), options.names or shipped.names("recipes")):
            print(row, flush=True)


if __name__ == "__main__":
    main()
