"""A network that lives on one device per replica: forward and backward passes, sums over replicas, scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.augment.pipeline import Augmentation
from paceline.data.load.batches import MicroBatch
from paceline.device import float_dtype
from paceline.model.batch import Batch
from paceline.model.build import build_network
from paceline.model.dropout import DropoutMasks
from paceline.model.exchange import GradientBuckets
from paceline.model.folded import FoldedNetwork
from paceline.model.forms import PLAIN, StepWeights, fuse
from paceline.model.kernels.ahead import compiled_together
from paceline.model.loss import make_loss
from paceline.model.metrics import TRAIN_SUMS, Answers, judge
from paceline.model.network import Network, mirrored_scores, recomputing
from paceline.model.norm import Statistics
from paceline.model.precision import autocast, compute_dtype, on_device
from paceline.model.recorded import Recorded
from paceline.planning import Plan
from paceline.settings.model import External
from paceline.world import T, World


class Whole:
    """The network, its norm statistics and dropout masks, and what a step and a validation do with them."""

    parts: Sequence[Sequence[str]] = ()
    """The blocks of each part of the network, where it is cut into parts."""

    def __init__(self, plan: Plan, world: World, class_weights: Sequence[float] | None = None) -> None:
        self.plan, self.device, self.dtype = plan, world.device, float_dtype(plan)
        network = build_network(plan.recipe, plan.facts)
        # Layers are numbered over the whole network, whatever part of it is here.
        self.masks = DropoutMasks(network, plan.recipe.seed, self.dtype)
        self.module = on_device(self._part(network), plan, world.device)
        self.forms = fuse(self.module, plan)
        """The form in which each block is computed."""
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.statistics = Statistics(self.module, plan.rounds, plan.norm_groups, world.subgroup(plan.norm_replicas))
        self.augment = Augmentation(plan, world.device)
        self._forward = placed_forward(self.module, plan)
        weights = None if class_weights is None else torch.tensor(class_weights, dtype=self.dtype, device=world.device)
        self._head_loss = make_loss(plan.recipe.loss, plan.facts.classes, weights)
        sent_as = torch.bfloat16 if plan.placement.communication == "bf16" else self.dtype
        self._buckets = GradientBuckets(self.parameters, world, self.dtype, plan.placement.bucket, sent_as)
        self._step_weights = StepWeights(self.module, compute_dtype(plan))
        self._one = torch.ones((), device=world.device)
        self._evaluator: Callable[[Tensor], Tensor] | None = None
        self._compiled: set[object] = set()
        """The shapes whose programs have been compiled ahead, or need not be."""

    def _part(self, network: Network) -> Network:
        """What is here of the network: all of it."""
        return network

    @contextmanager
    def entire(self) -> Iterator[Network]:
        """The whole network, to give it weights."""
        yield self.module

    def own(self, tensors: dict[str, T]) -> dict[str, T]:
        """Those of a whole network's tensors by name that are in this process: all of them."""
        return tensors

    def gather(self, groups: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """The tensors by name of the whole network, in groups: those that are here."""
        return groups

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        """Do what must be done to a training batch before the part of a step that a CUDA graph can hold."""
        assert batch.draws is not None
        return replace(batch, images=self.augment.prepare(batch.images, batch.draws))

    def compile_ahead(self, batch: MicroBatch, loss_scale: Tensor | None = None) -> None:
        """Compile what the passes of a step will launch for micro-batches of this shape, all at the same time.

        The passes that show what that is leave nothing behind. They must be taken before a step, on its stream.
        """
        assert batch.draws is not None
        shape = batch.images.shape, batch.draws.side
        if shape in self._compiled:
            return
        self._compiled.add(shape)
        if not self._compiles_ahead:
            return
        with compiled_together(self.plan.placement.cpu_threads):
            try:
                self._begin()
                self._train(0, batch, loss_scale)  # outside `micro_batches`, so that no gradient leaves
            finally:
                for parameter in self.parameters:
                    parameter.grad = None
                self.statistics.pop()

    @property
    def _compiles_ahead(self) -> bool:
        """Whether there are programs to compile, and passes change nothing that cannot be put back."""
        plan = self.plan
        return (
            self.device.type == "cuda"
            and set(self.forms.values()) != {PLAIN}
            and plan.stages == plan.norm_replicas == 1  # no pass exchanges anything
            and not plan.placement.compile  # else all of it would be compiled for launches that are left out
            and not isinstance(plan.recipe.model, External)  # which may keep more than we know of
        )

    def forward_backward(self, batches: list[MicroBatch], loss_scale: Tensor | None = None, begin: int = 0) -> Tensor:
        """Train on this replica's micro-batches: gradients times the loss scale add up, and TRAIN_SUMS come back.

        `begin` is the number of the first of them in the step; gradients of those before it are there already.
        """
        losses: list[Tensor] = []
        hits: list[Tensor] = []
        if begin == 0:
            self._begin()
        with self._buckets.micro_batches(len(batches)):
            for index, batch in enumerate(batches, begin):
                loss, scores = self._train(index, batch, loss_scale)
                losses.append(loss)
                hits.append((scores.argmax(1) == batch.labels).sum(dtype=self.dtype))
        if not batches:
            return torch.zeros(len(TRAIN_SUMS), dtype=self.dtype, device=self.device)
        return torch.stack([sum(losses[1:], losses[0]), sum(hits[1:], hits[0])])

    @torch.no_grad()
    def forward_statistics(self, batches: list[MicroBatch]) -> None:
        """Run the forward passes of training for nothing but the statistics of their norm groups."""
        self._begin()
        for index, batch in enumerate(batches):
            self._class_scores(self._mixed(batch)[0], self._pass(index, batch))

    def all_reduce(self, train_sums: Tensor) -> tuple[Tensor, Tensor]:
        """Sum gradients, norm sums and TRAIN_SUMS over the replicas, and return the latter two."""
        norm_sums = self.statistics.collect()
        row = self._buckets.finish(torch.cat([norm_sums, train_sums]))
        return row[: len(norm_sums)], row[len(norm_sums) :]

    def checksum(self) -> Tensor:
        """A checksum of the bits of all weights that train."""
        return checksum(self.parameters)

    def non_finite(self, sums: Tensor) -> Tensor:
        """1 if a gradient or a norm statistic of the step is not finite, else 0, on the device.

        Behind a variance that is infinite a norm's output is zero, and so every gradient is finite.
        """
        flag = torch.zeros((), device=self.device)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        # The check that torch's own gradient scaler makes: one pass over all of them, and no wait.
        torch._amp_foreach_non_finite_check_and_unscale_([*gradients, sums], flag, self._one)
        return flag

    @torch.inference_mode()
    def scores(self, images: Tensor) -> Tensor:
        """Class scores of 8-bit images in evaluation; the mean over both mirror images if the recipe says so."""
        if self.module.training:
            self.module.eval()
        if self._evaluator is None:
            self._evaluator = self._make_evaluator()
        return self._evaluator(images)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate the weights of now: what an evaluation computes from them once is theirs, and goes with the end."""
        self._evaluator = None
        try:
            yield
        finally:
            self._evaluator = None

    @property
    def evaluation_fault(self) -> str | None:
        """Why passes of this evaluation could not be recorded, if so."""
        return self._evaluator.fault if isinstance(self._evaluator, Recorded) else None

    @torch.inference_mode()
    def answers(self, batch: MicroBatch) -> Answers:
        """What the network says of each image of a validation batch."""
        return judge(self.scores(batch.images), batch.labels, batch.count)

    def _make_evaluator(self) -> Callable[[Tensor], Tensor]:
        """What gives the scores of images, by weights that stay as they are."""
        # A CPU has no kernels of ours, and would gain nothing.
        if self.device.type != "cuda" or set(self.forms.values()) == {PLAIN}:
            return partial(self._evaluated, None)
        evaluated = partial(self._evaluated_folded, FoldedNetwork(self.module, compute_dtype(self.plan)))
        return Recorded(evaluated) if self.plan.placement.graphs else evaluated

    def _evaluated_folded(self, folded: FoldedNetwork, images: Tensor) -> Tensor:
        """The scores of images, whose programs are compiled at the same time when a shape comes first."""
        shape = "evaluation", images.shape
        if shape not in self._compiled and not isinstance(self.plan.recipe.model, External):
            self._compiled.add(shape)
            with compiled_together(self.plan.placement.cpu_threads):
                self._evaluated(folded, images)
        return self._evaluated(folded, images)

    def _evaluated(self, forward: Callable[..., Any] | None, images: Tensor) -> Tensor:
        return mirrored_scores(
            lambda images: self._class_scores(images, None, forward)[0],
            self.augment.normalize(images), self.plan.recipe.evaluate.flip,
        )  # fmt: skip

    def _begin(self) -> None:
        """Make the network ready for the forward passes of a training step."""
        if not self.module.training:
            self.module.train()
        self._step_weights.refresh()

    def _train(self, index: int, batch: MicroBatch, loss_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the gradients of a micro-batch; gives its loss, and the scores of the last head."""
        images, labels, weights = self._mixed(batch)
        heads = self._class_scores(images, self._pass(index, batch))
        loss = self._loss(heads, labels, weights)
        (loss if loss_scale is None else loss * loss_scale).backward()
        return loss.detach(), heads[0].detach()

    def _mixed(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Augmented and mixed images, their labels, and the weights of the labels where an image has several."""
        assert batch.draws is not None
        return self.augment(batch.images, batch.labels, batch.draws)

    def _pass(self, index: int, batch: MicroBatch) -> Batch:
        """What the layers know of the micro-batch of this pass."""
        assert batch.positions is not None
        rows, masks = self.statistics.pass_rows(index), self.masks(batch.positions)
        if self.plan.placement.compile:  # which cuts rows itself, and cannot see a dictionary fill
            return Batch(rows, *masks)
        again = bool(self.plan.recomputed)
        return Batch(rows, *masks, self.statistics.slots(index), {} if again else None, {} if again else None)

    def _loss(self, heads: list[Tensor], labels: Tensor, weights: Tensor | None) -> Tensor:
        """The loss by the scores of the last head, and by those of auxiliary heads with the recipe's weight."""
        auxiliary: float = getattr(self.plan.recipe.model, "auxiliary", 0.0)
        loss = self._head_loss(heads[0], labels, weights)
        for scores in heads[1:]:
            loss = loss + auxiliary * self._head_loss(scores, labels, weights)
        return loss

    def _class_scores(
        self, images: Tensor, batch: Batch | None, forward: Callable[..., Any] | None = None
    ) -> list[Tensor]:
        """One row of class scores for each image, those of the last head first."""
        return [scores.to(self.dtype) for scores in self._outputs(images, batch=batch, forward=forward)]

    def _outputs(
        self, *carried: Tensor, batch: Batch | None, forward: Callable[..., Any] | None = None
    ) -> tuple[Tensor, ...]:
        """What the blocks that are here make of the images, or of what the blocks before them made."""
        with autocast(self.plan, self.device):
            output = (forward or self._forward)(*carried, batch=batch)
        return (output,) if isinstance(output, Tensor) else tuple(output)


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """A checksum of the bits of tensors, on their device."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [tensor.detach().view(integers[tensor.itemsize]).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(sums).sum()


def placed_forward(module: Network, plan: Plan) -> Callable[..., Any]:
    """The network's forward pass as the placement has it: cut where it is recomputed, and compiled."""
    recomputed = [name for name in plan.recomputed if name in module._modules]
    forward = recomputing(module.cut(recomputed)) if recomputed else module
    return torch.compile(forward) if plan.placement.compile else forward
