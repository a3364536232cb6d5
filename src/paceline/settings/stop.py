"""When a run may end before its last step: the settings of stopping."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from paceline.settings.duration import Validations
from paceline.settings.types import Settings, percent


class Stop(Settings):
    """When validations end a run before its last step."""

    patience: Validations | None = None
    """End after so many validations in a row that are no better than the best before them, such as 5 validations."""
    target: Annotated[float, BeforeValidator(percent), Field(gt=0, le=1e9)] | None = None
    """End at the first validation that is this good, such as 75.9%, or 0.8 for the loss."""
    metric: Literal["top1", "loss"] = "top1"
    """What makes a validation better, also to choose the best checkpoint: more top-1 accuracy, or less loss."""

    @model_validator(mode="after")
    def _target_can_be_reached(self) -> Self:
        if self.metric == "top1" and self.target is not None and self.target > 1:
            raise ValueError(f"target: no accuracy is above 1; write {self.target:g}%")
        return self

    @property
    def worst(self) -> float:
        """What every validation that is finite is better than."""
        return -math.inf if self.metric == "top1" else math.inf

    def is_better(self, value: float, best: float) -> bool:
        """Whether a validation is better than the best before it; one that is not finite never is."""
        return value > best if self.metric == "top1" else value < best

    def reaches(self, value: float) -> bool:
        """Whether a validation is as good as the target."""
        return self.target is not None and (value == self.target or self.is_better(value, self.target))
