"""Norm, activation and a factor for each channel of each image, in plain torch: the twins of gate_triton.py.

Data are [groups, rows, channels] as in rows.py, and what belongs to an image is [images, channels]: every image has the
same number of rows, and every group the same number of images. y stands for act(x scale + shift).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.kernels.rows import activate, slope, widened
from paceline.settings.model import Activation


class GateSums(NamedTuple):
    """Sums over the rows of each image, [images, channels] each; the slope is that of the activation."""

    outputs: Tensor
    """Of d y."""
    slopes: Tensor
    """Of d times the slope."""
    products: Tensor
    """Of d times the slope times x less the group's mean."""
    plain_slopes: Tensor
    """Of the slope."""
    plain_products: Tensor
    """Of the slope times x less the group's mean."""


class Excite(NamedTuple):
    """The two layers of squeeze-and-excite."""

    squeeze: Tensor
    """[hidden, channels]."""
    squeeze_bias: Tensor
    excite: Tensor
    """[channels, hidden]."""
    excite_bias: Tensor
    activation: Activation
    gate: str
    """sigmoid or hardsigmoid."""


def image_factors(
    x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None, images: int, excite: Excite
) -> Tensor:
    """The factors of squeeze-and-excite, by the means of y over the rows of each image, in float32 or wider."""
    means = image_means(x, scale, shift, activation, images)
    hidden = means @ excite.squeeze.to(means.dtype).T + excite.squeeze_bias.to(means.dtype)
    hidden = activate(hidden, excite.activation)
    factors = hidden @ excite.excite.to(means.dtype).T + excite.excite_bias.to(means.dtype)
    return F.sigmoid(factors) if excite.gate == "sigmoid" else F.hardsigmoid(factors)


def image_means(x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None, images: int) -> Tensor:
    """The mean of y over the rows of each image."""
    return _by_image(activate(_normed(x, scale, shift), activation), images).mean(1)


def gated(x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None, gate: Tensor) -> Tensor:
    """y times the factor of its image and channel."""
    y = _by_image(activate(_normed(x, scale, shift), activation), len(gate))
    return (y * gate[:, None]).view(x.shape).to(x.dtype)


def gate_sums(
    d: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None, images: int
) -> GateSums:
    """What both the factors' gradient and the norm's are made of, by one pass over the data."""
    z = _normed(x, scale, shift)
    steep = torch.ones_like(z) if activation is None else slope(z, activation)
    d, off = widened(d), widened(x) - mean[:, None].to(z.dtype)
    terms = (d * activate(z, activation), d * steep, d * steep * off, steep, steep * off)
    return GateSums(*(_by_image(term, images).sum(1) for term in terms))


def gated_gradient(
    d: Tensor, x: Tensor, scale: Tensor, shift: Tensor, activation: Activation | None,
    gate: Tensor, term: Tensor, constants: tuple[Tensor, Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """a dz + b x + c, where dz is (d gate + term) times the slope of the activation."""
    z = _normed(x, scale, shift)
    steep = torch.ones_like(z) if activation is None else slope(z, activation)
    dz = (_by_image(widened(d), len(gate)) * gate[:, None] + term[:, None]).view(x.shape) * steep
    a, b, c = (values[:, None] for values in constants)
    return (a * dz + b * widened(x) + c).to(x.dtype)


def _normed(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return widened(x) * scale[:, None] + shift[:, None]


def _by_image(values: Tensor, images: int) -> Tensor:
    """Rows as [images, rows of an image, channels]."""
    return values.view(images, -1, values.shape[2])
