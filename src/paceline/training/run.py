"""One start of a run: from opening its folder to the last row of its record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from rich.console import Console

from paceline.errors import INTERRUPTED, Broken, UserError
from paceline.job import Job
from paceline.launch import MESSAGES_FOLDER
from paceline.planning import Plan
from paceline.reconcile import fits, mixes
from paceline.record import Run, start_row
from paceline.settings.placement import SinkName
from paceline.sink import OpenSink, open_sinks
from paceline.sink.advice import AdviceSink
from paceline.training.averaging import average_at_end
from paceline.training.loop import train
from paceline.training.reports import run_speed
from paceline.training.requests import Stopped
from paceline.training.restore import restore_newest
from paceline.training.session import Session, open_session
from paceline.visible import plural


def train_run(
    job: Job,
    folder: Path,
    console: Console,
    command: list[str],
    handed: Mapping[SinkName, OpenSink] | None = None,
) -> int:
    """Train in a run folder, from its newest intact checkpoint; gives the exit status."""
    with open_session(
        job.plan, folder, data_folder=job.data_folder, launch=job.launch, quarantine=folder, signals=True
    ) as session:
        try:
            return _train(session, job, console, command, handed)
        except torch.OutOfMemoryError:
            fault = Broken(out_of_memory(job.plan))
            _write_failure(session.run, fault)
            raise fault from None
        except BaseException as fault:
            _write_failure(session.run, fault)
            raise


def _train(
    session: Session, job: Job, console: Console, command: list[str], handed: Mapping[SinkName, OpenSink] | None
) -> int:
    plan, world, run = session.plan, session.world, session.run
    before = run.rows()
    if world.first:
        advice = AdviceSink(plan, run, job.data_folder, job.machine.cores)
        run.sinks = [*open_sinks(plan, run, console, handed), advice]
    restore_newest(session)
    state = session.state
    ended = not before or any(row["kind"] == "end" for row in before)
    if session.is_done() and world.broadcast_object(ended):
        if world.first:
            verb = "is" if state.step == 1 else "are"
            text = f"This run is complete: {plural(state.step, 'step')} {verb} trained. {run.folder}"
            console.print(text, markup=False, soft_wrap=True)
        return 0
    parameters = sum(parameter.numel() for parameter in state.network.module.parameters())
    run.write(
        "start",
        **start_row(plan, job.machine, state.step, before, command),
        parameters=parameters,
        forms=state.network.forms,
    )
    done = False
    with suppress(Stopped):
        done = train(session)
    if done:
        average_at_end(session)
    if done:
        run.write("end", step=state.step, **run_speed(run.rows()))
    else:
        run.write("interrupted", step=state.step, why="time limit" if session.requests.out_of_time else "signal")
    if not done and world.first and MESSAGES_FOLDER in os.environ:
        Path(os.environ[MESSAGES_FOLDER], "interrupted").touch()
    return 0 if done else INTERRUPTED


def out_of_memory(plan: Plan) -> str:
    """What to write when a micro-batch does not fit the memory."""
    smaller = [
        size
        for size in range(plan.micro_batch - 1, 0, -1)
        if fits(plan.global_batch, plan.norm_batch, plan.replicas, size) and mixes(plan.recipe, size)
    ]
    remedy = (
        f"write a smaller one, such as on.micro_batch={smaller[0]}"
        if smaller
        else "no smaller one fits norm_batch and on.replicas; write on.recompute=all, or more on.replicas"
    )
    return f"out of memory at on.micro_batch={plan.micro_batch}; {remedy}"


def _write_failure(run: Run, fault: BaseException) -> None:
    """Leave the reason in the record if the disk still takes it."""
    reason = str(fault) if isinstance(fault, UserError) else f"{type(fault).__name__}: {fault}"
    with suppress(Broken):
        run.write("failed", why=reason)
