"""Paceline trains, validates and benchmarks image classifiers: the same recipe is the same run on every placement."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError

if TYPE_CHECKING:
    from paceline.api import export, load, plan, predict, train, validate

__version__ = "0.1.0"
__all__ = ["UserError", "export", "load", "plan", "predict", "train", "validate"]


def __getattr__(name: str) -> Any:
    # Found when it is asked for, so that importing a part of Paceline does not load all of it.
    if name in __all__:
        return getattr(importlib.import_module("paceline.api"), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
