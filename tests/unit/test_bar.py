"""The bar of a command that validates or averages outside the training."""

from __future__ import annotations

import io
import sys

import pytest

from paceline.progress import progress_bar
from paceline.sink.bar import BarSink


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_validation_has_the_bar_anew_under_the_name_of_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen())
    with progress_bar() as show:
        sink = BarSink(show)
        for checkpoint in range(2):
            for done in (100, 200):
                sink.progress("validation", done + checkpoint, 201)
        sink.row({"kind": "validation", "step": 1})
        sink.progress("averaging", 1, 3)
    text = sys.stderr.getvalue() if isinstance(sys.stderr, Screen) else ""
    assert "validating" in text
    assert "averaging" in text
    assert "201/201" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_shown_to_whoever_watches(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Screen() if terminal else io.StringIO())
    with progress_bar(watched=not terminal) as show:
        show("validating", 1, 2)
    assert isinstance(sys.stderr, io.StringIO)
    assert sys.stderr.getvalue() == ""
