"""`paceline watch`: follows runs by their records, through kills and resumes."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from conftest import Paceline, run_in
from paceline.command import watch
from paceline.command.watch import Picture, watch_all
from paceline.machine import AcceleratorLoad
from paceline.record import RECORD
from record_rows import append, report_of, start_of, validation_of


def runs(folder: Path, *names: str) -> tuple[Picture, list[Path]]:
    """Folders of runs that have no record yet, and what shows them."""
    folders = [folder / name for name in names]
    for one in folders:
        one.mkdir()
    return watch_all(folders), folders


def shown(picture: Picture, width: int = 80, height: int = 24) -> list[str]:
    """The lines of a terminal after one look."""
    picture.look()
    terminal = Console(width=width, height=height, force_terminal=True, color_system=None, highlight=False)
    with terminal.capture() as capture:
        terminal.print(picture)
    return capture.get().splitlines()


def states(picture: Picture) -> list[tuple[str, int]]:
    """What each run is doing after one look, and at which step."""
    picture.look()
    return [(watched.status.phase, watched.status.step) for watched in picture.runs]


def test_three_runs_are_followed_through_kill_and_resume(tmp_path: Path) -> None:
    picture, (one, two, three) = runs(tmp_path, "one", "two", "three")
    assert states(picture) == [("no record yet", 0)] * 3
    append(one, start_of(), report_of(10))
    append(two, start_of(), report_of(10), report_of(20))
    append(three, start_of())
    assert states(picture) == [("training", 10), ("training", 20), ("starting", 0)]
    append(one, report_of(20), report_of(30), end='\n{"kind": "rep')  # killed in the middle of a row
    append(two, {"kind": "interrupted", "step": 25, "why": "signal"})
    append(three, report_of(10), {"kind": "validation-start", "step": 10, "epoch": 1.0})
    assert states(picture) == [("training", 30), ("interrupted", 25), ("validating", 10)]
    record = one / RECORD
    os.truncate(record, record.read_bytes().rfind(b"\n") + 1)
    append(one, start_of(20), report_of(30, loss=9.0))
    append(two, start_of(25), report_of(30, bad_steps=1))
    append(three, validation_of(10, 0.5), report_of(60), {"kind": "end", "step": 60})
    assert states(picture) == [("training", 30), ("training", 30), ("ended", 60)]
    lines = shown(picture, width=100, height=40)
    assert lines[-2:] == ["one: killed after step 30, resumed at step 20", "two: 1 bad step by step 30"]
    assert [point.step for point in picture.runs[0].status.points] == [10, 20, 30]
    assert picture.runs[0].status.points[-1].loss == 9.0
    record.unlink()
    append(one, start_of())  # another run in the same folder
    assert states(picture)[0] == ("starting", 0)
    assert not picture.runs[0].status.events


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (120, 40), (30, 10), (20, 5)])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_picture_fits_the_terminal(tmp_path: Path, width: int, height: int, count: int) -> None:
    picture, folders = runs(tmp_path, *(f"{number}-run" for number in range(count)))
    for folder in folders[1:] or folders:
        append(folder, start_of(), *(report_of(step) for step in range(2, 50, 2)), validation_of(20, 0.5), start_of(20))
    picture.loads = [AcceleratorLoad(0, 97, 45 << 30, 140 << 30)]
    lines = shown(picture, width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert "GPU 0 97% 45.0 of" in "\n".join(lines[-2:])


def test_runs_stand_side_by_side_under_their_names(tmp_path: Path) -> None:
    picture, folders = runs(tmp_path, "first", "second")
    for folder, step in zip(folders, (10, 20), strict=True):
        append(folder, start_of(), report_of(step))
    lines = shown(picture, width=160)
    assert re.search(r"^first   training +second   training$", lines[0])
    assert re.search(r"^epoch 2 of 6 .* epoch 3 of 6 ", lines[1])
    assert "step 10 of 60" in lines[2]
    assert "step 20 of 60" in lines[2]


def test_what_is_in_a_record_or_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    picture, (folder,) = runs(tmp_path, "a\x1b[31mred\nrun")
    append(folder, start_of(), {"kind": "failed", "why": "\x1b]0;title\x07"})
    text = "\n".join(shown(picture, width=200))
    assert "\\x1b]0;title\\x07" in text
    assert "a\\x1b[31mred\\nrun" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


def test_time_stands_still_while_a_run_is_silent(tmp_path: Path) -> None:
    picture, (folder,) = runs(tmp_path, "run")
    append(folder, start_of(), report_of(10))
    before = time.time() - 3600
    os.utime(folder / RECORD, (before, before))
    lines = shown(picture, width=200)
    assert lines[0].endswith("run   silent 1 h 0 min")
    assert " 0:00:20 elapsed  0:01:40 left" in lines[2]
    append(folder, report_of(20))
    assert shown(picture, width=200)[0].endswith("run   training")


def test_a_pipe_gets_the_state_once_as_plain_text(tmp_path: Path, paceline: Paceline) -> None:
    append(tmp_path / "run", start_of(), report_of(10), report_of(20), validation_of(20, 0.75))
    (tmp_path / "new").mkdir()
    done = paceline("watch", "run", "new")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == "run   training"
    assert "validation 75.00% at epoch 2" in done.stdout
    assert lines[-1] == ""
    assert lines[-2] == "new   no record yet"
    assert max(map(len, lines)) <= 80


def test_a_folder_that_is_not_there_is_refused(paceline: Paceline) -> None:
    done = paceline("watch", "nowhere")
    assert done.returncode == 2
    assert done.stderr == "error: nowhere: there is no such folder; name a run folder, such as runs/first\n"


def test_watching_never_loads_torch(tmp_path: Path) -> None:
    append(tmp_path / "run", start_of(), report_of(10))
    program = (
        "import sys\nfrom paceline.cli import main\n"
        "try: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = run_in(tmp_path, "watch", "run", "--once", program=program)
    assert (done.returncode, done.stderr) == (0, "False\n")


def test_a_record_that_cannot_be_read_is_told_and_looked_for_again(tmp_path: Path) -> None:
    picture, (folder,) = runs(tmp_path, "run")
    (folder / RECORD).mkdir()
    assert shown(picture, width=200)[0].endswith("run   the record cannot be read: is not a file")
    (folder / RECORD).rmdir()
    append(folder, start_of())
    assert shown(picture, width=200)[0].endswith("run   starting")


class Pauses:
    """A clock by which something happens in each pause."""

    def __init__(self, happen: Callable[[], None]) -> None:
        self._happen = happen

    def sleep(self, _: float) -> None:
        self._happen()

    def time(self) -> float:
        return 0.0


def test_watching_ends_with_the_last_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, (one, two) = runs(tmp_path, "one", "two")
    append(one, start_of(), report_of(60), {"kind": "end", "step": 60})
    rows = [start_of(), {"kind": "interrupted", "step": 3}, start_of(3), report_of(60), {"kind": "end", "step": 60}]
    monkeypatch.setattr(watch, "time", Pauses(lambda: append(two, rows.pop(0))))
    monkeypatch.setattr(watch, "accelerator_loads", list)
    watch._follow(Console(file=io.StringIO(), force_terminal=True, width=80, height=24), picture)
    assert rows == []
    assert [watched.status.phase for watched in picture.runs] == ["ended", "ended"]
