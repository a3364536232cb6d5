"""Networks as ordered lists of blocks: what rides along, cutting, standing still, and computing again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from conftest import make_plan, make_session
from paceline.data.load.batches import MicroBatch
from paceline.data.load.loader import open_loader
from paceline.errors import PlanError
from paceline.model.batch import Batch
from paceline.model.build import build_network
from paceline.model.dropout import StochasticDepth
from paceline.model.network import Network, recomputing
from paceline.model.norm import BatchNormAct
from paceline.model.whole import Whole
from paceline.planning import Plan
from paceline.training.state import State, build_state, initialize_state
from paceline.training.step import take_step
from paceline.world import World

WORLD = World(torch.device("cpu"))
CHANCY = ("model=efficientnet-cifar", "model.survival=0.5", "model.dropout=0.5", "data.side=16")
"""A network with dropout, stochastic depth and norms."""
HEADED = ("model=googlenet", "data.side=16", "global_batch=4", "norm_batch=2")
"""A network with auxiliary heads, which drop too."""
BATCH = Batch(torch.empty(1, 0))
"""A micro-batch of a network without norms and dropouts."""


class Add(nn.Module):
    """Adds a number, and in training gives the sum of the picture as scores if it is told to."""

    def __init__(self, number: float, scores: bool = False) -> None:
        super().__init__()
        self.number, self.scores = nn.Parameter(torch.tensor(number)), scores

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor | tuple[Tensor, Tensor]:
        y = x + self.number
        return (y, x.sum().view(1)) if self.scores and batch is not None else y


def adders() -> Network:
    return Network(
        OrderedDict(a=Add(1.0), first=Add(10.0, True), b=Add(100.0), second=Add(1000.0, True), c=Add(10000.0))
    )


def chain(pieces: list[Network], x: Tensor, batch: Batch | None = None) -> Any:
    """What pieces give, one behind the other."""
    made: Any = x
    for piece in pieces:
        made = piece(*tensors(made), batch=batch)
    return made


def tensors(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else made


def make_state(plan: Plan) -> State:
    """The state before the first step, with running statistics that are not those every network starts with."""
    state = build_state(plan, WORLD)
    initialize_state(state, plan)
    for number, norm in enumerate(norms(state.network.module)):
        norm.running_mean.fill_(0.01 * number)
        norm.running_var.fill_(1 + 0.01 * number)
    return state


def norms(module: nn.Module) -> list[BatchNormAct]:
    return [part for part in module.modules() if isinstance(part, BatchNormAct)]


def shares(plan: Plan) -> Iterator[list[MicroBatch]]:
    return open_loader(plan, None, 0, WORLD.device).training(0)


def train(plan: Plan, state: State, steps: int) -> None:
    session = make_session(plan, state=state)
    for _, share in zip(range(steps), shares(plan), strict=False):
        take_step(session, share)


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(module: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def test_auxiliary_scores_ride_along_behind_the_picture_in_the_order_of_their_heads() -> None:
    picture, first, second = adders()(torch.zeros(2), batch=BATCH)
    assert picture.tolist() == [11111, 11111]
    assert (first.tolist(), second.tolist()) == ([2], [222])


def test_without_auxiliary_scores_the_picture_comes_alone() -> None:
    made = adders()(torch.zeros(2))
    assert isinstance(made, Tensor)
    assert made.tolist() == [11111, 11111]


@pytest.mark.parametrize("names", [[], ["a"], ["b"], ["first", "second"], ["second"], ["c", "b", "b", "a"]], ids=str)
def test_pieces_carry_auxiliary_scores_across_a_cut(names: list[str]) -> None:
    network = adders()
    x = torch.ones(3)
    expected, made = network(x, batch=BATCH), chain(network.cut(names), x, BATCH)
    assert len(made) == 3
    assert all(torch.equal(a, b) for a, b in zip(expected, made, strict=True))


@pytest.mark.parametrize(
    ("names", "starts"),
    [([], ["a"]), (["a"], ["a"]), (["b"], ["a", "b"]), (["c", "first"], ["a", "first", "c"]),
     (["b", "b"], ["a", "b"]), (["c", "second", "b", "first", "a"], ["a", "first", "b", "second", "c"])],
    ids=str,
)  # fmt: skip
def test_a_piece_begins_at_each_name_in_the_network_s_own_order(names: list[str], starts: list[str]) -> None:
    pieces = adders().cut(names)
    assert [next(iter(dict(piece.named_children()))) for piece in pieces] == starts
    assert [name for piece in pieces for name in dict(piece.named_children())] == ["a", "first", "b", "second", "c"]


@pytest.mark.parametrize("names", [["stage2/unit1"], ["stage1/unit1", "stage4/unit1", "head"], ["all"]], ids=str)
def test_a_cut_network_gives_the_same_scores_from_the_same_parameters(names: list[str]) -> None:
    plan = make_plan(*CHANCY)
    network = build_network(plan.recipe, plan.facts).double().eval()
    cuts = plan.network.chosen("on.recompute", names)
    pieces = network.cut(cuts)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert len(pieces) == len({"stem", *cuts})
    assert torch.equal(network(x), chain(pieces, x))
    whole = dict(network.named_parameters())
    cut = {name: parameter for piece in pieces for name, parameter in piece.named_parameters()}
    assert list(whole) == list(cut)
    assert all(cut[name] is parameter for name, parameter in whole.items())  # the very same, not copies


def test_a_network_can_be_exported() -> None:
    plan = make_plan("on.precision=fp64")
    network = build_network(plan.recipe, plan.facts).double().eval()
    x = torch.sin(torch.arange(2 * 3 * 64, dtype=torch.float64)).view(2, 3, 8, 8)
    exported = torch.export.export(network, (x,)).module()
    assert torch.allclose(exported(x), network(x), rtol=1e-12)


def test_a_slice_of_a_network_is_a_network() -> None:
    network = adders()
    middle = network[1:4]
    assert isinstance(middle, Network)
    assert [part.tolist() for part in middle(torch.ones(1), batch=BATCH)] == [[1111], [1], [111]]
    assert [part.tolist() for part in middle(torch.ones(1), torch.zeros(1), batch=BATCH)] == [[1111], [0], [1], [111]]


@pytest.mark.parametrize(
    ("names", "still"),
    [("[stem]", ("stem.",)), ("[stage1, stage3]", ("stage1/", "stage3/")),
     ("[stem, stage1, stage2, stage3, stage4, stage5, stage6, stage7, top]", ("stem.", "stage", "top."))],
    ids=["stem", "stages", "all-but-head"],
)  # fmt: skip
def test_frozen_blocks_stand_still_through_training_and_the_others_move(names: str, still: tuple[str, ...]) -> None:
    plan = make_plan(*CHANCY, "optimizer.lr=0.01", "weight_decay.rate=0.1", f"freeze={names}", "on.micro_batch=8")
    state = make_state(plan)
    module = state.network.module
    before = snapshot(module)
    train(plan, state, 3)
    assert changed(module, before) == {name for name in before if not name.startswith(still)}
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())
    moving = {name for name, parameter in module.named_parameters() if not name.startswith(still)}
    assert {name.removesuffix(".momentum") for name in state.optimizer.tensors()} == moving


def test_frozen_blocks_get_no_gradients() -> None:
    plan = make_plan("freeze=[stem, stage2]")
    state = make_state(plan)
    state.network.forward_backward(next(shares(plan)))
    module = dict(state.network.module.named_parameters())
    without = {name for name, parameter in module.items() if parameter.grad is None}
    frozen = {name for name in module if name.startswith(("stem.", "stage2/"))}
    assert without == frozen
    assert len(frozen) == 9
    assert not {id(p) for p in state.network.parameters} & {id(module[name]) for name in frozen}  # nor are any shared


def test_frozen_norms_use_the_statistics_they_have() -> None:
    """Images that share a batch with other images do not see them through a frozen norm."""
    plan = make_plan("freeze=[stem]", "on.precision=fp64")
    state = make_state(plan)
    stem = state.network.module[:1]
    state.network.module.train()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(stem(x, batch=BATCH)[:1], stem(x[:1], batch=BATCH), rtol=1e-12)
    assert norms(stem)[0] not in state.network.statistics.norms
    assert len(state.network.statistics.norms) == len(norms(state.network.module)) - 1


def test_train_keeps_frozen_blocks_in_evaluation() -> None:
    network = adders()
    network.freeze(["first", "b"])
    for _ in range(2):
        modes = {name: block.training for name, block in network.train().named_children()}
        assert modes == {"a": True, "first": False, "b": False, "second": True, "c": True}
        assert not any(block.training for block in network.eval())
    assert len(network.train()(torch.ones(1), batch=BATCH)) == 2  # a head that stands still gives no scores


def test_validation_between_steps_does_not_wake_frozen_blocks() -> None:
    plan = make_plan("freeze=[stage1]")
    state = make_state(plan)
    share = next(shares(plan))
    for _ in range(2):
        state.network.answers(share[0])
        state.network.forward_backward(share)
        awake = {name for name, block in state.network.module.named_children() if block.training}
        assert awake == {"stem", "stage2/unit1", "stage3/unit1", "head"}


@pytest.mark.long
def test_frozen_blocks_drop_nothing() -> None:
    plan = make_plan(*CHANCY, "freeze=[stage5, stage6, stage7]")
    whole = Whole(plan, WORLD)
    whole.module.train()
    batches: dict[str, Batch | None] = {}
    for name, block in whole.module.named_children():
        block.register_forward_pre_hook(lambda _block, inputs, name=name: batches.update({name: inputs[1]}))
    whole.forward_backward(next(shares(plan)))
    still = {name for name, batch in batches.items() if batch is None}
    assert still == {name for name in batches if name.startswith(("stage5", "stage6", "stage7"))}
    assert any(
        isinstance(part, StochasticDepth) for name in still for part in whole.module.get_submodule(name).modules()
    )


def test_a_freeze_of_everything_or_of_nothing_known_is_refused() -> None:
    with pytest.raises(PlanError, match="nothing trains"):
        make_plan("freeze=[all]")
    with pytest.raises(PlanError, match="freeze: the network has no block 'stage9'; it has stem, stage1/unit1"):
        make_plan("freeze=[stage9]")


def learned(whole: Whole, share: list[MicroBatch]) -> dict[str, Tensor]:
    """What one step's passes leave: the tally, every head's scores, every gradient and all norm statistics."""
    left: dict[str, Tensor] = {}
    forward = whole._forward

    def noted(x: Tensor, batch: Batch | None) -> Any:
        made = forward(x, batch=batch)
        left.update({f"scores {len(left)}": part.detach().clone() for part in tensors(made)})
        return made

    whole._forward = noted
    left["tally"] = whole.forward_backward(share)
    left |= {name: p.grad for name, p in whole.module.named_parameters() if p.grad is not None}
    return left | {"statistics": whole.statistics.collect().clone()}


def start_of(plan: Plan) -> dict[str, Tensor]:
    """Weights that need not be keyed: torch's own, from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return build_network(plan.recipe, plan.facts).state_dict()


def make_whole(plan: Plan, start: dict[str, Tensor]) -> Whole:
    whole = Whole(plan, WORLD)
    whole.module.load_state_dict(start)
    return whole


@pytest.mark.parametrize(
    ("words", "recompute"),
    [
        ((*CHANCY, "on.precision=fp32"), "all"),
        pytest.param((*CHANCY, "on.precision=fp64"), "[stage2/unit1, stage5]", marks=pytest.mark.long),
        pytest.param((*CHANCY, "on.precision=bf16"), "all", marks=pytest.mark.long),
        ((*CHANCY, "freeze=[stem, stage1, stage6]"), "all"),
        pytest.param((*CHANCY, "norm=group", "norm.proxy=true"), "all", marks=pytest.mark.long),
        (("on.precision=fp64",), "all"),
        (("on.precision=fp64",), "head"),
        ((*HEADED, "on.precision=fp32"), "all"),
        ((*HEADED, "on.precision=bf16"), "[inception4a, aux1, inception4c]"),
    ],
    ids=["all", "some", "half", "frozen", "proxy", "resnet", "head", "heads", "some-heads"],
)
def test_computing_again_changes_no_bit(words: tuple[str, ...], recompute: str) -> None:
    size = 2 if "model=googlenet" in words else 8  # two passes, most of them of two norm groups
    plain, again = (make_plan(*words, f"on.micro_batch={size}", *more) for more in ((), (f"on.recompute={recompute}",)))
    start, share = start_of(plain), next(shares(plain))
    assert len(share) == 2
    one, other = learned(make_whole(plain, start), share), learned(make_whole(again, start), share)
    assert one.keys() == other.keys()
    assert {name for name, value in one.items() if not torch.equal(value, other[name])} == set()
    assert all(torch.isfinite(value).all() for value in one.values())


@pytest.mark.parametrize("recompute", ["[]", "all"])
def test_every_pass_of_a_step_leaves_statistics_of_its_own(recompute: str) -> None:
    sums = []
    for micro_batch in (16, 8, 4):
        plan = make_plan(f"on.micro_batch={micro_batch}", "on.precision=fp64", f"on.recompute={recompute}")
        whole = make_whole(plan, start_of(plan))
        whole.forward_backward(next(shares(plan)))
        sums.append(whole.statistics.collect())
    one, *others = sums
    assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for other in others)


def test_chance_is_at_work_where_nothing_changes() -> None:
    """The networks of the test above do drop, and their heads do speak, so that it could fail."""
    for words, heads in ((CHANCY, 1), (HEADED, 3)):
        plan = make_plan(*words, "on.micro_batch=4")
        whole, batch = make_whole(plan, start_of(plan)), next(shares(plan))[0]
        images = whole.augment.normalize(batch.images)
        made = [whole._class_scores(images, batch_at(whole, first)) for first in (0, 0, 1000)]
        assert [len(scores) for scores in made] == [heads] * 3
        for one, same, other in zip(*made, strict=True):
            assert torch.equal(one, same)
            assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("recompute", "again"), [("all", 4), ("[stage3]", 3), ("[stage2, stage3]", 3), ("[head]", 4), ("[]", 0)]
)
def test_only_the_last_piece_is_not_computed_again(recompute: str, again: int) -> None:
    plan = make_plan("on.micro_batch=16", f"on.recompute={recompute}")
    whole = make_whole(plan, start_of(plan))
    seen: list[str] = []
    for name, block in whole.module.named_children():
        block.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    whole.forward_backward(next(shares(plan)))
    names = list(dict(whole.module.named_children()))
    assert seen[:5] == names
    assert sorted(seen[5:]) == sorted(names[:again])


def batch_at(whole: Whole, first: int) -> Batch:
    """What layers are told of the four images that begin at a position."""
    return Batch(whole.statistics.pass_rows(0), *whole.masks(first + torch.arange(4)))


def kept_bytes(forward: Callable[..., Any], x: Tensor, module: nn.Module, batch: Batch) -> int:
    """What a forward pass keeps for the backward pass, the parameters and what is given apart."""
    there = {tensor.untyped_storage().data_ptr() for tensor in (x, *module.parameters(), *batch.dropout, *batch.depth)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        made = forward(x, batch=batch)
    assert all(part.requires_grad for part in tensors(made))
    return sum(kept.values())


@pytest.mark.parametrize("words", [CHANCY, HEADED, ("model=resnet20",)], ids=["efficientnet", "googlenet", "resnet20"])
def test_computing_again_keeps_little_more_than_what_goes_from_piece_to_piece(words: tuple[str, ...]) -> None:
    plan = make_plan(*words, "on.micro_batch=4")
    whole = make_whole(plan, start_of(plan))
    whole.module.train()
    batch = batch_at(whole, 0)
    x = torch.zeros(4, 3, plan.facts.side, plan.facts.side)
    pieces = whole.module.cut(plan.network.blocks)
    made, carried = x, 0
    with torch.no_grad():
        for piece in pieces[:-1]:
            made = tensors(piece(made, batch=batch))[0]
            carried += made.numel() * made.element_size()
    plain, again = (kept_bytes(run, x, whole.module, batch) for run in (whole.module, recomputing(pieces)))
    fewer_cuts = kept_bytes(recomputing(whole.module.cut(plan.network.blocks[-2:])), x, whole.module, batch)
    assert fewer_cuts < again < plain / 2
    assert again <= carried + kept_bytes(pieces[-1], made.requires_grad_(), whole.module, batch)
