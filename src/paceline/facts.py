"""What a plan must know of the images and of the network, before either is opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import PlanError


@dataclass(frozen=True)
class DataFacts:
    """What a plan must know of a data set."""

    images: int
    validation_images: int
    classes: int
    side: int
    channels: int = 3
    evaluation_side: int | None = None
    """Where validation images have another side."""


@dataclass(frozen=True)
class NetworkFacts:
    """What a plan must know of a network, from the model tables."""

    parameters: int
    activations: int
    """Numbers kept for the backward pass, for one image."""
    smallest_side: int = 1
    last_side: int = 2
    """Pixels a side that the last norm sees."""
    blocks: tuple[str, ...] = ()
    """The names of its blocks, in order."""
    norms: bool = True
    """Whether it has any norms."""
    auxiliary: bool = False
    """Whether it is an auxiliary head that needs the smallest side."""

    def chosen(self, key: str, names: Iterable[str]) -> list[str]:
        """The blocks that names stand for: a block, a stage of blocks, or all; a wrong one lists the right ones."""
        chosen: set[str] = set()
        for name in names:
            named = [block for block in self.blocks if name in ("all", block) or block.startswith(f"{name}/")]
            if not named:
                raise PlanError(f"{key}: the network has no block '{name}'; it has {', '.join(self.blocks)}")
            chosen.update(named)
        return [block for block in self.blocks if block in chosen]
