"""The function of their own that a person lets training pictures go through."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SpecError

Own = Callable[[NDArray[np.uint8], NDArray[np.uint32]], Any]


def own_function(name: str | None) -> Own | None:
    """The function that a recipe names as module:function."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    try:
        sys.path.insert(0, "")  # the folder that the command is called in, where a user's own modules are
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as fault:  # noqa: BLE001 - a module of a person's own may raise anything
        what = " ".join(str(fault).split()) or type(fault).__name__
        raise SpecError(f"augment.python={name}: {what}; write module:function of one that can be imported") from None
    finally:
        sys.path.remove("")
    if not callable(found):
        raise SpecError(f"augment.python={name}: {module} has no function '{attribute}'; write module:function")
    own: Own = found
    return own
