"""A search among settings, as the page on own images prints it: a loop of runs that are watched and compared."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment, run_in
from folders_made import picture, put
from paceline.record import rows_of
from runs_made import write_run

PAGE = Path(__file__).parents[2] / "docs/own-images.md"
SMALL = "epochs=1 model=resnet8 data.side=16 global_batch=8 norm_batch=8 on.cpu_threads=1 --device cpu"


@pytest.mark.long
def test_the_loop_of_the_page_trains_compares_and_goes_on_where_it_was(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## Trying several settings")[2]
    block = section.split("```")[1]
    assert "epochs=10" in block
    for part in ("train", "val"):
        for name, color in (("cat", (200, 20, 20)), ("dog", (20, 200, 20))):
            put(tmp_path, *(f"photos/{part}/{name}/{n}.jpg" for n in range(8)), content=picture(color=color))
    shim = put(tmp_path, "bin/paceline", content=f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n'.encode())
    (shim / "bin/paceline").chmod(0o755)
    env = environment()
    script = f"set -e\nPATH={tmp_path}/bin:$PATH\n{block.replace('epochs=10', SMALL)}"
    names, ends = ("lr-0.01", "lr-0.03", "lr-0.1"), []
    for _ in range(2):
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        watched = re.findall(r"^(lr-\S+) +ended$", done.stdout, re.MULTILINE)
        assert watched == [*names]
        ends.append([rows_of(tmp_path / "runs" / name) for name in names])
    assert ends[0] == ends[1], "runs that have ended are left alone"
    page = (tmp_path / "search.html").read_text()
    assert all(text in page for text in (*names, "optimizer.lr"))


def test_two_runs_in_one_command_lead_to_the_report_of_both(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name) for name in ("one", "two"))
    done = run_in(tmp_path, "validate", one.name, two.name)
    assert done.returncode == 2
    assert done.stderr.endswith("; to compare runs write paceline report RUN RUN --out FILE.html\n")
