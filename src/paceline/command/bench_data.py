"""paceline bench data: what limits the way from files to the device on this machine, and what would help, measured."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.command.data_pack import progress
from paceline.command.tables import show_rows
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag
from paceline.data.pack import libjpeg
from paceline.data.pack.shards import Tell
from paceline.data.pack.transcode import Smaller
from paceline.errors import SpecError
from paceline.job import Job, console, make_job, read_words
from paceline.record import json_text
from paceline.settings.data import Files

if TYPE_CHECKING:
    from paceline.data.inspect.measure import Rates, Sample

AS_IT_IS, PACK, PRESET, DEVICE = "as it is", "lossless pack", "pack --max-side 500 --quality 90", "on.decoder=gpu"
ROUNDS = 5
"""How many times each rate is measured at most, in turn with the others."""
BUDGET = 30.0
"""Seconds that everything may take on any machine, while a measurement takes up to one: rounds that do not fit are left
out, but for the first."""
_WORTH = 1.1
"""A remedy that gives less is not worth the sentence."""


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
    with progress() as tell:
        facts = _measured(job, images, seconds, tell) | {"load_before": load, "cores": job.machine.cores}
    facts["sentence"] = sentence(facts)
    if as_json:
        print(json_text(facts, indent=1))
        return
    show_rows([_row(rates, facts) for rates in facts["rates"]], as_json=False)
    console().print(
        f"\nImages a second of {facts['images']:,} images, which were read once before (warm cache); read, decode and "
        f"whole each include what stands before them. Each is the best of {facts['rounds']}."
        f"{busy(load, job.machine.cores)}\n{facts['sentence']}",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def busy(load: float, cores: int) -> str:
    """A warning where the machine had other work before this began."""
    other = f" The machine was busy with other work (load {load:.1f} on {cores} cores), so that all of this is too low."
    return other if load > cores / 4 else ""


def sweep(cores: int, threads: int) -> list[int]:
    """The thread counts to measure: one, half and all of the cores of one replica, and the one that a run would use."""
    doubled = [1 << power for power in range(cores.bit_length())]
    return sorted({1, *doubled[-2:], cores, threads})


def _measured(job: Job, images: int, seconds: float, tell: Tell) -> dict[str, Any]:
    import torch

    from paceline.data.inspect.measure import Sample, transfer_rate
    from paceline.training.session import open_session

    plan = job.plan
    assert isinstance(plan.data, Files)
    assert job.data_folder is not None
    threads = plan.placement.loader_workers
    ends = time.monotonic() + BUDGET * max(1.0, seconds)
    tell("measuring", 0, ROUNDS)
    index = open_index(plan.data, job.data_folder)
    transfer, on_device = None, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, open_session(plan, Path(folder, "run")):
        sample = Sample.of(plan, index, images, Path(folder, "sample"))
        counts = sweep(max(1, job.machine.cores // plan.replicas), threads)
        todo = [(AS_IT_IS, sample, count) for count in counts]
        for what, smaller in _presets(sample):
            todo.append((what, sample.packed(Path(folder, str(len(todo))), smaller, tell=tell), threads))
        if plan.placement.device == "cuda":
            device = torch.device("cuda")
            transfer = transfer_rate(plan, device, seconds)
            on_device = _on_device(sample, threads, seconds, device)
        rounds, rates = _in_turn(todo, seconds, ends, tell)
        rates += on_device
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
        "remedies": remedies(rates, threads),
    }


def _in_turn(
    todo: list[tuple[str, Sample, int]], seconds: float, ends: float, tell: Tell
) -> tuple[int, list[dict[str, Any]]]:
    """The best of a few rounds of each, and how many there were: what else the machine does falls on all alike."""
    from paceline.data.inspect.measure import best, measure

    found: list[list[Rates]] = [[] for _ in todo]
    done, took = 0, 0.0
    while done < ROUNDS and (not done or time.monotonic() + took <= ends):
        began = time.monotonic()
        for place, (_, sample, threads) in enumerate(todo):
            tell("measuring", done * len(todo) + place, ROUNDS * len(todo))
            found[place].append(measure(sample, threads, seconds / ROUNDS))
        done, took = done + 1, time.monotonic() - began
    tell("measuring", done * len(todo), done * len(todo))
    return done, [_named(what, best(rates)) for (what, _, _), rates in zip(todo, found, strict=True)]


def _named(what: str, rates: Rates) -> dict[str, Any]:
    return {
        "images": what, "threads": rates.threads, "read": rates.read, "decode": rates.decode, "whole": rates.whole,
        "limit": rates.limit,
    }  # fmt: skip


def _presets(sample: Sample) -> list[tuple[str, Smaller | None]]:
    """The packs that are worth a try: of images that are in tiles already, only a smaller one."""
    flags = sample.open()[0].table.rows["flags"]
    whole = np.count_nonzero((flags & (Flag.JPEG | Flag.TILED)) == Flag.JPEG)
    lossless = libjpeg.available() and whole > len(flags) / 4
    return [*([(PACK, None)] if lossless else []), (PRESET, Smaller())]


def _on_device(sample: Sample, threads: int, seconds: float, device: Any) -> list[dict[str, Any]]:
    """What decoding on the accelerator gives, where it can."""
    from paceline.data.inspect.check import has_torchvision
    from paceline.data.inspect.measure import loader_rate

    if not has_torchvision() or sample.plan.recipe.augment.python is not None:
        return []
    whole = loader_rate(sample, threads, seconds, device, "gpu")
    return [{"images": DEVICE, "threads": threads, "read": None, "decode": None, "whole": whole, "limit": None}]


def _as_placed(rates: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    """What a run would get now."""
    return next(row for row in rates if row["images"] == AS_IT_IS and row["threads"] == threads)


def _limit(rates: list[dict[str, Any]], threads: int, transfer: float | None) -> str:
    now = _as_placed(rates, threads)
    return "transfer" if transfer is not None and transfer < now["whole"] else str(now["limit"])


def remedies(rates: list[dict[str, Any]], threads: int) -> list[dict[str, Any]]:
    """What was measured beside the images as they are, and how many times as fast it was."""
    now = _as_placed(rates, threads)
    write = {
        PACK: "paceline data pack SOURCE OUT",
        PRESET: "paceline data pack SOURCE OUT --max-side 500 --quality 90",
        DEVICE: "on.decoder=gpu",
    }
    best = max((row for row in rates if row["images"] == AS_IT_IS), key=lambda row: row["whole"])
    others = [(row["images"], row, write[row["images"]]) for row in rates if row["images"] in write]
    if best["threads"] != threads:
        others.insert(0, ("threads", best, f"on.loader_workers={best['threads']}"))
    return [
        {"remedy": what, "images_per_second": row["whole"], "times": row["whole"] / now["whole"], "write": write}
        for what, row, write in others
    ]


def sentence(facts: dict[str, Any]) -> str:
    """The limit, and what would be worth doing about it."""
    said = {PACK: "a pack", PRESET: "a pack with --max-side 500 --quality 90"}
    worth = [
        f"{said.get(row['remedy'], row['write'])} would give {row['times']:.1f}x"
        for row in facts["remedies"]
        if row["times"] >= _WORTH
    ]
    now = _as_placed(facts["rates"], facts["threads"])["whole"]
    how = f"{now:,.0f} images/s on {facts['threads']} {'thread' if facts['threads'] == 1 else 'threads'}"
    if facts["limit"] == "transfer":  # which nothing here makes faster
        how, worth = f"{facts['transfer']:,.0f} images/s", []
    return f"{facts['limit']} limits: {how}; {', '.join(worth) or 'nothing that was measured would give more'}"


def _row(rates: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    row: dict[str, Any] = {"images": rates["images"], "threads": rates["threads"]}
    for key in ("read", "decode", "whole"):
        row[key] = "-" if rates[key] is None else round(rates[key])
    if facts["transfer"] is not None:
        row["transfer"] = round(facts["transfer"])
    now = _as_placed(facts["rates"], facts["threads"])["whole"]
    return row | {"times": f"{rates['whole'] / now:.2f}x", "limit": rates["limit"] or "-"}
