"""Compiles the Triton programs of a network's pass at the same time, before the pass itself would do so one by one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from typing import Any

import torch

OURS = "paceline.model."
"""Whose programs are noted. The hook is the whole process's, and threads that decode images launch programs too."""
COMPILERS = 16
"""At most so many programs are compiled at a time: a network has some 80, and a part of the work is Python's."""
Programs = dict[tuple[Any, str], str]
"""What Triton compiles programs by: by the function and its key, the description that its `preload` takes."""
_noting: list[Programs] = []
"""Where programs are noted now, if they are."""


def is_noting() -> bool:
    """Whether programs are being noted, so that launches may do nothing and results mean nothing."""
    return bool(_noting)


@contextmanager
def compiled_together(threads: int) -> Iterator[None]:
    """Inside, a network's programs that are not compiled are noted in place of being launched; leaving compiles them.

    So what the work inside computes means nothing. A program that cannot be compiled or loaded says so when launched.
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
            ours = function.module.startswith(OURS)
        except (KeyError, AttributeError):  # another version of Triton
            return False
        if ours:
            programs[function, key] = data
        return bool(ours)

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
    # Programs are loaded now, and the work must find as much memory as it would have without this.
    torch.cuda.empty_cache()
    device = torch.cuda.current_device()  # each thread has its own
    pool = ThreadPoolExecutor(min(threads, COMPILERS), "compile", torch.cuda.set_device, (device,))
    try:
        for compiled in as_completed([pool.submit(function.preload, data) for (function, _), data in programs.items()]):
            with suppress(Exception):
                _load(compiled.result())
    finally:
        pool.shutdown(cancel_futures=True)


def _load(kernel: Any) -> None:
    """Build what launches a compiled program, and load both; one after another, see `load_programs_one_by_one`."""
    try:
        kernel.run  # noqa: B018 - a property, which loads
    except BaseException:
        kernel._run = None  # else Triton takes it for loaded, and a launch would fail by its arguments
        raise
