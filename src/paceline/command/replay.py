"""paceline replay: replays one step of a run and names the first layer that is not finite."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.command.tables import show_facts
from paceline.errors import RunError, SpecError
from paceline.job import WHOLE, Job, stored_job
from paceline.layouts import fits
from paceline.progress import notify, progress_bar
from paceline.record import rows_of
from paceline.visible import one_line, plural

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

    with open_session(job.plan, folder, "read", data_folder=job.data_folder) as session, progress_bar() as progress:
        finding = replay(session, step, notify, progress)
    if as_json:
        show_facts(asdict(finding), as_json=True)
    else:
        _show(finding, folder)
    return 1 if _not_finite(finding) else 0


def _job(folder: Path, words: list[str], step: int, data: Path | None) -> Job:
    """The run on one replica, by its own micro-batches where these fit: in 16 bits, what overflows depends on how many
    images a gradient is summed over."""
    alone = ["on.replicas=1", *WHOLE, "on.micro_batch=auto", "on.compile=false", *words]
    job = stored_job(folder, alone, data)
    starts = [row for row in rows_of(folder) if row["kind"] == "start" and row["step"] < step]
    placement = starts[-1].get("placement") if starts else None
    size = placement.get("micro_batch") if isinstance(placement, dict) else None
    if not isinstance(size, int) or size < 1:
        return job
    if size == job.plan.micro_batch or any(word.startswith("on.micro_batch=") for word in words):
        return job
    if fits(job.plan.global_batch, job.plan.norm_batch, 1, size):
        return stored_job(folder, [*alone, f"on.micro_batch={size}"], data)
    notify(
        f"micro-batches of {size}, as the run had them, do not fit norm groups on one replica: these have "
        f"{job.plan.micro_batch}, and 16-bit gradients may overflow elsewhere"
    )
    return job


def _not_finite(finding: Finding) -> bool:
    return bool(finding.layer or finding.statistics or finding.gradient)


def _show(finding: Finding, folder: Path) -> None:
    began = f"the checkpoint of step {finding.started_from}" if finding.from_checkpoint else "the initial weights"
    facts = {
        "started_from": began, "loss": finding.loss, "layer": finding.layer, "statistics": finding.statistics,
        "gradient": finding.gradient,
    }  # fmt: skip
    show_facts(facts, as_json=False, title=f"{folder}, step {finding.step}")
    if not _not_finite(finding):
        print("\nEvery output, statistic and gradient of this step is finite here.")
        return
    what = (
        f"with an output of {finding.layer} that"
        if finding.layer
        else f"in a step in which the mean or variance that {finding.statistics} finds"
        if finding.statistics
        else "in a step whose gradient"
    )
    print(f"\n{plural(len(finding.images), 'image')} {what} is not finite:")
    for image in finding.images[:_LISTED]:
        line = f"image {image['image']}" + (f"  {image['name']}" if "name" in image else "")
        print(one_line(line))
    if len(finding.images) > _LISTED:
        print(f"and {len(finding.images) - _LISTED:,} more; --json lists all")
