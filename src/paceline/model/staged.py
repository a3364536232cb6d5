"""One stage of a network that is a pipeline over several processes: the verbs of `Whole`, done together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.data.load.batches import MicroBatch
from paceline.errors import PlanError
from paceline.model.batch import Batch
from paceline.model.cost import parts_of
from paceline.model.metrics import TRAIN_SUMS, Answers, judge
from paceline.model.network import Network
from paceline.model.precision import network_on_device
from paceline.model.whole import Whole, placed_forward
from paceline.pipelining import Ends, Passes, Pipeline, StageTimes, TensorShape
from paceline.planning import Plan
from paceline.stages import part_name
from paceline.world import T, World


class Staged(Whole):
    """The blocks of one stage, their norm statistics, and what a step and a validation do with them.

    The network is cut into parts, which are dealt out to the stages in turn: one for each, or several. The first stage
    has the images, and the last one the scores and the loss. Between parts travel the picture and the scores of
    auxiliary heads. Every stage must call the same verbs in the same order.
    """

    def __init__(self, plan: Plan, world: World, class_weights: Sequence[float] | None = None) -> None:
        self._world = world
        self._first, self._last = world.stage == 0, world.stage == world.stages - 1
        self.parts = parts_of(plan)
        self._own = {part: self.parts[part] for part in range(world.stage, len(self.parts), world.stages)}
        super().__init__(plan, world, class_weights)
        pieces = self.module.cut([blocks[0] for blocks in self._own.values()])
        self._forwards = {part: placed_forward(piece, plan) for part, piece in zip(self._own, pieces, strict=True)}
        self._times: StageTimes | None = None
        self._pipelines: dict[tuple[int, int], Pipeline] = {}
        """By the pixels a side of the images and the number of micro-batches."""
        self._known_ends: dict[tuple[bool, int], dict[int, Ends]] = {}
        """In training or not, by the pixels a side: those of each part that is here."""

    def _part(self, network: Network) -> Network:
        """The blocks of this stage."""
        for number, blocks in enumerate(self.parts, 1):
            trained = [network.get_submodule(name) for name in blocks if name not in self.plan.frozen]
            if not any(True for block in trained for _ in block.parameters()):
                raise PlanError(
                    f"{part_name(self.plan)} {number} of {len(self.parts)} has nothing to train "
                    f"({', '.join(blocks)}); write fewer on.stages, or other on.splits"
                )
        return network.only([name for blocks in self._own.values() for name in blocks])

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
        others = {name for part, blocks in enumerate(self.parts) if part not in self._own for name in blocks}
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

        def forward(part: int, number: int, *carried: Tensor) -> tuple[Tensor, ...]:
            batch = batches[number]
            return self._through(part, carried or (self._mixed(batch)[0],), self._pass(begin + number, batch))

        def loss(heads: Sequence[Tensor], number: int) -> Tensor:
            draws = batches[number].draws
            assert draws is not None
            loss = self._loss([*heads], *self.augment.labels(labels[number], draws))
            hits = (heads[0].detach().argmax(1) == labels[number]).sum(dtype=self.dtype)
            sums.add_(torch.stack([loss.detach(), hits]))
            return loss if loss_scale is None else loss * loss_scale

        with self._buckets.micro_batches(len(batches)):
            self._pipeline(batches).step(Passes(forward, loss), self._times)
        return sums

    @contextmanager
    def timed(self) -> Iterator[StageTimes]:
        """Note when steps, and the passes of this stage, begin and end."""
        self._times = StageTimes(self.device)
        try:
            yield self._times
        finally:
            self._times = None

    @torch.no_grad()
    def forward_statistics(self, batches: list[MicroBatch]) -> None:
        """Run the forward passes of training for nothing but the statistics of their norm groups."""
        self._begin()
        for index, batch in enumerate(batches):
            ends = self._ends(True, _side(batch), self.plan.micro_batch)
            self._relay(self._mixed(batch)[0] if self._first else None, self._pass(index, batch), ends)

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
        ends = self._ends(False, facts.evaluation_side or facts.side, count)
        pictures = self.augment.normalize(images) if self._first else None
        rows = [self._relay(pictures, None, ends)]
        if self.plan.recipe.evaluate.flip:
            rows.append(self._relay(pictures.flip(3) if pictures is not None else None, None, ends))
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

    def _relay(self, pictures: Tensor | None, batch: Batch | None, ends: dict[int, Ends]) -> Tensor:
        """Take a batch through the network by itself, without a backward pass; gives scores on the last stage."""
        stage, stages = self._world.stage, self._world.stages
        outputs: tuple[Tensor, ...] = ()
        for part, (inputs, _) in ends.items():
            if part == 0:
                assert pictures is not None
                carried = [pictures]
            else:
                carried = [self._world.receive(shape.empty(self.device), (stage - 1) % stages) for shape in inputs]
            outputs = self._through(part, carried, batch)
            if part + 1 < len(self.parts):
                for tensor in outputs:
                    self._world.send(tensor, (stage + 1) % stages)
        return outputs[0]

    def _through(self, part: int, carried: Sequence[Tensor], batch: Batch | None) -> tuple[Tensor, ...]:
        """What leaves a part: scores in their own type from the last one, else what the next one takes."""
        pictures = map(_channels_first, carried) if part > 0 else carried
        outputs = self._outputs(*pictures, batch=batch, forward=self._forwards[part])
        if part + 1 == len(self.parts):
            return tuple(scores.to(self.dtype) for scores in outputs)
        return tuple(map(_channels_last, outputs))

    def _pipeline(self, batches: list[MicroBatch]) -> Pipeline:
        """What takes so many micro-batches of their size through the stages."""
        key = _side(batches[0]), len(batches)
        if key not in self._pipelines:
            ends, order = self._ends(True, key[0], self.plan.micro_batch), self.plan.placement.pipeline
            self._pipelines[key] = Pipeline(self._world, order, len(batches), ends, len(self.parts))
        return self._pipelines[key]

    @torch.no_grad()
    def _ends(self, trains: bool, side: int, count: int) -> dict[int, Ends]:
        """Those of this stage's parts for so many images of this size, found out once by passes that leave nothing
        behind."""
        if (trains, side) not in self._known_ends:
            images = torch.Size((count, self.plan.facts.channels, side, side))
            carried: Sequence[TensorShape] = (TensorShape(images, self.dtype),)
            ends: dict[int, Ends] = {}
            for part in range(len(self.parts)):
                if part in self._own:
                    ends[part] = Ends(carried, self._tried(part, carried, trains, count))
                    carried = ends[part].outputs
                carried = self._world.from_stage(carried, part % self._world.stages)
            self._known_ends[trains, side] = ends
        return self._known_ends[trains, side]

    def _tried(self, part: int, inputs: Sequence[TensorShape], trains: bool, count: int) -> tuple[TensorShape, ...]:
        """What comes out of a part for such inputs."""
        rows = torch.zeros_like(self.statistics.pass_rows(0))
        positions = torch.zeros(count, dtype=torch.int64, device=self.device)
        carried = [shape.empty(self.device).zero_() for shape in inputs]
        outputs = self._through(part, carried, Batch(rows, *self.masks(positions)) if trains else None)
        return tuple(TensorShape(tensor.shape, tensor.dtype) for tensor in outputs)


def _side(batch: MicroBatch) -> int:
    assert batch.draws is not None
    return batch.draws.side


def _channels_last(tensor: Tensor) -> Tensor:
    """A picture with its channels innermost, as it lies in memory; scores are passed on as they are."""
    return tensor.permute(0, 2, 3, 1).contiguous() if tensor.dim() == 4 else tensor.view_as(tensor).contiguous()


def _channels_first(tensor: Tensor) -> Tensor:
    """A picture as layers take it, in the same memory."""
    return tensor.permute(0, 3, 1, 2) if tensor.dim() == 4 else tensor
