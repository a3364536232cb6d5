"""Loads a function or class that the user wrote, named in the settings as module:name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from paceline.errors import SpecError


def load_user_code(setting: str, name: str) -> Callable[..., Any]:
    """Import a user's function or class; `setting` is the key that names it, for messages."""
    module, _, attribute = name.partition(":")
    try:
        sys.path.insert(0, "")  # the folder that the command is called in, where a user's own modules are
        code = getattr(importlib.import_module(module), attribute, None)
    except Exception as fault:  # noqa: BLE001 - a user's module may raise anything
        reason = " ".join(str(fault).split()) or type(fault).__name__
        raise SpecError(f"{setting}={name}: {module} cannot be imported: {reason}; write module:name") from None
    finally:
        sys.path.remove("")
    if not callable(code):
        raise SpecError(f"{setting}={name}: {module} has no function or class '{attribute}'; write module:name")
    loaded: Callable[..., Any] = code
    return loaded
