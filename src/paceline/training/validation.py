"""Evaluates checkpoints of a run on its validation images, or on others of the same classes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline import checkpoint
from paceline.data.load.quarantine import QUARANTINE, quarantined
from paceline.errors import Damaged, RunError
from paceline.job import Job
from paceline.model.hardest import HARDEST
from paceline.progress import progress_bar
from paceline.record import Row
from paceline.sink import open_sinks
from paceline.sink.bar import BarSink
from paceline.training.answers import WRONG
from paceline.training.details import details_folder, worst, write_details
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.restore import load_checkpoint
from paceline.training.selection import Selection, steps_to_evaluate
from paceline.training.session import Session, open_session


def validate_run(
    job: Job, folder: Path, selection: Selection, details: bool = False
) -> tuple[list[Row], list[str], list[Row]]:
    """Evaluate each selected checkpoint and append a row to the record.

    Gives the rows, notes for people and, with `details`, what was found worst and the folder with all of it.
    """
    plan = job.plan
    # Images of the run itself that cannot be decoded are listed where it was trained.
    quarantine = folder / "test" if selection.test else None
    notes: list[str] = []
    rows, found = [], []
    with (
        open_session(
            plan, folder, "append", data_folder=job.data_folder, launch=job.launch, quarantine=quarantine
        ) as session,
        progress_bar(session.world.first) as show,
    ):
        if session.world.first:
            session.run.sinks = [*open_sinks(plan, session.run), BarSink(show)]
        if quarantine and session.world.first:
            with suppress(OSError):  # where nothing can be written, the record says so
                quarantine.mkdir(exist_ok=True)
                (quarantine / QUARANTINE).unlink(missing_ok=True)
        for step in _load_each(session, selection, notes):
            hardest = plan.facts.validation_images if details else HARDEST
            row, evaluation = evaluate_checkpoint(session, selection, step, hardest)
            session.run.write(selection.kind, **row)
            rows.append(row)
            if details:
                into = details_folder(session.run, selection.kind, step)
                write_details(session, into, evaluation, WRONG)
                found.append({"step": step, "folder": str(into), **worst(session, evaluation)})
        if session.world.first:
            notes += [
                f"a neighbor was evaluated in place of {image['name']}: {image['reason']}"
                for image in (quarantined(quarantine) if quarantine else [])
            ]
    return rows, notes, found


def evaluate_checkpoint(
    session: Session, selection: Selection, step: int, hardest: int = HARDEST
) -> tuple[Row, Evaluation]:
    """Evaluate the checkpoint that is loaded; gives what a row says of it, and all that came out."""
    plan, start = session.plan, time.perf_counter()
    evaluation = evaluate(session, hardest)
    seconds = time.perf_counter() - start
    row = {
        "step": step,
        "epoch": plan.epoch(step),
        **evaluation.row,
        "seconds": seconds,
        "images_per_second": evaluation.row["images"] / seconds,
        "device": plan.placement.device,
        "precision": plan.placement.precision,
        **selection.data,
    }
    return row, evaluation


def _load_each(session: Session, selection: Selection, notes: list[str]) -> Iterator[int]:
    """Load one selected checkpoint after the other, and give its step.

    Beside a run that trains, checkpoints come and go, and replicas may see different ones: the first one reads.
    """
    world, run = session.world, session.run

    def damaged(fault: Damaged) -> None:
        notes.append(f"passed over: {fault}")

    def choose() -> list[int]:
        return steps_to_evaluate(run.folder, selection)

    if not selection.every:
        newest = checkpoint.first_intact(run.checkpoints, choose, damaged) if world.first else None
        if world.first and newest is None:
            raise RunError(_no_intact_checkpoint(run.checkpoints, choose(), notes))
        step, files = newest or (0, None)
        load_checkpoint(session, step, files)
        yield session.state.step
        return
    for step in world.broadcast_object(choose() if world.first else []):
        files = None
        if world.first:
            try:
                files = checkpoint.read(run.checkpoints / checkpoint.name_of(step))
            except RunError as fault:
                gone = checkpoint.is_gone(run.checkpoints / checkpoint.name_of(step))
                if not gone and not isinstance(fault, Damaged):
                    raise
                notes.append(
                    f"passed over: step {step}, whose checkpoint was removed meanwhile"
                    if gone
                    else f"passed over: {fault}"
                )
        if world.broadcast_object(files is not None):
            load_checkpoint(session, step, files)
            yield step


def _no_intact_checkpoint(folder: Path, chosen: list[int], notes: list[str]) -> str:
    others = [str(step) for step in checkpoint.saved_steps(folder) if step not in chosen]
    advice = f"choose another with --checkpoint: {', '.join(others)}" if others else "no other one is intact"
    return f"{notes[0].removeprefix('passed over: ')}; {advice}"
