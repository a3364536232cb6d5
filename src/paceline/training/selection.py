"""Which checkpoints of a run a command works on, chosen without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline import checkpoint
from paceline.errors import RunError, SpecError
from paceline.record import Row, best_step, judged_rows, stored_plan
from paceline.settings.read import cut


@dataclass(frozen=True)
class Selection:
    """Which checkpoints are evaluated, and whether on other images than the run's own."""

    checkpoint: str | None = None
    """A step, or 'best'; left out, the newest."""
    every: bool = False
    """All that were not evaluated yet."""
    test: Path | None = None
    """A folder of other images."""
    images: int = 0
    """How many images an evaluation takes; one of fewer, a partial one, does not stand in for it."""

    @property
    def kind(self) -> str:
        """The kind of the record's rows."""
        return "validation" if self.test is None else "test"

    @property
    def data(self) -> Row:
        """What a row says of other images than the run's own: where they are."""
        return {"data": str(self.test.resolve())} if self.test else {}

    def is_made(self, row: Row) -> bool:
        """Whether a row tells of such an evaluation."""
        same = {"kind": self.kind} | self.data
        return same.items() <= row.items() and row.get("images", 0) >= self.images


def steps_to_evaluate(folder: Path, selection: Selection) -> list[int]:
    """The steps selected; for the newest one, followed by those that take its place if it is damaged."""
    saved = checkpoint.saved_steps(folder / "checkpoints")
    if not saved:
        raise RunError(f"{folder}: there is no checkpoint in this run yet; write paceline resume {folder}")
    if selection.every:
        evaluated = {row["step"] for row in judged_rows(folder) if selection.is_made(row)}
        return [step for step in saved if step not in evaluated]
    if selection.checkpoint is None:
        return saved[::-1]
    if selection.checkpoint == "best":
        best = best_step(judged_rows(folder), saved, stored_plan(folder).recipe.stop)
        return saved[::-1] if best is None else [best]
    number = Path(selection.checkpoint).name.removeprefix("step-").lstrip("0") or "0"
    step = next((step for step in saved if str(step) == number), None)
    if step is None:
        raise RunError(
            f"{folder}: there is no checkpoint of step '{cut(selection.checkpoint)}'; there is "
            f"{', '.join(map(str, saved))}"
        )
    return [step]


def step_in_words(folder: Path, step: int) -> str:
    """The step of a checkpoint, and whether it is the newest or the best one: step 13, the best checkpoint."""
    saved = checkpoint.saved_steps(folder / "checkpoints")
    best = best_step(judged_rows(folder), saved, stored_plan(folder).recipe.stop)
    steps = {"newest": saved[-1] if saved else None, "best": best}
    is_one = " and ".join(name for name, one in steps.items() if one == step)
    others = ", ".join(f"{name}: step {one:,}" for name, one in steps.items() if one not in (step, None))
    what = f", the {is_one} checkpoint" if is_one else ""
    return f"step {step:,}{what}{f' ({others})' if others else ''}"


def steps_to_average(folder: Path, last: int | None) -> list[int]:
    """The steps of the last so many checkpoints, or of all; initial weights are no part of an average."""
    saved = [step for step in checkpoint.saved_steps(folder / "checkpoints") if step > 0]
    if not saved:
        raise RunError(f"{folder}: there is no checkpoint of a trained step to average; train this run first")
    if last is not None and last > len(saved):
        there = f"{len(saved)} ({', '.join(map(str, saved))})" if len(saved) > 1 else f"1 (step {saved[0]})"
        raise RunError(
            f"{folder}: --last {last}, and of the checkpoints of trained steps there are {there}; "
            f"write --last {len(saved)} or less, or train with a larger on.keep_last"
        )
    return saved[-last:] if last else saved


def check_top(top: object) -> None:
    """Refuse a number of classes to answer with that is none."""
    if not isinstance(top, int) or top < 1:
        raise SpecError(f"top: expected a whole number above 0, such as top=5, found {top!r}")
