"""What a run carries from step to step, as one tree of tensors and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.device import widest_float
from paceline.errors import Broken
from paceline.model.init import initialize, published
from paceline.model.metrics import TRAIN_SUMS
from paceline.model.norm import norm_parameters
from paceline.model.precision import network_on_device
from paceline.model.pretrained import LoadedWeights, load_weights, read_weights
from paceline.model.whole import Whole
from paceline.optim.averages import Ema
from paceline.optim.build import Optimizer, build_optimizer, weight_roundings
from paceline.optim.rounding import Rounding
from paceline.optim.shard import ShardedOptimizer
from paceline.planning import Plan
from paceline.settings.model import External
from paceline.training.loss_scale import LossScale
from paceline.training.stopping import Stopping
from paceline.world import World


@dataclass
class State:
    """Everything that a checkpoint holds. The place in the data and all random numbers follow from `step`."""

    network: Whole
    optimizer: Optimizer
    ema: Ema | None
    """The moving average of weights and running statistics, if the recipe has one."""
    loss_scale: LossScale
    """What the loss is multiplied by before the backward pass."""
    sums: Tensor
    """Loss and hits, summed over the images since the last report."""
    last_sums: Tensor
    """Loss and hits of the last step."""
    bad: Tensor
    """For each step of the run, whether it was skipped because something in it was not finite."""
    reported: int = 0
    """The step of the last report."""
    stopping: Stopping = field(default_factory=Stopping)
    """What validations have said so far, and whether they have ended the run."""
    step: int = 0

    def gathered(self, keep: bool = True) -> AbstractContextManager[None]:
        """While this is entered, have every tensor, also what other replicas keep; every replica must enter it.

        With `keep` false a replica only gives what it has.
        """
        return self.optimizer.gathered(keep) if isinstance(self.optimizer, ShardedOptimizer) else nullcontext()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor by name, in groups: network, optimizer and, once it has started, ema.

        Where the optimizer's state is in shares, this is every tensor only while it is `gathered`.
        """
        groups = {"network": self.network.module.state_dict(), "optimizer": self.optimizer.tensors()}
        if self.ema is not None and self.ema.started(self.step):
            groups["ema"] = self.ema.tensors()
        return groups

    def numbers(self) -> dict[str, Any]:
        """Everything else, as plain numbers and lists; this waits for the device."""
        return {
            "step": self.step,
            "reported": self.reported,
            "sums": self.sums.tolist(),
            "last_sums": self.last_sums.tolist(),
            "bad_steps": self.bad_steps(),
            "loss_scale": float(self.loss_scale.value) if self.loss_scale.dynamic else None,
            "good_steps": int(self.loss_scale.good_steps),
            "stopping": asdict(self.stopping),
        }

    def load_numbers(self, numbers: dict[str, Any]) -> None:
        """Take over what `numbers` gave; sums that were not finite are null in JSON."""
        self.step, self.reported = numbers["step"], numbers["reported"]
        self.stopping = Stopping(**numbers["stopping"])
        for sums, values in ((self.sums, numbers["sums"]), (self.last_sums, numbers["last_sums"])):
            finite = [math.nan if value is None else value for value in values]
            sums.copy_(torch.tensor(finite, dtype=sums.dtype))
        self.bad.zero_()
        for step in numbers["bad_steps"]:
            self.bad[step - 1] = 1
        if self.loss_scale.dynamic and numbers["loss_scale"] is not None:  # a fixed scale says nothing of a dynamic one
            self.loss_scale.value.fill_(numbers["loss_scale"])
            self.loss_scale.good_steps.fill_(numbers["good_steps"])

    def bad_steps(self) -> list[int]:
        """The steps so far that were skipped, counted from 1; this waits for the device."""
        return [index + 1 for index in self.bad[: self.step].nonzero().flatten().tolist()]


def build_state(plan: Plan, world: World, class_weights: Sequence[float] | None = None) -> State:
    """The state before the first step; `initialize_state` or a checkpoint sets its weights.

    The class weights are those of the recipe for its training images.
    """
    weighted = plan.recipe.loss.class_weights != "none" and not plan.evaluates
    assert (class_weights is not None) == weighted, "the loss has the class weights that the recipe asks for"
    network = _network(plan, world, class_weights)
    norms, roundings = norm_parameters(network.module), _roundings(plan)
    optimizer = build_optimizer(network.module.named_parameters(), plan, norms, world, roundings)
    decay = plan.recipe.ema.decay
    ema = None if decay is None else Ema(plan, network.module, decay)
    sums = torch.zeros(2, len(TRAIN_SUMS), dtype=widest_float(world.device), device=world.device)
    bad = torch.zeros(plan.steps, dtype=torch.uint8, device=world.device)
    return State(network, optimizer, ema, LossScale(plan, world.device), sums[0], sums[1], bad)


def _roundings(plan: Plan) -> dict[str, Rounding] | None:
    """How weights are rounded, where a process has a part of them only."""
    if plan.stages == 1 or plan.placement.weights not in ("bf16", "fp16"):
        return None
    with torch.device("meta"):
        whole = network_on_device(plan, torch.device("meta"))
    return weight_roundings(whole.named_parameters(), plan, norm_parameters(whole))


def _network(plan: Plan, world: World, class_weights: Sequence[float] | None) -> Whole:
    if world.stages == 1:
        return Whole(plan, world, class_weights)
    from paceline.model.staged import Staged  # noqa: PLC0415 - torch's pipelining is slow to import

    return Staged(plan, world, class_weights)


def initialize_state(state: State, plan: Plan) -> LoadedWeights | None:
    """Set initial weights, the same on every replica and placement; gives what became of weights from elsewhere."""
    recipe, source = plan.recipe, plan.recipe.init.from_
    with state.network.entire() as module:
        if not isinstance(recipe.model, External):  # a network of another package starts as that package says
            initialize(module, published(recipe.init, recipe.model), recipe.seed)
        return load_weights(module, read_weights(source), source) if source else None


def broadcast_state(world: World, state: State) -> None:
    """Give every replica the first one's state, stage by stage."""
    if world.replicas == 1:
        return
    state.load_numbers(world.broadcast_object(state.numbers()))
    for tensors in state.tensors().values():
        world.broadcast(list(tensors.values()))


def compare_replicas(world: World, state: State) -> None:
    """End the run if the replicas' weights are no longer the same bits: what they learn apart would be nobody's run."""
    if world.replicas > 1 and not world.all_equal(state.network.checksum()):
        raise Broken(f"the replicas' weights differ after step {state.step}; checkpoints before it are intact")
