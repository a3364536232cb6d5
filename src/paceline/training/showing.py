"""Rows that name files with what no number tells of a step: histograms of weights and gradients."""

from __future__ import annotations

from paceline.errors import Broken
from paceline.files import disk_faults
from paceline.histogram import HISTOGRAMS, Histograms, write_histograms
from paceline.record import INTACT
from paceline.training.reports import Clock
from paceline.training.save import tolerating_full_disk
from paceline.training.session import Session


def show(session: Session, clock: Clock) -> None:
    """Write what the placement wants to see of the step that was just taken."""
    if session.histograms is not None and session.histograms.is_wanted(session.state.step):
        with clock.pause():
            _show_histograms(session, session.histograms.read())


def _show_histograms(session: Session, own: Histograms) -> None:
    """Write the histograms of all stages, each of which has those of its own blocks."""
    run, step = session.run, session.state.step
    stages = session.world.gather_stages(own)
    if not run.writes:
        return
    whole: Histograms = {group: {n: one for stage in stages for n, one in stage[group].items()} for group in own}
    with tolerating_full_disk(run):
        with disk_faults(Broken, run.folder / HISTOGRAMS, "cannot be written", INTACT):
            file = write_histograms(run.folder, step, whole)
        run.write(HISTOGRAMS, step=step, epoch=session.plan.epoch(step), file=file)
