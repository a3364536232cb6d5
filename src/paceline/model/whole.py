"""A network that lives on one device per replica: learn, share, judge."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.augment.mix import draw
from paceline.augment.mix_pixels import mix
from paceline.augment.pipeline import Pixels
from paceline.data.load.batches import MicroBatch
from paceline.model.build import build_network
from paceline.model.dropout import Chances
from paceline.model.exchange import GradientBuckets
from paceline.model.loss import make_loss
from paceline.model.network import recomputing
from paceline.model.norm import Statistics
from paceline.planning import Plan
from paceline.world import World

TALLY = ("loss", "hits")
"""What a step's tally sums over its images."""
JUDGMENT = ("loss", "top1", "top5", "images")
"""What a judgment sums over validation images."""


class Whole:
    """The network, its norm statistics, and the three verbs of a step."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.device = plan, world.device
        self.dtype = torch.float64 if plan.placement.precision == "fp64" else torch.float32
        module = build_network(plan.recipe, plan.facts)
        self.module = module.to(world.device, self.dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.half = torch.float16 if plan.placement.precision == "fp16" else torch.bfloat16
        if plan.placement.weights in ("bf16", "fp16"):
            self._narrow()
        self.module.freeze(plan.frozen)
        self.statistics = Statistics(self.module, plan.rounds, plan.norm_groups)
        self.chances = Chances(self.module, plan.recipe.seed, self.dtype)
        neighbors = world.subgroup(plan.norm_replicas)
        for norm in self.statistics.norms:
            assert plan.norm_batch is not None
            norm.images, norm.neighbors = min(plan.norm_batch, plan.micro_batch), neighbors
        self._one = torch.ones((), device=world.device)
        self.divisor = torch.tensor(float(plan.global_batch), device=world.device)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._buckets = GradientBuckets(self.parameters, world, self.dtype)
        forward = recomputing(self.module.cut(plan.recomputed)) if plan.recomputed else self.module
        self._forward: Callable[[Tensor], Any] = torch.compile(forward) if plan.placement.compile else forward
        self._auxiliary: float = getattr(plan.recipe.model, "auxiliary", 0.0)
        self._pixels = Pixels(plan, world.device, self.dtype)
        self._places = torch.arange(plan.micro_batch, device=world.device)
        self._loss = make_loss(plan.recipe.loss, plan.facts.classes)

    def learn(self, share: list[MicroBatch], scale: Tensor | None = None) -> Tensor:
        """Forward and backward over this replica's micro-batches: summed gradients, times the loss scale, gather; the
        tally comes back."""
        losses: list[Tensor] = []
        hits: list[Tensor] = []
        if not self.module.training:
            self.module.train()
        for number, batch in enumerate(share):
            self.statistics.turn(number)
            self.chances.draw(batch.first + self._places)
            images, labels, weights = self._mixed(batch)
            with self._buckets.micro_batch(last=number == len(share) - 1):
                scores, *auxiliary = self._scores(images)
                loss = self._loss(scores, labels, weights)
                for other in auxiliary:
                    loss = loss + self._auxiliary * self._loss(other, labels, weights)
                (loss if scale is None else loss * scale).backward()
            losses.append(loss.detach())
            hits.append((scores.detach().argmax(1) == batch.labels).sum(dtype=self.dtype))
        if not share:
            return torch.zeros(len(TALLY), dtype=self.dtype, device=self.device)
        return torch.stack([sum(losses[1:], losses[0]), sum(hits[1:], hits[0])])

    @torch.no_grad()
    def look(self, share: list[MicroBatch]) -> None:
        """The same forward passes for nothing but the statistics of their norm groups."""
        if not self.module.training:
            self.module.train()
        for number, batch in enumerate(share):
            self.statistics.turn(number)
            self.chances.draw(batch.first + self._places)
            self._scores(self._mixed(batch)[0])

    def all_reduce(self, tally: Tensor) -> tuple[Tensor | None, Tensor]:
        """Sum gradients, norm sums and the tally over the replicas."""
        sums = self.statistics.collect()
        if sums is None:
            return None, self._buckets.finish(tally)
        row = self._buckets.finish(torch.cat([sums, tally]))
        return row[: len(sums)], row[len(sums) :]

    def fingerprint(self) -> Tensor:
        """A whole number that another bit in any weight would most likely change."""
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = [p.detach().view(whole[p.itemsize]).sum(dtype=torch.int64) for p in self.parameters]
        return torch.stack(sums).sum()

    def bad(self, sums: Tensor | None) -> Tensor:
        """1 where some gradient or statistic of the step is not a finite number, else 0, on the device.

        Behind a variance that is infinite a norm's output is zero, and so every gradient finite.
        """
        found = torch.zeros((), device=self.device)
        numbers = [p.grad for p in self.parameters if p.grad is not None] + ([] if sums is None else [sums])
        # The check that torch's own gradient scaler makes: one pass over all of them, and no wait.
        torch._amp_foreach_non_finite_check_and_unscale_(numbers, found, self._one)
        return found

    @torch.inference_mode()
    def judge(self, batch: MicroBatch) -> Tensor:
        """Loss, top-1 and top-5 hits and number of the real images of a batch, summed in float64 where there is one."""
        if self.module.training:
            self.module.eval()
        images = self._pixels.plain(batch.images)
        (scores,) = self._scores(images)
        if self.plan.recipe.evaluate.flip:
            scores = (scores + self._scores(images.flip(3))[0]) / 2
        real = torch.arange(len(scores), device=self.device) < batch.count
        losses = F.cross_entropy(scores, batch.labels, reduction="none")
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices == batch.labels[:, None]
        rows = torch.stack(
            [losses.to(self.dtype), best[:, 0].to(self.dtype), best.any(1).to(self.dtype), real.to(self.dtype)]
        )
        return torch.where(real, rows, 0).to(exact(self.device)).sum(1)

    def _narrow(self) -> None:
        """Hold the weights of convolutions and dense layers in 16 bits; their gradients still gather in 32."""
        for part in self.module.modules():
            if isinstance(part, nn.Conv2d | nn.Linear):
                part.to(self.half)
                for parameter in part.parameters():
                    parameter.grad_dtype = self.dtype

    def _mixed(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Images as the recipe changes and mixes them, their labels, and the weights of the labels where there are
        several."""
        images, recipe = self._pixels.changed(batch.images, batch.first), self.plan.recipe
        if not recipe.mix.active:
            return images, batch.labels, None
        positions = np.arange(batch.first, batch.first + len(images), dtype=np.int64)
        drawn = torch.from_numpy(draw(recipe, positions, images.shape[2]))
        drawn = drawn.pin_memory() if self.device.type == "cuda" else drawn
        return mix(images, batch.labels, drawn.to(self.device, self.dtype, non_blocking=True), recipe.mix.block)

    def _scores(self, images: Tensor) -> list[Tensor]:
        """One row of class scores for each image, from the last head first."""
        with self._arithmetic():
            made = self._forward(images)
        return [scores.to(self.dtype) for scores in ((made,) if isinstance(made, Tensor) else made)]

    def _arithmetic(self) -> AbstractContextManager[object]:
        narrow = self.plan.placement.precision in ("bf16", "fp16")
        return torch.autocast(self.device.type, self.half, enabled=narrow)


def exact(device: torch.device) -> torch.dtype:
    """The widest float of a device, for sums over many images."""
    return torch.float32 if device.type == "mps" else torch.float64
