"""A probe on the CPU: what it counts is what larger micro-batches keep, and plans on this machine go by it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from conftest import make_plan, make_session
from paceline import probing
from paceline.errors import PlanError
from paceline.facts import Probe
from paceline.job import plan_job
from paceline.machine import this_machine
from paceline.memory import demand
from paceline.planning import Plan
from paceline.probing import IN_A_STEP, decided, probe_plan, probe_sizes, store_probe, stored_probe
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, override
from paceline.training import probe as module
from paceline.training import probed_blocks
from paceline.training.device_step import device_update
from paceline.training.probe import take_probe
from paceline.training.session import Session

SIZE = 48
WORDS = ("global_batch=96", "norm_batch=48", f"on.micro_batch={SIZE}", "data.images=960")
NETWORKS = {
    "resnet": (),
    "fused": ("on.kernels=fused", "model=resnet11-bottleneck", "on.precision=fp64"),
    "efficientnet": ("model={name: efficientnet-cifar, width: 0.25, depth: 0.5}", "data.side=16", "ema.decay=0.9"),
    "adam": ("optimizer={name: adamw, lr: 0.1}", "mix.mixup=0.2", "mix.block=2", "freeze=stem"),
    "bf16": ("on.precision=bf16", "augment.policy={name: randaugment}"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMES", 1)
    monkeypatch.setattr(probed_blocks, "PASSES", 1)


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "MOST_ON_CPU", 8)


@pytest.fixture(scope="module")
def small_probe() -> Probe:
    return take_probe(make_plan(), this_machine())


def in_tensors(session: Session) -> tuple[int, int]:
    """Bytes that a forward pass of a real step keeps, and those of the weights with all that belongs to them."""
    network, sizes = session.state.network, dict[int, Any]()
    own = {t.untyped_storage()._cdata for t in (*network.module.parameters(), *network.module.buffers())}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            sizes[storage._cdata] = storage
        return tensor

    with closing(session.loader.training(0)) as steps:
        batch = network.prepare(next(steps)[0])
        with saved_tensors_hooks(count, lambda tensor: tensor):
            network.forward_backward([batch])
    kept = sum(storage.nbytes() for storage in sizes.values())
    tensors = [t for group in session.state.tensors().values() for t in group.values()]
    tensors += [] if session.state.ema is None else list(session.state.ema.tensors().values())
    return kept, sum(t.nbytes for t in tensors) + sum(p.grad.nbytes for p in network.parameters if p.grad is not None)


@pytest.mark.usefixtures("few_images")
@pytest.mark.parametrize("words", NETWORKS.values(), ids=NETWORKS)
def test_what_a_larger_micro_batch_keeps_is_predicted(words: tuple[str, ...]) -> None:
    plan = make_plan(*WORDS, *words)
    probe = take_probe(plan, this_machine())
    assert max(probe.sizes) <= SIZE / 2
    kept, state = in_tensors(make_session(plan))
    needs = demand(plan, probe)
    assert needs.kept == pytest.approx(kept, rel=0.01)
    gradients = sum(block.gradients for block in probe.blocks)
    assert needs.weights + needs.optimizer + gradients == pytest.approx(state, abs=8)  # AdamW counts its steps
    assert needs.step == pytest.approx(state + kept + needs.inputs, rel=0.01)
    assert probe.counted
    assert probe.off < 1e-3


def test_every_block_takes_time_and_keeps_something(small_probe: Probe) -> None:
    assert [block.name for block in small_probe.blocks] == list(make_plan().network.blocks)
    for block in small_probe.blocks:
        assert min(block.forward, block.backward, block.kept.slope, block.passed.slope, block.weights) > 0
    assert small_probe.seconds.base >= 0 < small_probe.seconds.slope


def test_frozen_blocks_keep_nothing_and_have_no_gradients() -> None:
    probe = take_probe(make_plan("freeze=[stem, stage1]"), this_machine())
    frozen, others = probe.blocks[:2], probe.blocks[2:]
    assert all(block.kept.slope == block.gradients == block.backward == 0 for block in frozen)
    assert all(block.kept.slope and block.gradients and block.backward for block in others)
    assert all(block.forward and block.weights for block in frozen)


@pytest.mark.parametrize(
    "words",
    [
        (), ("model.stem=3x3", "model=resnet18", "data.side=32"), ("mix.mixup=0.2", "mix.block=4"),
        ("norm=none",), ("average.last=1",),
        ("norm_batch=1", "data.side=8"), ("augment.side={0 epochs: 4, 50%: 8}",), ("stop.target=50%",),
        ("on.stages=2", "on.micro_batch=4"), ("on.replicas=2", "on.micro_batch=8"), ("global_batch=1", "norm_batch=1"),
    ],
    ids=str,
)  # fmt: skip
def test_the_sizes_of_a_probe_make_plans(words: tuple[str, ...]) -> None:
    plan = make_plan(*words)
    sizes = probe_sizes(plan)
    assert len(sizes) == 3
    for size in sizes:
        probed = probe_plan(plan, this_machine(), size)
        assert (probed.micro_batch, probed.rounds, probed.processes) == (size, IN_A_STEP, 1)
        assert probed.facts.side == plan.facts.side
        assert probed.recipe.model == plan.recipe.model


@pytest.mark.parametrize(("most", "last"), [(1.1e6, 32), (1.7e6, 64), (9e6, 64)])
def test_more_sizes_are_probed_where_something_else_takes_the_most(
    monkeypatch: pytest.MonkeyPatch, most: float, last: int
) -> None:
    """Such as room for kernels to be chosen in, which is the same for every size."""
    real = module._counted

    def with_room(blocks: dict[str, Any]) -> dict[str, float]:
        sizes = real(blocks)
        return {part: max(size, most) for part, size in sizes.items()}

    monkeypatch.setattr(module, "_counted", with_room)
    probe = take_probe(make_plan(), this_machine())
    assert probe.sizes[-1] == last
    kept = sum(block.kept.slope for block in probe.blocks)
    assert probe.first.slope == pytest.approx(kept)
    assert probe.following.slope == pytest.approx(kept)


def test_a_probe_that_the_memory_does_not_hold_takes_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    real, most = module._point, [8]

    def out_of_memory(session: Session, blocks: Any, left: int) -> Any:
        if session.plan.micro_batch > most[0]:
            raise torch.OutOfMemoryError("injected")
        return real(session, blocks, left)

    monkeypatch.setattr(module, "_point", out_of_memory)
    assert take_probe(make_plan(), this_machine()).sizes == (4, 8)
    most[0] = 4
    with pytest.raises(PlanError, match="the memory does not hold micro-batches of 8 images, which a probe would take"):
        take_probe(make_plan(), this_machine())


def test_a_probe_that_is_kept_is_found_again_for_the_same_work_only(own_cache: Path, small_probe: Probe) -> None:
    plan, machine = make_plan(), this_machine()
    assert stored_probe(plan, machine) is None
    path = store_probe(plan, machine, small_probe)
    assert path is not None
    assert path.parent == own_cache / "probes"
    assert stored_probe(plan, machine) == small_probe
    for words in (("on.micro_batch=4",), ("optimizer.lr=0.3", "epochs=2"), ("on.replicas=2", "on.micro_batch=8")):
        assert stored_probe(make_plan(*words), machine) == small_probe
    for word in ("on.precision=bf16", "data.side=16", "model=resnet14-cifar", "on.kernels=fused", "ema.decay=0.9"):
        assert stored_probe(make_plan(word), machine) is None
    path.write_text(path.read_text()[:200])
    assert stored_probe(plan, machine) is None


def test_a_cache_that_cannot_be_written_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_probe: Probe
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    assert store_probe(make_plan(), this_machine(), small_probe) is None


@pytest.fixture
def stored(small_probe: Probe) -> None:
    """A probe in the cache by which one image takes a third of a GiB."""
    data = json.loads(json.dumps(vars(small_probe), default=vars))
    for name in ("first", "following"):
        data[name]["slope"] = 2**30 / 3
    plan, machine = make_plan(), this_machine()
    path = store_probe(plan, machine, small_probe)
    assert path is not None
    path.write_text(json.dumps(data))


def planned(*words: str) -> Plan:
    placed = Tree({"device": "cpu", "cpu_threads": 1}, {(): "test"})
    for word in words:
        override(placed, word, Placement)
    return plan_job("test", make_plan().recipe, build(Placement, placed), None, Tree(), placed).plan


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    ("words", "size", "origin"),
    [
        (("memory=3 GiB",), 8, "a probe of"),
        (("memory=2 GiB",), 4, "a probe of"),
        (("memory=3 GiB", "micro_batch=16"), 16, "the placement"),
        (("memory=3 GiB", "precision=bf16"), 16, "an estimate"),
    ],
)
def test_auto_is_decided_by_the_probe_of_this_machine(words: tuple[str, ...], size: int, origin: str) -> None:
    plan = planned(*words)
    assert plan.micro_batch == size
    assert plan.chosen_by.startswith(origin)


@pytest.mark.usefixtures("stored")
def test_what_only_evaluates_has_no_use_for_a_probe() -> None:
    asked = Placement.model_validate({"device": "cpu", "cpu_threads": 1, "memory": "100 MiB"})
    plan = plan_job("test", make_plan().recipe, asked, None, Tree(), Tree(), evaluates=True).plan
    assert (plan.chosen_by, plan.micro_batch) == ("an estimate", 16)
    with pytest.raises(PlanError, match=r"is the least that fits the recipe"):
        plan_job("test", make_plan().recipe, asked, None, Tree(), Tree())


def test_a_choice_is_a_plan_like_any_other(small_probe: Probe) -> None:
    plan = make_plan("on.micro_batch=4")
    placed = Placement.model_validate({"device": "cpu", "cpu_threads": 1})
    best = decided(plan, placed, small_probe, this_machine(), None)
    assert best == make_plan() or best.micro_batch == 16
    assert best.recipe == plan.recipe


class Allocator:
    """Plays the statistics of a device: bytes in tensors now, and the most since they were reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.most = 100, 100
        for name, function in {
            "memory_allocated": lambda: self.now, "max_memory_allocated": lambda: self.most,
            "memory_reserved": lambda: self.now, "reset_peak_memory_stats": self.reset,
            "synchronize": lambda: None, "empty_cache": lambda: None, "Event": Moment,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, function)

    def reset(self) -> None:
        self.most = self.now

    def take(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


class Moment:
    """Plays an event of the device's clock, which ticks each time somebody looks."""

    ticks = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Moment.ticks += 1
        self.at = Moment.ticks

    def elapsed_time(self, other: Moment) -> float:
        return 1000.0 * (other.at - self.at)


def test_each_part_of_a_step_has_a_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    session, device = make_session(make_plan("on.micro_batch=4")), Allocator(monkeypatch)
    network, sizes = session.state.network, iter([30, 20, 10, 25, 40, 5])

    def taking(work: Any) -> Any:
        def taken(*arguments: Any) -> Any:
            size = next(sizes)
            device.take(size)
            device.take(-size)
            return work(*arguments)

        return taken

    monkeypatch.setattr(network, "forward_backward", taking(network.forward_backward))
    monkeypatch.setattr(module, "device_update", taking(device_update))
    with closing(session.loader.training(0)) as steps:
        peaks = module._peaks(session, next(steps)[:2])
    assert peaks == {"first": 130, "following": 140, "update": 110}
    assert session.state.step == 2
    assert module._held() == 100


def test_what_an_evaluation_takes_beside_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    session, device = make_session(make_plan()), Allocator(monkeypatch)
    network = session.state.network
    scores = network.scores

    def taking(images: Tensor) -> Tensor:
        device.take(len(images))
        device.take(-len(images))
        return scores(images)

    monkeypatch.setattr(network, "scores", taking)
    assert module._evaluation_peak(session) == session.plan.evaluation_batch == 37
    assert module._input_bytes(session) == 0


def test_blocks_are_timed_and_weighed_by_the_device_s_own_clock_and_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    session, device = make_session(make_plan()), Allocator(monkeypatch)
    passes = probed_blocks._Passes(session.state.network.module, torch.device("cuda"))
    mark = passes._mark

    def marking(moment: str) -> None:
        device.take(10)  # for a moment, beside 3 that stay
        device.take(-7)
        mark(moment)

    monkeypatch.setattr(passes, "_mark", marking)
    with closing(session.loader.training(0)) as steps, passes.watched(counts=False):
        session.state.network.forward_backward([session.state.network.prepare(next(steps)[0])])
    blocks = list(session.plan.network.blocks)
    assert passes.seconds() == dict.fromkeys(blocks, (1.0, 1.0))
    assert [passes.working(name) for name in blocks] == [10 + passes.passed[name] for name in blocks]
