"""Networks of other packages, with Paceline's norms and keyed dropout in place of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline import keyed
from paceline.errors import PlanError
from paceline.facts import DataFacts
from paceline.model.batch import Batch, Layer
from paceline.model.dropout import Dropout, DropoutMasks, StochasticDepth
from paceline.model.layers import MakeNorm
from paceline.model.norm import Statistics
from paceline.model.packages import first_line, network_maker
from paceline.settings.model import External

PROBE = 2
"""Images in the trial batch that shows how a network behaves."""


class ExternalNetwork(Layer):
    """A whole network of another package as one block; scores of auxiliary heads ride along.

    Its own code does not pass the micro-batch on, so this block hands it to Paceline's layers in it for the duration of
    one forward pass. Only one pass may be under way at a time, so such a network cannot be cut into pipeline stages.
    """

    def __init__(self, network: nn.Module, make_norm: MakeNorm) -> None:
        super().__init__()
        self.network = network
        _replace(self, make_norm)
        self._batch: Batch | None = None
        for module in self.network.modules():
            if isinstance(module, Layer):
                module.register_forward_pre_hook(self._add_batch)

    def _add_batch(self, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return (*inputs, self._batch)

    def forward(self, x: Tensor, batch: Batch | None) -> Any:
        self._batch = batch
        try:
            output = self.network(x)
        finally:
            self._batch = None
        if isinstance(output, Tensor):
            return output
        return tuple(scores for scores in output if scores is not None)


def external_blocks(model: External, facts: DataFacts, make_norm: MakeNorm, seed: int) -> dict[str, nn.Module]:
    """The network as one block; its weights are those its package starts with, drawn from the recipe's seed."""
    make = network_maker(model.name, model.network, facts)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(keyed.key(seed, "weights"))  # fits torch, however large the seed
        block = ExternalNetwork(make(), make_norm)
        _probe(block, facts, f"{model.name}:{model.network}")
    return {"network": block}


def _replace(module: nn.Module, make_norm: MakeNorm) -> None:
    """Replace batch norms and dropouts by Paceline's, which keep norm groups and keyed masks."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d) and child.affine:
            setattr(module, name, _norm(child, make_norm))
        elif isinstance(child, nn.Dropout):
            setattr(module, name, Dropout(child.p, 0))
        elif type(child).__name__ == "DropPath":
            setattr(module, name, StochasticDepth(float(getattr(child, "drop_prob", 0.0) or 0.0)))
        elif type(child).__name__ == "StochasticDepth" and getattr(child, "mode", "row") == "row":
            setattr(module, name, StochasticDepth(float(getattr(child, "p", 0.0))))
        else:
            _replace(child, make_norm)


def _norm(theirs: nn.BatchNorm2d, make_norm: MakeNorm) -> nn.Module:
    """Paceline's norm with the same numbers, followed by the dropout and activation that theirs may hold."""
    norm = make_norm.published(theirs.eps, theirs.momentum or 0.1)(theirs.num_features, None)
    norm.load_state_dict(theirs.state_dict(), strict=False)
    rest = [child for child in theirs.children() if not isinstance(child, nn.Identity)]
    return nn.Sequential(norm, *rest) if rest else norm


def _probe(block: nn.Module, facts: DataFacts, name: str) -> None:
    """Run a trial batch: dropouts count their features, and a network with random numbers of its own is refused."""
    if any(isinstance(module, _BatchNorm) for module in block.modules()):
        raise PlanError(f"{name} has batch norms over vectors or without a scale, which cannot keep norm groups")
    images = torch.zeros(PROBE, facts.channels, facts.side, facts.side)
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: setattr(module, "features", inputs[0][0].numel()))
        for module in block.modules()
        if isinstance(module, Dropout)
    ]
    before = torch.get_rng_state()
    try:
        block.eval()(images, None)
        rows = Statistics(block, passes=1, groups=1).pass_rows(0)
        for _ in range(2):  # auxiliary heads run in training only, and their dropouts drop from the second time on
            masks = DropoutMasks(block, 0, torch.float32)(torch.arange(PROBE))
            block.train()(images, Batch(rows, *masks))
        for hook in hooks:
            hook.remove()
    except (RuntimeError, ValueError, TypeError, AssertionError) as fault:
        size = f"{facts.channels} x {facts.side} x {facts.side}"
        raise PlanError(f"{name} does not take images of {size}: {first_line(fault)}") from None
    if not torch.equal(before, torch.get_rng_state()):
        raise PlanError(
            f"{name} draws random numbers of its own in training, so that placements would not be the same run; "
            "choose a network without them"
        )
