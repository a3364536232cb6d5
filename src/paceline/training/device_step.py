"""The device's part of an optimizer step: it touches tensors only, so that CUDA graphs can hold it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.data.load.batches import MicroBatch
from paceline.training.gradients import GradientReader
from paceline.training.session import Session


def device_step(
    session: Session, batches: list[MicroBatch], scale: Tensor, readers: Sequence[GradientReader] = ()
) -> Tensor:
    """Forward, backward, exchange and update; gives the flag of a bad step, which changes nothing."""
    if batches:
        session.state.network.compile_ahead(batches[0], scale)
    norm_sums, sums = device_sums(session, batches, scale)
    for reader in readers:
        reader.take(scale)
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
