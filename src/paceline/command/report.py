"""paceline report: writes a page with the curves, mistakes and origins of runs, from their folders alone."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import SpecError
from paceline.record import REPORT
from paceline.reporting.page import PLOTLY, write_report
from paceline.reporting.results import RESULTS, write_results
from paceline.reporting.shown_run import read_run
from paceline.visible import one_line


def run(folders: list[Path], out: Path | None, data: Path | None) -> None:
    """Write the report of one run into its folder, or that of several into one file."""
    if out is None and len(folders) > 1:
        raise SpecError("a report of several runs goes to a file; write --out FILE.html")
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise SpecError(f"--out {out}: a report is an HTML file; write --out {out.with_suffix('.html')}")
    repeated = next((folder for index, folder in enumerate(folders) if folder in folders[:index]), None)
    if repeated is not None:
        raise SpecError(f"{repeated} is named twice; name each run once")
    path = out or folders[0] / REPORT
    names = [folder.resolve().name for folder in folders]
    if len({*names}) < len(names):
        names = [str(folder) for folder in folders]
    runs = [read_run(folder, data, name) for folder, name in zip(folders, names, strict=True)]
    write_report(runs, path, None if out is not None else folders[0] / PLOTLY)
    if out is None:
        write_results(runs[0], folders[0] / RESULTS)
    print(one_line(str(path)))
