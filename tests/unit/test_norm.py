"""Normalization: torch's own numbers for one group, separate ones for ghost groups, statistics that move once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline import keyed
from paceline.model.batch import Batch, Chain
from paceline.model.norm import BatchNormAct, GroupNormAct, NormAct, Statistics
from paceline.settings.model import Activation
from replicas_made import Circle, in_threads

CHANNELS = 5
GOOD = torch.zeros(())
BAD = torch.ones(())


def numbers(name: str, *shape: int) -> Tensor:
    """Keyed normal numbers in float64, a little off zero."""
    count = int(torch.Size(shape).numel())
    return torch.from_numpy(keyed.normals(keyed.key(0, name), count)).view(shape) * 1.7 + 0.4


def make_norm(passes: int, groups: int = 1, activation: Activation | None = None) -> tuple[BatchNormAct, Statistics]:
    """A norm in float64 with scales, shifts and running statistics of its own."""
    norm = BatchNormAct(CHANNELS, 0.1, 1e-5, activation).double()
    for name, values in norm.state_dict().items():
        values.copy_(numbers(name, CHANNELS).abs() + 0.1)
    return norm, Statistics(norm, passes, groups)


def make_reference(norm: BatchNormAct, momentum: float) -> nn.BatchNorm2d:
    """torch's batch norm with the same numbers."""
    reference = nn.BatchNorm2d(CHANNELS, momentum=momentum, eps=norm.epsilon).double()
    reference.load_state_dict(norm.state_dict(), strict=False)
    return reference


def batch_of(statistics: Statistics, index: int = 0) -> Batch:
    """What a norm is told in a forward pass of a step."""
    return Batch(statistics.pass_rows(index))


def close(one: Tensor | None, other: Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_one_group_is_torch_s_batch_norm_in_outputs_gradients_and_statistics() -> None:
    norm, statistics = make_norm(passes=1)
    reference = make_reference(norm, norm.momentum)
    for step in range(3):
        x, weights = numbers(f"x{step}", 12, CHANNELS, 3, 4), numbers(f"w{step}", 12, CHANNELS, 3, 4)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = norm(ours, batch_of(statistics)), reference(theirs)
        (y * weights).sum().backward()
        (expected * weights).sum().backward()
        statistics.update(statistics.collect(), 1, GOOD)
        assert close(y, expected)
        assert close(ours.grad, theirs.grad)
        assert close(norm.weight.grad, reference.weight.grad)
        assert close(norm.bias.grad, reference.bias.grad)
        assert close(norm.running_mean, reference.running_mean)
        assert close(norm.running_var, reference.running_var)
    reference.eval()
    assert close(norm(numbers("new", 4, CHANNELS, 2, 2), None), reference(numbers("new", 4, CHANNELS, 2, 2)))


def test_ghost_groups_are_separate_batch_norms_over_neighbors() -> None:
    norm, statistics = make_norm(passes=1, groups=3)
    x, weights = numbers("x", 12, CHANNELS, 3, 3), numbers("w", 12, CHANNELS, 3, 3)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    references = [make_reference(norm, 1.0) for _ in range(3)]
    y = norm(ours, batch_of(statistics))
    expected = torch.cat([bn(part) for bn, part in zip(references, theirs.split(4), strict=True)])
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    assert close(y, expected)
    assert close(ours.grad, theirs.grad)
    assert close(norm.weight.grad, sum_of([bn.weight.grad for bn in references]))
    assert close(norm.bias.grad, sum_of([bn.bias.grad for bn in references]))
    before = norm.running_mean.clone(), norm.running_var.clone()
    statistics.update(statistics.collect(), 3, GOOD)
    for was, running, seen in zip(
        before, (norm.running_mean, norm.running_var), ("running_mean", "running_var"), strict=True
    ):
        mean = sum_of([getattr(bn, seen) for bn in references]) / 3
        assert close(running, 0.9 * was + 0.1 * mean)


def sum_of(tensors: list[Tensor | None]) -> Tensor:
    return torch.stack([tensor for tensor in tensors if tensor is not None]).sum(0)


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_running_statistics_move_once_per_step_however_it_is_cut(passes: int) -> None:
    x = numbers("x", 16, CHANNELS, 2, 3)
    expected, whole = make_norm(passes=1, groups=4)
    expected(x, batch_of(whole))
    whole.update(whole.collect(), 4, GOOD)
    norm, statistics = make_norm(passes, groups=4 // passes)
    before = norm.running_mean.clone()
    for number, part in enumerate(x.split(16 // passes)):
        norm(part, batch_of(statistics, number))
        assert torch.equal(norm.running_mean, before)  # a pass alone moves nothing
    statistics.update(statistics.collect(), 4, GOOD)
    assert close(norm.running_mean, expected.running_mean)
    assert close(norm.running_var, expected.running_var)
    assert not torch.equal(norm.running_mean, before)


@pytest.mark.parametrize(("passes", "groups"), [(1, 1), (2, 1), (2, 2)])
def test_a_pass_that_is_computed_again_counts_once(passes: int, groups: int) -> None:
    x = numbers("x", 4 * passes * groups, CHANNELS, 2, 3)
    norm, statistics = make_norm(passes, groups)
    expected, whole = make_norm(1, passes * groups)
    computed: list[int] = []
    norm.register_forward_pre_hook(lambda *_: computed.append(1))
    for number, part in enumerate(x.split(4 * groups)):
        batch = batch_of(statistics, number)
        # With a layer behind it, the norm is computed again to its end.
        y = checkpoint(
            lambda x, batch: norm(x, batch).square(), part, batch, use_reentrant=False, preserve_rng_state=False
        )
        y.sum().backward()
    assert len(computed) == 2 * passes
    expected(x, batch_of(whole))
    sums, their_sums = statistics.collect(), whole.collect()
    assert close(sums, their_sums)
    for one, its in ((statistics, sums), (whole, their_sums)):
        one.update(its, passes * groups, GOOD)
    assert close(norm.running_mean, expected.running_mean)
    assert close(norm.running_var, expected.running_var)


def test_a_frozen_norm_is_left_alone() -> None:
    still, moving = (BatchNormAct(3, 0.1, 1e-5).double() for _ in range(2))
    still.requires_grad_(False)
    statistics = Statistics(nn.Sequential(still, moving), passes=1, groups=1)
    assert statistics.norms == [moving]
    x = numbers("x", 4, 3, 2, 2)
    moving(still(x, None), batch_of(statistics))
    sums = statistics.collect()
    assert sums.shape == (2 * 3,)
    statistics.update(sums, 1, GOOD)
    assert torch.equal(still.running_mean, torch.zeros(3))
    assert torch.equal(still.running_var, torch.ones(3))
    assert not torch.equal(moving.running_mean, torch.zeros(3))


def test_two_steps_are_not_mixed_up() -> None:
    norm, statistics = make_norm(passes=2)
    reference = make_reference(norm, 0.1)
    for step in range(2):
        parts = [numbers(f"{step}/{part}", 4, CHANNELS, 2, 2) for part in range(2)]
        seen = []
        for number, part in enumerate(parts):
            norm(part, batch_of(statistics, number))
            alone = make_reference(norm, 1.0)
            alone(part)
            seen.append(alone.running_mean)
        expected = 0.9 * reference.running_mean + 0.1 * (seen[0] + seen[1]) / 2  # type: ignore[operator]
        reference.running_mean = expected
        statistics.update(statistics.collect(), 2, GOOD)
        assert close(norm.running_mean, expected)


def test_a_bad_step_moves_no_statistics_and_leaves_nothing_behind() -> None:
    norm, statistics = make_norm(passes=1)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    norm(torch.full((4, CHANNELS, 2, 2), float("nan"), dtype=torch.float64), batch_of(statistics))
    statistics.update(statistics.collect(), 1, BAD)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    fresh, moved = make_norm(passes=1)
    x = numbers("x", 4, CHANNELS, 2, 2)
    for one, its in ((norm, statistics), (fresh, moved)):
        one(x, batch_of(its))
        its.update(its.collect(), 1, GOOD)
    assert torch.equal(norm.running_mean, fresh.running_mean)
    assert torch.equal(norm.running_var, fresh.running_var)


def test_statistics_of_several_norms_are_kept_apart_and_stay_in_the_state() -> None:
    both = Chain(BatchNormAct(3, 0.1, 1e-5), BatchNormAct(3, 0.1, 1e-5)).double()
    statistics = Statistics(both, passes=1, groups=1)
    x = numbers("x", 4, 3, 2, 2)
    both(x, batch_of(statistics))
    statistics.update(statistics.collect(), 1, GOOD)
    first, second = both[0].running_mean, both[1].running_mean
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert close(first, 0.1 * x.mean((0, 2, 3)))
    assert not close(first, second)
    assert torch.equal(both.state_dict()["0.running_mean"], first)
    both.load_state_dict({name: torch.zeros_like(value) for name, value in both.state_dict().items()})
    both(x, None)
    assert not first.any()  # loading writes through to the row that statistics move


def test_a_network_without_batch_norm_keeps_no_statistics() -> None:
    statistics = Statistics(nn.Sequential(NormAct(3), GroupNormAct(4, 2, 1e-5)), passes=2, groups=1)
    assert statistics.width == statistics.pass_rows(1).numel() == 0
    statistics.update(statistics.collect(), 0, GOOD)


@pytest.mark.parametrize("count", [2, 3])
def test_a_group_across_replicas_is_one_batch_norm_over_all_their_images(count: int) -> None:
    size = 4
    x = numbers("x", count * size, CHANNELS, 3, 2)
    weights = numbers("w", count * size, CHANNELS, 3, 2)
    whole, moved = make_norm(passes=1)
    reference = make_reference(whole, 0.1)
    theirs = x.clone().requires_grad_()
    expected = reference(theirs)
    (expected * weights).sum().backward()
    circle = Circle(count)
    made = [make_norm(passes=1) for _ in range(count)]
    ours = [part.clone().requires_grad_() for part in x.split(size)]
    outputs: list[Tensor] = [torch.empty(0)] * count

    def work(replica: int) -> None:
        norm = made[replica][0]
        norm.shared = circle.seat(replica)
        outputs[replica] = norm(ours[replica], batch_of(made[replica][1]))
        (outputs[replica] * weights.split(size)[replica]).sum().backward()

    in_threads(count, work)
    assert close(torch.cat(outputs), expected)
    assert close(torch.cat([part.grad for part in ours if part.grad is not None]), theirs.grad)
    assert close(sum_of([norm.weight.grad for norm, _ in made]), reference.weight.grad)
    assert close(sum_of([norm.bias.grad for norm, _ in made]), reference.bias.grad)
    sums = sum_of([statistics.collect() for _, statistics in made])
    for norm, statistics in made:
        statistics.update(sums, 1, GOOD)
        assert close(norm.running_mean, reference.running_mean)
        assert close(norm.running_var, reference.running_var)
    assert moved.norms == [whole]


@pytest.mark.parametrize("shortcut", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "relu6", "silu", "hardswish"])
@pytest.mark.parametrize("kind", ["batch", "group", "none"])
def test_norm_then_shortcut_then_activation(kind: str, activation: Activation | None, shortcut: bool) -> None:
    norm: NormAct = {
        "batch": BatchNormAct(CHANNELS, 0.1, 1e-5, activation),
        "group": GroupNormAct(CHANNELS, 1, 1e-5, activation),
        "none": NormAct(CHANNELS, activation),
    }[kind].double()
    with torch.no_grad():
        norm.weight.copy_(6 * numbers("weight", CHANNELS))
        norm.bias.copy_(numbers("bias", CHANNELS))
    x, beside = numbers("x", 4, CHANNELS, 3, 3), numbers("beside", 4, CHANNELS, 3, 3)
    kept = x.clone(), beside.clone()
    plain = {
        "batch": F.batch_norm(x, torch.zeros(CHANNELS).double(), torch.ones(CHANNELS).double(), norm.weight, norm.bias),
        "group": F.group_norm(x, 1, norm.weight, norm.bias),
        "none": x * norm.weight[:, None, None] + norm.bias[:, None, None],
    }[kind]
    before = plain + beside if shortcut else plain
    expected = {
        None: before,
        "relu": before.clamp_min(0),
        "relu6": before.clamp(0, 6),
        "silu": before / (1 + (-before).exp()),
        "hardswish": before * (before + 3).clamp(0, 6) / 6,
    }[activation]
    assert close(norm(x, None, beside if shortcut else None), expected)
    assert torch.equal(x, kept[0])
    assert torch.equal(beside, kept[1])  # neither input is changed in place
    assert (activation in ("relu", "relu6")) == bool((expected >= 0).all())
    assert before.min() < -3
    assert before.max() > 6


@pytest.mark.parametrize(
    ("channels", "asked", "groups"), [(64, 32, 32), (16, 32, 16), (24, 16, 12), (7, 4, 1), (10, 4, 2), (1, 32, 1)]
)
def test_a_narrow_layer_uses_as_many_groups_as_divide_it(channels: int, asked: int, groups: int) -> None:
    norm = GroupNormAct(channels, asked, 1e-5, activation=None).double()
    x = numbers("x", 3, channels, 4, 4)
    assert norm.groups == groups
    assert close(norm(x, None), F.group_norm(x, groups))
    assert close(norm(x, None)[1:2], norm(x[1:2], None))  # each image by itself


def test_gradients_flow_through_shortcut_and_activation() -> None:
    norm, statistics = make_norm(passes=1, activation="relu")
    x, beside = numbers("x", 4, CHANNELS, 2, 2).requires_grad_(), numbers("b", 4, CHANNELS, 2, 2).requires_grad_()
    reference = make_reference(norm, 0.1)
    norm(x, batch_of(statistics), beside).square().sum().backward()
    ours = x.grad, beside.grad
    x.grad = beside.grad = None
    F.relu(reference(x) + beside).square().sum().backward()
    assert close(ours[0], x.grad)
    assert close(ours[1], beside.grad)


def test_a_mask_leaves_out_the_branch_of_an_image_before_the_shortcut_is_added() -> None:
    norm, statistics = make_norm(passes=1, activation="silu")
    x, beside = numbers("x", 4, CHANNELS, 2, 2).requires_grad_(), numbers("b", 4, CHANNELS, 2, 2)
    mask = torch.tensor([0.0, 2.0, 2.0, 0.0])
    y = norm(x, batch_of(statistics), beside, mask)
    expected = F.silu(make_reference(norm, 0.1)(x) * mask.view(-1, 1, 1, 1) + beside)
    assert close(y, expected)
    assert close(y[::3], F.silu(beside[::3]))
    ours, theirs = (torch.autograd.grad(each.square().sum(), x)[0] for each in (y, expected))
    assert close(ours, theirs)
