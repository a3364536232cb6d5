"""From a recipe's optimizer settings to an optimizer, with what weight decay leaves alone in plain sight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline import keyed
from paceline.optim.adam import AdamRule
from paceline.optim.clip import Clipping
from paceline.optim.flat import Group
from paceline.optim.lars import LarcRule, LarsRule
from paceline.optim.muon import MuonRule
from paceline.optim.rmsprop import RmsPropRule
from paceline.optim.rule import Part, Rule, Ruled
from paceline.optim.sgd import Descent, DescentRule
from paceline.planning import Plan
from paceline.settings.optimizer import AdamW, Clip, Lamb, Larc, Lars, Muon, RmsProp, Sgd, WeightDecay


class Optimizer(Protocol):
    """What the step needs of an optimizer."""

    def step(self, lr: Tensor, divisor: Tensor, bad: Tensor, step: Tensor, /) -> None:
        """Move the weights by gradients / divisor unless the step is bad, and drop the gradients.

        All four are 0-dimensional tensors on the device, so that a CUDA graph can hold the step: lr and divisor in the
        device's widest float, `bad` a float32 that is 0 for a good step, and the int64 `step`, which keys rounding.
        """
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything it carries from step to step, by name."""
        ...


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], plan: Plan, norms: Set[str] = frozenset()
) -> Optimizer:
    """The optimizer of a recipe for the named parameters of a network that train; `norms` are those of norms, whatever
    they are called: the word norm in a recipe means these too."""
    named = {name: p for name, p in parameters if p.requires_grad}
    groups, settings, bounds = group(plan, named, norms), plan.recipe.optimizer, plan.recipe.clip
    if isinstance(settings, Sgd) and bounds == Clip() and all(map(Descent.fits, named.values())):
        return Descent(groups, settings.momentum, settings.nesterov)
    last = head(plan, named)
    pairs = ruled(plan, groups, norms, last)
    parts = [Part(some, rule, rounding(plan, some)) for some, rule in pairs if some.parameters]
    return Ruled(parts, Clipping(bounds, [part.slab for part in parts], last))


def rounding(plan: Plan, group: Group) -> int | None:
    """The key by which a group's 16-bit weights are rounded by chance; None where they are not."""
    name, first = next(iter(group.parameters.items()))
    if first.dtype.itemsize >= 4 or not plan.placement.stochastic_rounding:
        return None
    return keyed.key(plan.recipe.seed, "rounding", name)


def ruled(plan: Plan, groups: list[Group], norms: Set[str], head: Set[str]) -> Iterator[tuple[Group, Rule]]:
    """Every group with the rule that moves it; where a rule leaves parameters out, they are a group of their own."""
    settings = plan.recipe.optimizer
    for whole in groups:
        match settings:
            case Sgd():
                yield whole, DescentRule(settings.momentum, settings.nesterov)
            case RmsProp():
                yield whole, RmsPropRule(settings)
            case Lars():
                skipped, scaled = whole.split(lambda name, p: _skips(settings, name, p, norms))
                yield scaled, LarsRule(settings, skipped=False)
                yield skipped, LarsRule(settings, skipped=True)
            case Larc():
                yield whole, LarcRule(settings)
            case AdamW():
                yield whole, AdamRule(settings.betas, settings.epsilon)
            case Lamb():
                scales = settings.scales == "all" or whole.decay > 0
                yield whole, AdamRule(settings.betas, settings.epsilon, scales)
            case Muon():
                matrices, rest = whole.split(
                    lambda name, p: p.dim() > 1 and name not in head and not _named(settings.skip_names, name, norms)
                )
                yield matrices, MuonRule(settings)
                # The schedule has multiplied the peak: what it multiplied it by, times the rest's own rate.
                share = settings.adamw_lr / plan.peak_lr if plan.peak_lr else 0.0
                yield replace(rest, lr_factor=rest.lr_factor * share), AdamRule((0.9, 0.999), 1e-8)


def group(plan: Plan, named: dict[str, nn.Parameter], norms: Set[str] = frozenset()) -> list[Group]:
    """Parameters by how weight decay pulls at them, what their learning rate is multiplied by, and type."""
    decay = plan.recipe.weight_decay
    found: dict[tuple[float, float, torch.dtype], dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        rate = decay.rate if decays(decay, name, parameter, norms) else 0.0
        factor = plan.lr_factor(name.partition(".")[0])
        found.setdefault((rate, factor, parameter.dtype), {})[name] = parameter
    return [Group(rate, factor, members) for (rate, factor, _), members in found.items()]


def decays(decay: WeightDecay, name: str, parameter: Tensor, norms: Set[str] = frozenset()) -> bool:
    """Whether weight decay pulls at this parameter."""
    return decay.rate > 0 and not _skips(decay, name, parameter, norms)


def head(plan: Plan, named: dict[str, nn.Parameter]) -> set[str]:
    """The weights that decide between classes: the last matrix of the last block, where it trains here."""
    last = plan.network.blocks[-1:]
    return set([name for name, p in named.items() if p.dim() == 2 and name.partition(".")[0] in last][-1:])


def _skips(settings: WeightDecay | Lars, name: str, parameter: Tensor, norms: Set[str]) -> bool:
    return _named(settings.skip_names, name, norms) or parameter.dim() in settings.skip_dimensions


def _named(words: tuple[str, ...], name: str, norms: Set[str]) -> bool:
    return any(word in name for word in words) or ("norm" in words and name in norms)
