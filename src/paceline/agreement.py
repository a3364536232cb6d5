"""What must be the same for all replicas before a run starts, and what to say where it is not; without torch."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path

from paceline import __version__
from paceline.planning import Plan
from paceline.settings.placement import shared_keys

_SHOWN = 40
"""Longer values are compared by their digest, and not shown."""
_NAMED = 3


def agreement(plan: Plan, data_digest: str) -> dict[str, str]:
    """Code, images, recipe, how its steps are cut, and arithmetic: of each the value, or its digest."""
    recipe = json.loads(plan.recipe.model_dump_json())
    placement = json.loads(plan.placement.model_dump_json(include=shared_keys()))
    return {
        "the code of Paceline": f"{__version__} {code_digest()}",
        "torch": metadata.version("torch"),
        "the index of the images": data_digest,
        **{key: _short(value) for key, value in recipe.items()},
        **{f"on.{key}": _short(placement[key]) for key in sorted(placement)},
    }


def digest_of_agreement(facts: dict[str, str]) -> str:
    """A digest of everything that must be the same."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def difference(facts: dict[str, str], others: dict[str, str]) -> str:
    """In what another replica differs from this one, and what to do about it."""
    keys = [key for key in (facts | others) if facts.get(key) != others.get(key)]
    parts = [f"{key} ({others.get(key)} and {facts.get(key)})" for key in keys[:_NAMED]]
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return f"{', '.join(parts)}{more}; {_remedy(keys[0])}"


def _remedy(key: str) -> str:
    if key in ("the code of Paceline", "torch"):
        return "install the same on every host"
    if key == "the index of the images":
        return "give every host the same files"
    return "start every process with the same arguments"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else _digest(text.encode())


def code_digest() -> str:
    """A digest of all source files of the package."""
    package = Path(__file__).parent
    files = sorted(package.rglob("*.py"))
    return _digest(b"\0".join(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes() for file in files))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
