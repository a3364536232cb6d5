"""paceline repeat: one step of a run again, watched layer by layer, to see where it stopped being finite."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.command.resume import stored_job
from paceline.command.show import counted, show_facts, tell
from paceline.errors import RunError, SpecError
from paceline.record import Run

if TYPE_CHECKING:
    from paceline.train.repeat import Finding

_LISTED = 16
"""Images that are named to people; --json has all."""


def run(folder: Path, words: list[str], step: int, data: Path | None, as_json: bool) -> int:
    """Replay from the newest checkpoint before a step; the exit status is 1 when the step is bad here too."""
    for word in words:
        if word.startswith("on.replicas=") and word != "on.replicas=1":
            raise SpecError(f"'{word}': repeat sees all images of a step in one process; leave on.replicas out")
    # What is not asked for, this machine decides.
    job = stored_job(folder, ["on.replicas=1", "on.micro_batch=auto", "on.compile=false", *words], data)
    if not 1 <= step <= job.plan.steps:
        raise RunError(f"{folder}: --step {step}, and the run has steps 1 to {job.plan.steps}")
    from paceline.train.repeat import repeat
    from paceline.train.session import settle_torch
    from paceline.world import join

    settle_torch(job.plan)
    world = join(job.plan, None)
    found = repeat(job.plan, world, Run(folder, writer=False), job.data_folder, step, tell)
    if as_json:
        show_facts(asdict(found), as_json=True)
    else:
        _show(found, folder)
    return 1 if found.layer or found.gradient else 0


def _show(found: Finding, folder: Path) -> None:
    began = f"the checkpoint of step {found.started_from}" if found.from_checkpoint else "the initial weights"
    facts = {"started_from": began, "loss": found.loss, "layer": found.layer, "gradient": found.gradient}
    show_facts(facts, as_json=False, title=f"{folder}, step {found.step}")
    if found.layer is None and found.gradient is None:
        print("\nEvery output and gradient of this step is finite here.")
        return
    what = f"with an output of {found.layer} that" if found.layer else "in a step whose gradient"
    print(f"\n{counted(len(found.images), 'image')} {what} is not finite:")
    for image in found.images[:_LISTED]:
        line = f"image {image['image']}" + (f"  {image['name']}" if "name" in image else "")
        print(line.encode(errors="backslashreplace").decode())  # a file's name may be bytes that are no text
    if len(found.images) > _LISTED:
        print(f"and {len(found.images) - _LISTED:,} more; --json lists all")
