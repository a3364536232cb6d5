"""Triton's interpreter, which runs kernels on the CPU, for the tests of kernels."""

from __future__ import annotations

import os
from typing import Any

import pytest


def interpret_kernels() -> None:
    """Skip the module that asks unless Triton is here and TRITON_INTERPRET=1; else make it work with today's NumPy."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET is not 1", allow_module_level=True)
    patch = interpreter._patch_lang_tensor
    if patch.__module__ == __name__:
        return

    def patch_index(tensor: Any, scope: Any) -> None:
        # Triton 3.6 makes range() take an array of one number by int(array), which NumPy 2.4 refuses.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index
