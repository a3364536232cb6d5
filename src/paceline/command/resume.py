"""paceline resume: go on with a run from its newest whole checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline import spec
from paceline.command.job import Job, flag_words, plan_job, run_job
from paceline.data import index
from paceline.errors import SpecError
from paceline.placement import Placement
from paceline.record import stored_plan


def run(folder: Path, words: list[str], data: Path | None, replicas: int | None, device: str | None) -> int:
    """Go on; only on.* words may differ from the first start."""
    return run_job(stored_job(folder, [*words, *flag_words(replicas, device)], data), folder, sys.argv[1:])


def stored_job(folder: Path, words: list[str], data: Path | None) -> Job:
    """The job of a run folder, on its own placement with on.* words in place of what was asked before."""
    stored = stored_plan(folder)
    placed = spec.read(spec.dump(stored.placement), str(folder))
    for word in words:
        if not word.startswith("on."):
            raise SpecError(f"'{word}': a run keeps its recipe; only on.* words may change, such as on.micro_batch=64")
        spec.override(placed, word.removeprefix("on."), Placement)
    remembered = Path(stored.data_folder) if stored.data_folder else None
    where = remembered if data is None and remembered and remembered.is_dir() else index.given_folder(data)
    found, place = index.locate(stored.recipe.data, where)
    recipe = stored.recipe.model_copy(update={"data": found})
    return plan_job(str(folder), recipe, spec.build(Placement, placed), place, spec.Tree(), placed)
