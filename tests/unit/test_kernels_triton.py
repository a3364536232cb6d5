"""The Triton kernels of fused bottlenecks and stems, interpreted, have the numbers of their twins in plain torch.

What they leave to torch's own products in 16 bits, which are CUDA's only, is tested on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bottleneck_cases import distance
from interpreted import interpret_kernels
from paceline.model.kernels import gram, pool
from paceline.model.kernels.rows import Normed, NormNumbers
from paceline.model.kernels.tiles import Tile


@pytest.fixture(params=["some inner columns at a time", "all inner columns"])
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kernels of a bottleneck, interpreted, with few programs of several tiles each."""
    interpret_kernels()
    from paceline.model.kernels import gram_triton

    def tile(kernel: str, _columns: int, inner: int, _memory: int) -> Tile:
        whole = request.param.startswith("all") and kernel != "input_gradient"  # that one has no such form
        return Tile(32, 64, inner if whole else 32, 4, 2, programs=2)

    monkeypatch.setattr(gram_triton, "ELEMENTS", 1024)
    monkeypatch.setattr(gram_triton, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(gram_triton, "tile", tile)
    return gram_triton


@pytest.fixture
def pooling() -> ModuleType:
    """The kernels of a stem, interpreted."""
    interpret_kernels()
    from paceline.model.kernels import pool_triton

    return pool_triton


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a tuple of tuples."""
    if isinstance(value, Tensor):
        yield value
    else:
        for part in value:
            yield from tensors(part)


def assert_close(ours: Any, theirs: Any) -> None:
    for one, other in zip(tensors(ours), tensors(theirs), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert distance(one, other) < 2e-6


class Case(NamedTuple):
    """Rows of three widths in norm groups, 64 narrow, 128 wide and 128 before the unit, and what belongs to them."""

    x: Tensor
    """[groups, rows, 128] before the unit."""
    raw: Tensor
    """[groups, rows, 64] behind the 3x3 convolution."""
    d: Tensor
    """[groups, rows, 128] behind the unit."""
    narrow: Tensor
    """[64, 128] weights."""
    wide: Tensor
    """[128, 64] weights."""
    scale: Tensor
    shift: Tensor


def make_case(groups: int, rows: int) -> Case:
    x, raw, d = (torch.randn(groups, rows, channels) for channels in (128, 64, 128))
    narrow, wide = torch.randn(64, 128) / 8, torch.randn(128, 64) / 8
    return Case(x.relu() + 0.1, raw, d, narrow, wide, torch.rand(groups, 128) + 0.5, torch.randn(groups, 128) * 0.2)


@pytest.fixture(params=[(2, 150), (1, 128)], ids=["2 groups of 150 rows", "1 group of 128 rows"])
def case(request: pytest.FixtureRequest) -> Case:
    """Rows that fill tiles, or do not."""
    return make_case(*request.param)


def test_a_product_and_its_moments_have_the_twin_s_numbers(ours: ModuleType, case: Case) -> None:
    assert_close(ours.product_moments(case.x, case.narrow), gram.product_moments(case.x, case.narrow))


def test_norms_behind_products_have_the_twin_s_numbers_and_leave_their_moments(ours: ModuleType, case: Case) -> None:
    groups, count = case.x.shape[:2]
    scatter = gram.row_scatter(case.raw)
    for channels, operation, arguments in (
        (64, "product_normed", (case.x, case.narrow)),
        (128, "widened_normed", (case.wide, scatter, count)),
    ):
        results = []
        for kernels in (ours, gram):
            statistics = torch.zeros(groups, 2 * channels + 3)
            slots = statistics[:, 1 : channels + 1], statistics[:, channels + 1 : 2 * channels + 1]
            numbers = NormNumbers(case.scale[0, :channels], case.shift[0, :channels], 1e-3, slots)
            results.append([*getattr(kernels, operation)(*arguments, numbers), statistics])
        assert_close(*results)
        assert results[0][-1][:, 0].eq(0).all(), "before the slots"


def test_scatters_have_the_twin_s_numbers(ours: ModuleType, case: Case) -> None:
    scale, shift = case.scale[:, :64].contiguous(), case.shift[:, :64].contiguous()
    assert_close(ours.relu_scatter(case.raw, scale, shift), gram.relu_scatter(case.raw, scale, shift))
    assert_close(ours.row_scatter(case.raw), gram.row_scatter(case.raw))


def test_a_mean_of_30_standard_deviations_costs_no_digits(ours: ModuleType) -> None:
    rows, weight = (torch.randn(1, 1100, 64) * 2 + 60), torch.randn(64, 64).abs() / 8
    exact = gram.row_scatter(rows.double())
    scatter = ours.row_scatter(rows)
    assert torch.allclose(scatter.mean.double(), exact.mean, rtol=1e-6)
    assert distance(scatter.matrix, exact.matrix) < 1e-5
    moments, _ = ours.widened_moments(weight, scatter, 1100)
    expected, _ = gram.widened_moments(weight.double(), exact, 1100)
    assert torch.allclose(moments.var.double(), expected.var, rtol=1e-4)
    y, moments = ours.product_moments(rows, weight)
    assert torch.allclose(moments.var.double(), y.double().var(1, correction=0), rtol=1e-5)


def test_what_widens_has_the_twin_s_numbers(ours: ModuleType, case: Case) -> None:
    rows = case.raw.shape[1]
    narrow = case.raw.relu()
    scatter = gram.row_scatter(narrow)
    moments = gram.widened_moments(case.wide, scatter, rows)
    assert_close(ours.widened_moments(case.wide, scatter, rows), moments)
    normed = Normed(moments[0].mean, (moments[0].var + 1e-5).rsqrt(), case.scale, case.shift)
    product, sums = gram.weight_product(case.d, narrow), case.d.sum(1)
    args = product, sums, case.wide, scatter, moments[1], normed, rows, torch.float32
    gradient = gram.widened_gradient(*args)
    assert_close(ours.widened_gradient(*args), gradient)
    back = gradient[2]
    assert_close(ours.input_gradient(case.d, narrow, back), gram.input_gradient(case.d, narrow, back))
    assert_close(
        ours.input_gradient_masked(case.d, narrow, back, case.raw),
        gram.input_gradient_masked(case.d, narrow, back, case.raw),
    )


def test_a_product_behind_its_norm_has_the_twin_s_numbers(ours: ModuleType, case: Case) -> None:
    narrow = case.raw.relu()
    plain = narrow, case.wide, case.scale, case.shift, case.d
    assert_close(ours.product_norm(*plain), gram.product_norm(*plain))
    projection = torch.randn(len(narrow), 128, 128) / 8
    projected = narrow, case.wide, case.scale, case.shift, case.x, projection
    assert_close(ours.product_norm_projected(*projected), gram.product_norm_projected(*projected))


@pytest.mark.parametrize(("groups", "images", "side"), [(2, 6, 5), (1, 8, 4)])
def test_the_gradient_of_the_input_has_the_twin_s_numbers(
    ours: ModuleType, groups: int, images: int, side: int
) -> None:
    case = make_case(groups, images * side**2)
    x = case.x - 0.1  # with zeros
    halved = torch.randn(groups, images * ((side + 1) // 2) ** 2, 128)
    for added in (case.d, halved):
        args = case.raw, case.narrow, added, x, side
        assert_close(ours.input_gradient_added(*args), gram.input_gradient_added(*args))


def test_a_masked_gradient_has_the_twin_s_numbers(ours: ModuleType, case: Case) -> None:
    out = case.x - 0.1
    assert_close(ours.masked(case.d, out), gram.masked(case.d, out))


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_in_fours_are_the_twin_s(pooling: ModuleType, channels: int) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = (
            torch.randn(2, channels, 8, 12).contiguous(memory_format=layout).bfloat16().float()
        )  # the interpreter cuts bits off
        for dtype in (torch.float32, torch.bfloat16):
            ours, theirs = (module.unshuffle(x, dtype, 16) for module in (pooling, pool))
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()


@pytest.mark.parametrize(("groups", "channels", "side"), [(1, 16, 10), (2, 64, 6)])
def test_the_pool_has_the_twin_s_numbers(pooling: ModuleType, groups: int, channels: int, side: int) -> None:
    raw = torch.randn(4, channels, side, side).contiguous(memory_format=torch.channels_last)
    scale, shift = torch.randn(2, groups, channels)
    y, position, top = pool.pool_forward(raw, scale, shift)
    own_y, own_position, own_top = pooling.pool_forward(raw, scale, shift)
    assert_close(own_y, y)
    assert torch.equal(pooling.pool_alone(raw, scale, shift), own_y)
    assert torch.equal(own_position >= 0, position >= 0)
    assert torch.equal(own_top * (y > 0), top * (y > 0))
    # The gradient's sums ask what was pooled whether it was positive.
    by_image = [values.repeat_interleave(4 // groups, 0)[:, :, None, None] for values in (scale, shift)]
    assert torch.equal(own_top * by_image[0] + by_image[1] > 0, y > 0)
    dy, constants = torch.randn_like(y), torch.randn(3, groups, channels)
    assert_close(
        pooling.pool_backward(dy, own_position, raw, *constants), pool.pool_backward(dy, position, raw, *constants)
    )
