"""paceline verify: the promise, proved on the user's own recipe and machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from paceline.command.verify_layouts import MOST_REPLICAS, Layout, choose_layouts, shrink
from paceline.data.index import locate
from paceline.data.load.class_weights import class_weights
from paceline.errors import PlanError, SpecError
from paceline.job import Job, plan_job, read_recipe, read_words
from paceline.machine import this_machine
from paceline.record import json_text
from paceline.settings.placement import Placement
from paceline.settings.read import Tree
from paceline.settings.recipe import Recipe
from paceline.sink.console import console

if TYPE_CHECKING:
    from paceline.training.lockstep import Differences, Lead
    from paceline.training.trials import Trial

LIMIT = 1e-12
"""What a float64 step from the first layout's state may differ by, times the amplification of each tensor."""
FIRST_LOSS_LIMIT = 1e-6
"""What the first loss of float32 trials may differ by, times its amplification; rounding grows in training, so later
steps are only shown."""
STEP_COLUMNS = ("step_inputs", "step_gradients", "step_norm_sums", "step_loss", "step_update")
"""What each float64 step is compared by."""
RUN_COLUMNS = ("loss", "weights", "statistics")
"""What whole float64 runs are compared by, which has no limit."""
NOTABLE = 1e3
"""A larger amplification is printed."""
ENOUGH = 5
"""Fewer layouts prove too little."""


def run(
    recipe: str | None,
    words: list[str],
    data: Path | None,
    steps: int,
    full: bool,
    as_json: bool,
    *,
    whole_runs: bool = True,
) -> int:
    """Run every layout and two resumes; the exit status is 0 when all of them are the same run."""
    name, words = read_words(recipe, words)
    if any(word.startswith("on.") for word in words):
        raise SpecError("verify chooses the placements itself; leave the on.* words out")
    settings, _ = read_recipe(name, words)
    data_settings, folder = locate.locate(settings.data, locate.given_folder(data))
    # What the end of a run averages is on disk: the proof is of what is trained.
    average = settings.average.model_copy(update={"last": None})
    settings = settings.model_copy(update={"data": data_settings, "average": average})
    whole = _job(settings, Layout("whole", 1, settings.global_batch), "fp64")  # refuses what no layout could run
    class_weights(whole.plan, folder)  # and names that no class has
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
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as work:
        trials = _Trials(Path(work), folder, steps, whole_runs, say)
        resumed, amplified = _compare(settings, layouts, rows, trials)
    verdict = judge(rows, resumed, amplified)
    if as_json:
        facts = {"recipe": name, "steps": steps, "shrunk": shrunk, "layouts": rows, "resumes": resumed}
        print(json_text({**facts, **verdict}, indent=1))
    else:
        _show(rows, resumed, verdict, whole_runs)
    return 0 if verdict["passed"] else 1


def judge(rows: list[dict[str, Any]], resumed: list[dict[str, Any]], amplified: dict[str, Any]) -> dict[str, Any]:
    """Whether everything agrees, the largest difference of a float64 step, and how much of it the recipe multiplied."""
    stepwise = [row for row in [*rows, *resumed] if not row.get("same_layout")]
    passed = (
        len(rows) >= ENOUGH
        and all(_steps_agree(row) for row in stepwise)
        and all(_first_loss_agrees(row, amplified) for row in rows)
        and all(row["bitwise"] for row in resumed if row["same_layout"])
    )
    largest = max(row["largest_difference"] for row in stepwise)
    return {"passed": passed, "largest_difference": largest, "limit": LIMIT, **amplified}


def _steps_agree(row: dict[str, Any]) -> bool:
    return all(row[column] <= LIMIT for column in STEP_COLUMNS)


def _first_loss_agrees(row: dict[str, Any], amplified: dict[str, Any]) -> bool:
    """Whether the first loss in float32 is that of the first layout, where it was run."""
    limit = FIRST_LOSS_LIMIT * float(amplified["first_loss_amplification"])
    return "float32_first_loss" not in row or float(row["float32_first_loss"]) <= limit


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
            "shard": layout.shard,
            "stages": layout.stages,
            "virtual_stages": layout.virtual_stages,
            "pipeline": layout.pipeline,
            "precision": precision,
            "cpu_threads": _threads(),
            "loader_workers": 2,  # trials are processes that may have none of their own
        }
    )
    job = plan_job("verify", recipe, placement, None, Tree(), Tree())
    # On a CPU a plan leaves state where it is; here the CPU plays the device, and pieces come and go all the same.
    settled = job.plan.placement.model_copy(update={"offload": layout.offload})
    return replace(job, plan=replace(job.plan, placement=settled))


@cache
def _threads() -> int:
    """As many for every layout, because their number changes rounding, and no more than there are cores for."""
    return max(1, this_machine().cores // MOST_REPLICAS)


def _compare(
    recipe: Recipe, layouts: list[Layout], rows: list[dict[str, Any]], trials: _Trials
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run all trials and fill in what they differ by from the first; gives the resumes and the amplification."""
    from paceline.training.lockstep import STEP_PARTS, Difference
    from paceline.training.trials import Outcome, compare_outcomes

    with trials.one(f"{layouts[0].label}, step by step", stays=True) as trial:
        lead = trial.lead(_job(recipe, layouts[0], "fp64").plan)
    first = {"fp64": Outcome(lead.losses, lead.tensors)}
    rows[0] |= _step_row(dict.fromkeys(STEP_PARTS, Difference()))
    rows[0] |= compare_outcomes(first["fp64"], first["fp64"]) if trials.whole_runs else {}
    for layout, row in zip(layouts, rows, strict=True):
        plan = _job(recipe, layout, "fp64").plan
        if layout != layouts[0]:
            with trials.one(f"{layout.label}, step by step") as trial:
                row.update(_step_row(trial.follow(plan, lead)))
        if layout != layouts[0] and trials.whole_runs:
            with trials.one(f"{layout.label}, fp64") as trial:
                row.update(compare_outcomes(first["fp64"], trial.finish(plan)))
        # Of float32 only the first loss is judged, which depends on how images are cut more than on who takes them.
        if trials.whole_runs or layout in (layouts[0], layouts[-1]):
            with trials.one(f"{layout.label}, fp32", steps=trials.steps if trials.whole_runs else 1) as trial:
                outcome = trial.finish(_job(recipe, layout, "fp32").plan)
            differences = compare_outcomes(first.setdefault("fp32", outcome), outcome)
            row.update({f"float32_{part}": value for part, value in differences.items()})
    with trials.one("rounding of float32") as trial:
        first_loss = trial.first_loss_amplification(_job(recipe, layouts[0], "fp32").plan)
    amplified = {"amplification": lead.amplification, "amplified": lead.amplified}
    return _resume(recipe, layouts, trials, lead), amplified | {"first_loss_amplification": first_loss}


def _resume(recipe: Recipe, layouts: list[Layout], trials: _Trials, lead: Lead) -> list[dict[str, Any]]:
    """Kill a run on the first layout, resume it there and on the last, and compare with the one that was not killed."""
    from paceline.training.trials import Outcome, compare_outcomes

    rows, first = [], layouts[0]
    with trials.one(f"killed on '{first.label}'") as killed:
        killed_at = killed.kill_after(_job(recipe, first, "fp64").plan, trials.steps // 2)
        for other in (first, layouts[-1]):
            plan, same = _job(recipe, other, "fp64").plan, other == first
            row: dict[str, Any] = {"resumed_on": other.label, "killed_after_step": killed_at, "same_layout": same}
            with trials.one(f"resumed on '{other.label}'", killed) as trial:
                row |= {} if same else _step_row(trial.follow(plan, lead))
                if same or trials.whole_runs:
                    row |= compare_outcomes(Outcome(lead.losses, lead.tensors), trial.finish(plan))
                    row["bitwise"] = max(float(row[column]) for column in RUN_COLUMNS) == 0.0
            rows.append(row)
    return rows


@dataclass(frozen=True)
class _Trials:
    """A folder in which one trial runs after another."""

    work: Path
    data: Path | None
    steps: int
    whole_runs: bool
    """Whether what has no limit is run too."""
    say: Any

    @contextmanager
    def one(
        self, label: str, earlier: Trial | None = None, *, steps: int | None = None, stays: bool = False
    ) -> Iterator[Trial]:
        """A trial with its own folder, which begins as an earlier one left it and is removed unless it stays."""
        from paceline.training.trials import Trial

        folder = self.work / label
        folder.mkdir()
        if earlier is not None:
            earlier.copy_to(folder)
        if self.say:
            self.say.print(f"[dim]{label}[/dim]", end="\r" if self.say.is_terminal else "\n", soft_wrap=True)
        yield Trial(folder, self.data, steps or self.steps)
        if not stays:
            shutil.rmtree(folder)


def _step_row(differences: Differences) -> dict[str, Any]:
    """What a layout's steps differ by, divided by what they may, and the largest difference as it is."""
    row: dict[str, Any] = {f"step_{part}": found.judged for part, found in differences.items()}
    worst = max(differences.values())
    return row | {"largest_difference": max(found.relative for found in differences.values()), "where": worst.where}


def _show(rows: list[dict[str, Any]], resumed: list[dict[str, Any]], verdict: dict[str, Any], whole_runs: bool) -> None:
    out = console()
    out.print("each step from the first layout's state, in float64; limit 1e-12, amplification taken out")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("layout", "replicas x micro-batch", "rounds", "norm groups"):
        table.add_column(column)
    for column in ("inputs", "gradients", "norm sums", "loss", "update", "float32: first loss", ""):
        table.add_column(column, justify="right")
    for row in rows:
        good = _steps_agree(row) and _first_loss_agrees(row, verdict)
        table.add_row(
            row["layout"], f"{row['replicas']} x {row['micro_batch']}", str(row["rounds"]), row["norm"],
            *(_small(row.get(column)) for column in (*STEP_COLUMNS, "float32_first_loss")),
            _mark(good),
        )  # fmt: skip
    out.print(table)
    if whole_runs:
        _show_whole_runs(rows, out)
    out.print()
    for row in resumed:
        out.print(_resume_line(row), soft_wrap=True)
    out.print(f"\n{_conclusion(rows, resumed, verdict)}", soft_wrap=True)


def _show_whole_runs(rows: list[dict[str, Any]], out: Console) -> None:
    out.print("\nthe whole run, over which rounding grows; no limit")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layout")
    for column in ("float64: loss", "weights", "statistics", "float32: loss"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(row["layout"], *(_small(row[column]) for column in (*RUN_COLUMNS, "float32_loss")))
    out.print(table)


def _resume_line(row: dict[str, Any]) -> str:
    killed = f"killed after step {row['killed_after_step']}, resumed on"
    how = ""
    if "bitwise" in row:
        whole = max(float(row[column]) for column in RUN_COLUMNS)
        how = "bit for bit the same" if row["bitwise"] else f"the whole run differs by {_small(whole)}"
    if row["same_layout"]:
        return f"{killed} the same layout: {how} {_mark(row['bitwise'])}"
    steps = f"steps differ by {_small(max(float(row[column]) for column in STEP_COLUMNS))}"
    return f"{killed} '{row['resumed_on']}': {', '.join(filter(None, (steps, how)))} {_mark(_steps_agree(row))}"


def _conclusion(rows: list[dict[str, Any]], resumed: list[dict[str, Any]], verdict: dict[str, Any]) -> str:
    lines = []
    if verdict["amplification"] > NOTABLE:
        lines.append(
            f"this recipe multiplies rounding by up to {verdict['amplification']:.1e} ({verdict['amplified']})"
        )
    count = f"{len(rows)} layouts and {len(resumed)} resumes"
    worst = f"largest difference of a step {_small(verdict['largest_difference'])}, amplification "
    worst += f"{verdict['amplification']:.2g}, limit {LIMIT:.0e} times amplification"
    if verdict["passed"]:
        return "\n".join([*lines, f"[bold green]PASS[/bold green]: {count} are one run; {worst}"])
    lines += [f"{row['layout']}: {row['where']}" for row in rows if not _steps_agree(row)]
    return "\n".join([*lines, f"[bold red]FAIL[/bold red]: {count}; {worst}"])


def _small(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def _mark(good: bool) -> str:
    return "[green]pass[/green]" if good else "[red]FAIL[/red]"
