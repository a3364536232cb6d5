"""Programs that are compiled side by side before a step: all of them, once, and nothing else comes of it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import make_plan, make_session
from paceline.model.folded import FoldedNetwork
from paceline.model.forms import PLAIN
from paceline.model.kernels import fastest
from paceline.model.kernels.ahead import compiled_together
from paceline.model.whole import Whole
from paceline.training.session import Session
from paceline.training.step import take_step

THREADS = 4
FUSED = "on.kernels=fused"


class Function:
    """What Triton makes of a kernel, as far as its hook goes: compiles for each key, and launches."""

    def __init__(
        self, runtime: Any, faulty: bool = False, module: str = "paceline.model.kernels.rows_programs"
    ) -> None:
        self.runtime, self.faulty, self.module = runtime, faulty, module
        self.no_memory = False
        self.compiled: dict[str, Kernel] = {}
        self.launched: list[str] = []
        self.loaded: list[str] = []
        self.loaders: set[str] = set()

    def launch(self, key: str) -> None:
        """function[grid](...) with arguments that give this key."""
        if key not in self.compiled and self._compile(key) is None:
            return
        assert self.compiled[key].run
        self.launched.append(key)

    def preload(self, data: str) -> Any:
        return self._compile(data.removeprefix("data of "))

    def _compile(self, key: str) -> Any:
        hook = self.runtime.jit_cache_hook
        described = {"key": key, "specialization_data": f"data of {key}"}
        if hook is not None and hook(
            key=key, repr=key, fn=SimpleNamespace(jit_function=self), compile=described, is_manual_warmup=False
        ):
            return None
        if self.faulty:
            raise RuntimeError("ptxas died")
        assert key not in self.compiled, "compiled twice"
        self.compiled[key] = Kernel(self, key)
        return self.compiled[key]


class Kernel:
    """What Triton has compiled, as far as loading goes: it remembers what launches, even where loading has failed."""

    def __init__(self, function: Function, key: str) -> None:
        self._function, self._key, self.compiler = function, key, threading.current_thread().name
        self._run: object = None
        self.loaded = False

    @property
    def run(self) -> object:
        if self._run is None:
            self._run = object()
            if self._function.no_memory:
                raise RuntimeError("out of memory")
            self._function.loaded.append(self._key)
            self._function.loaders.add(threading.current_thread().name)
            self.loaded = True
        if not self.loaded:
            raise TypeError("no function")
        return self._run


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part of Triton that the hook is in, of a Triton that is not there, with a device that is not there."""
    triton, knobs = ModuleType("triton"), SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=None))
    triton.knobs = knobs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    no_device(monkeypatch)
    return knobs.runtime


def looking() -> tuple[list[str], Callable[..., bool]]:
    """A hook that lets every program be compiled, and the keys that it has seen."""
    seen: list[str] = []

    def look(**asked: Any) -> bool:
        seen.append(asked["key"])
        return False

    return seen, look


def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_what_is_launched_inside_is_compiled_once_on_other_threads(runtime: Any) -> None:
    one, other = Function(runtime), Function(runtime)
    one.launch("warm")
    with compiled_together(THREADS):
        for key in ("a", "b", "a", "warm"):
            one.launch(key)
        other.launch("a")
        assert [*one.compiled] == ["warm"], "nothing is ready halfway through the work"
    assert one.launched == ["warm", "warm"], "what was compiled before is launched"
    assert sorted(one.compiled) == ["a", "b", "warm"]
    assert [*other.compiled] == other.loaded == ["a"]
    assert sorted(one.loaded) == ["a", "b", "warm"]
    names = {kernel.compiler for each in (one, other) for key, kernel in each.compiled.items() if key != "warm"}
    own = threading.current_thread().name
    assert own not in names
    assert one.loaders == other.loaders == {own}, "modules of one name are not loaded at the same time"
    assert runtime.jit_cache_hook is None
    one.launch("b")
    assert one.launched[-1] == "b"


def test_a_program_that_cannot_be_compiled_says_so_when_it_is_launched(runtime: Any) -> None:
    good, bad = Function(runtime), Function(runtime, faulty=True)
    with compiled_together(THREADS):
        bad.launch("a")
        good.launch("a")
    assert [*good.compiled] == ["a"]
    with pytest.raises(RuntimeError, match="ptxas died"):
        bad.launch("a")


def test_a_program_that_cannot_be_loaded_is_loaded_when_it_is_launched(runtime: Any) -> None:
    function = Function(runtime)
    function.no_memory = True
    with compiled_together(THREADS):
        function.launch("a")
    with pytest.raises(RuntimeError, match="out of memory"):
        function.launch("a")
    function.no_memory, function.compiled["a"]._run = False, None
    function.launch("a")
    assert function.launched == ["a"]


def test_what_another_thread_launches_for_the_images_is_launched(runtime: Any) -> None:
    ours, theirs = Function(runtime), Function(runtime, module="paceline.data.load.resample_cuda")
    with compiled_together(THREADS):
        ours.launch("a")
        thread = threading.Thread(target=theirs.launch, args=("a",))
        thread.start()
        thread.join()
        assert theirs.launched == ["a"]
    assert ours.launched == []


def test_work_that_fails_compiles_nothing_and_leaves_no_hook(runtime: Any) -> None:
    function = Function(runtime)

    def fail() -> None:
        with compiled_together(THREADS):
            function.launch("a")
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert function.compiled == {}
    assert runtime.jit_cache_hook is None


def test_where_somebody_else_looks_on_programs_are_compiled_as_ever(runtime: Any) -> None:
    function, (seen, theirs) = Function(runtime), looking()
    runtime.jit_cache_hook = theirs
    with compiled_together(THREADS):
        function.launch("a")
    assert function.launched == seen == ["a"]
    assert runtime.jit_cache_hook is theirs


@pytest.mark.parametrize("without", ["triton", "triton.knobs"])
def test_without_triton_the_work_is_done_as_ever(monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    monkeypatch.setitem(sys.modules, "triton", None if without == "triton" else ModuleType("triton"))
    done = []
    with compiled_together(THREADS):
        done.append(1)
    assert done == [1]


def test_a_triton_that_asks_otherwise_compiles_as_ever(runtime: Any) -> None:
    with compiled_together(THREADS):
        assert runtime.jit_cache_hook(key="a", fn=None) is False


def test_while_programs_are_noted_all_ways_are_taken_and_none_is_chosen(runtime: Any) -> None:
    taken, one, other = list[str](), torch.ones(()), torch.zeros(())

    def way(name: str, result: Tensor | None) -> Tensor:
        taken.append(name)
        if result is None:
            raise RuntimeError("not on this device")
        return result

    ways = [lambda: way("first", one), lambda: way("faulty", None), lambda: way("last", other)]
    with compiled_together(THREADS):
        assert fastest.fastest("a shape of its own", ways) is one
    assert sorted(taken) == ["faulty", "first", "last"]
    assert "a shape of its own" not in fastest._chosen


def test_an_evaluation_has_one_pass_ahead_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, taken = make_session(make_plan()).state.network, list[int]()
    inner = whole._evaluated

    def evaluated(*arguments: Any) -> Tensor:
        taken.append(len(arguments[1]))
        return inner(*arguments)

    folded, batch = FoldedNetwork(whole.module.eval(), torch.float32), torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    monkeypatch.setattr(whole, "_evaluated", evaluated)
    with torch.inference_mode():
        for images in (batch, batch, batch[:2], batch):
            assert torch.equal(whole._evaluated_folded(folded, images), inner(folded, images))
    assert taken == [4, 4, 4, 2, 2, 4]


def test_triton_itself_gets_the_same_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels are not compiled")
    from paceline.model.kernels import rows_programs

    target, driver = triton.backends.compiler.GPUTarget("cuda", 90, 32), triton.runtime.driver
    launched: list[tuple[Any, ...]] = []
    before = driver._active
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            launcher_cls=lambda source, metadata: lambda *arguments: launched.append(arguments),
            utils=SimpleNamespace(
                load_binary=lambda *arguments: (object(), 1, 10, 0, 1024),
                get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
            ),
        )
    )
    no_device(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function, (late, look) = rows_programs.sums_of_chunks, looking()

    def launch() -> None:
        for block in (16, 32):
            partials, totals = torch.empty((2, 1, 64, 8), dtype=torch.float64), torch.empty((2, 1, 8))
            function[(1, 1)](
                partials, totals, *[None] * 6, 64, 8, 3, 0, 0.0, MOMENTS=True, NORMED=False, BP=block, BC=8, num_warps=4
            )

    try:
        with compiled_together(THREADS):
            launch()
        assert launched == []
        compiled = {path.parent.name for path in tmp_path.glob("*/*.cubin")}
        assert len(compiled) == 2
        triton.knobs.runtime.jit_cache_hook = look
        launch()
        assert len(launched) == 2
        assert late == []
        function.device_caches.clear()
        launch()
        assert len(late) == 2
        assert {path.parent.name for path in tmp_path.glob("*/*.cubin")} == compiled, "another program by its key"
    finally:
        triton.knobs.runtime.jit_cache_hook = None
        driver._active = before
        function.device_caches.clear()


def everything(session: Session) -> dict[str, Tensor]:
    """All that steps change."""
    state, network = session.state, session.state.network
    named = {f"{group}/{name}": t for group, tensors in state.tensors().items() for name, t in tensors.items()}
    scale = {"scale": state.loss_scale.value, "good steps": state.loss_scale.good_steps}
    pending = {"pending": network.statistics.collect()}
    return {**named, **scale, **pending, "sums": state.sums, "last": state.last_sums, "bad": state.bad}


def trained(monkeypatch: pytest.MonkeyPatch, ahead: bool, *words: str) -> tuple[Session, int]:
    """A session after three steps, and how many passes were taken ahead of them."""
    taken = []
    inner = Whole._train

    def train(*arguments: Any) -> Any:
        taken.append(arguments)
        return inner(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Whole, "_compiles_ahead", property(lambda whole: ahead))
        patch.setattr(Whole, "_train", train)
        no_device(patch)
        session = make_session(make_plan(*words))
        steps = session.loader.training(0)
        for _ in range(3):
            take_step(session, next(steps))
    return session, len(taken) - 3 * session.plan.rounds


@pytest.mark.parametrize(
    "words",
    [
        (FUSED, "on.micro_batch=8"),
        (FUSED, "model=resnext11", "on.recompute=all", "ema.decay=0.9"),
        ("model=efficientnet-b0", "model.dropout=0.5", "data.side=16", FUSED),
        ("mix.mixup=0.4", "augment.erase.probability=0.5", "on.precision=fp32"),
    ],
)
def test_a_pass_ahead_changes_nothing(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    (with_pass, one), (without, none) = (trained(monkeypatch, ahead, *words) for ahead in (True, False))
    assert (one, none) == (1, 0), "one pass, before the first step"
    theirs = everything(without)
    for name, tensor in everything(with_pass).items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_pass_ahead_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    no_device(monkeypatch)
    monkeypatch.setattr(Whole, "_compiles_ahead", True)
    session = make_session(make_plan())
    network, (batch, *_) = session.state.network, next(session.loader.training(0))

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError

    next(iter(network.parameters)).register_post_accumulate_grad_hook(run_out)
    with pytest.raises(torch.OutOfMemoryError):
        network.compile_ahead(batch)
    assert all(parameter.grad is None for parameter in network.parameters)
    assert not network.statistics.collect().any()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), True),
        (("on.replicas=2",), True),
        (("on.replicas=8", "norm_batch=16"), False),
        (("on.compile=true", "on.kernels=plain"), False),
        (("on.stages=2",), False),
        (("model={name: torchvision, network: resnet18}",), False),
    ],
)
def test_there_is_a_pass_ahead_only_where_it_can_be_taken_back(words: tuple[str, ...], expected: bool) -> None:
    network = make_session(make_plan(FUSED)).state.network
    assert not network._compiles_ahead, "a CPU has no programs"
    network.device = torch.device("cuda", 0)
    network.plan = make_plan(FUSED, *words)
    assert network._compiles_ahead == expected
    network.forms = dict.fromkeys(network.forms, PLAIN)
    assert not network._compiles_ahead
