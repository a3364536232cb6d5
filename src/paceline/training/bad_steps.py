"""Steps that were skipped because something in them was not finite: the longest streak, and when a run ends by them."""

from __future__ import annotations

from itertools import groupby

from paceline.errors import Broken
from paceline.record import NOT_FINITE, Row
from paceline.training.save import finish_saving, save
from paceline.training.session import Session


def longest_streak(steps: list[int], after: int) -> list[int]:
    """The most of these steps that follow each other, of the rows that reach beyond `after`."""
    rows = ([step for _, step in row] for _, row in groupby(enumerate(steps), lambda pair: pair[1] - pair[0]))
    return max((row for row in rows if row[-1] > after), key=len, default=[])


def stop_on_bad_steps(session: Session, report: Row) -> None:
    """End a run, saved, if its recipe does not allow bad steps, or if it has nothing but bad ones any more."""
    recipe, streak = session.plan.recipe, report["bad_steps_in_a_row"]
    if recipe.on_bad_step == "stop" and streak:
        first = report["first_bad_step"]
        what = f"step {first} was bad ({NOT_FINITE}), and on_bad_step is stop"
    elif streak >= recipe.bad_steps_in_a_row:
        first = longest_streak(session.state.bad_steps(), 0)[0]
        what = f"{streak} steps in a row were bad ({NOT_FINITE})"
    else:
        return
    save(session)
    finish_saving(session)
    raise Broken(f"{what}; find the layer with: paceline replay {session.run.folder} --step {first}")
