"""Whether validations end a run before its last step; what decides it is part of the state."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.settings.stop import Stop


@dataclass
class Stopping:
    """What the validations of a run have said so far."""

    validated: int = 0
    """The step of the last validation."""
    best: float | None = None
    """The best value of the recipe's `stop.metric`; None before the first that is finite."""
    best_step: int = 0
    """The step at which that was."""
    no_better: int = 0
    """How many validations in a row were no better."""
    reason: str | None = None
    """What has ended the run, patience or target; None as long as it goes on."""

    def judge(self, stop: Stop, step: int, value: float) -> None:
        """Take the value of a validation after `step`, and decide whether the run ends with it."""
        self.validated = step
        if stop.is_better(value, stop.worst if self.best is None else self.best):
            self.best, self.best_step, self.no_better = value, step, 0
        else:
            self.no_better += 1
        if stop.reaches(value):
            self.reason = "target"
        elif stop.patience is not None and self.no_better >= stop.patience:
            self.reason = "patience"
