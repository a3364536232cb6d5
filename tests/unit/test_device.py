"""Triton programs are loaded by one thread at a time, whoever launches them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from paceline.device import load_programs_one_by_one


@pytest.fixture
def fresh() -> Iterator[None]:
    load_programs_one_by_one.cache_clear()
    yield
    load_programs_one_by_one.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_two_threads_never_load_programs_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most, loaded = list[int](), list[int](), list[int]()

    class CompiledKernel:
        def __init__(self, number: int) -> None:
            self.number = number

        def _init_handles(self) -> None:
            inside.append(self.number)
            most.append(len(inside))
            time.sleep(0.01)
            inside.remove(self.number)
            loaded.append(self.number)

    compiler = ModuleType("triton.compiler")
    compiler.CompiledKernel = CompiledKernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.compiler", compiler)
    for _ in range(2):  # the second time is one too many for a lock around a lock
        load_programs_one_by_one()
    threads = [threading.Thread(target=CompiledKernel(number)._init_handles) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loaded) == [*range(8)]
    assert max(most) == 1


@pytest.mark.usefixtures("fresh")
def test_without_triton_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.compiler", None)
    load_programs_one_by_one()


@pytest.mark.usefixtures("fresh")
def test_a_triton_that_loads_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, kernel = ModuleType("triton.compiler"), type("CompiledKernel", (), {})
    compiler.CompiledKernel = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.compiler", compiler)
    load_programs_one_by_one()
    assert not hasattr(kernel, "_init_handles")
