"""Makes the pictures of the docs anew, from runs on this machine: `.venv/bin/python docs/pictures.py [NAME]...`.

The terminals of live, verify and watch are those of tmux; for the report a browser is asked for, as its test does.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent / "pictures"
PACELINE = f"{shlex.quote(sys.executable)} -m paceline"
TMUX = ["tmux", "-L", "paceline-pictures"]
"""A server of its own, which nobody's sessions are on."""
PATIENCE = 3600.0
"""Seconds after which a command is given up."""


@contextmanager
def terminal(command: str, folder: Path, columns: int, lines: int = 50) -> Iterator[Callable[[str], str]]:
    """Run a command in a terminal; what is given waits until the screen has what a pattern asks for."""
    words = command.replace("paceline", PACELINE, 1)
    size = ["-x", str(columns), "-y", str(lines)]
    subprocess.run([*TMUX, "new-session", "-d", *size, "-c", str(folder), f"{words}; sleep {PATIENCE}"], check=True)

    def screen(pattern: str) -> str:
        end = time.monotonic() + PATIENCE
        while True:
            shown = subprocess.run(
                [*TMUX, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True
            ).stdout
            if re.search(pattern, Text.from_ansi(shown).plain):
                return shown.rstrip("\n")
            assert time.monotonic() < end, shown
            time.sleep(0.2)

    try:
        yield screen
    finally:
        subprocess.run([*TMUX, "kill-server"], check=True)


def draw(name: str, command: str, shown: str, columns: int) -> None:
    """Write what a terminal showed as SVG, below the command, in the fonts that the reader has."""
    console = Console(record=True, width=columns, file=io.StringIO())
    console.print(f"[bold green]$[/] {command}", highlight=False)
    for line in Text.from_ansi(shown).split("\n"):
        line.rstrip()
        console.print(line, no_wrap=True, crop=True)
    console.print()
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code, monospace", "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace")
    svg = console.export_svg(title="", code_format=form, unique_id=f"paceline-{name}")
    (HERE / f"{name}.svg").write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE))


def live(folder: Path) -> None:
    """The display of a run that trains."""
    command = "paceline train --out runs/demo"
    with terminal(command, folder, 80) as screen:
        draw("live", command, screen(r"epoch 5 of 8 +━{8}"), 80)
        screen("Run folder")


def verify(folder: Path) -> None:
    """The proof of a recipe."""
    command = "paceline verify shapes/resnet8 --no-whole-runs"
    with terminal(command, folder, 164) as screen:
        draw("verify", command, screen("PASS|FAIL"), 164)


def watch(folder: Path) -> None:
    """Three runs of which one was killed and resumed, while it trains."""
    begin = folder / "runs/second/checkpoints"
    for name, words in (("first", "epochs=1"), ("third", "epochs=1 optimizer.lr=0.02")):
        subprocess.run(shlex.split(f"{PACELINE} train {words} --out runs/{name}"), cwd=folder, check=True)
    second = shlex.split(f"{PACELINE} train epochs=2 --out runs/second on.save='20 steps'")
    with subprocess.Popen(second, cwd=folder) as process:
        while not (begin / "step-000000040").exists():
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    command = "paceline watch runs/first runs/second runs/third"
    with subprocess.Popen(shlex.split(f"{PACELINE} resume runs/second"), cwd=folder) as process:
        with terminal(command, folder, 80, 40) as screen:
            draw("watch", command, screen(r"epoch 2 of 2 +━{3}"), 80)
        process.wait()


def demo(folder: Path) -> Path:
    """The run folder of the demo, which is trained if it is not there."""
    run = folder / "runs/demo"
    if not run.exists():
        subprocess.run(shlex.split(f"{PACELINE} train --out {run}"), cwd=folder, check=True)
    return run


def results(folder: Path) -> None:
    """The curves of the demo as one picture, which matplotlib has drawn."""
    with Image.open(demo(folder) / "results.png") as image:
        image.convert("RGB").quantize(64).save(HERE / "results.png", optimize=True)


def report(folder: Path) -> None:
    """The top of the report of the demo, light and dark."""
    from playwright.sync_api import sync_playwright

    run = demo(folder)
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = os.environ.get("PACELINE_BROWSER") or next(filter(None, map(shutil.which, names)))
    with sync_playwright() as player:
        opened = player.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = opened.new_page(
                color_scheme="dark" if scheme == "dark" else "light", viewport={"width": 1120, "height": 560}
            )
            page.goto((run / "report.html").as_uri())
            page.wait_for_selector(".scatterlayer path")
            page.wait_for_timeout(500)
            pixels = Image.open(io.BytesIO(page.screenshot()))
            pixels.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(
                HERE / f"report-{scheme}.png", optimize=True
            )
        opened.close()


PICTURES = {"live": live, "report": report, "results": results, "watch": watch, "verify": verify}

if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        for chosen in sys.argv[1:] or PICTURES:
            PICTURES[chosen](Path(place))
