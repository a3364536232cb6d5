"""The learning rate over a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.settings.duration import Duration, Interval, Length
from paceline.settings.types import NotNegative, Positive, Settings

# Every schedule has these two.
Warmup = Annotated[Length, Field(description="How long the learning rate climbs to its peak at the start of the run.")]
WarmupStart = Annotated[NotNegative, Field(description="The learning rate that warm-up climbs from, absolute.")]


class Constant(Settings):
    """The peak learning rate throughout, after warm-up."""

    name: Literal["constant"]
    warmup: Warmup = Duration.parse("0 steps")
    start: WarmupStart = 0.0


class Stepped(Settings):
    """Multiplied by `factor` at each of the `drops`."""

    name: Literal["stepped"]
    drops: Annotated[tuple[Length, ...], Field(examples=[["50%", "75%"]])]
    """When the learning rate falls, such as [50%, 75%] or [80 epochs, 120 epochs]."""
    factor: Positive = 0.1
    """What it is multiplied by at each drop."""
    warmup: Warmup = Duration.parse("0 steps")
    start: WarmupStart = 0.0


class Cosine(Settings):
    """Half a cosine from the peak to `end`."""

    name: Literal["cosine"]
    end: NotNegative = 0.0
    """The learning rate that it falls to, absolute."""
    warmup: Warmup = Duration.parse("0 steps")
    start: WarmupStart = 0.0
    after_warmup: bool = False
    """Start the cosine when warm-up ends instead of running it underneath (masked, as the older systems do)."""
    every: Interval | None = None
    """How long each value lasts, such as 1 epoch (NVIDIA) or 1/16 epochs (Graphcore PyTorch); left out, one step."""
    first: Literal[0, 1] = 0
    """What warm-up calls the first of them: 0, whose learning rate is then `start`, or 1 (NVIDIA)."""


class Exponential(Settings):
    """Multiplied by `factor` each time another `every` has passed."""

    name: Literal["exponential"]
    factor: Positive = 0.97
    """What the learning rate is multiplied by."""
    every: Annotated[Interval, Field(examples=["2.4 epochs"])]
    """How long each value lasts, such as 2.4 epochs."""
    warmup: Warmup = Duration.parse("0 steps")
    start: WarmupStart = 0.0


class Polynomial(Settings):
    """From the peak to `end` as (1 - progress) ** power, starting when warm-up ends."""

    name: Literal["polynomial"]
    power: Positive = 2.0
    """Shape of the fall: 1 is a straight line."""
    end: NotNegative = 0.0
    """The last learning rate, absolute."""
    warmup: Warmup = Duration.parse("0 steps")
    start: WarmupStart = 0.0
    first: Literal[0, 1] = 0
    """What the schedule calls the first step: 0 (TensorFlow; its learning rate is then `start`) or 1 (NVIDIA)."""
    extra_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Steps added to the length of the fall: 1 in the MLPerf reference, which never quite reaches `end`."""


Schedule = Constant | Stepped | Cosine | Exponential | Polynomial
