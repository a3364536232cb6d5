"""Text that people see: characters that would steer a terminal, or hide, are shown as escapes such as \\x1b."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

# Control characters but for tab and line feed; what turns the direction of text or has no width; halves of characters,
# which stand for bytes of a file's name that are no text.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with an escape in place of each character that would steer a terminal, or hide."""
    return _HIDDEN.sub(_escape, text)


def one_line(text: str) -> str:
    """The same for what must stay on one line."""
    return visible(text).replace("\n", "\\n")


def plural(count: int, noun: str) -> str:
    """A count and its noun: '1 image', '1,024 images'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def long_time(seconds: float) -> str:
    """A time for people, in two units."""
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            whole, rest = divmod(round(seconds / smaller), size // smaller)
            return f"{whole} {unit} {rest} {name}"
    return f"{seconds:.1f} s"


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    if number == 0x7F:  # the only one that stands in JSON as it is, and JSON has no \x
        return "\\u007f"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class _VisibleStream:
    """A stream of text that shows what would steer a terminal; rich, which has to steer it, writes past this."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.rich_proxied_file: TextIO = getattr(stream, "rich_proxied_file", stream)

    def write(self, text: str) -> int:
        self._stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def visible_output() -> Iterator[None]:
    """Let everything that is printed to stdout and stderr inside be visible, in whatever encoding they have."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = (cast(TextIO, _VisibleStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
