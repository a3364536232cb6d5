"""Compiles the Triton programs of some work at the same time, before the work itself would do so one by one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import Any

import torch

COMPILERS = 16
"""At most so many programs are compiled at a time: a network has some 80, and a part of the work is Python's."""
Programs = dict[tuple[Any, str], str]
"""What Triton compiles programs by: by the function and its key, the description that its `preload` takes."""
_noting: list[Programs] = []
"""Where programs are noted now, if they are."""


def is_noting() -> bool:
    """Whether this is inside `compiled_together`, where a launch may do nothing and no result is of any use."""
    return bool(_noting)


@contextmanager
def compiled_together(threads: int) -> Iterator[None]:
    """Inside, programs that are not compiled are noted in place of being launched; leaving compiles them on threads.

    So what the work inside computes is worthless. A program that cannot be compiled says so when it is launched.
    """
    runtime = _triton_runtime()
    if runtime is None or runtime.jit_cache_hook is not None:  # a tool that looks at what is compiled, and when
        yield
        return
    programs: Programs = {}

    def note(**launch: Any) -> bool:
        """Whether a program that Triton is about to compile need not be launched."""
        try:
            function, key, data = launch["fn"].jit_function, launch["key"], launch["compile"]["specialization_data"]
        except (KeyError, AttributeError):  # another version of Triton
            return False
        programs[function, key] = data
        return True

    runtime.jit_cache_hook = note
    _noting.append(programs)
    try:
        yield
    finally:
        _noting.clear()
        runtime.jit_cache_hook = None
    if programs:
        _compile(programs, threads)


def _triton_runtime() -> Any:
    """Where Triton looks for a hook that it asks before it compiles a program; None where it has no such place."""
    try:
        from triton import knobs  # type: ignore[import-not-found]  # noqa: PLC0415 - comes with torch for CUDA only
    except ImportError:
        return None
    runtime = getattr(knobs, "runtime", None)
    return runtime if hasattr(runtime, "jit_cache_hook") else None


def _compile(programs: Programs, threads: int) -> None:
    """Have all of these ready to be launched on this device, but for those that cannot be."""
    device = torch.cuda.current_device()  # each thread has its own
    pool = ThreadPoolExecutor(min(threads, COMPILERS), "compile", torch.cuda.set_device, (device,))
    try:
        for compiled in as_completed([pool.submit(function.preload, data) for (function, _), data in programs.items()]):
            with suppress(Exception):
                _load(compiled.result())
    finally:
        pool.shutdown(cancel_futures=True)


def _load(kernel: Any) -> object:
    """Build what launches a compiled program, and load both.

    One thread does this for all of them. What launches programs are modules of one name, and Python gives two threads
    that load such modules at a time the same one: a program would be launched with the arguments of another.
    """
    return kernel.run
