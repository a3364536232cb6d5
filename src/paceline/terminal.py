"""The terminal as rich draws on it: the styles are rich's, and no text can bring its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from paceline.visible import visible


class Terminal(Console):
    """A console that shows characters which would steer the terminal as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

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
