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
class Line:
    """A number that grows with the images of a forward pass."""

    base: float
    slope: float

    @staticmethod
    def through(one: tuple[int, float], other: tuple[int, float]) -> Line:
        """The line through two points, each so many images and the number there."""
        slope = (other[1] - one[1]) / (other[0] - one[0])
        return Line(one[1] - slope * one[0], slope)

    def at(self, images: float) -> float:
        """The number for so many images."""
        return self.base + self.slope * images


@dataclass(frozen=True)
class ProbedBlock:
    """What a block takes of a device, in bytes and seconds."""

    name: str
    weights: int
    gradients: int
    optimizer: int
    """The optimizer's state, and the moving average if there is one."""
    kept: Line
    """What its forward pass keeps for the backward pass."""
    passed: Line
    """What it passes on to the next block."""
    working: Line
    """What its backward pass takes for a moment, with the gradient that comes in; 0 where memory is counted."""
    forward: float
    """Seconds for one image, in a micro-batch of the largest size that was probed."""
    backward: float


@dataclass(frozen=True)
class Probe:
    """What a few real steps at small micro-batches took of a device; memory is in bytes, without the input of a step.

    Lines are by the images of a micro-batch.
    """

    device: str
    """The device's name."""
    counted: bool
    """Whether memory is counted, tensor by tensor, because nothing measures it."""
    taken: float
    """When, in seconds since 1970."""
    sizes: tuple[int, ...]
    """The micro-batches that were probed."""
    available: int
    """Memory of the device that torch can have: all but what others and CUDA itself take."""
    first: Line
    """The most that is taken in the passes of a step's first micro-batch."""
    following: Line
    """The same in those of a later one, beside gradients of the first."""
    update: Line
    """The same while weights are updated."""
    held: Line
    """What is held between steps: with CUDA graphs, their memory too."""
    evaluation: Line
    """What an evaluation takes beside that, by the images that it evaluates at a time."""
    off: float
    """How far the size before them is off the line through the two largest, as a fraction of what it took."""
    seconds: Line
    """How long both passes of a micro-batch take."""
    update_seconds: float
    blocks: tuple[ProbedBlock, ...]


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
