"""One start of a run: from opening its folder to the last row of its record."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from rich.console import Console

from paceline import checkpoint
from paceline.binding import bound_cores
from paceline.errors import INTERRUPTED, Broken, RanOut, ReadFailed, UserError
from paceline.job import Job
from paceline.launch import MESSAGES_FOLDER
from paceline.model.cost import stage_shares
from paceline.planning import Plan
from paceline.ran_out import next_smaller, remember
from paceline.record import Row, Run, start_row
from paceline.settings.placement import SinkName
from paceline.sink import OpenSink, open_sinks
from paceline.sink.advice import AdviceSink
from paceline.stages import part_name, percents
from paceline.starting import training_begins
from paceline.training.averaging import average_at_end
from paceline.training.loop import train
from paceline.training.reports import run_speed
from paceline.training.requests import Stopped
from paceline.training.restore import restore_newest
from paceline.training.save import finish_saving
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
        except BaseException as fault:
            if is_out_of_memory(fault):
                told = _ran_out(session)
                _write_failure(session, told)
                raise told from None
            _write_failure(session, fault)
            saved = checkpoint.saved_steps(session.run.checkpoints)
            # This replica or another one waited for images and has left, saved.
            if isinstance(fault, Broken | ReadFailed) and session.requests.urgent and session.state.step in saved:
                _tell_launcher(session, "interrupted")
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
    stages = world.gather_stages((parameters, state.network.forms))
    parts = state.network.parts
    of, shares = stage_shares(plan, parts) if parts and world.first else ("", ())
    run.write(
        "start",
        **start_row(plan, job.machine, state.step, before, command),
        parameters=sum(parameters for parameters, _ in stages),
        forms={block: form for _, forms in stages for block, form in forms.items()},
        cores=world.all_gather_object(bound_cores()),
        **({"stage_shares": {"of": of, "shares": shares}} if shares else {}),
    )
    training_begins()
    _tell_launcher(session, "training")
    if plan.ran_out is not None:
        _tell_once(run, before, plan)
    if parts:
        begin = ", ".join(blocks[0] for blocks in parts)
        run.note(f"The {part_name(plan)}s begin at {begin}, and the stages have {percents(shares)} of the {of}.")
    if job.launch and (working := min(plan.replicas, plan.micro_batches) * plan.stages) < job.launch.count:
        norm = f", norm_batch {plan.norm_batch}" if plan.norm_batch else ""
        run.note(
            f"{job.launch.count} processes were started, and {working} of them have work: steps of "
            f"{plural(plan.global_batch, 'image')} in micro-batches of {plan.micro_batch}{norm}"
        )
    run.patient, done = True, False
    with suppress(Stopped):
        done = train(session)
    run.patient = False
    if done:
        average_at_end(session)
    if done:
        run.write("end", step=state.step, time=time.time(), **run_speed(run.rows()))
    else:
        why = "time limit" if session.requests.out_of_time else "signal"
        run.write("interrupted", step=state.step, time=time.time(), why=why)
    if not done:
        _tell_launcher(session, "interrupted")
    return 0 if done else INTERRUPTED


def _tell_once(run: Run, before: list[Row], plan: Plan) -> None:
    """Note that the micro-batch is smaller than it was, in the first start in which it is."""
    text = (
        f"on.micro_batch={plan.ran_out} ran out of memory, so it is {plan.micro_batch} from here on, "
        "in what is the same run"
    )
    if not any(row.get("text") == text for row in before):
        run.note(text, warning=True)


def _tell_launcher(session: Session, what: str) -> None:
    """Let Paceline's own launcher know that this start is "training", or was "interrupted" and is saved."""
    if session.world.first and MESSAGES_FOLDER in os.environ:
        Path(os.environ[MESSAGES_FOLDER], what).touch()


_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
"""What CUDA, its libraries and torch on the CPU say where they raise no error of its own kind."""


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether memory is what was missing."""
    if isinstance(fault, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(fault, RuntimeError) and any(words in str(fault) for words in _OUT_OF_MEMORY)


def out_of_memory(plan: Plan) -> str:
    """What to write when a micro-batch does not fit the memory."""
    smaller = next_smaller(plan)
    remedy = (
        f"write a smaller one, such as on.micro_batch={smaller}"
        if smaller
        else "no smaller one fits norm_batch and on.replicas; write on.recompute=all, or more on.replicas"
    )
    return f"out of memory at on.micro_batch={plan.micro_batch}; {remedy}"


def _ran_out(session: Session) -> Broken:
    """Remember a micro-batch that does not fit the memory, if there is a smaller one."""
    plan = session.plan
    smaller = next_smaller(plan)
    if smaller is None:
        return Broken(out_of_memory(plan))
    try:
        remember(session.run.folder, plan)
    except Broken as fault:
        return Broken(f"{out_of_memory(plan)} ({fault})")
    return RanOut(
        f"out of memory at on.micro_batch={plan.micro_batch}; started again, the run goes on with "
        f"on.micro_batch={smaller}"
    )


def _write_failure(session: Session, fault: BaseException) -> None:
    """Leave the reason in the record if the disk still takes it, after what was still being saved."""
    reason = str(fault) if isinstance(fault, UserError) else f"{type(fault).__name__}: {fault}"
    with suppress(UserError):
        finish_saving(session)
    session.run.patient = False
    with suppress(Broken):
        session.run.write("failed", time=time.time(), why=reason)
