"""paceline plan: the whole arithmetic of a run, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.command import plan_probe
from paceline.command.notes import describe_found, index_of, notes_of, precision_notes
from paceline.command.tables import show_facts, show_line, show_rows
from paceline.data.index import locate
from paceline.data.load.class_weights import class_weights
from paceline.errors import SpecError
from paceline.job import Asked, Job, ask, make_job, read_placement
from paceline.launch import Launch
from paceline.model import tables
from paceline.model.sources import told
from paceline.planning import Plan
from paceline.reconcile import make_plan
from paceline.record import numbers_of
from paceline.settings.configurations import placement_of
from paceline.settings.data import Made, Shapes, likeness
from paceline.settings.model import External
from paceline.settings.placement import Placement
from paceline.settings.read import dump, flow
from paceline.settings.recipe import Recipe
from paceline.settings.types import Settings
from paceline.stages import part_name, percents
from paceline.visible import one_line


def run(
    recipe: str | None, words: list[str], data: Path | None, page: str | None, replicas: int | None, device: str | None,
    as_json: bool, as_yaml: bool, schema: bool, rehearsed: int | None = None, probes: bool = False,
) -> None:  # fmt: skip
    """Print the plan as a table, as JSON, or as the resolved settings with where each value came from."""
    if schema:
        print(json.dumps({"recipe": Recipe.model_json_schema(), "placement": Placement.model_json_schema()}, indent=1))
        return
    if as_yaml + (rehearsed is not None) + probes > 1:
        raise SpecError("--yaml prints settings, and --rehearse and --probe each run them; write one of them")
    if as_json and as_yaml:
        raise SpecError("--json and --yaml are two forms of one plan; write one of them")
    asked = ask(recipe, words, data)
    if rehearsed is not None:
        _rehearse(asked, page, replicas, device, rehearsed, as_json)
        return
    if probes:
        plan_probe.run(asked, page, replicas, device, as_json)
        return
    job = make_job(asked.name, asked.words, asked.data, page, replicas, device, look=False, choices=asked.choices)
    if as_yaml:
        print(f"recipe:\n{dump(job.plan.recipe, job.written, '  ')}placement:")
        print(dump(job.asked, job.placed, "  "), end="")
        return
    index = index_of(job)
    found = {"found": describe_found(index)} if index is not None else {}
    facts = {**_parts(job), **found, **numbers_of(job.plan), **_balance(job.plan)}
    notes = [*notes_of(job, index), *precision_notes(job)]
    if as_json:
        chosen = {"chosen": [choice._asdict() for choice in asked.choices]} if asked.choices else {}
        show_facts({**facts, **chosen, "notes": notes}, as_json)
        return
    changed = any(not word.startswith("on.") for word in asked.words)
    how = ", fitted" if asked.choices else ", changed" if changed else ""
    show_facts(facts, as_json, title=f"{asked.name}{how}")
    if asked.choices:
        print()
        show_rows([{"chosen": choice.word, "because": choice.reason} for choice in asked.choices], as_json)
    for number, note in enumerate(notes):
        show_line(one_line(f"note: {note}") if number else f"\n{one_line(f'note: {note}')}")


def _balance(plan: Plan) -> dict[str, str]:
    """Where the stages of a pipeline begin, and how much of the work each has, if that was not measured: it is counted,
    which takes torch a moment."""
    if plan.stages == 1 or plan.shares:
        return {}
    from paceline.model.cost import parts_of, stage_shares

    parts = parts_of(plan)
    of, shares = stage_shares(plan, parts)
    begin = ", ".join(blocks[0] for blocks in parts[1:])
    return {f"{part_name(plan)}s begin at": begin, f"{of} of each stage": percents(shares)}


def _rehearse(
    asked: Asked, page: str | None, replicas: int | None, device: str | None, rank: int, as_json: bool
) -> None:
    """Take one step as one of many replicas, and print what it sends and the memory that it takes."""
    placed, _ = read_placement(placement_of(asked.name) if page is None else page, asked.words, replicas, device)
    if placed.replicas == "auto":
        raise SpecError("--rehearse plays one of many replicas; write how many there are, as in on.replicas=256")
    # One process is here, whatever the number of replicas elsewhere; and what pixels show makes no difference.
    launch = Launch(0, placed.replicas, 0, 1, "", 0, store_is_there=False)
    job = make_job(asked.name, asked.words, asked.data, page, replicas, device, look=False, launch=launch)
    made = Made(name="synthetic", **likeness(job.plan.data))
    init = job.plan.recipe.init.model_copy(update={"from_": None})
    recipe = job.plan.recipe.model_copy(update={"data": made, "init": init})
    plan = make_plan(recipe, job.asked, job.machine, job.plan.network, launch)
    from paceline.training.rehearsal import rehearse

    found = rehearse(plan, rank)
    if as_json:
        show_facts(found, as_json)
        return
    collectives = found.pop("collectives")
    show_facts(found, as_json, title=f"replica {rank} of {plan.replicas}, one step")
    print()
    show_rows(collectives, as_json)


def _parts(job: Job) -> dict[str, Any]:
    """What is trained on what, in words."""
    recipe = job.plan.recipe
    return {
        "network": _network(job.plan),
        "data": _data(job),
        **_source(recipe),
        "optimizer": _kind(recipe.optimizer),
        "schedule": _kind(recipe.schedule),
        **_class_weights(job),
    }


def _network(plan: Plan) -> str:
    """Its name and settings, and its parameters; only a network that the tables do not know is built to count them."""
    recipe, written = plan.recipe, _kind(plan.recipe.model)
    if isinstance(recipe.model, External):
        return written
    count = tables.parameters(recipe.model, plan.facts, getattr(recipe.norm, "proxy", False))
    if count is None:
        from paceline.model.cost import count_parameters

        count = count_parameters(recipe, plan.facts)
    return f"{written}, {count:,} parameters"


def _data(job: Job) -> str:
    data = job.plan.data
    if isinstance(data, Shapes | Made):
        return f"{data.name}, drawn by Paceline"
    return f"{data.name} in {job.data_folder}" if job.data_folder else f"{data.name}, as published; not looked for"


def _source(recipe: Recipe) -> dict[str, str]:
    """Where the first weights come from, and what they were trained with."""
    if recipe.init.from_ is None:
        return {}
    values = [f"{key.partition('.')[2]} {_shown(value)}" for key, value in told(recipe).items() if value is not None]
    return {"first weights": recipe.init.from_, "trained with": ", ".join(values) or "not known"}


def _class_weights(job: Job) -> dict[str, str]:
    """The least and the largest weight of a class, where classes have some; they follow from the images."""
    asked = job.plan.recipe.loss.class_weights
    if asked == "none":
        return {}
    known = job.data_folder is not None or not locate.needs_files(job.plan.data)
    weights = class_weights(job.plan, job.data_folder) if known else None
    if not weights:
        return {"class weights": "as written" if isinstance(asked, dict) else asked}
    ends = [
        f"{weights[name]:.3g} ({name})"
        for name in (min(weights, key=weights.__getitem__), max(weights, key=weights.__getitem__))
    ]
    return {"class weights": f"{'balanced, ' if isinstance(asked, str) else ''}{' to '.join(ends)}"}


def _shown(value: Any) -> str:
    """A value with its numbers rounded, and one number for equal ones."""
    if isinstance(value, Settings):
        return _kind(value)
    if isinstance(value, tuple):
        return " ".join(dict.fromkeys(map(_shown, value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _kind(chosen: Settings) -> str:
    """The name of a kind, and those of its settings that are not its defaults."""
    values = json.loads(chosen.model_dump_json(exclude_defaults=True))
    return ", ".join([values.pop("name"), *(f"{key} {flow(value)}" for key, value in values.items())])
