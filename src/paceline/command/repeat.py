"""paceline repeat: one step of a run again, watched layer by layer, to see where it stopped being finite."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from paceline.command.resume import stored_job
from paceline.command.show import show_facts
from paceline.errors import RunError
from paceline.record import Run


def run(folder: Path, words: list[str], step: int, data: Path | None, as_json: bool) -> int:
    """Replay from the newest checkpoint before a step; the exit status is 1 when the step is bad here too."""
    # One process sees all images of the step; what is not asked for, this machine decides.
    job = stored_job(folder, ["on.replicas=1", "on.micro_batch=auto", "on.compile=false", *words], data)
    if not 1 <= step <= job.plan.steps:
        raise RunError(f"{folder}: --step {step}, and the run has steps 1 to {job.plan.steps}")
    from paceline.train.repeat import repeat
    from paceline.train.session import settle_torch
    from paceline.world import join

    settle_torch(job.plan)
    world = join(job.plan, None)
    found = repeat(job.plan, world, Run(folder, writer=False), job.data_folder, step)
    facts = asdict(found)
    if as_json:
        show_facts(facts, as_json=True)
    else:
        shown = ", ".join(map(str, found.images[:20])) + (" ..." if len(found.images) > 20 else "")
        show_facts({**facts, "images": shown or None}, as_json=False, title=f"{folder}, step {step}")
        if found.layer is None and found.gradient is None:
            print("\nEvery output and gradient of this step is finite here.")
    return 1 if found.layer or found.gradient else 0
