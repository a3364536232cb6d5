"""The class that groups settings, and the small types that they are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Settings(BaseModel):
    """A group of settings: frozen, strict, each with its one-sentence meaning as its docstring."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


def _as_names(value: object) -> object:
    """One name alone means a list of it."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def percent(value: object) -> object:
    """Reads '10%' as 0.1; everything else stays as it is."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(f"{value.strip()[:-1].strip()}e-2")  # divided by 100, 75.9 would be rounded twice
        except ValueError:
            raise ValueError(f"expected a fraction such as 10% or 0.1, found {value!r}") from None
    return value


# Everything has an upper bound, far above what anybody trains with: then no sum, product or list grows out of hand.
Count = Annotated[int, Field(gt=0, le=10**9)]
ImageCount = Annotated[int, Field(gt=0, le=10**12)]
ClassCount = Annotated[int, Field(gt=0, le=10**6)]
Pixels = Annotated[int, Field(gt=0, le=65_535)]
Channels = Annotated[int, Field(gt=0, le=4096)]
Few = Annotated[int, Field(gt=0, le=1000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Factor = Annotated[float, Field(gt=0, le=100)]
Probability = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]
