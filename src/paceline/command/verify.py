"""paceline verify: the promise, proved on the user's own recipe and machine."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from paceline.data.index import locate
from paceline.errors import PlanError, SpecError
from paceline.job import Job, plan_job, read_recipe, read_words
from paceline.model import tables
from paceline.reconcile import fits, mixes
from paceline.record import json_text
from paceline.settings.augment import Augment
from paceline.settings.data import Center, Files, Made
from paceline.settings.placement import Placement
from paceline.settings.read import Tree
from paceline.settings.recipe import BatchNorm, Recipe
from paceline.sink.console import console

if TYPE_CHECKING:
    from paceline.training.trials import Outcome

LIMIT = 1e-12
"""What float64 trials may differ by."""
FIRST_LOSS_LIMIT = 1e-6
"""What the first loss of float32 trials may differ by; rounding grows in training, so later steps are only shown."""
PARTS = ("loss", "weights", "statistics")
"""What float64 trials are compared by."""
ENOUGH = 5
"""Fewer layouts prove too little."""


@dataclass(frozen=True)
class Layout:
    """One way to cut a step."""

    label: str
    replicas: int
    micro_batch: int
    recompute: tuple[str, ...] = ()


def run(recipe: str | None, words: list[str], data: Path | None, steps: int, full: bool, as_json: bool) -> int:
    """Run every layout and two resumes; the exit status is 0 when all of them are the same run."""
    name, words = read_words(recipe, words)
    if any(word.startswith("on.") for word in words):
        raise SpecError("verify chooses the placements itself; leave the on.* words out")
    settings, _ = read_recipe(name, words)
    data_settings, folder = locate.locate(settings.data, locate.given_folder(data))
    # What the end of a run averages is on disk: the proof is of what is trained.
    average = settings.average.model_copy(update={"last": None})
    settings = settings.model_copy(update={"data": data_settings, "average": average})
    _job(settings, Layout("whole", 1, settings.global_batch), "fp64")  # refuses what no layout could run
    settings, shrunk = (settings, []) if full else shrink(settings)
    steps = min(steps, _job(settings, Layout("whole", 1, settings.global_batch), "fp64").plan.steps)
    if steps < 2:
        raise PlanError("this recipe has one step, and what is killed after one needs another: write more epochs")
    layouts = choose_layouts(settings)
    if len(layouts) < ENOUGH:
        raise PlanError(
            f"this recipe allows only {len(layouts)} layouts, and a proof needs {ENOUGH}: nothing is proved"
        )
    say = console() if not as_json else None
    if say:
        say.print(
            f"[bold]{name}[/bold]: is it the same run on every layout, {steps} steps in float64 and float32?",
            soft_wrap=True,
        )
        for line in shrunk:
            say.print(f"shrunk: {line}")
    rows = [_lay(settings, layout) for layout in layouts]
    rows, resumed = _compare(settings, folder, layouts, rows, steps, say)
    verdict = judge(rows, resumed)
    if as_json:
        facts = {"recipe": name, "steps": steps, "shrunk": shrunk, "layouts": rows, "resumes": resumed}
        print(json_text({**facts, **verdict}, indent=1))
    else:
        _show(rows, resumed, verdict)
    return 0 if verdict["passed"] else 1


def shrink(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The smallest recipe with as many norm groups a step (at most two), where it is large; and what changed."""
    changes: dict[str, Any] = {}
    notes = []
    if recipe.global_batch > 128:
        norm = recipe.norm_batch or recipe.global_batch
        # Near 16: smaller groups would measure rounding, larger ones only take longer.
        block = recipe.mix.block if recipe.mix.active and norm % recipe.mix.block == 0 else 1
        # Without norm groups the blocks of mixing are what a step is cut between: four of them, for enough layouts.
        least = min(max(8, block if isinstance(recipe.norm, BatchNorm) else 4 * block), norm)
        near = min((d for d in range(least, norm + 1) if norm % d == 0 and d % block == 0), key=lambda d: abs(d - 16))
        batch = near if norm == recipe.global_batch else 2 * near
        changes |= {"global_batch": batch, "norm_batch": near}
        notes.append(f"global_batch {recipe.global_batch} -> {batch}, norm_batch {norm} -> {near}")
    small = max(32, tables.smallest_side(recipe.model))
    if isinstance(recipe.data, Made | Files) and recipe.data.side > small:
        other = {"name": "generated"} if isinstance(recipe.data, Made) else _smaller_evaluation(recipe.data, small)
        changes["data"] = recipe.data.model_copy(update={"side": small, **other})
        notes.append(f"image side {recipe.data.side} -> {small}")
        changes["augment"] = _shrunk(recipe.augment, small / recipe.data.side, tables.smallest_side(recipe.model))
    return recipe.model_copy(update=changes), notes


def _smaller_evaluation(data: Files, side: int) -> dict[str, Any]:
    """What is given in pixels of how validation images in files are evaluated."""
    how = data.evaluation
    if isinstance(how, Center) and how.short:
        how = Center(name="center", short=max(side, how.short * side // data.side))
    return {"evaluation_side": None, "evaluation": how}


def _shrunk(augment: Augment, share: float, least: int) -> Augment:
    """The same for what is given in pixels."""
    sides = {when: max(least, math.ceil(side * share)) for when, side in augment.side.items()}
    return augment.model_copy(update={"side": sides, "cutout": math.ceil(augment.cutout * share)})


def choose_layouts(recipe: Recipe) -> list[Layout]:
    """Layouts of every kind the recipe allows: whole, accumulated, ghost norm, 2 and 3 replicas, distributed norm."""
    G = recipe.global_batch  # noqa: N806 - the design's letter
    n = (recipe.norm_batch or G) if isinstance(recipe.norm, BatchNorm) else None
    piece = n if n is not None and n < G else G // 4 if n is None else G
    wanted = [
        Layout("whole", 1, G),
        Layout("accumulated", 1, piece),
        Layout("ghost norm, accumulated" if n else "accumulated in halves", 1, 2 * piece),
        Layout("2 replicas", 2, piece),
        Layout("3 replicas", 3, piece),
        Layout("recomputed", 1, piece, ("all",)),
    ]
    if n is not None:
        wanted += [Layout(f"distributed norm over {q}", q, n // q) for q in (2, 3, 4, 5) if n % q == 0]
        wanted += [Layout("distributed norm, 2 of 4", 4, n // 2)] if n % 2 == 0 else []
    else:
        wanted += [Layout(f"{R} replicas", R, m) for R, m in ((4, G // 4), (2, G // 2), (5, G // 5), (2, 1), (3, 1))]
    able: dict[tuple[Any, ...], Layout] = {}
    for layout in wanted:
        m = layout.micro_batch
        if 0 < m <= G and fits(G, n, layout.replicas, m) and mixes(recipe, m):
            able.setdefault((layout.replicas, m, layout.recompute), layout)
    return list(able.values())


def judge(rows: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether everything agrees, and the largest float64 difference seen."""
    exact = [row[part] for row in [*rows, *resumed] for part in PARTS]
    passed = (
        len(rows) >= ENOUGH
        and all(value <= LIMIT for value in exact)
        and all(row["float32_first_loss"] <= FIRST_LOSS_LIMIT for row in rows)
        and all(row["bitwise"] for row in resumed if row["same_layout"])
    )
    return {"passed": passed, "largest_difference": max(exact), "limit": LIMIT}


def _lay(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    plan = _job(recipe, layout, "fp64").plan
    norm = "-"
    if plan.norm_batch is not None:
        across = f"across {plan.norm_replicas} replicas" if plan.norm_replicas > 1 else f"{plan.norm_groups} in each"
        norm = f"{plan.norm_total} groups, {across}"
    return {
        "layout": layout.label,
        "replicas": layout.replicas,
        "micro_batch": layout.micro_batch,
        "rounds": plan.rounds,
        "norm": norm,
    }


def _job(recipe: Recipe, layout: Layout, precision: str) -> Job:
    placement = Placement.model_validate(
        {
            "device": "cpu",
            "replicas": layout.replicas,
            "micro_batch": layout.micro_batch,
            "recompute": layout.recompute,
            "precision": precision,
            "loader_workers": 2,  # trials are processes that may have none of their own
        }
    )
    return plan_job("verify", recipe, placement, None, Tree(), Tree())


def _compare(
    recipe: Recipe, data: Path | None, layouts: list[Layout], rows: list[dict[str, Any]], steps: int, say: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run all trials and fill in what they differ by from the first."""
    from paceline.training.trials import Trial, compare_outcomes

    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as work:

        def trial(label: str) -> Trial:
            folder = Path(work) / label
            folder.mkdir()
            if say:
                say.print(f"[dim]{label}[/dim]", end="\r" if say.is_terminal else "\n", soft_wrap=True)
            return Trial(folder, data, steps)

        first: dict[str, Outcome] = {}
        for layout, row in zip(layouts, rows, strict=True):
            for precision, start in (("fp64", ""), ("fp32", "float32_")):
                outcome = trial(f"{layout.label}, {precision}").finish(_job(recipe, layout, precision).plan)
                differences = compare_outcomes(first.setdefault(precision, outcome), outcome)
                row.update({start + part: value for part, value in differences.items()})
        resumed = []
        for other in (layouts[0], layouts[-1]):
            again = trial(f"killed on '{layouts[0].label}', resumed on '{other.label}'")
            killed_at = again.kill_after(_job(recipe, layouts[0], "fp64").plan, steps // 2)
            outcome = again.finish(_job(recipe, other, "fp64").plan)
            differences = compare_outcomes(first["fp64"], outcome)
            same = other == layouts[0]
            bitwise = max(differences.values()) == 0.0
            resumed.append(
                {
                    "resumed_on": other.label,
                    "killed_after_step": killed_at,
                    "same_layout": same,
                    "bitwise": bitwise,
                    **differences,
                }
            )
    return rows, resumed


def _show(rows: list[dict[str, Any]], resumed: list[dict[str, Any]], verdict: dict[str, Any]) -> None:
    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("layout", "replicas x micro-batch", "rounds", "norm groups"):
        table.add_column(column)
    for column in ("float64: loss", "weights", "statistics", "float32: first loss", "all losses", ""):
        table.add_column(column, justify="right")
    for row in rows:
        good = _worst(row) <= LIMIT and row["float32_first_loss"] <= FIRST_LOSS_LIMIT
        table.add_row(
            row["layout"], f"{row['replicas']} x {row['micro_batch']}", str(row["rounds"]), row["norm"],
            *(_small(row[part]) for part in (*PARTS, "float32_first_loss", "float32_loss")),
            _mark(good),
        )  # fmt: skip
    out.print(table)
    out.print()
    for row in resumed:
        good = row["bitwise"] if row["same_layout"] else _worst(row) <= LIMIT
        how = "bit for bit the same" if row["bitwise"] else f"differs by {_small(_worst(row))}"
        where = "the same layout" if row["same_layout"] else f"'{row['resumed_on']}'"
        out.print(
            f"killed after step {row['killed_after_step']}, resumed on {where}: {how} {_mark(good)}", soft_wrap=True
        )
    out.print(f"\n{_conclusion(rows, resumed, verdict)}", soft_wrap=True)


def _conclusion(rows: list[dict[str, Any]], resumed: list[dict[str, Any]], verdict: dict[str, Any]) -> str:
    worst = f"largest float64 difference {_small(verdict['largest_difference'])}, limit {LIMIT:.0e}"
    if verdict["passed"]:
        return f"[bold green]PASS[/bold green]: {len(rows)} layouts and {len(resumed)} resumes are one run; {worst}"
    return f"[bold red]FAIL[/bold red]: {len(rows)} layouts and {len(resumed)} resumes; {worst}"


def _worst(row: dict[str, Any]) -> float:
    return max(float(row[part]) for part in PARTS)


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _mark(good: bool) -> str:
    return "[green]pass[/green]" if good else "[red]FAIL[/red]"
