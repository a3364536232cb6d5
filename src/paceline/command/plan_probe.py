"""paceline plan --probe: measures a few small steps here, chooses by them, and predicts what the run takes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.command.tables import show_facts, show_line, show_rows
from paceline.facts import Probe
from paceline.job import Asked, Job, make_job
from paceline.machine import check_torch_build
from paceline.memory import MARGIN, Demand, demand, room_of, size_text
from paceline.model.packages import check_packages
from paceline.planning import Plan
from paceline.probing import decided, is_open, store_probe
from paceline.progress import progress_bar
from paceline.record import json_text
from paceline.stages import percents
from paceline.visible import long_time, one_line

_COLUMNS = ("weights", "gradients", "optimizer", "kept")


def run(asked: Asked, page: str | None, replicas: int | None, device: str | None, as_json: bool) -> None:
    """Probe the device, and print what is chosen and predicted."""
    job = make_job(asked.name, asked.words, asked.data, page, replicas, device, look=False, choices=asked.choices)
    check_packages(job.plan.recipe)
    check_torch_build(job.plan.placement.device)
    from paceline.training.probe import take_probe

    with progress_bar() as progress:
        probe = take_probe(job.plan, job.machine, progress)
    kept_in = store_probe(job.plan, job.machine, probe)
    plan = decided(job.plan, job.asked, probe, job.machine, job.launch) if is_open(job.asked) else job.plan
    needs, notes = demand(plan, probe), _notes(plan, probe, kept_in)
    if as_json:
        print(json_text(_facts(job, plan, probe, needs) | {"notes": notes}, indent=1))
        return
    show_facts(_in_words(plan, probe, needs), as_json, title=f"{job.name}, probed on {probe.device}")
    print()
    show_rows([_line(row) for row in _rows(plan, probe, needs)], as_json)
    for number, note in enumerate(notes):
        show_line(("" if number else "\n") + one_line(f"note: {note}"))


def _facts(job: Job, plan: Plan, probe: Probe, needs: Demand) -> dict[str, Any]:
    """Everything as JSON has it, in bytes and seconds."""
    return {
        "recipe": job.name,
        "device": probe.device,
        "precision": plan.placement.precision,
        "micro_batch": plan.micro_batch,
        "micro_batch_from": plan.chosen_by,
        "rounds": plan.rounds,
        "recomputed": plan.recomputed,
        "splits": plan.splits,
        "stage_shares": plan.shares,
        "memory": plan.placement.memory,
        "margin": MARGIN,
        "room": room_of(plan, probe),
        "fits": needs.peak <= room_of(plan, probe),
        "peak_memory": needs.peak,
        "peak_memory_of_a_step": needs.step,
        "peak_memory_of_a_validation": needs.evaluation,
        "evaluated_at_a_time": plan.evaluation_batch,
        "seconds_per_step": needs.seconds,
        "images_per_second": plan.global_batch / needs.seconds,
        "seconds": plan.steps * needs.seconds,
        "blocks": _rows(plan, probe, needs),
        "probe": asdict(probe),
    }


def _in_words(plan: Plan, probe: Probe, needs: Demand) -> dict[str, Any]:
    """The same for people."""
    room = room_of(plan, probe)
    peaks = f"step {size_text(needs.step)}, validation of {plan.evaluation_batch:,} {size_text(needs.evaluation)}"
    each = max(probe.first.slope, probe.following.slope)
    more = "" if needs.peak <= room else ", more than that,"
    sizes = ", ".join(map(str, probe.sizes[:-1]))
    how = "counted" if probe.counted else "measured"
    return {
        "probed": f"micro-batches of {sizes} and {probe.sizes[-1]} images, {plan.placement.precision}",
        "micro-batch": f"{plan.micro_batch:,}, from {plan.chosen_by}; {plan.rounds:,} in a step",
        "recomputed": ", ".join(plan.recomputed) or "nothing",
        **({"stages": _stages(plan)} if plan.stages > 1 else {}),
        "memory": f"{size_text(room / (1 - MARGIN))}, of which {MARGIN:.0%} stay free: {size_text(room)}",
        "peak memory": f"{size_text(needs.peak)}{more} ({peaks})",
        "memory of an image": f"{each / 2**20:.2f} MiB, {how}; the smallest size is {probe.off:.1%} off that line",
        "images/s": f"{plan.global_batch / needs.seconds:,.0f}",
        "ms per step": f"{1000 * needs.seconds:,.2f}",
        "time": f"{long_time(plan.steps * needs.seconds)} for {plan.steps:,} steps, without validation and checkpoints",
    }


def _stages(plan: Plan) -> str:
    """Where the stages begin, and their shares of the time."""
    return f"{plan.stages}, begin at {', '.join(plan.splits)}, have {percents(plan.shares)} of the time"


def _rows(plan: Plan, probe: Probe, needs: Demand) -> list[dict[str, Any]]:
    """Where the memory is and the time goes: block by block for a micro-batch, and what is beside that."""
    size = plan.micro_batch
    rows: list[dict[str, Any]] = [
        {
            "block": block.name,
            "weights": block.weights,
            "gradients": block.gradients,
            "optimizer": block.optimizer,
            "kept": max(0.0, block.kept.at(size)),
            "forward_seconds": block.forward * size,
            "backward_seconds": block.backward * size,
        }
        for block in probe.blocks
    ]
    times = {key: sum(row[key] for row in rows) for key in ("forward_seconds", "backward_seconds")}
    there = {key: getattr(needs, key) for key in _COLUMNS}
    return [
        *rows,
        {"block": "there at the peak", **there, **times},
        {"block": "images", "kept": needs.inputs},
        {"block": "workspace", "kept": needs.workspace},
    ]


def _line(row: dict[str, Any]) -> dict[str, str]:
    """A row for people: MiB and milliseconds."""
    sizes = {f"{key} MiB": f"{row[key] / 2**20:,.1f}" if key in row else "" for key in _COLUMNS}
    times = {
        f"{part} ms": f"{1000 * row[f'{part}_seconds']:,.2f}" if f"{part}_seconds" in row else ""
        for part in ("forward", "backward")
    }
    return {"block": row["block"], **sizes, **times}


def _notes(plan: Plan, probe: Probe, kept_in: Path | None) -> list[str]:
    notes = []
    if probe.counted:
        notes.append(
            "memory is counted, tensor by tensor, and not measured: a CPU keeps no statistics of it, and takes more"
        )
    if plan.replicas > 1:
        notes.append(f"one of {plan.replicas} replicas was probed: time is without the exchange between them")
    if plan.stages > 1:
        notes.append("memory is that of the stage that takes the most, and time is without what stages send each other")
    if plan.recomputed:
        notes.append("what is recomputed was not measured so: memory and time follow from those of its blocks")
    if kept_in is None:
        notes.append("the probe could not be kept for runs, because Paceline's cache cannot be written")
    elif plan.chosen_by != "the placement":
        notes.append(f"runs on this machine take the same micro-batch from here on, by {kept_in}")
    return notes
