"""From a recipe's optimizer settings to an optimizer: which parameters share a group, and which rule updates them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline import keyed
from paceline.optim.adam import AdamRule
from paceline.optim.clip import Clipping
from paceline.optim.flat import ParameterGroup, flat_starts
from paceline.optim.lars import LarcRule, LarsRule
from paceline.optim.muon import MuonRule
from paceline.optim.offload import PIECE_BYTES, HostGroup, Lane
from paceline.optim.parts import GroupPart, in_pieces, in_shares
from paceline.optim.rmsprop import RmsPropRule
from paceline.optim.rounding import Rounding
from paceline.optim.rule import FlatGroup, FlatOptimizer, Rule
from paceline.optim.sgd import FusedSgd, FusedSgdRule, SgdRule
from paceline.optim.shard import OthersGroup, ShardedOptimizer
from paceline.planning import Plan
from paceline.settings.optimizer import AdamW, Clip, Lamb, Larc, Lars, Muon, RmsProp, Sgd, WeightDecay
from paceline.world import World


class Optimizer(Protocol):
    """What a training step needs of an optimizer."""

    def step(self, lr: Tensor, divisor: Tensor, bad: Tensor, step: Tensor, /) -> None:
        """Move the weights by gradients / divisor unless the step is bad, and drop the gradients.

        All four are 0-dimensional tensors on the device, so that a CUDA graph can hold the step: lr and divisor in the
        device's widest float, `bad` a float32 that is 0 for a good step, and the int64 `step`, which keys rounding.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the optimizer carries from step to step, by name."""


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    plan: Plan,
    norms: Set[str] = frozenset(),
    world: World | None = None,
    roundings: Mapping[str, Rounding] | None = None,
) -> Optimizer:
    """The recipe's optimizer for the trainable ones of these named parameters; other stages of `world` have others.

    `norms` names the parameters of norm layers: the word norm in a recipe means them too, whatever they are called.
    Where the placement wants shares, the replicas of `world` have them. Where these parameters are not all of the
    network's, `roundings` says how each is rounded.
    """
    named = {name: p for name, p in parameters if p.requires_grad}
    roundings = weight_roundings(named.items(), plan, norms) if roundings is None else roundings
    groups, settings, limits = parameter_groups(plan, named, norms), plan.recipe.optimizer, plan.recipe.clip
    offloads = plan.placement.offload == "optimizer"
    sharers = world if world is not None and world.replicas > 1 and plan.shards else None
    fuses = limits == Clip() and all(map(FusedSgd.supports, named.values()))
    if isinstance(settings, Sgd) and fuses and not offloads and sharers is None:
        return FusedSgd(groups, settings.momentum, settings.nesterov)
    head = head_weights(plan, named)
    pairs = assign_rules(plan, groups, norms, head, fuses)
    parts = [
        GroupPart(group, rule, roundings.get(next(iter(group.parameters))), stacked=isinstance(rule, MuonRule))
        for group, rule in pairs
        if group.parameters
    ]
    if sharers is not None:
        parts = in_shares(parts, sharers.replicas)
    if offloads:
        parts = in_pieces(parts, PIECE_BYTES)
    flat_groups = _flat_groups(parts, sharers.replica if sharers else 0, offloads)
    optimizer = FlatOptimizer(flat_groups, Clipping(limits, [group.flat for group in flat_groups], head, world))
    if sharers is None:
        return optimizer
    return ShardedOptimizer(optimizer, [*zip(flat_groups, (part.owner for part in parts), strict=True)], sharers)


def _flat_groups(parts: list[GroupPart], replica: int, offloads: bool) -> list[FlatGroup]:
    """The groups of a replica: each with its state on the device or on the host, or without if it is another's."""
    lane = Lane(next(iter(parts[0].group.parameters.values())).device) if offloads else None
    groups: list[FlatGroup] = []
    for part in parts:
        if part.owner != replica:
            groups.append(OthersGroup(part.group, part.rule))
        elif lane is not None:
            groups.append(HostGroup(part.group, part.rule, part.rounding, lane))
        else:
            groups.append(FlatGroup(part.group, part.rule, part.rounding))
    return groups


def weight_roundings(
    parameters: Iterable[tuple[str, nn.Parameter]], plan: Plan, norms: Set[str] = frozenset()
) -> dict[str, Rounding]:
    """The stochastic rounding of each 16-bit weight of a whole network, by name; none where it is to the nearest."""
    named = {name: p for name, p in parameters if p.requires_grad and p.dtype.itemsize < 4}
    roundings: dict[str, Rounding] = {}
    if not plan.placement.stochastic_rounding:
        return roundings
    groups = parameter_groups(plan, named, norms)
    for group, _ in assign_rules(plan, groups, norms, head_weights(plan, named)):
        if group.parameters:
            key = keyed.key(plan.recipe.seed, "rounding", next(iter(group.parameters)))
            roundings |= dict.fromkeys(group.parameters, Rounding(key, flat_starts(group.parameters)))
    return roundings


def assign_rules(
    plan: Plan, groups: list[ParameterGroup], norms: Set[str], head: Set[str], fuses: bool = False
) -> Iterator[tuple[ParameterGroup, Rule]]:
    """Every group with its rule; parameters that an optimizer treats differently become a group of their own.

    `fuses` says that torch's kernel for SGD can update them.
    """
    settings = plan.recipe.optimizer
    for group in groups:
        match settings:
            case Sgd():
                yield group, (FusedSgdRule if fuses else SgdRule)(settings.momentum, settings.nesterov)
            case RmsProp():
                yield group, RmsPropRule(settings)
            case Lars():
                skipped, scaled = group.split(lambda name, p: _skips(settings, name, p, norms))
                yield scaled, LarsRule(settings, skipped=False)
                yield skipped, LarsRule(settings, skipped=True)
            case Larc():
                yield group, LarcRule(settings)
            case AdamW():
                yield group, AdamRule(settings.betas, settings.epsilon)
            case Lamb():
                scales = settings.scales == "all" or group.decay > 0
                yield group, AdamRule(settings.betas, settings.epsilon, lamb=scales)
            case Muon():
                matrices, rest = group.split(
                    lambda name, p: p.dim() > 1 and name not in head and not _names(settings.skip_names, name, norms)
                )
                yield matrices, MuonRule(settings)
                # The schedule multiplies Muon's peak, so the rest gets the ratio of its own rate to that peak.
                ratio = settings.adamw_lr / plan.peak_lr if plan.peak_lr else 0.0
                yield replace(rest, lr_factor=rest.lr_factor * ratio), AdamRule((0.9, 0.999), 1e-8)


def parameter_groups(plan: Plan, named: dict[str, nn.Parameter], norms: Set[str] = frozenset()) -> list[ParameterGroup]:
    """Parameters grouped by weight decay, learning-rate factor and type."""
    decay = plan.recipe.weight_decay
    groups: dict[tuple[float, float, torch.dtype], dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        rate = decay.rate if decays(decay, name, parameter, norms) else 0.0
        factor = plan.lr_factor(name.partition(".")[0])
        groups.setdefault((rate, factor, parameter.dtype), {})[name] = parameter
    return [ParameterGroup(rate, factor, members) for (rate, factor, _), members in groups.items()]


def decays(decay: WeightDecay, name: str, parameter: Tensor, norms: Set[str] = frozenset()) -> bool:
    """Whether weight decay applies to a parameter."""
    return decay.rate > 0 and not _skips(decay, name, parameter, norms)


def head_weights(plan: Plan, named: dict[str, nn.Parameter]) -> set[str]:
    """The name of the classifier's weights: the last matrix of the last block, if it is among these parameters."""
    last = plan.network.blocks[-1:]
    return set([name for name, p in named.items() if p.dim() == 2 and name.partition(".")[0] in last][-1:])


def _skips(settings: WeightDecay | Lars, name: str, parameter: Tensor, norms: Set[str]) -> bool:
    return _names(settings.skip_names, name, norms) or parameter.dim() in settings.skip_dimensions


def _names(words: tuple[str, ...], name: str, norms: Set[str]) -> bool:
    return any(word in name for word in words) or ("norm" in words and name in norms)
