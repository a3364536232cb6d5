"""The result of a benchmark: what it says of itself, the file that keeps it, and how two of them compare."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.command.bench_job import BenchJob
from paceline.errors import RunError, SpecError
from paceline.files import disk_faults, read_whole, write_whole
from paceline.planning import Plan
from paceline.record import json_text, start_row

Result = dict[str, Any]

_FREE = (
    "about", "published", "source", "data", "epochs", "seed", "init", "report", "average", "drop_last",
    "evaluate.every", "evaluate.offset", "augment.crop", "augment.python",
)  # fmt: skip
"""What two recipes may differ in and still do the same work."""
_TOLD = ("compile", "micro_batch", "replicas", "device", "deterministic", "recompute", "cpu_threads", "loader_workers")
"""Placement keys that are told if they differ, because they explain a ratio."""
_LARGEST = 64 << 20
"""Bytes of a result at most."""


def facts_of(bench: str, job: BenchJob, words: list[str]) -> Result:
    """What a result says about what was measured, and on what."""
    plan = job.job.plan
    start = start_row(plan, job.job.machine, 0, [], sys.argv[1:])
    return {
        "bench": bench,
        "recipe": job.job.name,
        "words": words,
        "data": plan.data.name,
        "data_folder": str(job.job.data_folder) if job.job.data_folder else None,
        "same": same_work(plan),
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "replicas": plan.replicas,
        "rounds": plan.rounds,
        "norm_batch": plan.norm_batch,
        "device": plan.placement.device,
        "precision": plan.placement.precision,
        **{key: start[key] for key in ("time", "command", "placement", "machine", "versions", "commit")},
        "notes": job.notes,
    }


def same_work(plan: Plan) -> dict[str, Any]:
    """Everything in which two results must agree to be compared: the recipe, the batch and the precision."""
    settings = dict(_leaves(json.loads(plan.recipe.model_dump_json()), ""))
    kept = {
        key: value
        for key, value in settings.items()
        if not any(key == name or key.startswith(f"{name}.") for name in _FREE)
    }
    facts, placement = plan.facts, plan.placement
    return {
        **kept,
        "data.side": facts.side,
        "data.classes": facts.classes,
        "data.channels": facts.channels,
        "on.precision": placement.precision,
        "on.weights": placement.weights,
    }


def _leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def open_result(path: Path, option: str) -> Result:
    """What a file holds that `paceline bench` has written, for the option that names it."""
    with disk_faults(SpecError, path, "cannot be read", f"{option} takes a file that --out has written"):
        content = read_whole(path, _LARGEST)
    try:
        result = json.loads(content)
        assert isinstance(result, dict)
        assert isinstance(result["same"], dict)
        assert {"bench", "recipe", "placement", "versions", "machine"} <= result.keys()
    except (ValueError, LookupError, AssertionError, RecursionError):
        raise SpecError(
            f"{path}: this is no result of paceline bench; {option} takes a file that --out has written"
        ) from None
    return result


def read_result(path: Path, now: Result) -> Result:
    """An earlier result to compare with; refused if it is of other work, which is named."""
    before = open_result(path, "--against")
    if before["bench"] != now["bench"]:
        raise SpecError(f"--against {path}: it is of paceline bench {before['bench']}, not {now['bench']}")
    if differing := differences(before["same"], now["same"]):
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise SpecError(f"--against {path}: it measured other work: {'; '.join(differing[:3])}{more}")
    return before


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two sets of settings, the batch and the precision first."""
    keys = [key for key in {**now, **before} if before.get(key) != now.get(key)]
    keys.sort(key=lambda key: key not in ("model.name", "global_batch", "norm_batch", "on.precision"))
    return [f"{key} was {json.dumps(before.get(key))} and is {json.dumps(now.get(key))}" for key in keys]


def changes_since(before: Result, now: Result) -> list[str]:
    """What else differs between two results and may be why their speeds do."""
    lines = [
        f"on.{key} {_word(before['placement'].get(key))} -> {_word(now['placement'].get(key))}"
        for key in _TOLD
        if before["placement"].get(key) != now["placement"].get(key)
    ]
    lines += [
        f"{name} {before['versions'].get(name)} -> {version}"
        for name, version in now["versions"].items()
        if before["versions"].get(name) != version
    ]
    for key in ("accelerator", "processor", "host"):
        if before["machine"].get(key) != now["machine"].get(key):
            lines.append(f"{key} {before['machine'].get(key) or '-'} -> {now['machine'].get(key) or '-'}")
    for key in ("data", "commit"):
        if before.get(key) != now.get(key):
            lines.append(f"{key} {before.get(key)} -> {now.get(key)}")
    return lines


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def ratio_of(before: Result, now: Result) -> Result:
    """How many times as fast as an earlier result, as slow and as large in memory, and whether that is beyond doubt:
    every block of one is faster than every block of the other."""
    spreads = [each["images_per_second_spread"] for each in (before, now)]
    apart = spreads[0]["most"] < spreads[1]["least"] or spreads[1]["most"] < spreads[0]["least"]
    peaks = before.get("peak_memory"), now.get("peak_memory")
    return {
        "images_per_second": now["images_per_second"] / before["images_per_second"],
        "ms_per_step": now["ms_per_step"] / before["ms_per_step"],
        "peak_memory": peaks[1] / peaks[0] if peaks[0] and peaks[1] else None,
        "clear": apart,
    }


def check_places(out: Path | None, profile: Path | None = None) -> None:
    """Refuse files that cannot be written, before anything is measured."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        what = "this is a folder" if out.is_dir() else f"there is no folder {out.absolute().parent}"
        raise SpecError(f"--out {out}: {what}; --out takes the name of a file to write")
    if profile is not None:
        with disk_faults(SpecError, profile, "cannot be made", "choose another folder with --profile"):
            profile.mkdir(parents=True, exist_ok=True)


def deliver(result: Result, out: Path | None, as_json: bool) -> None:
    """Keep a result in a file and print it for programs, where that is asked for."""
    if out is not None:
        with disk_faults(RunError, out, "cannot be written"):
            write_whole(out, json_text(result, indent=1))
    if as_json:
        print(json_text(result, indent=1))
