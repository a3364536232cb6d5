"""One stage of a network that is a pipeline over several processes: the verbs of `Whole`, done together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.data.load.batches import MicroBatch
from paceline.errors import PlanError
from paceline.model.batch import Batch
from paceline.model.cost import block_costs
from paceline.model.metrics import TRAIN_SUMS, Answers, judge
from paceline.model.network import Network
from paceline.model.precision import network_on_device
from paceline.model.whole import Whole
from paceline.pipelining import Passes, Pipeline, TensorShape
from paceline.planning import Plan
from paceline.stages import balanced, parted
from paceline.world import T, World

StageShapes = tuple[tuple[TensorShape, ...], tuple[TensorShape, ...]]
"""The shapes of what comes into a stage and of what goes out of it."""


class Staged(Whole):
    """The blocks of one stage, their norm statistics, and what a step and a validation do with them.

    The first stage has the images, and the last one the scores and the loss. Between stages travel the picture and the
    scores of auxiliary heads. Every stage must call the same verbs in the same order.
    """

    def __init__(self, plan: Plan, world: World, class_weights: Sequence[float] | None = None) -> None:
        self._world = world
        self._first, self._last = world.stage == 0, world.stage == world.stages - 1
        self._stages = stages_of(plan)
        super().__init__(plan, world, class_weights)
        self._pipelines: dict[tuple[int, int], Pipeline] = {}
        """By the pixels a side of the images and the number of micro-batches."""
        self._known_shapes: dict[tuple[bool, int], StageShapes] = {}
        """In training or not, by the pixels a side."""

    def _part(self, network: Network) -> Network:
        """The blocks of this stage."""
        pieces = network.cut([blocks[0] for blocks in self._stages[1:]])
        for number, piece in enumerate(pieces, 1):
            trained = [block for name, block in piece.named_children() if name not in self.plan.frozen]
            if not any(True for block in trained for _ in block.parameters()):
                raise PlanError(
                    f"stage {number} of {len(pieces)} has nothing to train ({', '.join(piece._modules)}); "
                    "write fewer on.stages, or other on.splits"
                )
        return pieces[self._world.stage]

    @contextmanager
    def entire(self) -> Iterator[Network]:
        """The whole network on the host, to give it weights; this stage takes its own."""
        network = network_on_device(self.plan, torch.device("cpu"))
        yield network
        with torch.no_grad():
            for name, tensor in self.module.state_dict().items():
                tensor.copy_(network.state_dict()[name])

    def own(self, tensors: dict[str, T]) -> dict[str, T]:
        """Those of a whole network's tensors by name that are not another stage's."""
        others = {name for blocks in self._stages for name in blocks} - set(self._stages[self._world.stage])
        return {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] not in others}

    def gather(self, groups: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """The tensors by name of all stages, in groups, on the first process."""
        pieces = self._world.gather_stages(groups)
        return (
            {group: {k: v for piece in pieces for k, v in piece[group].items()} for group in groups} if pieces else {}
        )

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        """Do what must be done to a training batch before its passes, where its images are."""
        return super().prepare(batch) if self._first else batch

    def forward_backward(self, batches: list[MicroBatch], loss_scale: Tensor | None = None, begin: int = 0) -> Tensor:
        """Train on the micro-batches of this replica: gradients times the loss scale add up in all stages, and
        TRAIN_SUMS come back on the last one."""
        sums = torch.zeros(len(TRAIN_SUMS), dtype=self.dtype, device=self.device)
        if begin == 0:
            self._begin()
        if not batches:
            return sums
        labels = self._labels([batch.labels for batch in batches], (len(batches), self.plan.micro_batch))

        def forward(number: int, *carried: Tensor) -> tuple[Tensor, ...]:
            batch = batches[number]
            pictures = [*map(_channels_first, carried)] if carried else [self._mixed(batch)[0]]
            return self._passed_on(self._outputs(*pictures, batch=self._pass(begin + number, batch)))

        def loss(heads: Sequence[Tensor], number: int) -> Tensor:
            draws = batches[number].draws
            assert draws is not None
            loss = self._loss([*heads], *self.augment.labels(labels[number], draws))
            hits = (heads[0].detach().argmax(1) == labels[number]).sum(dtype=self.dtype)
            sums.add_(torch.stack([loss.detach(), hits]))
            return loss if loss_scale is None else loss * loss_scale

        with self._buckets.micro_batches(len(batches)):
            self._pipeline(batches).step(Passes(forward, loss))
        return sums

    @torch.no_grad()
    def forward_statistics(self, batches: list[MicroBatch]) -> None:
        """Run the forward passes of training for nothing but the statistics of their norm groups."""
        self._begin()
        for index, batch in enumerate(batches):
            inputs, _ = self._shapes(True, _side(batch), self.plan.micro_batch)
            self._relay(self._mixed(batch)[0] if self._first else None, self._pass(index, batch), inputs)

    def all_reduce(self, train_sums: Tensor) -> tuple[Tensor, Tensor]:
        """Sum gradients and norm sums over the replicas, and TRAIN_SUMS over all stages as well."""
        norm_sums, sums = super().all_reduce(train_sums)
        return norm_sums, self._world.over_stages(sums)

    def non_finite(self, sums: Tensor) -> Tensor:
        """1 if a gradient or a norm statistic of any stage is not finite, else 0, on the device."""
        return self._world.over_stages(super().non_finite(sums)).clamp_(max=1)

    @torch.inference_mode()
    def scores(self, images: Tensor) -> Tensor:
        """Class scores of a validation batch on the last stage, by its 8-bit images on the first; elsewhere zeros."""
        self.module.eval()
        facts, count = self.plan.facts, self.plan.evaluation_batch
        inputs, _ = self._shapes(False, facts.evaluation_side or facts.side, count)
        pictures = self.augment.normalize(images) if self._first else None
        rows = [self._relay(pictures, None, inputs)]
        if self.plan.recipe.evaluate.flip:
            rows.append(self._relay(pictures.flip(3) if pictures is not None else None, None, inputs))
        if not self._last:
            return torch.zeros(count, facts.classes, dtype=self.dtype, device=self.device)
        return sum(rows[1:], rows[0]) / len(rows)

    @torch.inference_mode()
    def answers(self, batch: MicroBatch) -> Answers:
        """What the network says of each image of a validation batch, on the last stage; elsewhere no image is real."""
        labels = self._labels([batch.labels], (1, self.plan.evaluation_batch))[0]
        return judge(self.scores(batch.images), labels, batch.count if self._last else 0)

    def _labels(self, labels: list[Tensor], size: tuple[int, int]) -> Tensor:
        """The labels of batches, which the first stage has, on the last one; between them zeros."""
        last = self._world.stages - 1
        rows = torch.zeros(size, dtype=torch.int64, device=self.device)
        if self._first:
            rows.copy_(torch.stack(labels))
            self._world.send(rows, last)
        elif self._last:
            self._world.receive(rows, 0)
        return rows

    def _relay(self, pictures: Tensor | None, batch: Batch | None, inputs: Sequence[TensorShape]) -> Tensor:
        """Take a batch through this stage by itself, without a backward pass; gives scores on the last one."""
        carried = [pictures] if pictures is not None else []
        if not self._first:
            received = [self._world.receive(shape.empty(self.device), self._world.stage - 1) for shape in inputs]
            carried = [*map(_channels_first, received)]
        outputs = self._passed_on(self._outputs(*carried, batch=batch))
        if not self._last:
            for tensor in outputs:
                self._world.send(tensor, self._world.stage + 1)
        return outputs[0]

    def _passed_on(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What leaves this stage: scores in their own type from the last one, else what the next stage takes."""
        if self._last:
            return tuple(scores.to(self.dtype) for scores in outputs)
        return tuple(map(_channels_last, outputs))

    def _pipeline(self, batches: list[MicroBatch]) -> Pipeline:
        """What takes so many micro-batches of their size through the stages."""
        key = _side(batches[0]), len(batches)
        if key not in self._pipelines:
            shapes = self._shapes(True, key[0], self.plan.micro_batch)
            order = self.plan.placement.pipeline
            self._pipelines[key] = Pipeline(self._world, order, len(batches), *shapes)
        return self._pipelines[key]

    @torch.no_grad()
    def _shapes(self, trains: bool, side: int, count: int) -> StageShapes:
        """The shapes of so many images of this size, found out once by a pass that leaves nothing behind."""
        if (trains, side) not in self._known_shapes:
            images = torch.Size((count, self.plan.facts.channels, side, side))
            carried: tuple[TensorShape, ...] = (TensorShape(images, self.dtype),)
            mine = carried, carried
            for stage in range(self._world.stages):
                if stage == self._world.stage:
                    mine = carried, self._tried(carried, trains, count)
                carried = self._world.from_stage(mine[1], stage)
            self._known_shapes[trains, side] = mine
        return self._known_shapes[trains, side]

    def _tried(self, inputs: Sequence[TensorShape], trains: bool, count: int) -> tuple[TensorShape, ...]:
        """What comes out of this stage for such inputs."""
        rows = torch.zeros_like(self.statistics.pass_rows(0))
        positions = torch.zeros(count, dtype=torch.int64, device=self.device)
        carried = [shape.empty(self.device).zero_() for shape in inputs]
        pictures = carried if self._first else map(_channels_first, carried)
        outputs = self._outputs(*pictures, batch=Batch(rows, *self.masks(positions)) if trains else None)
        return tuple(TensorShape(tensor.shape, tensor.dtype) for tensor in self._passed_on(outputs))


def stages_of(plan: Plan) -> list[list[str]]:
    """The names of the blocks of each stage: as `on.splits` has them, else with about the same work in each."""
    blocks, splits = plan.network.blocks, plan.splits
    if not splits:
        costs = [cost.multiply_adds for cost in block_costs(plan.recipe, plan.facts)]
        splits = balanced(blocks, costs, plan.stages)
    return parted(blocks, splits)


def _side(batch: MicroBatch) -> int:
    assert batch.draws is not None
    return batch.draws.side


def _channels_last(tensor: Tensor) -> Tensor:
    """A picture with its channels innermost, as it lies in memory; scores are passed on as they are."""
    return tensor.permute(0, 2, 3, 1).contiguous() if tensor.dim() == 4 else tensor.view_as(tensor).contiguous()


def _channels_first(tensor: Tensor) -> Tensor:
    """A picture as layers take it, in the same memory."""
    return tensor.permute(0, 3, 1, 2) if tensor.dim() == 4 else tensor
