"""What each block of a network costs for one image: parameters, numbers saved for the backward pass, multiply-adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from paceline.facts import DataFacts
from paceline.model.batch import Batch
from paceline.model.build import build_network
from paceline.model.dropout import DropoutMasks
from paceline.model.norm import Statistics
from paceline.planning import Plan
from paceline.settings.recipe import Recipe
from paceline.stages import balanced, parted, shares_of_stages

IMAGES = 2
"""How many images are sent through, so that a norm over a picture of one pixel has two numbers."""


@dataclass(frozen=True)
class BlockCost:
    """What a block costs for one image."""

    name: str
    parameters: int
    activation_bytes: int
    """What the backward pass finds saved, in float32."""
    multiply_adds: int


def block_costs(recipe: Recipe, facts: DataFacts) -> list[BlockCost]:
    """Every block of a network in order, measured without memory or arithmetic, on torch's meta device."""
    with torch.device("meta"):
        network = build_network(recipe, facts).to("meta")  # another package's network comes from the CPU
        picture = torch.empty(IMAGES, facts.channels, facts.side, facts.side)
        rows = Statistics(network, passes=1, groups=1).pass_rows(0)
        batch = Batch(rows, *DropoutMasks(network, 0, torch.float32)(torch.arange(IMAGES)))
    costs = []
    saved: dict[int, Tensor] = {}  # by storage: what two operations save is counted once
    for name, block in network.named_children():
        before = sum(map(_bytes, saved.values()))

        def save(tensor: Tensor) -> Tensor:
            if tensor.dim() > 1 and tensor.shape[0] == IMAGES and not isinstance(tensor, torch.nn.Parameter):
                saved.setdefault(tensor.untyped_storage()._cdata, tensor)
            return tensor

        with FlopCounterMode(display=False) as counter, saved_tensors_hooks(save, lambda tensor: tensor):
            output = block(picture, batch)
        picture = output if isinstance(output, Tensor) else output[0]
        after = sum(map(_bytes, saved.values()))
        parameters = sum(p.numel() for p in block.parameters())
        costs.append(BlockCost(name, parameters, (after - before) // IMAGES, counter.get_total_flops() // (2 * IMAGES)))
    return costs


def parts_of(plan: Plan) -> list[list[str]]:
    """The names of the blocks of each part: as `on.splits` has them, else with about the same work in each, and in none
    only frozen blocks if that can be."""
    blocks, splits = plan.network.blocks, plan.splits
    if not splits:
        costs = [cost.multiply_adds for cost in block_costs(plan.recipe, plan.facts)]
        splits = balanced(blocks, costs, plan.parts, frozen=plan.frozen)
    return parted(blocks, splits)


def stage_shares(plan: Plan, parts: Sequence[Sequence[str]]) -> tuple[str, tuple[float, ...]]:
    """How much of the work each stage of a pipeline has, by the parts of the network: what is counted, which is time if
    a probe has measured that, and the shares."""
    if plan.shares:
        return "time", plan.shares
    costs = {cost.name: cost.multiply_adds for cost in block_costs(plan.recipe, plan.facts)}
    return "multiply-adds", tuple(shares_of_stages(costs, parts, plan.stages))


def count_parameters(recipe: Recipe, facts: DataFacts) -> int:
    """How many parameters a network has, by building it without memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_network(recipe, facts).parameters())


def exchanged(recipe: Recipe, facts: DataFacts, frozen: list[str]) -> tuple[int, int, int]:
    """Parameters that train, norm layers that keep statistics, and their channels, by building without memory."""
    with torch.device("meta"):
        network = build_network(recipe, facts).to("meta")
        network.freeze(frozen)
        norms = Statistics(network, passes=1, groups=1).norms
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    return trained, len(norms), sum(len(norm.weight) for norm in norms)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
