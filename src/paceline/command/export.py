"""paceline export: writes the network of a run as a file that other programs read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.command.tables import show_facts
from paceline.exporting.request import read_request
from paceline.progress import progress_bar
from paceline.training.selection import step_in_words

if TYPE_CHECKING:
    from paceline.exporting.folder import Exported


def run(
    folder: Path, to: str, out: Path | None, checkpoint: str | None, half: bool, images: list[str], data: Path | None,
    allow_difference: bool, as_json: bool,
) -> int:  # fmt: skip
    """Export, compare, and print what was measured."""
    request = read_request(folder, to, out, checkpoint, half, images, data)
    from paceline.exporting.folder import export_run

    with progress_bar() as progress:
        exported = export_run(request, allow_difference, progress)
    if as_json:
        facts = {"file": str(exported.file), "step": exported.step, **asdict(exported.comparison)}
        show_facts(facts, as_json)
    else:
        _show(exported, request.sample.about, folder)
    return 0


def _show(exported: Exported, about: str, folder: Path) -> None:
    result = exported.comparison
    facts = {
        "file": str(exported.file),
        "size": f"{exported.file.stat().st_size / 1e6:,.1f} MB",
        "network": step_in_words(folder, exported.step),
        "run by": result.by,
        "equal answers": f"{result.equal:,} of {result.images:,} {about}",
        "largest difference": f"{result.difference:.2g} (largest score {result.largest:.3g})",
        "time": f"{result.milliseconds:.2f} ms an image on the CPU",
        "model card": str(exported.folder / "README.md"),
    }
    show_facts(facts, as_json=False)
