"""Fused bottlenecks and stems on CUDA: no further from float64 than autocast, and the same bits every time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bottleneck_cases import distance, make_stem, make_unit, passes, pictures
from conftest import make_plan
from paceline.augment.normalize import Normalize
from paceline.model.batch import Batch
from paceline.model.kernels import gram, pool
from paceline.model.kernels.bottleneck import fused_bottleneck
from paceline.model.kernels.rows import Normed
from paceline.model.kernels.stem import fused_stem

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = [(2, 3136, 64, 256), (1, 1000, 256, 512)]
"""Norm groups, rows, narrow channels and wide ones: scatters of a program's own, and those by torch's product."""
SHORT = 2**-8
"""How far bfloat16 rounds."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def exact(value: Any) -> Any:
    """Tensors, or tuples of them, in float64."""
    if isinstance(value, Tensor):
        return value.double()
    if isinstance(value, torch.dtype):
        return torch.float64
    return type(value)(*map(exact, value)) if isinstance(value, tuple) else value


def check(name: str, ours: Any, theirs: Any, limit: float) -> None:
    """Every tensor in these tuples of tuples is no further than the limit."""
    if isinstance(ours, Tensor):
        error = distance(ours, theirs)
        print(f"{name}: {error:.1e}")
        assert error <= limit, name
    else:
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            check(f"{name} {index}", one, other, limit)


@pytest.mark.parametrize(("groups", "rows", "narrow", "wide"), SHAPES)
def test_kernels_have_float64_s_numbers(groups: int, rows: int, narrow: int, wide: int) -> None:
    from paceline.model.kernels import gram_triton as ours

    def both(name: str, limit: float, *args: Any) -> Any:
        own = getattr(ours, name)(*args)
        check(name, own, getattr(gram, name)(*map(exact, args)), limit)
        return own

    x, raw = drawn(groups, rows, wide).relu().bfloat16(), drawn(groups, rows, narrow).bfloat16()
    w1, w3 = (drawn(*shape).div(shape[1] ** 0.5).bfloat16() for shape in ((narrow, wide), (wide, narrow)))
    y, moments = ours.product_moments(x, w1)
    check("product_moments", y, exact(x) @ exact(w1).t(), SHORT)
    check("product_moments", tuple(moments), (exact(y).mean(1), exact(y).var(1, correction=0)), 1e-5)
    scale, shift = torch.rand(groups, narrow, device="cuda") + 0.5, drawn(groups, narrow) * 0.2 + 0.3
    a, scatter = ours.relu_scatter(raw, scale, shift)
    check("relu_scatter", a, gram.relu_scatter(exact(raw), exact(scale), exact(shift))[0], SHORT)
    # Rows are rounded to 16 bits around their pivot, which shows where there are few of them.
    check("relu_scatter", scatter, gram.row_scatter(exact(a)), 2e-3)
    both("row_scatter", 2e-3, x)
    moments, weight_scatter = both("widened_moments", 1e-4, w3, scatter, rows)
    scale3, shift3 = torch.rand(groups, wide, device="cuda") + 0.5, drawn(groups, wide)
    both("product_norm", SHORT, a, w3, scale3, shift3, drawn(groups, rows, wide).bfloat16())
    projection = drawn(groups, wide, wide).div(wide**0.5).bfloat16()
    both("product_norm_projected", SHORT, a, w3, scale3, shift3, x, projection)
    d, _ = both("masked", SHORT, drawn(groups, rows, wide).bfloat16(), x)
    product, sums = both("weight_product", 1e-4, d, a), d.float().sum(1)
    normed = Normed(moments.mean, (moments.var + 1e-5).rsqrt(), scale3, shift3)
    _, _, back = both("widened_gradient", SHORT, product, sums, w3, scatter, weight_scatter, normed, rows, w3.dtype)
    both("input_gradient", SHORT, d, a, back)
    both("input_gradient_masked", 4 * SHORT, d, a, back, raw)
    both("input_gradient_added", 4 * SHORT, raw, w1, d, x, 8)


@pytest.mark.parametrize("channels", [64, 256])
def test_a_mean_of_30_standard_deviations_costs_no_digits(channels: int) -> None:
    from paceline.model.kernels import gram_triton

    rows = 25_088
    x, weight = (drawn(1, rows, channels) * 0.1 + 3).bfloat16(), drawn(256, channels).abs().bfloat16()
    ours = gram_triton.widened_moments(weight, gram_triton.row_scatter(x), rows)[0]
    theirs = gram.widened_moments(exact(weight), gram.row_scatter(exact(x)), rows)[0]
    assert float((theirs.mean / theirs.var.sqrt()).min()) > 30
    assert float((ours.mean / theirs.mean - 1).abs().max()) < 1e-5
    assert float((ours.var / theirs.var - 1).abs().max()) < 1e-4


def compare(module: nn.Module, fused: Any, x: Tensor, groups: int) -> list[Tensor]:
    """Assert that the fused form is no further from float64 than autocast, and print how far both are."""
    module.cuda()
    x = x.cuda().bfloat16()
    truth = passes(module, module, x.double(), groups)
    module.float()

    def autocast(x: Tensor, batch: Batch) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y: Tensor = module(x, batch)
            return y

    ours, theirs = passes(module, fused, x, groups), passes(module, autocast, x, groups)
    for index, (one, other, value) in enumerate(zip(ours, theirs, truth, strict=True)):
        print(f"{index}: fused {distance(one, value):.2e}, autocast {distance(other, value):.2e}")
        assert one.dtype == other.dtype
    for one, other, value in zip(ours, theirs, truth, strict=True):
        assert distance(one, value) <= 1.15 * distance(other, value) + 2e-6
    again = passes(module, fused, x, groups)
    assert all(map(torch.equal, ours, again)), "two calls have different bits"
    return ours


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The convolutions between our kernels give the same bits each time too."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("inputs", "width", "stride", "groups"), [(256, 64, 1, 2), (256, 128, 2, 1)])
def test_a_bottleneck_is_no_further_from_float64_than_autocast(
    inputs: int, width: int, stride: int, groups: int
) -> None:
    unit = make_unit(inputs, width, stride)
    compare(unit, lambda x, batch: fused_bottleneck(unit, x, batch), pictures(16, inputs, 28), groups)


@pytest.mark.usefixtures("deterministic")
def test_a_stem_is_no_further_from_float64_than_autocast() -> None:
    stem = make_stem()
    x = torch.randn(16, 3, 64, 64, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    ours = compare(stem, lambda x, batch: fused_stem(stem, x, batch, torch.bfloat16), x, 2)
    assert ours[0].shape == (16, 64, 16, 16)


def test_the_pool_has_float64_s_numbers() -> None:
    from paceline.model.kernels import pool_triton

    raw = drawn(8, 64, 56, 56).bfloat16().contiguous(memory_format=torch.channels_last)
    scale, shift, *constants = drawn(5, 2, 64)
    y, position, top = pool.pool_forward(exact(raw), exact(scale), exact(shift))
    own_y, own_position, own_top = pool_triton.pool_forward(raw, scale, shift)
    check("y", own_y, y, SHORT)
    by_image = [exact(values).repeat_interleave(4, 0)[:, :, None, None] for values in (scale, shift)]
    positive = exact(own_top) * by_image[0] + by_image[1] > 0
    assert float((positive != (y > 0)).double().mean()) < 1e-3  # but for pixels around zero
    check("top", own_top * (y > 0), top * (y > 0), 1e-2)  # pixels that float32 cannot tell apart
    dy = torch.randn_like(own_y)
    there = pool.pool_backward(exact(dy), position, exact(raw), *map(exact, constants))
    check("dx", pool_triton.pool_backward(dy, own_position, raw, *constants), there, 1e-2)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = drawn(4, 3, 32, 64).contiguous(memory_format=layout)
        assert torch.equal(pool_triton.unshuffle(x, torch.bfloat16, 16), pool.unshuffle(x, torch.bfloat16, 16))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_normalized_with_torch_s_bits(channels: int) -> None:
    from paceline.augment.normalize_cuda import normalize

    plan = make_plan()
    images = torch.randint(0, 256, (5, channels, 37, 41), dtype=torch.uint8, device="cuda")
    images = images.contiguous(memory_format=torch.channels_last)
    module = Normalize(plan.data).cuda().float()
    mean, std = module.mean[:channels].contiguous(), module.std[:channels].contiguous()
    expected = (images.float() - mean) / std
    ours = normalize(images, mean, std)
    assert torch.equal(ours, expected)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    if channels == 3:
        assert torch.equal(module(images), expected)
        assert torch.equal(module(images.contiguous()), expected)
