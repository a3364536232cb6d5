"""One optimizer step: the host sets its inputs, and everything after that touches tensors on the device only."""

from __future__ import annotations

from torch import Tensor

from paceline import schedule
from paceline.data.load.batches import MicroBatch
from paceline.training.session import Session


def take_step(session: Session, batches: list[MicroBatch]) -> None:
    """Take one step over this replica's micro-batches of the global batch."""
    prepared, scale = begin_step(session, batches)
    graphs = session.graphs
    bad = device_step(session, prepared, scale) if graphs is None else graphs.step(prepared, scale)
    end_step(session, bad)


def begin_step(session: Session, batches: list[MicroBatch]) -> tuple[list[MicroBatch], Tensor]:
    """Set the numbers of the step on the device; gives the prepared micro-batches and the loss scale."""
    state = session.state
    session.inputs.set(schedule.lr(session.plan, state.step), state.step)
    # How many images a policy's operation takes depends on numbers drawn on the host: no CUDA graph can hold this part.
    return [state.network.prepare(batch) for batch in batches], state.loss_scale.now(state.step)


def device_step(session: Session, batches: list[MicroBatch], scale: Tensor) -> Tensor:
    """Forward, backward, exchange and update; gives the flag of a bad step, which changes nothing."""
    norm_sums, sums = device_sums(session, batches, scale)
    return device_update(session, norm_sums, sums, scale)


def device_sums(session: Session, batches: list[MicroBatch], scale: Tensor) -> tuple[Tensor, Tensor]:
    """Forward, backward and exchange: leaves gradients, summed over images and times the scale; gives norm sums and
    TRAIN_SUMS."""
    network = session.state.network
    return network.all_reduce(network.forward_backward(batches, scale))


def device_update(session: Session, norm_sums: Tensor, sums: Tensor, scale: Tensor) -> Tensor:
    """Move everything by what the replicas have summed; gives the flag of a bad step, which changes nothing."""
    state, network, inputs = session.state, session.state.network, session.inputs
    bad = network.non_finite(norm_sums)
    divisor = scale.to(inputs.lr.dtype) * session.plan.global_batch
    state.optimizer.step(inputs.lr, divisor, bad, inputs.index)
    state.loss_scale.update(bad)
    network.statistics.update(norm_sums, session.plan.norm_total, bad)
    state.last_sums.copy_(sums)
    state.sums += state.last_sums
    state.bad.scatter_(0, inputs.index[None], bad.to(state.bad.dtype)[None])
    return bad


def end_step(session: Session, bad: Tensor) -> None:
    """Count the step; the average follows, and requests of the replicas are exchanged."""
    state = session.state
    state.step += 1
    if state.ema is not None:
        state.ema.update(state.step, bad)
    session.requests.exchange(state.step)  # last: if another replica is missing, this step is saved whole
