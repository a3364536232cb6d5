"""Dropout and stochastic depth: fractions and scales, and numbers that hang on seed, position and layer alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import make_plan
from paceline import keyed
from paceline.data.load.loader import open_loader
from paceline.model.batch import Batch
from paceline.model.dropout import Dropout, DropoutMasks, StochasticDepth
from paceline.model.whole import Whole
from paceline.planning import Plan
from paceline.world import World

WORLD = World(torch.device("cpu"))
IMAGES = 4000


def layers() -> nn.ModuleList:
    """Three dropouts and two depths, with layers between them that leave nothing to chance."""
    return nn.ModuleList(
        [Dropout(0.3, 7), StochasticDepth(0.2), Dropout(0.0, 5), nn.ReLU(), Dropout(0.5, 4), StochasticDepth(0.0),
         StochasticDepth(0.6), Dropout(0.9, 9)]
    )  # fmt: skip


def drawn(positions: Tensor, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The masks of the layers that drop, in their order, for the images at these positions."""
    network = layers()
    batch = batch_of(network, positions, seed, dtype)
    return [mask_of(layer, batch) for layer in network if isinstance(layer, Dropout | StochasticDepth) and layer.rate]


def batch_of(network: nn.Module, positions: Tensor, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    return Batch(torch.empty(1, 0), *DropoutMasks(network, seed, dtype)(positions))


def mask_of(layer: Dropout | StochasticDepth, batch: Batch) -> Tensor:
    return (batch.dropout if isinstance(layer, Dropout) else batch.depth)[layer.index]


def rates() -> list[float]:
    return [part.rate for part in layers() if isinstance(part, (Dropout, StochasticDepth)) and part.rate]


def test_each_layer_drops_its_share_and_scales_what_it_keeps() -> None:
    for rate, kept in zip(rates(), drawn(torch.arange(IMAGES)), strict=True):
        assert kept.unique().tolist() == [0.0, pytest.approx(1 / (1 - rate), rel=1e-15)]
        spread = (rate * (1 - rate) / kept.numel()) ** 0.5
        assert float((kept == 0).double().mean()) == pytest.approx(rate, abs=4 * spread)
        assert float(kept.mean()) == pytest.approx(1, abs=4 * spread / (1 - rate))


def test_every_feature_and_every_image_drops_its_share() -> None:
    dropout = Dropout(0.4, IMAGES)
    ((mask,), _) = DropoutMasks(dropout, 0, torch.float32)(torch.arange(IMAGES))
    dropped = mask.eq(0).double()
    spread = (0.4 * 0.6 / IMAGES) ** 0.5
    for axis in (0, 1):
        shares = dropped.mean(axis)
        assert float(shares.std()) == pytest.approx(spread, rel=0.1)  # neither tied together nor evened out
        assert float((shares - 0.4).abs().max()) < 5 * spread


def test_layers_drop_independently_of_each_other() -> None:
    columns = torch.cat([kept.view(IMAGES, -1) for kept in drawn(torch.arange(IMAGES))], 1)
    together = torch.corrcoef((columns == 0).double().T)
    assert together.shape == (22, 22)
    assert float((together - torch.eye(22, dtype=torch.float64)).abs().max()) < 5 * IMAGES**-0.5


def test_dropout_scales_what_it_keeps_and_zeroes_the_rest_in_any_shape() -> None:
    dropout = Dropout(0.25, 12)
    batch = batch_of(dropout, torch.arange(50))
    (mask,) = batch.dropout
    for shape in ((50, 12), (50, 3, 2, 2), (50, 12, 1, 1)):
        x = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
        y = dropout(x, batch)
        assert torch.allclose(y.view(50, 12), x.view(50, 12) * mask, rtol=1e-15)
        assert 0 < int((y == 0).sum()) < y.numel()
    assert dropout(torch.ones(50, 12, dtype=torch.bfloat16), batch).dtype == torch.bfloat16


def test_stochastic_depth_takes_whole_images() -> None:
    depth = StochasticDepth(0.5)
    batch = batch_of(depth, torch.arange(40))
    for shape in ((40, 3, 2, 2), (40, 5), (40, 6, 1)):
        y = depth(torch.ones(shape, dtype=torch.float64), batch).flatten(1)
        assert {tuple(row.unique().tolist()) for row in y} == {(0.0,), (2.0,)}
        assert torch.equal(y[:, 0], batch.depth[0])


def test_gradients_are_dropped_and_scaled_as_the_features_are() -> None:
    dropout = Dropout(0.25, 6)
    batch = batch_of(dropout, torch.arange(5))
    x = torch.ones(5, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(dropout(x, batch).sum(), x)
    assert torch.equal(gradient, batch.dropout[0])


def test_evaluation_and_a_rate_of_zero_leave_everything() -> None:
    x = torch.ones(3, 7)
    for layer in (Dropout(0.5, 7), StochasticDepth(0.5)):
        assert layer(x, None) is x
    for layer in (Dropout(0.0, 7), StochasticDepth(0.0)):
        assert layer(x, Batch(torch.empty(1, 0))) is x  # and no mask was drawn


@pytest.mark.parametrize("sizes", [[12], [6, 6], [4, 4, 4], [1] * 12, [5, 7]], ids=str)
def test_how_a_batch_is_cut_changes_no_number(sizes: list[int]) -> None:
    start = 1000
    whole = drawn(start + torch.arange(12))
    parts = [drawn(part) for part in (start + torch.arange(12)).split(sizes)]
    for layer, expected in enumerate(whole):
        assert torch.equal(torch.cat([part[layer] for part in parts]), expected)


def test_numbers_follow_an_image_s_position_and_not_its_place_in_the_batch() -> None:
    positions = torch.tensor([5, 2**40, 7, 2**31, 5])
    once, other = drawn(positions), drawn(positions.flip(0))
    for kept, reversed_ in zip(once, other, strict=True):
        assert torch.equal(kept.flip(0), reversed_)
        assert torch.equal(kept[0], kept[4])


def test_another_position_seed_or_layer_gives_other_numbers() -> None:
    base = drawn(torch.arange(200))
    for other in (drawn(torch.arange(200), seed=1), drawn(200 + torch.arange(200)), drawn(2**32 + torch.arange(200))):
        assert not any(torch.equal(a, b) for a, b in zip(base, other, strict=True))
    twins = nn.ModuleList([Dropout(0.5, 4), Dropout(0.5, 4), StochasticDepth(0.5), StochasticDepth(0.5)])
    dropout, depth = DropoutMasks(twins, 0, torch.float64)(torch.arange(200))
    assert not torch.equal(*dropout)
    assert not torch.equal(*depth)


def test_several_batches_may_be_in_flight() -> None:
    depth = StochasticDepth(0.5)
    one, other = (batch_of(depth, positions) for positions in (torch.arange(64), torch.arange(64, 128)))
    x = torch.ones(64, 1)
    first = depth(x, one)
    assert not torch.equal(depth(x, other), first)
    assert torch.equal(depth(x, one), first)


def test_a_layer_s_number_is_the_one_that_its_key_stands_for() -> None:
    """Dropouts take the words of consecutive indices one behind the other; depths take the first word of their own."""
    positions = np.array([0, 3, 2**33 + 1], dtype=np.int64)[:, None]
    seed = 11
    words = np.stack(keyed.words(keyed.key(seed, "dropout"), positions, np.arange(5, dtype=np.int64)), 2).reshape(3, 20)
    depths = keyed.words(keyed.key(seed, "stochastic depth"), positions, np.arange(2, dtype=np.int64))[0]
    first, depth1, second, depth2, third = drawn(torch.from_numpy(positions[:, 0]), seed)
    for kept, word, rate in (
        (first, words[:, :7], 0.3), (second, words[:, 7:11], 0.5), (third, words[:, 11:20], 0.9),
        (depth1, depths[:, 0], 0.2), (depth2, depths[:, 1], 0.6),
    ):  # fmt: skip
        assert np.array_equal(kept.numpy() > 0, word / 2**32 >= rate)


def test_numpy_and_torch_give_the_same_words_for_arrays_of_positions_and_indices() -> None:
    positions = np.array([[0], [1], [2**32 - 1], [2**32], [2**62 + 12345]], dtype=np.int64)
    indices = np.array([0, 1, 2, 2**31, 2**32, 2**40 + 7], dtype=np.int64)
    key = keyed.key(5, "dropout")
    host = keyed.words(key, positions, indices)
    device = keyed.words(key, torch.from_numpy(positions), torch.from_numpy(indices))
    for ours, theirs in zip(host, device, strict=True):
        assert ours.shape == (5, 6)
        assert np.array_equal(ours, theirs.numpy())
        assert len(np.unique(ours)) == ours.size
        assert ours.min() >= 0
        assert ours.max() < 2**32
    for column, index in enumerate(indices):  # an array of indices is the same as one index after the other
        alone = keyed.words(key, positions[:, 0], int(index))
        assert all(np.array_equal(a[:, column], b) for a, b in zip(host, alone, strict=True))


CHANCY = ("model=efficientnet-cifar", "model.dropout=0.5", "model.survival=0.5", "data.side=16", "norm=group")


def masks_of_steps(plan: Plan, steps: int) -> list[Tensor]:
    """What the network's layers kept of each image of these steps, one row for each image in the order of the list."""
    whole = Whole(plan, WORLD)
    rows: list[Tensor] = []

    def note(_module: nn.Module, _inputs: Any, named: dict[str, Batch]) -> None:
        batch = named["batch"]
        rows.append(torch.cat([mask.view(plan.micro_batch, -1) for mask in (*batch.dropout, *batch.depth)], 1))

    whole.module.register_forward_pre_hook(note, with_kwargs=True)
    loader = open_loader(plan, None, 0, WORLD.device)
    for _, share in zip(range(steps), loader.training(0), strict=False):
        whole.forward_backward(share)
    return list(torch.cat(rows).split(plan.global_batch))


@pytest.mark.long
def test_a_network_draws_by_the_images_positions_however_a_step_is_cut() -> None:
    expected = masks_of_steps(make_plan(*CHANCY, "on.micro_batch=16"), 2)
    found = masks_of_steps(make_plan(*CHANCY, "on.micro_batch=4"), 2)
    resident = masks_of_steps(make_plan(*CHANCY, "on.micro_batch=8", "on.data_on_device=true"), 2)
    for masks in (found, resident):
        assert all(torch.equal(a, b) for a, b in zip(masks, expected, strict=True))
    assert not torch.equal(expected[0], expected[1])  # the next step's images have other positions
    assert len({tuple(row.tolist()) for row in torch.cat(expected)}) == 32


def test_no_generator_of_torch_is_touched() -> None:
    plan = make_plan(*CHANCY)
    whole = Whole(plan, WORLD)
    share = next(open_loader(plan, None, 0, WORLD.device).training(0))
    before = torch.get_rng_state()
    whole.forward_backward(share)
    drawn(torch.arange(100))
    assert torch.equal(torch.get_rng_state(), before)
