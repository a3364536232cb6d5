"""The small types that settings are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field


def _as_names(value: object) -> object:
    """One name alone means a list of it."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Count = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]
