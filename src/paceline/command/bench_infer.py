"""paceline bench infer: measures latency and speed of a network in evaluation on this machine, by batch size."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.command.bench_job import BenchJob, infer_job
from paceline.command.bench_result import (
    Result,
    changes_since,
    check_places,
    deliver,
    facts_of,
    ratio_of,
    read_result,
)
from paceline.command.bench_train import (
    against_lines,
    between,
    measured_how,
    memory,
    quiet_profiler,
    show_profile,
    show_remarks,
)
from paceline.command.tables import show_rows
from paceline.errors import SpecError
from paceline.job import prepare_folder
from paceline.settings.configurations import named
from paceline.settings.data import Made
from paceline.sink.console import console
from paceline.visible import plural
from paceline.worker import run_verb

_LARGEST = 65_536


def run(
    name: str | None, words: list[str], data: Path | None, page: str | None, replicas: int | None, device: str | None,
    which: str | None, batch: str | None, repeats: int, seconds: float, profile: Path | None, out: Path | None,
    against: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure each batch size, and print one table or one JSON object."""
    began = time.time()
    batches = read_batches(batch or usual_batches(name))
    job = infer_job(name, words, data, page, replicas, device, which)
    facts = facts_of("infer", job, words) | {"weights_of": str(job.run) if job.run else None}
    before = read_result(against, facts) if against is not None else None
    if before is not None:
        _check_batches(before, batches, against)
    check_places(out, profile)
    quiet_profiler()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        folder = Path(scratch, "run")
        prepare_folder(job.job, folder)
        measured = run_verb(
            "bench_infer", job.job, folder, began=began, run=str(job.run.absolute()) if job.run else None, which=which,
            batches=batches, repeats=repeats, seconds=seconds, loaded=data is not None,
            profile=str(profile.absolute()) if profile else None,
        )  # fmt: skip
    if not job.speaks:
        return
    result = facts | measured
    result["verdict"] = measured["loaded"]["verdict"] if measured["loaded"] else None
    if before is not None:
        result["against_batches"] = _compare(before, result, str(against))
    deliver(result, out, as_json)
    if not as_json:
        _show(job, result)


def usual_batches(name: str | None) -> str:
    """The batch of an older configuration of inference, or a few to compare."""
    older = named(name or "")
    return str(older[0].batch) if older and older[0].batch else "1,8,32,128"


def read_batches(text: str) -> list[int]:
    """The batch sizes of --batch, as they are written."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 9 and 0 < int(word) <= _LARGEST for word in words):
        raise SpecError(f"--batch {text}: expected sizes from 1 to {_LARGEST:,}, such as --batch 1,8,32,128")
    return list(dict.fromkeys(map(int, words)))


def _check_batches(before: Result, batches: list[int], against: Path | None) -> None:
    there = [row["batch"] for row in before.get("batches", [])]
    if not set(there) & set(batches):
        sizes = ",".join(map(str, there))
        raise SpecError(f"--against {against}: it has none of these batch sizes; write --batch {sizes}")


def _compare(before: Result, result: Result, file: str) -> list[dict[str, Any]]:
    """The ratios of every batch size that both have."""
    earlier = {row["batch"]: row for row in before["batches"]}
    changes = changes_since(before, result)
    return [
        {"batch": row["batch"], "file": file, **ratio_of(earlier[row["batch"]], row), "changes": changes}
        | {"latency_p50": row["latency_ms"]["p50"] / earlier[row["batch"]]["latency_ms"]["p50"]}
        for row in result["batches"]
        if row["batch"] in earlier
    ]


def _show(job: BenchJob, result: Result) -> None:
    plan, machine = job.job.plan, job.job.machine
    hardware = f" ({machine.accelerator})" if plan.placement.device == "cuda" and machine.accelerator else ""
    weights = "random weights" if job.run is None else f"weights of step {result['checkpoint']}"
    data = f"{plan.data.name} images" if isinstance(plan.data, Made) else f"images of {job.job.data_folder}"
    side = plan.facts.evaluation_side or plan.facts.side
    console().print(
        f"{job.job.name}: {weights}, {data}, {side} pixels, {plan.placement.precision} on {plan.replicas} x "
        f"{plan.placement.device}{hardware}", style="bold", markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    show_rows([_line(row) for row in result["batches"]], as_json=False)
    repeats = plural(result["batches"][0]["repeats"], "time")
    lines = [
        "",
        f"Latency in milliseconds: from 8-bit images in the host's memory to scores there, one batch alone, "
        f"{repeats} for the first size. Images/s: batches on the device, one after the other.",
        f"first batch {result['first_batch_seconds']:.1f} s after the command began"
        + (f"; peak memory {memory(result)}" if result["peak_memory"] else ""),
    ]
    if loaded := result["loaded"]:
        lines.append(
            f"with the loader, batches of {loaded['batch']:,}: "
            f"{between(loaded['images_per_second_spread'], '{:,.0f}')} images/s, "
            f"{loaded['waiting']:.1%} of the time waiting; {measured_how(loaded)}"
        )
    lines += [
        f"batch {row['batch']}: {against_lines(row)[0]}, {row['latency_p50']:.3f}x the latency"
        for row in result.get("against_batches", [])
    ]
    lines += against_lines(result["against_batches"][0])[1:] if "against_batches" in result else []
    console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    show_remarks(result)
    if result["profile"]:
        show_profile(result["profile"])


def _line(row: dict[str, Any]) -> dict[str, Any]:
    latency = {name: f"{value:,.2f}" for name, value in row["latency_ms"].items()}
    speed = between(row["images_per_second_spread"], "{:,.0f}") + ("" if row["steady"] else ", not steady")
    return {"batch": row["batch"], **latency, "images/s": speed}
