"""paceline replay: replays one step of a run and names the first layer that is not finite."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.command.tables import notify, plural, show_facts
from paceline.errors import RunError, SpecError
from paceline.job import Job, stored_job
from paceline.reconcile import fits
from paceline.record import rows_of

if TYPE_CHECKING:
    from paceline.training.replay import Finding

_LISTED = 16
"""Images that are named to people; --json has all."""


def run(folder: Path, words: list[str], step: int, data: Path | None, as_json: bool) -> int:
    """Replay from the newest checkpoint before a step; the exit status is 1 when the step is bad here too."""
    for word in words:
        if word.startswith("on.replicas=") and word != "on.replicas=1":
            raise SpecError(f"'{word}': replay sees all images of a step in one process; leave on.replicas out")
    job = _job(folder, words, step, data)
    if not 1 <= step <= job.plan.steps:
        raise RunError(f"{folder}: --step {step}, and the run has steps 1 to {job.plan.steps}")
    from paceline.training.replay import replay
    from paceline.training.session import open_session

    with open_session(job.plan, folder, "read", data_folder=job.data_folder) as session:
        found = replay(session, step, notify)
    if as_json:
        show_facts(asdict(found), as_json=True)
    else:
        _show(found, folder)
    return 1 if _not_finite(found) else 0


def _job(folder: Path, words: list[str], step: int, data: Path | None) -> Job:
    """The run on one replica, by its own micro-batches where these fit: in 16 bits, what overflows depends on how many
    images a gradient is summed over."""
    alone = ["on.replicas=1", "on.micro_batch=auto", "on.compile=false", *words]
    job = stored_job(folder, alone, data)
    starts = [row for row in rows_of(folder) if row["kind"] == "start" and row["step"] < step]
    size = starts[-1]["placement"]["micro_batch"] if starts else job.plan.micro_batch
    if size == job.plan.micro_batch or any(word.startswith("on.micro_batch=") for word in words):
        return job
    if fits(job.plan.global_batch, job.plan.norm_batch, 1, size):
        return stored_job(folder, [*alone, f"on.micro_batch={size}"], data)
    notify(
        f"micro-batches of {size}, as the run had them, do not fit norm groups on one replica: these have "
        f"{job.plan.micro_batch}, and 16-bit gradients may overflow elsewhere"
    )
    return job


def _not_finite(found: Finding) -> bool:
    return bool(found.layer or found.statistics or found.gradient)


def _show(found: Finding, folder: Path) -> None:
    began = f"the checkpoint of step {found.started_from}" if found.from_checkpoint else "the initial weights"
    facts = {
        "started_from": began, "loss": found.loss, "layer": found.layer, "statistics": found.statistics,
        "gradient": found.gradient,
    }  # fmt: skip
    show_facts(facts, as_json=False, title=f"{folder}, step {found.step}")
    if not _not_finite(found):
        print("\nEvery output, statistic and gradient of this step is finite here.")
        return
    what = (
        f"with an output of {found.layer} that"
        if found.layer
        else f"in a step in which the mean or variance that {found.statistics} finds"
        if found.statistics
        else "in a step whose gradient"
    )
    print(f"\n{plural(len(found.images), 'image')} {what} is not finite:")
    for image in found.images[:_LISTED]:
        line = f"image {image['image']}" + (f"  {image['name']}" if "name" in image else "")
        print(line.encode(errors="backslashreplace").decode())  # a file's name may be bytes that are no text
    if len(found.images) > _LISTED:
        print(f"and {len(found.images) - _LISTED:,} more; --json lists all")
