"""paceline plan: the whole arithmetic of a run, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

from paceline import spec
from paceline.command.job import make_job, read_words
from paceline.command.show import show_facts
from paceline.placement import Placement
from paceline.recipe import Recipe
from paceline.record import numbers_of


def run(
    recipe: str | None, words: list[str], data: Path | None, page: str | None, replicas: int | None, device: str | None,
    as_json: bool, as_yaml: bool, schema: bool,
) -> None:  # fmt: skip
    """Print the plan as a table, as JSON, or as the resolved settings with where each value came from."""
    if schema:
        print(json.dumps({"recipe": Recipe.model_json_schema(), "placement": Placement.model_json_schema()}, indent=1))
        return
    name, words = read_words(recipe, words)
    job = make_job(name, words, data, page, replicas, device, look=False)
    if as_yaml:
        print(f"recipe:\n{spec.dump(job.plan.recipe, job.written, '  ')}placement:")
        print(spec.dump(job.asked, job.placed, "  "), end="")
        return
    show_facts(numbers_of(job.plan), as_json, title=name)
