"""Rows that name files with what no number tells of a step: histograms of weights and gradients, and its images."""

from __future__ import annotations

import io

import numpy as np
import torch

from paceline import checkpoint
from paceline.augment.pipeline import draw_each
from paceline.data.inspect.contact_sheet import contact_sheet
from paceline.data.inspect.samples import pixels_seen
from paceline.data.load.batches import MicroBatch
from paceline.errors import Broken
from paceline.files import disk_faults, write_whole
from paceline.histogram import HISTOGRAMS, Histograms, write_histograms
from paceline.record import INTACT, SAMPLES
from paceline.training.opened import run_classes
from paceline.training.reports import Clock
from paceline.training.save import tolerating_full_disk
from paceline.training.session import Session

_IMAGES, _COLUMNS = 16, 4
_PIXEL_ART, _LEAST_SIDE = 64, 96
"""Images of up to so many pixels a side are kept without loss, and are enlarged to at least so many."""


def show(session: Session, clock: Clock, batches: list[MicroBatch]) -> None:
    """Write what the placement wants to see of the step that was just taken."""
    step, samples = session.state.step, session.plan.samples
    if session.histograms is not None and session.histograms.is_wanted(step):
        with clock.pause():
            _show_histograms(session, session.histograms.read())
    if samples is not None and samples.due(step) and session.run.writes:
        with clock.pause():
            _show_samples(session, batches[0])


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


def _show_samples(session: Session, batch: MicroBatch) -> None:
    """Write a picture of the first images of the step, which are the first ones of its first micro-batch."""
    plan, run, step = session.plan, session.run, session.state.step
    assert batch.positions is not None
    count = min(_IMAGES, batch.count)
    images, positions = batch.images[:count].cpu(), batch.positions[:count].cpu().numpy()
    # What is drawn for an image follows from its position alone, so it can be drawn once more.
    (draws,) = draw_each(plan, [positions.astype(np.int64)], torch.device("cpu"))
    pixels, names = pixels_seen(plan, images, draws), run_classes(run.folder, plan.data)
    classes = [names[label] if 0 <= label < len(names) else "?" for label in batch.labels[:count].tolist()]
    small = draws.side <= _PIXEL_ART
    groups = [*zip(classes, ([one] for one in pixels), strict=True)]
    sheet = contact_sheet(groups, _COLUMNS, max(1, _LEAST_SIDE // draws.side))
    content = io.BytesIO()
    sheet.save(content, "PNG" if small else "JPEG", quality=90)
    file = f"{SAMPLES}/{checkpoint.name_of(step)}.{'png' if small else 'jpg'}"
    with tolerating_full_disk(run):
        with disk_faults(Broken, run.folder / SAMPLES, "cannot be written", INTACT):
            (run.folder / SAMPLES).mkdir(exist_ok=True)
            write_whole(run.folder / file, content.getvalue())
        run.write(SAMPLES, step=step, epoch=plan.epoch(step), file=file, classes=classes)
