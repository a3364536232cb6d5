"""results.png: a picture of a run's curves, for who has matplotlib, and nothing for who has not."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from paceline.command import report
from paceline.record import Row
from paceline.reporting import results
from paceline.reporting.results import RESULTS, write_results
from paceline.reporting.shown_run import read_run
from runs_made import START, report_row, validation_of, write_run

installed = pytest.mark.skipif(not find_spec("matplotlib"), reason="matplotlib is not installed")


def drawn(folder: Path) -> tuple[int, int]:
    """The size of a run's picture."""
    write_results(read_run(folder), folder / RESULTS)
    with Image.open(folder / RESULTS) as image:
        assert image.format == "PNG"
        assert len(image.convert("L").getcolors() or ()) > 50  # something is drawn
        return image.size


@installed
def test_a_run_has_a_picture_of_its_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "mine")
    report.run([folder], None, None)
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert drawn(folder) == (1890, 555)


@installed
@pytest.mark.parametrize(
    "rows",
    [
        [START, report_row(1)],
        [START, report_row(1, loss=None), validation_of(1, 0.0, loss=None)],
        [START, *(report_row(step, loss=10.0**-step, lr=0.0) for step in range(1, 9))],
        [START, *(report_row(step) for step in range(1, 4000)), *(validation_of(step, 0.5) for step in range(1, 99))],
    ],
    ids=["one report", "no finite loss", "a loss of many sizes", "long"],
)
def test_every_record_can_be_drawn(tmp_path: Path, rows: list[Row]) -> None:
    width, _ = drawn(write_run(tmp_path / "mine", rows=rows))
    assert width >= 630 * 2


@installed
@pytest.mark.parametrize("name", ["cost $x_1$ of \\frac", "日本語", "a" * 200])
def test_a_name_is_drawn_as_it_is_and_warns_of_nothing(tmp_path: Path, name: str) -> None:
    drawn(write_run(tmp_path / name))


@installed
def test_before_the_first_report_there_is_nothing_to_draw(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "mine", rows=[START])
    write_results(read_run(folder), folder / RESULTS)
    assert not (folder / RESULTS).exists()


def test_without_matplotlib_there_is_no_picture_and_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "find_spec", lambda _name: None)
    folder = write_run(tmp_path / "mine")
    write_results(read_run(folder), folder / RESULTS)
    assert not (folder / RESULTS).exists()


def test_matplotlib_is_imported_by_who_draws_alone() -> None:
    program = "import sys, paceline.reporting.results; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
