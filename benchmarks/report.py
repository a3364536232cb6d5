"""Prints how long reports take to write and to open, and how large they are: python benchmarks/report.py.

Three runs of 10 classes and one of 1,000, made up on the spot. Opening is timed with playwright, if it is installed, in
the browser that PACELINE_BROWSER or the path names; without one, only writing is.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # which make up runs, too

from paceline.reporting.page import write_report
from paceline.reporting.shown_run import read_run
from runs_made import START, report_row, validation_of, write_answers, write_run

REPEATS = 5


def made_run(folder: Path, classes: int, seed: int) -> Path:
    """A run of 5,000 reports in which every class was mistaken for others."""
    rows = [START, *(report_row(step) for step in range(1, 5000)), validation_of(6, 0.5)]
    write_run(folder, f"data.classes={classes}", f"seed={seed}", rows=rows)
    names = [f"class {number:04d}" for number in range(classes)]
    write_answers(folder, names, [[truth * answer % 3 for answer in range(classes)] for truth in range(classes)])
    return folder


def seconds_to_open(path: Path, browser: str) -> float:
    """How long a new browser takes from asking for the page until every curve is drawn; the median of several."""
    from playwright.sync_api import sync_playwright

    times = []
    with sync_playwright() as player:
        for _ in range(REPEATS):
            opened = player.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            page = opened.new_page()
            start = time.perf_counter()
            page.goto(path.as_uri())
            page.wait_for_function(
                "[...document.querySelectorAll('.chart')].every(one => one.querySelector('.scatterlayer path'))"
            )
            times.append(time.perf_counter() - start)
            opened.close()
    return sorted(times)[REPEATS // 2]


def main() -> None:
    found = os.environ.get("PACELINE_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    browser = found if importlib.util.find_spec("playwright") else None
    with tempfile.TemporaryDirectory() as scratch:
        for name, count, classes in (("3 runs of 10 classes", 3, 10), ("a run of 1,000 classes", 1, 1000)):
            folders = [made_run(Path(scratch, f"{classes}-{seed}"), classes, seed) for seed in range(count)]
            out = Path(scratch, f"{classes}.html")
            wall, cpu = time.perf_counter(), time.process_time()
            write_report([read_run(folder) for folder in folders], out)
            written = f"written in {time.perf_counter() - wall:.2f} s ({time.process_time() - cpu:.2f} s of CPU)"
            opened = f", opened in {seconds_to_open(out, browser):.2f} s" if browser else ""
            print(f"{name}: {out.stat().st_size / 1e6:.2f} MB, {written}{opened}")


if __name__ == "__main__":
    main()
