"""paceline bench train: measures how fast a recipe's steps are on this machine, and what limits them."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.command.bench_job import BenchJob, train_job
from paceline.command.bench_result import (
    Result,
    changes_since,
    check_places,
    deliver,
    facts_of,
    ratio_of,
    read_result,
)
from paceline.command.tables import show_facts, show_rows
from paceline.job import prepare_folder, read_words
from paceline.settings.data import Made
from paceline.sink.console import console
from paceline.stages import percents
from paceline.visible import long_time, plural
from paceline.worker import run_verb

_SHOWN = 15
"""Kernels of a profile that are printed; its files have all."""


def run(
    recipe: str | None, words: list[str], data: Path | None, page: str | None, replicas: int | None, device: str | None,
    steps: int | None, seconds: float, profile: Path | None, out: Path | None, against: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure the steps of a recipe, and print one table or one JSON object."""
    began = time.time()
    name, words = read_words(recipe, words)
    job = train_job(name, words, data, page, replicas, device)
    facts = facts_of("train", job, words)
    before = read_result(against, facts) if against is not None else None
    check_places(out, profile)
    quiet_profiler()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        folder = Path(scratch, "run")
        prepare_folder(job.job, folder)
        measured = run_verb(
            "bench_train", job.job, folder, began=began, steps=steps, seconds=seconds,
            profile=str(profile.absolute()) if profile else None,
        )  # fmt: skip
    if not job.speaks:
        return
    result = facts | measured | predicted(job, measured)
    if before is not None:
        result["against"] = {"file": str(against), **ratio_of(before, result), "changes": changes_since(before, result)}
    deliver(result, out, as_json)
    if not as_json:
        _show(job, result)


def quiet_profiler() -> None:
    """Keep torch's profiler, which is not loaded yet, from printing when it starts and stops."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def predicted(job: BenchJob, measured: Result) -> Result:
    """The time of all steps of the recipe, if their number is known."""
    seconds = None if job.steps is None else job.steps * measured["ms_per_step"] / 1000
    return {"recipe_epochs": job.epochs, "recipe_steps": job.steps, "predicted_seconds": seconds}


def _show(job: BenchJob, result: Result) -> None:
    plan, machine = job.job.plan, job.job.machine
    hardware = f" ({machine.accelerator})" if plan.placement.device == "cuda" and machine.accelerator else ""
    data = f"{plan.data.name} images" if isinstance(plan.data, Made) else f"{plan.data.name} in {job.job.data_folder}"
    where = f"{plan.placement.precision} on {plan.replicas} x {plan.placement.device}{hardware}"
    changed = ", changed" if any(not word.startswith("on.") for word in result["words"]) else ""
    show_facts(
        {
            "images/s": between(result["images_per_second_spread"], "{:,.0f}"),
            "ms per step": between(result["ms_per_step_spread"], "{:,.2f}"),
            "step": _step(job),
            "data": f"{data}, {plan.facts.side} pixels, {plan.facts.classes:,} classes",
            "measured": measured_how(result),
            "first step": f"{result['first_step_seconds']:.1f} s after the command began",
            "warm-up": f"{result['warm_up_seconds']:.1f} s of steps that do not count",
            "waiting": f"{result['waiting']:.1%} of the time for images",
            "peak memory": memory(result),
            "idle stages": _idle(result),
            "predicted": _prediction(job, result),
        },
        as_json=False,
        title=f"{job.job.name}{changed}: {where}",
    )
    show_remarks(result)
    if result["profile"]:
        show_profile(result["profile"])


def between(spread: dict[str, float], form: str) -> str:
    """A median, and the extremes around it."""
    return f"{form} ({form} to {form})".format(spread["median"], spread["least"], spread["most"])


def measured_how(result: Result) -> str:
    """How many blocks were measured, and whether they agree."""
    steady = "" if result["steady"] else "; not steady: no three blocks in a row agreed within 2 %"
    return f"median of {plural(result['blocks'], 'block')} of {plural(result['block_steps'], 'step')}{steady}"


def memory(result: Result) -> str | None:
    """The peak memory of a device for people."""
    if result["peak_memory"] is None:
        return None
    return f"{result['peak_memory'] / 2**30:.2f} GiB in tensors, {result['reserved_memory'] / 2**30:.2f} GiB reserved"


def show_remarks(result: Result) -> None:
    """Print the notes, the comparison and the verdict of a result below its table."""
    lines = [f"note: {note}" for note in result["notes"]]
    if "against" in result:
        lines += against_lines(result["against"])
    if result.get("verdict"):
        lines.append(f"verdict: {result['verdict']}")
    if lines:
        console().print("\n" + "\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def against_lines(against: dict[str, Any]) -> list[str]:
    """A comparison in words."""
    memory_ratio = f", {against['peak_memory']:.3f}x the memory" if against["peak_memory"] else ""
    doubt = "" if against["clear"] else "; blocks of the two overlap, so this may be no difference"
    lines = [f"against {against['file']}: {against['images_per_second']:.3f}x the images/s{memory_ratio}{doubt}"]
    return lines + ([f"  changed since: {'; '.join(against['changes'])}"] if against["changes"] else [])


def _step(job: BenchJob) -> str:
    plan = job.job.plan
    rounds = f"{plan.rounds} x {plan.micro_batch:,}" if plan.rounds > 1 else f"{plan.micro_batch:,}"
    each = f" on each of {plan.replicas} replicas" if plan.replicas > 1 else ""
    norm = f", norm batch {plan.norm_batch:,}" if plan.norm_batch else ""
    return f"{plan.global_batch:,} images: {rounds}{each}{norm}"


def _idle(result: Result) -> str | None:
    idle = result["idle_share"]
    if idle is None:
        return None
    return (
        f"{idle['measured']:.1%} of the time of a step's passes (by stage: {percents(idle['of_each'])}); "
        f"{idle['predicted']:.1%} predicted for stages of equal work"
    )


def _prediction(job: BenchJob, result: Result) -> str | None:
    if result["predicted_seconds"] is None:
        return None
    epochs = f"{job.epochs:g} {'epoch' if job.epochs == 1 else 'epochs'}"
    return (
        f"{long_time(result['predicted_seconds'])} for {epochs} of {job.job.plan.epoch_images:,} images, without "
        "validation and checkpoints"
    )


def show_profile(profile: dict[str, Any]) -> None:
    """Print where the files of a profile are, and the longest kernels."""
    print(
        f"\nprofile of {plural(profile['steps'], 'step')}, in {profile['folder']}: {', '.join(profile['files'])}"
        f"{'' if profile['memory_timeline'] else '; there is no timeline of memory on a CPU'}"
    )
    print(
        f"this device copies {profile['copy_bytes_per_second'] / 1e9:,.1f} GB/s (read and written) and multiplies "
        f"matrices at {profile['matrix_flops_per_second'] / 1e12:,.3g} TFLOP/s\n{profile['kernels_are']}:"
    )
    show_rows([_kernel_line(row) for row in profile["kernels"][:_SHOWN]], as_json=False)
    if profile["operators"]:
        print("\noperators whose arithmetic the profiler counts, with all that they call:")
        show_rows([_operator_line(row) for row in profile["operators"][:_SHOWN]], as_json=False)


def _kernel_line(row: dict[str, Any]) -> dict[str, Any]:
    line = {"name": _short(row["name"]), "calls": f"{row['calls_per_step']:g}", "ms": f"{row['ms_per_step']:.3f}"}
    line["share"] = f"{row['share']:.1%}"
    if "share_of_copy_speed" in row:
        share = row["share_of_copy_speed"]
        line["of copy speed"] = "-" if share is None else f"{share:.0%}"
    return line


def _operator_line(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": _short(row["name"]),
        "calls": f"{row['calls_per_step']:g}",
        "ms": f"{row['ms_per_step']:.3f}",
        "TFLOP/s": f"{row['flops_per_second'] / 1e12:.3g}",
        "of matrix peak": f"{row['share_of_matrix_peak']:.0%}",
    }


def _short(name: str, most: int = 90) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."
