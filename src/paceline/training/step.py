"""One optimizer step: the host sets its inputs, and everything after that touches tensors on the device only."""

from __future__ import annotations

from torch import Tensor

from paceline import schedule
from paceline.data.load.batches import MicroBatch
from paceline.training.session import Session


def take_step(session: Session, batches: list[MicroBatch]) -> None:
    """Take one step over this replica's micro-batches of the global batch."""
    state = session.state
    session.inputs.set(schedule.lr(session.plan, state.step), state.step)
    scale = state.loss_scale.now(state.step)
    # How many images a policy's operation takes depends on numbers drawn on the host: no CUDA graph can hold this part.
    bad = device_step(session, [state.network.prepare(batch) for batch in batches], scale)
    state.step += 1
    if state.ema is not None:
        state.ema.update(state.step, bad)
    session.requests.exchange(state.step)  # last: if another replica is missing, this step is saved whole


def device_step(session: Session, batches: list[MicroBatch], scale: Tensor) -> Tensor:
    """Forward, backward, exchange and update; gives the flag of a bad step, which changes nothing."""
    state, network, inputs = session.state, session.state.network, session.inputs
    sums = network.forward_backward(batches, scale)  # leaves gradients, summed over images and times the scale
    norm_sums, sums = network.all_reduce(sums)
    bad = network.non_finite(norm_sums)
    divisor = scale.to(inputs.lr.dtype) * session.plan.global_batch
    state.optimizer.step(inputs.lr, divisor, bad, inputs.index)
    state.loss_scale.update(bad)
    network.statistics.update(norm_sums, session.plan.norm_total, bad)
    state.last_sums.copy_(sums)
    state.sums += state.last_sums
    state.bad.scatter_(0, inputs.index[None], bad.to(state.bad.dtype)[None])
    return bad
