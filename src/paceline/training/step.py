"""One optimizer step: the host sets its inputs, and everything after that touches tensors on the device only."""

from __future__ import annotations

from torch import Tensor

from paceline import schedule
from paceline.data.load.batches import MicroBatch
from paceline.training.device_step import device_step
from paceline.training.graphs import StepGraphs
from paceline.training.session import Session


def take_step(session: Session, batches: list[MicroBatch]) -> None:
    """Take one step over this replica's micro-batches of the global batch."""
    prepared, scale = begin_step(session, batches)
    if session.plan.placement.graphs:
        session.graphs = session.graphs or StepGraphs(session)
        bad = session.graphs.step(prepared, scale)
    else:
        bad = device_step(session, prepared, scale, session.wanted_readers)
    end_step(session, bad)


def begin_step(session: Session, batches: list[MicroBatch]) -> tuple[list[MicroBatch], Tensor]:
    """Set the numbers of the step on the device; gives the prepared micro-batches and the loss scale."""
    state = session.state
    assert state.step < session.plan.steps, "the last step of the plan has been taken"
    session.inputs.set(schedule.lr(session.plan, state.step), state.step)
    # How many images a policy's operation takes depends on numbers drawn on the host: no CUDA graph can hold this part.
    return [state.network.prepare(batch) for batch in batches], state.loss_scale.now(state.step)


def end_step(session: Session, bad: Tensor) -> None:
    """Count the step; the average follows, and requests of the replicas are exchanged."""
    state = session.state
    state.step += 1
    if state.ema is not None:
        state.ema.update(state.step, bad, session.graphs.recorded_average(bad) if session.graphs else None)
    session.requests.exchange(state.step)  # last: if another replica is missing, this step is saved whole
