"""The sum of gradients over replicas, in buckets that leave while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.world import Work, World


class GradientBuckets:
    """Sums the gradients of parameters over all replicas.

    Buckets hold the parameters last to first, which is about the order in which a backward pass finishes their
    gradients, and leave in one fixed order on every replica. Parameters without a gradient send zeros. A single replica
    has no buckets, and its gradients stay as they are.

    A bucket is complete once it holds `size` bytes of gradients; `sent_as` is the type in which they travel.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, dtype: torch.dtype, size: int, sent_as: torch.dtype
    ) -> None:
        self._parameters, self._world = parameters, world
        self._buckets: list[_Bucket] = []
        self._works: list[Work] = []
        """The collectives of this step that have been started, one for each of the first buckets."""
        self._leaving = False
        if world.replicas > 1:
            pieces = _cut(parameters[::-1], size // dtype.itemsize)
            self._buckets = [_Bucket(some, world.device, dtype, sent_as) for some in pieces]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._on_gradient(bucket))

    @contextmanager
    def micro_batches(self, count: int) -> Iterator[None]:
        """Enclose the passes of a step's micro-batches; a bucket leaves once all of these have given its gradients.

        No pass waits for a bucket. A stage of a pipeline sends its own in its last backward pass, which needs nothing
        from stages before it any more. So processes cannot wait for each other in a circle, even where a device does
        one exchange after the other. If a pass fails, the gradients of the step are dropped.
        """
        for bucket in self._buckets:
            bucket.missing = count * len(bucket.parameters)
        self._leaving = True
        try:
            yield
        except BaseException:
            self._drop()
            raise
        finally:
            self._leaving = False

    def finish(self, sums: Tensor) -> Tensor:
        """Let every gradient be its sum over the replicas, and `sums`, any other numbers of the step, too.

        If a replica is missing, the gradients of the step are dropped.
        """
        if self._world.replicas == 1:
            return sums
        try:
            for bucket in self._buckets[len(self._works) :]:
                self._send(bucket)
            for work in (*self._works, self._world.all_reduce_async(sums)):
                work.wait()
        except BaseException:
            self._drop()
            raise
        for bucket in self._buckets:
            bucket.give_back()
        self._works.clear()
        return sums

    def _on_gradient(self, bucket: _Bucket) -> None:
        """Send the buckets that are full now that one more gradient has come, unless an earlier one is not."""
        if self._leaving:
            bucket.missing -= 1
            while len(self._works) < len(self._buckets) and not self._buckets[len(self._works)].missing:
                self._send(self._buckets[len(self._works)])

    def _send(self, bucket: _Bucket) -> None:
        bucket.fill()
        self._works.append(self._world.all_reduce_async(bucket.sent))

    def _drop(self) -> None:
        self._works.clear()
        for parameter in self._parameters:
            parameter.grad = None


class _Bucket:
    """Parameters whose gradients travel together, side by side in one flat tensor."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], device: torch.device, dtype: torch.dtype, sent_as: torch.dtype
    ) -> None:
        self.parameters = parameters
        self.missing = 0
        """How many gradients are yet to come, one for each parameter from each micro-batch."""
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=device)
        self.sent = self.flat if sent_as == dtype else torch.zeros_like(self.flat, dtype=sent_as)
        """What travels: the flat tensor itself, or a copy of it in a smaller type."""
        self.gradients: list[Tensor] = []
        """The places of the gradients in the flat tensor, each laid out as its parameter is."""
        offset = 0
        for parameter in parameters:
            self.gradients.append(self.flat.as_strided(parameter.shape, parameter.stride(), offset))
            offset += parameter.numel()

    @torch.no_grad()
    def fill(self) -> None:
        """Move the gradients from the parameters into the flat tensor."""
        filled, sources = [], []
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is None:
                gradient.zero_()
            else:
                filled.append(gradient)
                sources.append(parameter.grad)
                parameter.grad = None
        if filled:
            torch._foreach_copy_(filled, sources)
        if self.sent is not self.flat:
            self.sent.copy_(self.flat)

    @torch.no_grad()
    def give_back(self) -> None:
        """Let the parameters have the sums that have come back."""
        if self.sent is not self.flat:
            self.flat.copy_(self.sent)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient


def _cut(parameters: Sequence[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Cut a list of parameters into pieces that end as soon as they have `limit` numbers."""
    piece: list[nn.Parameter] = []
    for parameter in parameters:
        piece.append(parameter)
        if sum(p.numel() for p in piece) >= limit:
            yield piece
            piece = []
    if piece:
        yield piece
