"""A network that lives on one device per replica: learn, share, judge."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data.loader import MicroBatch
from paceline.model.build import build_network
from paceline.model.chance import Chances
from paceline.model.network import recomputing
from paceline.model.norm import Statistics
from paceline.plan import Plan
from paceline.world import World

TALLY = ("loss", "hits")
"""What a step's tally sums over its images."""
JUDGEMENT = ("loss", "top1", "top5", "images")
"""What a judgement sums over validation images."""


class Whole:
    """The network, its norm statistics, and the three verbs of a step."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.device = plan, world.device
        self.dtype = torch.float64 if plan.placement.precision == "64.64" else torch.float32
        module = build_network(plan.recipe, plan.facts)
        self.module = module.to(world.device, self.dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module.freeze(plan.frozen)
        self.statistics = Statistics(self.module, plan.rounds, plan.norm_groups)
        self.chances = Chances(self.module, plan.recipe.seed, self.dtype)
        neighbours = world.neighbours(plan.norm_replicas)
        for norm in self.statistics.norms:
            assert plan.norm_batch is not None
            norm.images, norm.neighbours = min(plan.norm_batch, plan.micro_batch), neighbours
        self._one = torch.ones((), device=world.device)
        self.divisor = torch.tensor(float(plan.global_batch), device=world.device)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        forward = recomputing(self.module.cut(plan.recomputed)) if plan.recomputed else self.module
        self._forward: Callable[[Tensor], Any] = torch.compile(forward) if plan.placement.compile else forward
        self._auxiliary: float = getattr(plan.recipe.model, "auxiliary", 0.0)
        colour = torch.tensor([plan.data.mean, plan.data.std], dtype=torch.float64) * 255
        self._mean, self._spread = (row.view(-1, 1, 1).to(world.device, self.dtype) for row in colour)
        self._places = torch.arange(plan.micro_batch, device=world.device)
        smoothing, classes = plan.recipe.loss.label_smoothing, plan.facts.classes
        # Spread over the other classes only, epsilon is what torch calls epsilon * K / (K - 1).
        self._smoothing = smoothing if plan.recipe.loss.smooth_over == "all" else smoothing * classes / (classes - 1)

    def learn(self, share: list[MicroBatch]) -> Tensor:
        """Forward and backward over this replica's micro-batches: summed gradients gather; the tally comes back."""
        losses: list[Tensor] = []
        hits: list[Tensor] = []
        if not self.module.training:
            self.module.train()
        for number, batch in enumerate(share):
            self.statistics.turn(number)
            self.chances.draw(batch.first + self._places)
            scores, *auxiliary = self._scores(batch)
            loss = self._loss(scores, batch.labels)
            for other in auxiliary:
                loss = loss + self._auxiliary * self._loss(other, batch.labels)
            loss.backward()
            losses.append(loss.detach())
            hits.append((scores.detach().argmax(1) == batch.labels).sum(dtype=self.dtype))
        if not share:
            return torch.zeros(len(TALLY), dtype=self.dtype, device=self.device)
        return torch.stack([sum(losses[1:], losses[0]), sum(hits[1:], hits[0])])

    def share(self, world: World, tally: Tensor, wishes: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Add up gradients, norm sums, tally and wishes over the replicas in one exchange."""
        sums = self.statistics.collect()
        if world.replicas == 1:
            return sums, tally, wishes
        assert wishes is not None
        for parameter in self.parameters:
            if parameter.grad is None:  # no micro-batch in the last round: this replica adds zeros
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        tail = [tally, wishes] if sums is None else [sums, tally, wishes]
        row = world.sum(torch.cat([g.reshape(-1) for g in gradients] + tail))
        pieces = list(row.split([g.numel() for g in gradients] + [len(t) for t in tail]))
        wishes, tally = pieces.pop(), pieces.pop()
        sums = None if sums is None else pieces.pop()
        shaped = [piece.view(g.shape) for piece, g in zip(pieces, gradients, strict=True)]
        torch._foreach_copy_(gradients, shaped)
        return sums, tally, wishes

    def bad(self) -> Tensor:
        """1 where some gradient is not a finite number, else 0, on the device."""
        found = torch.zeros((), device=self.device)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        # The check that torch's own gradient scaler makes: one pass over all gradients, and no wait.
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, self._one)
        return found

    @torch.inference_mode()
    def judge(self, batch: MicroBatch) -> Tensor:
        """Loss, top-1 and top-5 hits and number of the real images of a batch, summed in float64 where there is one."""
        if self.module.training:
            self.module.eval()
        (scores,) = self._scores(batch)
        real = torch.arange(len(scores), device=self.device) < batch.count
        losses = F.cross_entropy(scores, batch.labels, reduction="none")
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices == batch.labels[:, None]
        rows = torch.stack(
            [losses.to(self.dtype), best[:, 0].to(self.dtype), best.any(1).to(self.dtype), real.to(self.dtype)]
        )
        return torch.where(real, rows, 0).to(exact(self.device)).sum(1)

    def _loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores, labels, reduction="sum", label_smoothing=self._smoothing)

    def _scores(self, batch: MicroBatch) -> list[Tensor]:
        """One row of class scores for each image, from the last head first; pixels are normalised on the device."""
        images = (batch.images.to(self.dtype) - self._mean) / self._spread
        with self._arithmetic():
            made = self._forward(images)
        return [scores.to(self.dtype) for scores in ((made,) if isinstance(made, Tensor) else made)]

    def _arithmetic(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.plan.placement.precision == "16.32")


def exact(device: torch.device) -> torch.dtype:
    """The widest float of a device, for sums over many images."""
    return torch.float32 if device.type == "mps" else torch.float64
