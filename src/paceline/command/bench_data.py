"""paceline bench data: measures what limits the way from files to the device on this machine, and what would help."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.command.tables import show_rows
from paceline.data.index.scan import open_index
from paceline.data.inspect.advice import GPU_DECODER, PACK, SMALLER_PACK, Remedy, more_threads, remedies
from paceline.data.pack import libjpeg
from paceline.data.pack.transcode import LossyPreset
from paceline.errors import SpecError
from paceline.job import Job, make_job, read_words
from paceline.progress import Progress, progress_bar
from paceline.record import json_text
from paceline.settings.data import Files
from paceline.sink.console import console

if TYPE_CHECKING:
    from paceline.data.inspect.measure import Rates, Sample

AS_IT_IS = "as it is"
ROUNDS = 5
"""How many times each rate is measured at most, in turn with the others."""
BUDGET = 30.0
"""Seconds that everything may take on any machine, while a measurement takes up to one: rounds that do not fit are left
out, but for the first."""
_WORTH = 1.1
"""A remedy with a smaller gain is not mentioned."""
_PRESETS = {PACK: None, SMALLER_PACK: LossyPreset()}


def run(
    recipe: str | None, words: list[str], data: Path | None, page: str | None, device: str | None, images: int,
    seconds: float, as_json: bool,
) -> None:  # fmt: skip
    """Measure a sample of the training images, and print one table and one sentence."""
    name, words = read_words(recipe, words)
    job = make_job(name, words, data, page, None, device)
    if not isinstance(job.plan.data, Files):
        raise SpecError(f"{name} trains on {job.plan.data.name}, which is not in files; write data=images after it")
    load = os.getloadavg()[0]
    with progress_bar() as progress:
        facts = _measure(job, images, seconds, progress) | {"load_before": load, "cores": job.machine.cores}
    facts["sentence"] = sentence(facts)
    if as_json:
        print(json_text(facts, indent=1))
        return
    show_rows([_row(rates, facts) for rates in facts["rates"]], as_json=False)
    console().print(
        f"\nImages a second of {facts['images']:,} images, which were read once before (warm cache); read, decode and "
        f"whole each include what stands before them. Each is the best of {facts['rounds']}."
        f"{busy_warning(load, job.machine.cores)}\n{facts['sentence']}",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def busy_warning(load: float, cores: int) -> str:
    """A warning where the machine had other work before this began; else nothing."""
    warning = f" The machine was busy with other work (load {load:.1f} on {cores} cores), so all of this is too low."
    return warning if load > cores / 4 else ""


def thread_counts(cores: int, threads: int) -> list[int]:
    """The thread counts to measure: one, half and all of the cores of one replica, and the one that a run would use."""
    doubled = [1 << power for power in range(cores.bit_length())]
    return sorted({1, *doubled[-2:], cores, threads})


def _measure(job: Job, images: int, seconds: float, progress: Progress) -> dict[str, Any]:
    import torch

    from paceline.data.inspect.measure import Sample, loader_rate, transfer_rate
    from paceline.training.session import open_session

    plan = job.plan
    assert isinstance(plan.data, Files)
    assert job.data_folder is not None
    threads = plan.placement.loader_workers
    deadline = time.monotonic() + BUDGET * max(1.0, seconds)
    progress("measuring", 0, ROUNDS)
    index = open_index(plan.data, job.data_folder)
    possible = remedies(plan, index.training, job.machine.cores)
    transfer, on_gpu = None, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, open_session(plan, Path(folder, "run")):
        sample = Sample.of(plan, index, images, Path(folder, "sample"))
        counts = thread_counts(max(1, job.machine.cores // plan.replicas), threads)
        cases = [(AS_IT_IS, sample, count) for count in counts]
        for remedy, preset in _PRESETS.items():
            if remedy in possible and (preset is not None or libjpeg.available()):
                packed = sample.packed(Path(folder, str(len(cases))), preset, progress=progress)
                cases.append((remedy.name, packed, threads))
        if plan.placement.device == "cuda":
            device = torch.device("cuda")
            transfer = transfer_rate(plan, device, seconds)
            if GPU_DECODER in possible or plan.placement.decoder == "gpu":
                rate = loader_rate(sample, threads, seconds, device, "gpu")
                alone = {"images": GPU_DECODER.name, "threads": threads, "read": None, "decode": None}
                on_gpu = [alone | {"whole": rate, "limit": None}]
        rounds, rates = _measure_in_turn(cases, seconds, deadline, progress)
        rates += on_gpu
    return {
        "recipe": job.name,
        "folder": str(job.data_folder),
        "format": index.kind,
        "images": sample.images,
        "warm_cache": True,
        "rounds": rounds,
        "threads": threads,
        "side": plan.facts.side,
        "rates": rates,
        "transfer": transfer,
        "limit": _limit(rates, threads, transfer),
        "remedies": gains(rates, threads),
    }


def _measure_in_turn(
    cases: list[tuple[str, Sample, int]], seconds: float, deadline: float, progress: Progress
) -> tuple[int, list[dict[str, Any]]]:
    """The best of a few rounds of each case, and how many rounds there were; other work disturbs all cases alike."""
    from paceline.data.inspect.measure import best_rates, measure_rates

    measured: list[list[Rates]] = [[] for _ in cases]
    done, took = 0, 0.0
    while done < ROUNDS and (not done or time.monotonic() + took <= deadline):
        began = time.monotonic()
        for index, (_, sample, threads) in enumerate(cases):
            progress("measuring", done * len(cases) + index, ROUNDS * len(cases))
            measured[index].append(measure_rates(sample, threads, seconds / ROUNDS))
        done, took = done + 1, time.monotonic() - began
    progress("measuring", done * len(cases), done * len(cases))
    best = [(name, best_rates(rates)) for (name, _, _), rates in zip(cases, measured, strict=True)]
    return done, [{"images": name, **asdict(rates), "limit": rates.limit} for name, rates in best]


def _present(rates: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    """What a run would get now."""
    return next(row for row in rates if row["images"] == AS_IT_IS and row["threads"] == threads)


def _limit(rates: list[dict[str, Any]], threads: int, transfer: float | None) -> str:
    now = _present(rates, threads)
    return "transfer" if transfer is not None and transfer < now["whole"] else str(now["limit"])


def gains(rates: list[dict[str, Any]], threads: int) -> list[dict[str, Any]]:
    """How many times as fast each remedy was as the images are now."""
    now = _present(rates, threads)
    by_name = {remedy.name: remedy for remedy in (PACK, SMALLER_PACK, GPU_DECODER)}
    measured: list[tuple[Remedy, dict[str, Any]]] = [
        (by_name[row["images"]], row) for row in rates if row["images"] in by_name
    ]
    best = max((row for row in rates if row["images"] == AS_IT_IS), key=lambda row: row["whole"])
    if best["threads"] != threads:
        measured.insert(0, (more_threads(best["threads"]), best))
    return [
        {
            "remedy": remedy.name,
            "images_per_second": row["whole"],
            "times": row["whole"] / now["whole"],
            "write": remedy.write,
        }
        for remedy, row in measured
    ]


def sentence(facts: dict[str, Any]) -> str:
    """What limits the loader, and what would be worth doing about it."""
    worth = [
        f"{Remedy(row['remedy'], row['write'])} would give {row['times']:.1f}x"
        for row in facts["remedies"]
        if row["times"] >= _WORTH
    ]
    now = _present(facts["rates"], facts["threads"])["whole"]
    rate = f"{now:,.0f} images/s on {facts['threads']} {'thread' if facts['threads'] == 1 else 'threads'}"
    if facts["limit"] == "transfer":  # which nothing here makes faster
        rate, worth = f"{facts['transfer']:,.0f} images/s", []
    return f"{facts['limit']} limits: {rate}; {', '.join(worth) or 'nothing that was measured would give more'}"


def _row(rates: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    row: dict[str, Any] = {"images": rates["images"], "threads": rates["threads"]}
    for key in ("read", "decode", "whole"):
        row[key] = "-" if rates[key] is None else round(rates[key])
    if facts["transfer"] is not None:
        row["transfer"] = round(facts["transfer"])
    now = _present(facts["rates"], facts["threads"])["whole"]
    return row | {"times": f"{rates['whole'] / now:.2f}x", "limit": rates["limit"] or "-"}
