"""Shares of the optimizer's state: the same bits as without, less memory for each replica, and whole when gathered."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from conftest import make_plan
from optim_cases import BAD, GOOD, MANY, OPTIMIZERS, RATES, everything, parameters, plan_of, steps, take_step
from paceline.optim.adam import AdamRule
from paceline.optim.build import Optimizer, build_optimizer
from paceline.optim.flat import ParameterGroup
from paceline.optim.parts import GroupPart, in_shares
from paceline.optim.shard import ShardedOptimizer
from paceline.planning import Plan
from paceline.world import World
from replicas_made import Circle, ThreadWorld, in_threads

ADAM = "{name: adamw, lr: 0.2}"
BAD_STEP = 3


def sharded(plan: Plan) -> Plan:
    return replace(plan, placement=plan.placement.model_copy(update={"shard": "optimizer"}))


def weights_of(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(p.detach().to(dtype)) for name, p in parameters(MANY).items()}


def learned(plan: Plan, world: World, dtype: torch.dtype = torch.float64) -> tuple[dict[str, nn.Parameter], Optimizer]:
    """The weights, and the optimizer that has moved them a few steps, one of them bad."""
    weights = weights_of(dtype)
    optimizer = build_optimizer(weights.items(), plan, world=world)
    for step, _ in enumerate(steps(weights, len(RATES))):
        take_step(optimizer, RATES[step], 3.0, BAD if step == BAD_STEP else GOOD, step)
    return weights, optimizer


def on_replicas(count: int, plan: Plan, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    """The weights and the gathered state of each replica after a few steps."""
    circle, left = Circle(count), list[dict[str, Tensor]]([{}] * count)

    def work(replica: int) -> None:
        weights, optimizer = learned(sharded(plan), ThreadWorld(circle, replica), dtype)
        assert isinstance(optimizer, ShardedOptimizer)
        with optimizer.gathered():
            left[replica] = everything(weights, optimizer)

    in_threads(count, work)
    return left


def alone(plan: Plan, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return everything(*learned(plan, World(torch.device("cpu")), dtype))


@pytest.mark.parametrize(("optimizer", "count"), [(page, 2 + index % 2) for index, page in enumerate(OPTIMIZERS)])
def test_replicas_with_shares_take_the_steps_of_one_without(optimizer: str, count: int) -> None:
    plan = plan_of(optimizer, "weight_decay.rate=0.1", "lr_factors.conv=0.5", shapes=MANY)
    whole = alone(plan)
    for left in on_replicas(count, plan):
        assert left.keys() == whole.keys()
        for name, values in whole.items():
            # On a CPU the kernel of SGD may round the last few numbers of a parameter otherwise.
            limit = 1e-14 if "sgd" in optimizer else 0
            assert torch.allclose(left[name], values, rtol=limit, atol=limit), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [ADAM, "{name: lars, lr: 0.2, trust_coefficient: 0.1}", "{name: muon, lr: 0.2}"])
def test_shares_of_16_bit_weights_are_rounded_by_the_same_bits(optimizer: str, dtype: torch.dtype) -> None:
    plan = plan_of(optimizer, "weight_decay.rate=0.1", shapes=MANY)
    whole, nearest = alone(plan, dtype), alone(plan_of(optimizer, "on.stochastic_rounding=false", shapes=MANY), dtype)
    for left in on_replicas(3, plan, dtype):
        assert [name for name, values in whole.items() if not torch.equal(values, left[name])] == []
    assert any(not torch.equal(values, nearest[name]) for name, values in whole.items())


@pytest.mark.parametrize("optimizer", [ADAM, "{name: lamb, lr: 0.2}", "{name: sgd, lr: 0.2, momentum: 0.9}"])
def test_clipping_sums_over_all_shares(optimizer: str) -> None:
    plan = plan_of(optimizer, "clip={value: 0.5, norm: 0.7, adaptive: 0.1}", shapes=MANY)
    whole, free = alone(plan), alone(plan_of(optimizer, shapes=MANY))
    one, *others = on_replicas(3, plan)
    for name, values in whole.items():
        assert torch.allclose(one[name], values, rtol=1e-13, atol=1e-14), name
        assert all(torch.equal(one[name], other[name]) for other in others), name
    assert not torch.allclose(whole["wide.weight"], free["wide.weight"], rtol=1e-3)


@pytest.mark.parametrize("count", [2, 3])
def test_each_replica_keeps_its_share_of_the_bytes(count: int) -> None:
    network = make_plan("model=resnet20", "optimizer={name: adamw, lr: 0.1}")
    circle, kept, after = Circle(count), [0] * count, [0] * count
    shapes = {f"{index}.weight": (16, 16, 3, 3 + index % 2) for index in range(11)} | {"head.weight": (10, 64)}

    def bytes_of(optimizer: Optimizer) -> int:
        tensors = optimizer.tensors()
        return sum(tensor.nbytes for name, tensor in tensors.items() if name != "good_steps")

    def work(replica: int) -> None:
        optimizer = build_optimizer(parameters(shapes).items(), sharded(network), world=ThreadWorld(circle, replica))
        kept[replica] = bytes_of(optimizer)
        assert isinstance(optimizer, ShardedOptimizer)
        with optimizer.gathered(keep=replica == 0):
            after[replica] = bytes_of(optimizer)
        assert bytes_of(optimizer) == kept[replica]

    in_threads(count, work)
    whole = bytes_of(build_optimizer(parameters(shapes).items(), network))
    assert sum(kept) == whole > 0
    assert max(kept) <= 1.2 * whole / count
    assert after == [whole, *kept[1:]]


def test_shares_are_whole_parameters_dealt_by_size() -> None:
    group = ParameterGroup(0.0, 1.0, parameters({"a": (64,), "b": (3, 64), "c": (2, 64), "d": (1,), "e": (3, 64)}))
    rule = AdamRule((0.9, 0.999), 1e-8)
    shares = in_shares([GroupPart(group, rule)], 2)
    assert [(share.owner, sorted(share.group.parameters)) for share in shares] == [
        (0, ["b", "c"]),
        (1, ["a", "d", "e"]),
    ]
    assert [share.owner for share in in_shares([GroupPart(group, rule)], 9)] == [0, 1, 2, 3, 4]


def test_what_is_given_to_gathered_state_stays_with_the_replica_that_keeps_it() -> None:
    plan, circle, left = plan_of(ADAM, shapes=MANY), Circle(2), list[dict[str, Tensor]]([{}, {}])

    def work(replica: int) -> None:
        optimizer = build_optimizer(parameters(MANY).items(), sharded(plan), world=ThreadWorld(circle, replica))
        assert isinstance(optimizer, ShardedOptimizer)
        with optimizer.gathered():
            for name, tensor in optimizer.tensors().items():
                tensor.fill_(float(sum(map(ord, name))))
        with optimizer.gathered():
            left[replica] = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}

    in_threads(2, work)
    for tensors in left:
        assert len(tensors) == 2 * len(MANY) + 1
        assert all((tensor == sum(map(ord, name))).all() for name, tensor in tensors.items())


def test_a_single_replica_shares_with_nobody() -> None:
    plan = make_plan("on.shard=optimizer", "on.replicas=1")
    assert not plan.shards
    assert make_plan("on.shard=optimizer", "on.replicas=2", "on.micro_batch=4").shards
    alone = build_optimizer(parameters().items(), sharded(plan_of(ADAM)), world=World(torch.device("cpu")))
    assert not isinstance(alone, ShardedOptimizer)
