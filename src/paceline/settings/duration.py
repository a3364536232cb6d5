"""Lengths of training in any unit ("5 epochs", "500 steps", "2%"), and the rhythm of things that come back."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
)
from pydantic_core import core_schema

from paceline.settings.types import Positive

_WRITTEN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:/[0-9]+)?)\s*(epochs?|steps?|images?|seconds?|minutes?|hours?|%)\s*")
_LONGEST = 100
"""So long a duration or a rate may be written: in longer texts the search for a number takes forever."""
_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


@dataclass(frozen=True)
class Duration:
    """An exact amount of training: epochs, steps, images, a percentage of the run, or seconds on the clock."""

    amount: Fraction
    unit: str

    @classmethod
    def parse(cls, text: Any, units: str = "epochs, steps, images, % or seconds") -> Duration:
        """Reads '5 epochs', '1/16 epochs', '500 steps', '1000 images', '2%' or '10 minutes'; a fault offers `units`."""
        if isinstance(text, Duration):
            return text
        match = _WRITTEN.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST else None
        if not match:
            unit = re.split(", | or ", units)[0]
            number = isinstance(text, int | float) and not isinstance(text, bool)
            amount = text or 1  # nothing at all is refused next
            hint = f", such as '{amount:g} {unit.removesuffix('s') if amount == 1 else unit}'" if number else ""
            raise ValueError(f"expected an amount with its unit ({units}){hint}")
        if re.search(r"/0+$", match[1]):
            raise ValueError(f"expected an amount that is a number, found '{text}'")
        amount, unit = Fraction(match[1]), match[2].removesuffix("s")
        if unit in _SECONDS:
            return cls(amount * _SECONDS[unit], "seconds")
        return cls(amount, unit if unit == "%" else unit + "s")

    def __str__(self) -> str:
        exact = self.amount.denominator == 1 or float(self.amount) * self.amount.denominator == self.amount.numerator
        text = repr(float(self.amount)).removesuffix(".0") if exact and float(self.amount) < 1e15 else str(self.amount)
        if "e" in text or Fraction(text) != self.amount:
            text = str(self.amount)
        if self.unit == "%":
            return f"{text}%"
        return f"{text} {self.unit.removesuffix('s') if self.amount == 1 else self.unit}"

    @property
    def seconds(self) -> float | None:
        """The time on the clock; None for an amount of training."""
        return float(self.amount) if self.unit == "seconds" else None

    def images(self, epoch_images: int, global_batch: int, steps: int) -> Fraction:
        """How many images this amount of training sees; a percentage is of the whole run."""
        per_unit = {
            "epochs": Fraction(epoch_images),
            "steps": Fraction(global_batch),
            "images": Fraction(1),
            "%": Fraction(steps * global_batch, 100),
        }
        return self.amount * per_unit[self.unit]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, inner: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(str),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, inner: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{_WRITTEN.pattern}$", "examples": ["5 epochs", "500 steps", "2%"]}


def refuse_clock(value: Any, units: str = "epochs, steps, images or %") -> Duration:
    """Reads a duration without regard to the clock: what follows that would be another run on a slow machine."""
    duration = Duration.parse(value, units)
    if duration.unit == "seconds":
        raise ValueError(f"'{duration}' depends on the machine's speed; write {units}")
    return duration


def _refuse_nothing(duration: Duration) -> Duration:
    if duration.amount <= 0:
        raise ValueError(f"must be greater than zero, such as '1 {duration.unit.removesuffix('s')}'")
    return duration


def _clock_time(value: Any) -> Duration:
    duration = Duration.parse(value, "seconds, minutes or hours")
    if duration.unit != "seconds":
        raise ValueError(f"'{duration}' is no time on the clock; write seconds, minutes or hours")
    return duration


def _interval_or_never(value: Any) -> Duration | str:
    return "never" if value == "never" else _refuse_nothing(refuse_clock(value, "epochs, steps, images or %; or never"))


def _image_count(value: Any) -> Duration:
    duration = _refuse_nothing(Duration.parse(value, "images or steps"))
    if duration.unit not in ("images", "steps"):
        raise ValueError(f"'{duration}' is no number of images; write images, or steps of global_batch images")
    return duration


_VALIDATIONS = re.compile(r"\s*([1-9][0-9]{0,8})\s+validations?\s*")


def _validations(value: Any) -> int:
    match = _VALIDATIONS.fullmatch(value) if isinstance(value, str) and len(value) <= _LONGEST else None
    if not match:
        raise ValueError("expected a number of validations, such as '5 validations'")
    return int(match[1])


def _run_length(value: Any, epochs: ValidatorFunctionWrapHandler) -> float | Duration:
    """A number of epochs stays one; '500 steps' is a duration, and so are epochs that no float is equal to."""
    if not isinstance(value, Duration) and not (isinstance(value, str) and re.search("[0-9]", value)):
        return float(epochs(value))
    duration = _refuse_nothing(refuse_clock(value, "epochs, steps or images"))
    if duration.unit == "%":
        raise ValueError(f"'{duration}' would be a part of the run's own length; write epochs, steps or images")
    number = float(duration.amount)
    is_number = duration.unit == "epochs" and Fraction(str(number)) == duration.amount
    return float(epochs(number)) if is_number else duration


RunLength = Annotated[
    float | Duration,
    GetPydanticSchema(
        lambda _, inner: core_schema.no_info_wrap_validator_function(
            _run_length,
            inner.generate_schema(Positive),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda length: str(length) if isinstance(length, Duration) else length
            ),
        )
    ),
    WithJsonSchema(
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "examples": ["500 steps"]}]}
    ),
]
"""How long a run is: a number of epochs, or any amount of training."""
Length = Annotated[Duration, BeforeValidator(refuse_clock)]
"""An amount of training, without regard to the clock."""
Interval = Annotated[Length, AfterValidator(_refuse_nothing)]
"""An amount of training greater than zero, without regard to the clock."""
IntervalOrNever = Annotated[
    Duration | Literal["never"],
    PlainValidator(_interval_or_never),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "examples": ["1 epoch", "500 steps", "never"]}),
]
"""An amount of training greater than zero, without regard to the clock, or never."""
Images = Annotated[Duration, BeforeValidator(_image_count)]
"""A number of images above zero, as such or as steps of `global_batch` images."""
ClockInterval = Annotated[Duration, AfterValidator(_refuse_nothing)]
"""An amount greater than zero, of training or on the clock."""
ClockTime = Annotated[Duration, BeforeValidator(_clock_time), AfterValidator(_refuse_nothing)]
"""An amount greater than zero on the clock."""
Validations = Annotated[
    int,
    BeforeValidator(_validations),
    PlainSerializer(lambda count: f"{count} validation{'s' if count > 1 else ''}"),
    WithJsonSchema({"type": "string", "pattern": f"^{_VALIDATIONS.pattern}$", "examples": ["5 validations"]}),
]
"""A number of validations, above zero."""


@dataclass(frozen=True)
class Rhythm:
    """Something due each time another `every` images were seen, the first time after `offset` more."""

    every: int
    offset: int
    step: int
    """All three in one unit, so fine that they are whole."""

    @classmethod
    def of(cls, every: Fraction, offset: Fraction, global_batch: int) -> Rhythm:
        """A rhythm of images for steps of `global_batch` images."""
        unit = math.lcm(every.denominator, offset.denominator)
        return cls(int(every * unit), int(offset * unit), global_batch * unit)

    def due(self, step: int) -> bool:
        """Whether one of the marks was reached by step number `step` (1 is the first) and not before it."""
        return step > 0 and self._marks(step) > max(self._marks(step - 1), 0 if self.offset == 0 else -1)

    @property
    def first(self) -> int:
        """The first step at which it is due."""
        return -(-(self.offset or self.every) // self.step)

    def before(self, step: int) -> int:
        """The last step before `step` at which it is due; 0 where there is none."""
        marks = self._marks(step - 1)
        return -(-(self.offset + marks * self.every) // self.step) if marks >= (0 if self.offset else 1) else 0

    def _marks(self, step: int) -> int:
        return (step * self.step - self.offset) // self.every


MOST_RATE = 1e30
"""Far beyond what trains, and finite in every type."""


@dataclass(frozen=True)
class Rate:
    """A learning rate: a number, or one that grows with the global batch ('2^-6 per image', '0.1 per 256 images')."""

    text: str = field(compare=False)
    value: float
    images: int | None = None

    @classmethod
    def parse(cls, text: Any) -> Rate:
        """Reads 0.1, '2^-6 per image' or '0.256 per 256 images'."""
        if isinstance(text, Rate):
            return text
        if isinstance(text, int | float) and not isinstance(text, bool):
            if not text >= 0 or math.isinf(text):
                raise ValueError(f"expected a learning rate of at least 0, found {text}")
            if text > MOST_RATE:
                raise ValueError(f"expected a learning rate of at most {MOST_RATE:g}, found {text:g}")
            return cls(repr(text), float(text))
        plain = r"[0-9]*\.?[0-9]+"
        number = rf"(?:2\^(-?{plain})|({plain}(?:e-?[0-9]+)?))"
        match = (
            re.fullmatch(rf"\s*{number}\s+per\s+(?:([1-9][0-9]{{0,11}})\s+images|image)\s*", text)
            if isinstance(text, str) and len(text) <= _LONGEST
            else None
        )
        if not match:
            raise ValueError(
                f"expected a learning rate such as 0.1, '2^-6 per image' or '0.1 per 256 images', found {text!r}"
            )
        value = 2.0 ** min(float(match[1]), 1024.0 - 1e-9) if match[1] else float(match[2])
        if not value <= MOST_RATE:
            raise ValueError(f"expected a learning rate of at most {MOST_RATE:g}, found '{text}'")
        return cls(text.strip(), value, int(match[3] or 1))

    def at(self, global_batch: int) -> float:
        """The peak learning rate for a global batch."""
        return self.value if self.images is None else self.value * global_batch / self.images

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, inner: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def plain(rate: Rate) -> float | str:
            return rate.value if rate.images is None else rate.text

        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(plain)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, inner: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "number"}, {"type": "string", "examples": ["2^-6 per image", "0.1 per 256 images"]}]}
