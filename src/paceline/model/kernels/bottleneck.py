"""The fused form of a residual bottleneck: its wide norms never look at wide tensors, forward or backward."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.batch import Batch
from paceline.model.kernels import gram
from paceline.model.kernels.convolution import PLAIN_CONVS
from paceline.model.kernels.gram import Scatter, WidenedGradient
from paceline.model.kernels.norm import (
    as_images,
    as_rows,
    kernel_numbers,
    norm_by_moments,
    norm_gradient_by_sums,
    norm_of_rows,
    rows_for,
)
from paceline.model.kernels.rows import Normed
from paceline.model.norm import BatchNormAct, NormAct
from paceline.settings.model import Activation

if TYPE_CHECKING:
    from paceline.model.resnet import ResidualUnit

LANES = 64
"""The kernels take channels in multiples of this."""
ROWS_PER_CHANNEL = 16
"""With fewer rows than this for each narrow channel, a norm group costs more in small matrices than it spares."""


class Handover:
    """Between a bottleneck and the next one: the gradient that the later one has masked already, and its sums."""

    def __init__(self) -> None:
        self._gradient: Tensor | None = None
        self._sums: Tensor | None = None

    def leave(self, gradient: Tensor, sums: Tensor) -> None:
        """Leave a gradient, zero where the block's input is, and its sums over the rows of each norm group."""
        self._gradient, self._sums = gradient, sums

    def take(self, gradient: Tensor) -> Tensor | None:
        """The sums of a gradient, if it is the one that was left and not, say, the sum of two."""
        left, sums = self._gradient, self._sums
        self._gradient = self._sums = None
        same = left is not None and left.data_ptr() == gradient.data_ptr() and left.stride() == gradient.stride()
        return sums if same else None


class Site(NamedTuple):
    """What a bottleneck's passes need beside tensors that have gradients."""

    unit: ResidualUnit
    batch: Batch
    before: Handover | None
    """Shared with the block that made the input, if that is a fused one."""
    after: Handover
    output: Tensor | None = None
    """What the unit gave before, where it is computed again for what the backward pass needs."""


class Narrow(NamedTuple):
    """What stays of the narrow part: its input, and the rows before and behind the 3x3 convolution."""

    x: Tensor
    a1: Tensor
    n1: Tensor
    a2: Tensor


class Widened(NamedTuple):
    """What stays of a widening product and its norm."""

    a: Tensor
    mean: Tensor
    matrix: Tensor
    weight_scatter: Tensor


def can_fuse(unit: ResidualUnit) -> bool:
    """Whether a unit has the form that is fused here."""
    convolutions = [m for m in unit.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in unit.modules() if isinstance(m, BatchNormAct)]
    return (
        unit.bottleneck
        and len(norms) == len(convolutions)
        and all(type(m) in PLAIN_CONVS for m in convolutions)
        and all(n % LANES == 0 for m in convolutions for n in (m.in_channels, m.out_channels))
        and unit.conv1.stride == (1, 1)
        and unit.stride in (1, 2)
    )


def pays(unit: ResidualUnit, images: int, side: int) -> bool:
    """Whether norm groups of so many images, of this side where they enter the unit, have enough rows."""
    count = images * (-(-side // unit.stride)) ** 2
    widest = max(unit.conv3.in_channels, unit.projection.in_channels if unit.projects else 0)
    return count >= ROWS_PER_CHANNEL * widest


def fused_bottleneck(unit: ResidualUnit, x: Tensor, batch: Batch) -> Tensor:
    """The unit's output in training; statistics of its norms are written as the unit itself writes them."""
    before, output = getattr(x, "handover", None), batch.outputs.pop(unit, None) if batch.outputs else None
    site = Site(unit, batch, before, Handover(), output)
    layers = [unit.conv1, unit.norm1, unit.conv2, unit.norm2, unit.conv3, unit.norm3]
    if unit.projects:
        layers += [unit.projection, unit.projection_norm]
    y: Tensor = _Bottleneck.apply(x, site, *(p for layer in layers for p in layer.parameters()))  # type: ignore[no-untyped-call]
    y.handover = site.after  # type: ignore[attr-defined]
    return y


def compute_weight(layer: nn.Conv2d, dtype: torch.dtype) -> Tensor:
    """A convolution's weight in the type of the images: the copy that was made for the whole step, if there is one."""
    copy: Tensor | None = getattr(layer, "step_weight", None)
    return layer.weight.detach().to(dtype) if copy is None else copy


def wide_weight(layer: nn.Conv2d, dtype: torch.dtype) -> Tensor:
    """The numbers of `compute_weight` in float32 or wider, for the small matrices that they make."""
    copy: Tensor | None = getattr(layer, "wide_step_weight", None)
    return gram.wide(compute_weight(layer, dtype)) if copy is None else copy


class _Bottleneck(torch.autograd.Function):
    """conv1, norm1, ReLU, conv2, norm2, ReLU, conv3, norm3, plus the shortcut or its projection and norm, ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, site: Site, *_parameters: Tensor) -> Tensor:
        # The small matrices between the products are float32, which autocast would round.
        with torch.autocast(x.device.type, enabled=False):
            return _Bottleneck._forward(ctx, x, site)

    @staticmethod
    def _forward(ctx: Any, x: Tensor, site: Site) -> Tensor:
        unit, groups = site.unit, len(site.batch.statistics)
        kernels = gram_for(x)
        x = x.contiguous(memory_format=torch.channels_last)
        narrow, norm1, norm2, picture = _narrow_forward(unit, as_rows(x, groups), x.shape, site.batch)
        n2, scatter = kernels.relu_scatter(narrow.a2, norm2.scale, norm2.shift)
        wide3, norm3 = _widen(unit.conv3, unit.norm3, n2, scatter, site.batch)
        saved, wide4, norm4 = [*narrow, *norm1, *norm2, *wide3, *norm3], None, None
        if unit.projects:
            xs = as_rows(_every(x, unit.stride), groups)
            wide4, norm4 = _widen(unit.projection, unit.projection_norm, xs, kernels.row_scatter(xs), site.batch)
            saved += [*wide4, *norm4]
        known = site.output
        out = _output(unit, narrow, n2, norm3, wide4, norm4) if known is None else as_rows(known, groups)
        ctx.save_for_backward(out, *saved)
        ctx.site, ctx.shape, ctx.shape2 = site, x.shape, picture.shape
        return as_images(out, picture.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        site: Site = ctx.site
        unit, saved = site.unit, ctx.saved_tensors
        out, narrow, norm1, norm2 = saved[0], Narrow(*saved[1:5]), Normed(*saved[5:9]), Normed(*saved[9:13])
        kernels, ops = gram_for(out), rows_for(out)
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        d, sums = as_rows(dy, len(out)), site.after.take(dy)
        if sums is None:
            d, sums = kernels.masked(d, out)

        wide3, norm3 = Widened(*saved[13:17]), Normed(*saved[17:21])
        *g3, back3 = _widened_backward(unit.conv3, unit.norm3, wide3, norm3, d, sums)
        z, z_sums, z_products = kernels.input_gradient_masked(d, wide3.a, back3, narrow.a2)
        da2, *g2 = _norm_backward(unit.norm2, norm2, z, narrow.a2, z_sums, z_products, None)
        dn1, d_w2 = _conv2_backward(unit.conv2, da2, narrow.n1, ctx.shape, ctx.shape2)
        s1, p1, _ = ops.gradient_sums(dn1, narrow.a1, norm1.scale, norm1.shift, "relu")
        da1, *g1 = _norm_backward(unit.norm1, norm1, dn1, narrow.a1, s1, p1, "relu")
        d_w1 = _over_groups(kernels.weight_product(da1, narrow.x))

        added, last = d, list[Tensor]()
        if unit.projects:
            wide4, norm4 = Widened(*saved[21:25]), Normed(*saved[25:29])
            *g4, back4 = _widened_backward(unit.projection, unit.projection_norm, wide4, norm4, d, sums)
            last = [like_parameter(unit.projection.weight, back4.weight), *g4]
            if ctx.needs_input_grad[0]:
                added = kernels.input_gradient(d, wide4.a, back4)
        dx = None
        if ctx.needs_input_grad[0]:
            weight1 = compute_weight(unit.conv1, out.dtype).flatten(1)
            dx_rows, dx_sums = kernels.input_gradient_added(da1, weight1, added, narrow.x, ctx.shape[2])
            dx = as_images(dx_rows, ctx.shape)
            if site.before is not None:
                site.before.leave(dx, dx_sums)
        weights = (
            like_parameter(layer.weight, d_weight)
            for layer, d_weight in ((unit.conv1, d_w1), (unit.conv2, d_w2), (unit.conv3, back3.weight))
        )
        by_layer = [[weight, *g] for weight, g in zip(weights, (g1, g2, g3), strict=True)]
        return dx, None, *(t for layer in by_layer for t in layer), *last


def gram_for(x: Tensor) -> ModuleType:
    """The operations of gram.py for the device of a tensor."""
    if not x.is_cuda or x.dtype == torch.float64:
        return gram
    from paceline.model.kernels import gram_triton  # noqa: PLC0415 - Triton comes with torch for CUDA only

    return gram_triton


def _every(x: Tensor, stride: int) -> Tensor:
    """Every pixel that a stride meets, in channels-last order."""
    if stride == 1:
        return x
    # Sixteen bytes at a time: torch would copy number by number.
    wide = x.permute(0, 2, 3, 1).view(torch.complex128)
    return wide[:, ::stride, ::stride].contiguous().view(x.dtype).permute(0, 3, 1, 2)


def _over_groups(products: Tensor) -> Tensor:
    """The sum over norm groups."""
    return products[0] if len(products) == 1 else products.sum(0)


def like_parameter(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient as its parameter is: in shape, and in the type in which gradients add up."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return gradient.view(parameter.shape).to(dtype)


def _product_norm(layer: nn.Conv2d, norm: NormAct, x: Tensor, batch: Batch) -> tuple[Tensor, Normed]:
    """A product of rows, and the norm of what it gives, whose moments go to the batch's statistics."""
    assert isinstance(norm, BatchNormAct)
    kernels, weight, numbers = gram_for(x), compute_weight(layer, x.dtype).flatten(1), kernel_numbers(norm, batch)
    if numbers is None:
        y, moments = kernels.product_moments(x, weight)
        return y, norm_by_moments(norm, moments, x.shape[1], batch)
    y, normed = kernels.product_normed(x, weight, numbers)
    return y, normed


def widened_norm(layer: nn.Conv2d, norm: NormAct, a: Tensor, scatter: Scatter, batch: Batch) -> tuple[Normed, Tensor]:
    """The norm of a widening product of rows with this scatter; the weight times the scatter matrix comes with it."""
    assert isinstance(norm, BatchNormAct)
    kernels, weight, numbers = gram_for(a), wide_weight(layer, a.dtype).flatten(1), kernel_numbers(norm, batch)
    if numbers is None:
        moments, weight_scatter = kernels.widened_moments(weight, scatter, a.shape[1])
        return norm_by_moments(norm, moments, a.shape[1], batch), weight_scatter
    normed, weight_scatter = kernels.widened_normed(weight, scatter, a.shape[1], numbers)
    return normed, weight_scatter


def _norm_backward(
    norm: NormAct, normed: Normed, d: Tensor, x: Tensor, sums: Tensor, products: Tensor,
    activation: Activation | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient before a norm by that behind it, or behind its activation, and the sums of d and of d x; with those
    of its weight and bias."""
    assert isinstance(norm, BatchNormAct)
    g = norm_gradient_by_sums(normed, norm.weight, sums, products, x.shape[1], norm.shared)
    dx = rows_for(x).norm_gradient(d, x, normed.scale, normed.shift, g.a, g.b, g.c, activation)
    return dx, g.weight, g.bias


def _output(
    unit: ResidualUnit, narrow: Narrow, n2: Tensor, norm3: Normed, wide4: Widened | None, norm4: Normed | None
) -> Tensor:
    """What the unit gives: the widening product and its norm, plus the shortcut or its projection and norm, ReLU."""
    kernels, weight3 = gram_for(n2), compute_weight(unit.conv3, n2.dtype).flatten(1)
    out: Tensor
    if wide4 is not None and norm4 is not None:
        weight4 = compute_weight(unit.projection, n2.dtype).flatten(1)
        scaled = (norm4.scale[..., None] * weight4).to(n2.dtype)
        out = kernels.product_norm_projected(n2, weight3, norm3.scale, norm3.shift + norm4.shift, wide4.a, scaled)
    else:
        out = kernels.product_norm(n2, weight3, norm3.scale, norm3.shift, narrow.x)
    return out


def _narrow_forward(
    unit: ResidualUnit, x: Tensor, shape: torch.Size, batch: Batch
) -> tuple[Narrow, Normed, Normed, Tensor]:
    """conv1, norm1, ReLU and conv2, with the norm behind that; the picture that conv2 gives comes last."""
    a1, norm1 = _product_norm(unit.conv1, unit.norm1, x, batch)
    n1 = rows_for(x).scale_shift(a1, norm1.scale, norm1.shift, "relu")
    conv, weight = unit.conv2, compute_weight(unit.conv2, x.dtype)
    picture = F.conv2d(as_images(n1, shape), weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    picture = picture.contiguous(memory_format=torch.channels_last)
    a2 = as_rows(picture, len(x))
    assert isinstance(unit.norm2, BatchNormAct)
    return Narrow(x, a1, n1, a2), norm1, norm_of_rows(unit.norm2, a2, batch), picture


def _widen(layer: nn.Conv2d, norm: NormAct, a: Tensor, scatter: Scatter, batch: Batch) -> tuple[Widened, Normed]:
    """The norm of a widening product of rows with this scatter."""
    normed, weight_scatter = widened_norm(layer, norm, a, scatter, batch)
    return Widened(a, *scatter, weight_scatter), normed


def _widened_backward(
    layer: nn.Conv2d, norm: NormAct, widened: Widened, normed: Normed, d: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, WidenedGradient]:
    """The gradients of a norm's weight and bias and of the widening product before it, by that behind the norm."""
    assert isinstance(norm, BatchNormAct)
    kernels = gram_for(d)
    gradients: tuple[Tensor, Tensor, WidenedGradient] = kernels.widened_gradient(
        kernels.weight_product(d, widened.a), sums, wide_weight(layer, d.dtype).flatten(1),
        Scatter(widened.mean, widened.matrix), widened.weight_scatter, normed, d.shape[1], d.dtype, norm.shared,
    )  # fmt: skip
    return gradients


def _conv2_backward(
    conv: nn.Conv2d, d: Tensor, n1: Tensor, shape: torch.Size, shape2: torch.Size
) -> tuple[Tensor, Tensor]:
    """The gradients of the 3x3 convolution's input rows and weight."""
    dn1, d_weight, _ = torch.ops.aten.convolution_backward(
        as_images(d, shape2), as_images(n1, shape), compute_weight(conv, d.dtype), None, conv.stride, conv.padding,
        conv.dilation, False, [0, 0], conv.groups, [True, True, False],
    )  # fmt: skip
    return as_rows(dn1.contiguous(memory_format=torch.channels_last), len(d)), d_weight
