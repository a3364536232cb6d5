"""A tree of plain values becomes checked settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError

from paceline.errors import SpecError
from paceline.settings.faults import describe
from paceline.settings.read import Tree
from paceline.settings.schema import named_kinds
from paceline.settings.types import Settings

Kind = TypeVar("Kind", bound=Settings)


def build(model: type[Kind], tree: Tree, beside: Sequence[str] = ()) -> Kind:
    """The checked settings of a tree, or a SpecError about the first thing wrong in it.

    An unknown key is looked for among all addresses of the model, and those `beside` it.
    """
    values = named_kinds(tree.values, model)
    try:
        return model.model_validate_json(json.dumps(values))
    except ValidationError as fault:
        raise SpecError(describe(fault, tree, values, model, beside)) from None
