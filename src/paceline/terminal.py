"""The terminal as rich draws on it: the styles are rich's, and no text can bring its own."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from paceline.visible import visible


class Terminal(Console):
    """A console that shows characters which would steer the terminal as escapes.

    With `works_on` the command goes on when nobody reads its output any more, as under nohup when a terminal is closed.
    """

    def __init__(self, *, works_on: bool = False, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)
        self._works_on = works_on

    @property
    def file(self) -> IO[str]:
        """The stream itself: while a bar is shown, one stands before another, and each would escape what steers."""
        stream = super().file
        while (inner := getattr(stream, "rich_proxied_file", stream)) is not stream:
            stream = inner
        return stream

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as fault:
            # A terminal that is gone answers this, and no longer that it is one; so does a disk that fails.
            if fault.errno != errno.EIO or not stat.S_ISCHR(os.fstat(self.file.fileno()).st_mode):
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """End the command, because nobody reads on; or only its output, if the work is worth more than that."""
        if not self._works_on:
            super().on_broken_pipe()
        self.quiet = True
        gone = os.fstat(self.file.fileno())
        with Path(os.devnull).open("wb") as nowhere:
            for descriptor in (1, 2):  # or Python's last write to one of them would fail
                if os.path.samestat(os.fstat(descriptor), gone):
                    os.dup2(nowhere.fileno(), descriptor)

    def render_str(self, text: str, **options: Any) -> Text:
        # rich leaves some of them out of a text, where nobody would see that they were there.
        return super().render_str(visible(text), **options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        # What comes as Text has not passed render_str; a carriage return alone is the end of a line written again.
        shown = (
            Segment(text if control or text == "\r" else visible(text), style, control)
            for text, style, control in buffer
        )
        return super()._render_buffer(shown)
