"""What the documents show: every command with the output below it, and what of an output may differ."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Shown:
    """A command of a page; with `$` before it, what stands below it is what it prints."""

    page: str
    line: int
    command: str
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.command}"


def commands_of(page: Path) -> Iterator[Shown]:
    """The commands in the blocks of a page; a block of anything else names its language, or is ```text."""
    name = page.relative_to(ROOT).as_posix()
    for first, block in blocks(page.read_text()):
        shown = any(line.startswith("$ ") for line in block)
        starts = [number for number, line in enumerate(block) if not shown or line.startswith("$ ")]
        starts = [number for number in starts if number == 0 or not block[number - 1].endswith("\\")]
        for start, end in zip(starts, [*starts[1:], len(block)], strict=True):
            command, *output = block[start:end]
            if command.startswith("for "):
                command = "\n".join(block[start : block.index("done", start) + 1])
            elif (not shown and command.startswith("  ")) or command == "done":
                continue  # it belongs to the loop above it
            while command.endswith("\\"):
                command = f"{command[:-1].rstrip()} {output.pop(0).strip()}"
            if command.strip():
                text = "\n".join(output).strip("\n") if shown else None
                yield Shown(name, first + start, command.removeprefix("$ ").strip(), text)


def blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """The line of each block of commands, and its lines: fenced without a language, or indented by four."""
    lines, number = text.splitlines(), 0
    while number < len(lines):
        if fence := re.match(r" *```(\w*)$", lines[number]):
            end = next(after for after in range(number + 1, len(lines)) if lines[after].strip() == "```")
            if not fence[1]:
                yield number + 2, lines[number + 1 : end]
            number = end
        elif lines[number].startswith("    ") and not lines[number - 1].strip():
            end = next((after for after in range(number, len(lines)) if lines[after][:4].strip()), len(lines))
            yield number + 1, [line[4:] for line in lines[number:end]]
            number = end - 1
        number += 1


def masked(text: str) -> str:
    """A text without what differs from run to run: times, speeds, what limits them, and the width of columns."""
    text = re.sub(r"(\d+ (min|h) )*[\d.]+ s left", "N left", text)
    text = re.sub(r"\d[\d,]*\.\d+(e[-+]?\d+)?%?|\d+e[-+]\d+|(?<![\w.,/])0(?![\w.,/])", "N", text)
    text = re.sub(
        r"\d[\d,]*(?= (images/s|MB/s|ms|s|min|MB|GiB)\b)|(?<=amplification )\d+|(?<=step )\d+(?=[, ])", "N", text
    )
    text = re.sub(r"^(as it is|a \w+ pack) .*$|^[a-z ]+ limits: .*$", r"\1", text, flags=re.MULTILINE)
    return "\n".join(re.sub(r" +", " ", line).strip() for line in text.strip().splitlines())


def is_shown(shown: str, printed: str) -> bool:
    """Whether a command printed what a page shows of it; a line `...` stands for any lines, in a line for anything."""
    lines = [
        r"(.*\n)*?" if line == "..." else f"{'.*'.join(map(re.escape, line.split('...')))}\n"
        for line in shown.split("\n")
    ]
    return re.fullmatch("".join(lines), f"{printed}\n") is not None
