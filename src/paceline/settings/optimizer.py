"""How gradients become steps: optimizers, weight decay and clipping."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.settings.duration import Rate
from paceline.settings.types import Fraction, NotNegative, Positive, Settings

Lr = Annotated[Rate, Field(description="Peak learning rate: a number, or '2^-6 per image', or '0.1 per 256 images'.")]


class Sgd(Settings):
    """Gradient descent, plain or with momentum: m = momentum * m + (g + decay * w); w -= lr * m."""

    name: Literal["sgd"]
    lr: Annotated[Lr, Field(examples=["0.1 per 256 images"])]
    momentum: Fraction = 0.0
    """Fraction of the last step's direction that is kept."""
    nesterov: bool = False
    """Look ahead by one momentum step (Nesterov)."""


class RmsProp(Settings):
    """Steps divided by the root of the mean square of past gradients, with momentum; weight decay is added to the
    gradient."""

    name: Literal["rmsprop"]
    lr: Annotated[Lr, Field(examples=["2^-14 per image"])]
    form: Literal["tensorflow", "torch"] = "tensorflow"
    """tensorflow: epsilon inside the root, squares that start at 1, learning rate inside the momentum; torch: epsilon
    outside, squares from 0, learning rate outside."""
    decay: Fraction = 0.9
    """Fraction of the mean square that is kept."""
    momentum: Fraction = 0.9
    """Fraction of the last step that is kept."""
    epsilon: Positive = 1e-3
    """Added to the mean square, or to its root."""


class Lars(Settings):
    """Momentum with a learning rate for each tensor, by the ratio of its weights' and gradient's norms."""

    name: Literal["lars"]
    lr: Annotated[Lr, Field(examples=["2^-9.5 per image"])]
    momentum: Fraction = 0.9
    """Fraction of the last step that is kept."""
    trust_coefficient: Positive = 0.001
    """trust_coefficient * |w| / (|g| + decay * |w| + epsilon) multiplies the learning rate."""
    decay: NotNegative = 0.0
    """LARS's own weight decay, inside the ratio; `weight_decay` is added to the gradient before the ratio sees it, and
    with both the weights decay twice."""
    epsilon: NotNegative = 0.0
    """Added to the denominator of the ratio."""
    momentum_correction: bool = False
    """Keep the learning rate out of the momentum, as NVIDIA does; off, it is inside, as in the MLPerf reference."""
    skip_names: tuple[str, ...] = ("norm", "bias")
    """Parameters with one of these words in their name take a plain momentum step, without LARS's decay; norm means
    those of norms also where another package calls them bn1."""
    skip_dimensions: tuple[int, ...] = ()
    """The same for parameters with this many dimensions."""


class Larc(Settings):
    """Momentum over gradients that are scaled tensor by tensor, by the ratio of weights' and gradient's norms."""

    name: Literal["larc"]
    lr: Annotated[Lr, Field(examples=["1 per 1024 images"])]
    momentum: Fraction = 0.9
    """Fraction of the last step's direction that is kept."""
    nesterov: bool = True
    """Look ahead by one momentum step (Nesterov)."""
    trust_coefficient: Positive = 0.003
    """The ratio is trust_coefficient * |w| / |g|, weight decay included in g, and 1 where one of the norms is zero."""
    mode: Literal["clip", "scale"] = "clip"
    """clip: gradients times min(ratio / lr, 1), so that no tensor moves faster than lr; scale: times the ratio."""


class AdamW(Settings):
    """Adam with weight decay apart from the gradient: w -= lr * (m / (sqrt(v) + epsilon) + decay * w)."""

    name: Literal["adamw"]
    lr: Annotated[Lr, Field(examples=[3e-4])]
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Fractions of the mean gradient and of the mean square that are kept; both means are corrected for their start."""
    epsilon: Positive = 1e-8
    """Added to the root of the mean square."""


class Lamb(Settings):
    """AdamW whose step is scaled tensor by tensor to the norm of the weights, weight decay included: u = m / (sqrt(v) +
    epsilon) + decay * w; w -= lr * |w| / |u| * u."""

    name: Literal["lamb"]
    lr: Annotated[Lr, Field(examples=[8e-3])]
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Fractions of the mean gradient and of the mean square that are kept; both means are corrected for their start."""
    epsilon: Positive = 1e-6
    """Added to the root of the mean square."""
    scales: Literal["all", "decayed"] = "all"
    """Which tensors' steps are scaled: all, or those that weight decay pulls at; the others take AdamW's (timm)."""


class Muon(Settings):
    """Momentum whose direction is made orthogonal for each convolution and dense layer; everything else takes AdamW.
    Weight decay is apart from the gradient: w -= lr * (direction + decay * w)."""

    name: Literal["muon"]
    lr: Annotated[Rate, Field(examples=[0.02])]
    """Peak learning rate of the orthogonal steps."""
    momentum: Fraction = 0.95
    """Fraction of the last step's direction that is kept."""
    nesterov: bool = True
    """Look ahead by one momentum step (Nesterov)."""
    iterations: Annotated[int, Field(ge=1, le=8)] = 5
    """Newton-Schulz iterations that make a direction orthogonal; they do not settle, and more only amplify rounding."""
    adamw_lr: Positive = 0.001
    """Learning rate of what is not orthogonal, at the peak of the schedule; its other settings are AdamW's defaults."""
    skip_names: tuple[str, ...] = ()
    """Parameters with one of these words in their name take AdamW too; weights of the last dense layer always do."""


OptimizerSettings = Sgd | RmsProp | Lars | Larc | AdamW | Lamb | Muon


class Clip(Settings):
    """Bounds on the mean gradient of a step, applied in this order; none of them by default."""

    value: Positive | None = None
    """Every number of the gradient stays within +-value."""
    norm: Positive | None = None
    """The gradient of the whole network is scaled down to this norm where it is larger."""
    adaptive: Positive | None = None
    """Each output's gradient is scaled down to this fraction of the norm of the output's weights where it is larger;
    the last dense layer and parameters with one dimension are left alone."""


class WeightDecay(Settings):
    """Pull of the weights toward zero, and what it leaves alone: rate * w is added to the gradient, but in adamw, lamb
    and muon it is apart from it, w -= lr * rate * w (lamb scales the two together)."""

    rate: NotNegative = 0.0
    """Strength of the decay."""
    skip_names: tuple[str, ...] = ()
    """Leave out parameters with one of these words in their name, such as norm or bias; norm means those of norms also
    where another package calls them bn1."""
    skip_dimensions: tuple[int, ...] = ()
    """Leave out parameters with this many dimensions, such as 1 for every scale, shift and bias."""
