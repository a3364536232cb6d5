"""Batch norms in evaluation: a factor and a term for each channel, computed together with what stands around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from paceline.model.kernels import product
from paceline.model.kernels.fastest import fastest
from paceline.model.kernels.norm import as_images, as_rows, rows_for
from paceline.settings.model import Activation

if TYPE_CHECKING:
    from paceline.model.norm import BatchNormAct

VECTOR = 8
"""A product's channels come in multiples of this: 16 bytes of a 16-bit type."""


class FoldedNorm(NamedTuple):
    """A batch norm by running statistics that do not change: act(x scale + shift), [1, channels] each."""

    scale: Tensor
    shift: Tensor
    activation: Activation | None


def folded_norm_act(norm: FoldedNorm, x: Tensor, shortcut: Tensor | None) -> Tensor:
    """The activation of the normalized images plus the shortcut, in one pass."""
    beside = None if shortcut is None else as_rows(shortcut, 1)
    return as_images(rows_for(x).scale_shift(as_rows(x, 1), *norm, beside), x.shape)


def is_product(layer: nn.Conv2d) -> bool:
    """Whether a convolution is a matrix product over pixels, of a shape and type that the kernel takes."""
    return (
        type(layer) is nn.Conv2d
        and (layer.kernel_size, layer.padding, layer.groups, layer.bias) == ((1, 1), (0, 0), 1, None)
        and layer.in_channels % VECTOR == layer.out_channels % VECTOR == 0
        and (layer.weight.itemsize == 2 or not layer.weight.is_cuda)  # TF32 would do for no other type
    )


def folded_product(
    layer: nn.Conv2d, norm: BatchNormAct, folded: FoldedNorm, x: Tensor, shortcut: Tensor | None
) -> Tensor:
    """The activation of a 1x1 convolution, normalized, plus the shortcut."""
    across, down = layer.stride
    picked = x[:, :, ::across, ::down].to(layer.weight.dtype)
    weight, shape = layer.weight.flatten(1), picked.shape
    a, beside = as_rows(picked, 1), None if shortcut is None else as_rows(shortcut, 1)
    if not x.is_cuda:
        return as_images(product.product_act(a, weight, *folded, beside), shape)
    from paceline.model.kernels import product_triton  # noqa: PLC0415 - Triton comes with torch for CUDA only

    ways = [
        lambda tile=tile: as_images(product_triton.product_act(a, weight, *folded, beside, tile), shape)
        for tile in product_triton.suitable_tiles(a.shape[1], len(weight))
    ]
    apart = lambda: norm(layer(x), None, shortcut)  # noqa: E731 - one of several
    case = (
        *a.shape,
        len(weight),
        a.dtype,
        folded.activation,
        shortcut is None,
        layer.stride,
        torch.cuda.current_device(),
    )
    return fastest(case, [*ways, apart])
