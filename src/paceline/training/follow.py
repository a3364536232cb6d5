"""Follows a run while it trains, and evaluates each of its checkpoints once, into follow.jsonl."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from paceline import checkpoint
from paceline.errors import Broken, Damaged, RunError
from paceline.files import append_line, cut_torn_line, disk_faults, open_lock
from paceline.job import Job
from paceline.record import FOLLOWED, Row, follow_rows, json_text, rows_of
from paceline.training.restore import load_checkpoint
from paceline.training.selection import Selection
from paceline.training.session import open_session
from paceline.training.validation import evaluate_checkpoint
from paceline.visible import plural

FOLDER = "follow"
PAUSE = 0.2
"""Seconds between two looks for new checkpoints."""


class Queue:
    """The checkpoints of a run that wait to be evaluated, in a folder of hard links beside them.

    The run may remove a checkpoint at any time, and its links stay; so a thread looks for new ones while another
    one is evaluated. Who is killed leaves the links, and the next follower goes on with them.
    """

    def __init__(self, run: Path, selection: Selection) -> None:
        self.folder, self._run, self._selection = run / FOLDER, run, selection
        self._lock = self._take()
        checkpoint.clear_leftovers(self.folder)
        cut_torn_line(run / FOLLOWED)
        self._done = {row["step"] for row in follow_rows(run) if selection.is_made(row)}
        for step in self._done & set(checkpoint.saved_steps(self.folder)):
            self._remove(step)  # evaluated just before the follower was killed

    def _take(self) -> IO[str]:
        """Be the only follower of this run."""
        with disk_faults(RunError, self.folder, "cannot be made"):
            lock = open_lock(self._run / ".follow-lock")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                raise RunError(f"{self._run}: another process follows this run; end it first") from None
            self.folder.mkdir(exist_ok=True)
        return lock

    def close(self) -> None:
        """Let another process follow the run, and go on with what waits."""
        with suppress(OSError):
            self.folder.rmdir()
        self._lock.close()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look for new checkpoints in a thread as long as this is entered."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(PAUSE):
                self._link_new()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def look(self) -> tuple[int | None, bool]:
        """The oldest checkpoint that waits, and whether the run has ended and none will come."""
        ended = any(row["kind"] == "end" for row in rows_of(self._run))
        self._link_new()  # after that row was looked for: whatever was saved before it is there
        waiting = checkpoint.saved_steps(self.folder)
        return (waiting[0], False) if waiting else (None, ended)

    def files(self, step: int) -> checkpoint.CheckpointFiles:
        """The content of a checkpoint that waits."""
        return checkpoint.read(self.folder / checkpoint.name_of(step))

    def write(self, row: Row) -> None:
        """Append a row to follow.jsonl; then its checkpoint waits no longer."""
        path = self._run / FOLLOWED
        with disk_faults(Broken, path, "cannot be written"):
            append_line(path, json_text(row))
        self._done.add(row["step"])
        self._remove(row["step"])

    def missed(self) -> list[int]:
        """The steps that the run saved and removed while nobody followed it."""
        saved = {row["step"] for row in rows_of(self._run) if row["kind"] == "checkpoint"}
        return sorted(saved - self._done)

    def ending(self) -> list[str]:
        """What people want to know when the run has ended: what was not evaluated, and what was best."""
        notes = []
        if missed := self.missed():
            steps = ", ".join(map(str, missed))
            notes.append(f"not evaluated, since they were removed while nobody followed the run: steps {steps}")
        rows = [row for row in follow_rows(self._run) if self._selection.is_made(row)]
        told = f"the run has ended, with {plural(len(rows), 'checkpoint')} evaluated"
        if rows:
            best = max(rows, key=lambda row: row["top1"])
            told += f"; the best top-1 is {best['top1']:.2%}, at step {best['step']}"
        return [*notes, told]

    def _remove(self, step: int) -> None:
        shutil.rmtree(self.folder / checkpoint.name_of(step), ignore_errors=True)

    def _link_new(self) -> None:
        for step in checkpoint.saved_steps(self._run / "checkpoints"):
            link = self.folder / checkpoint.name_of(step)
            if step not in self._done and not link.exists():
                _link_files(self._run / "checkpoints" / link.name, link)


def _link_files(source: Path, link: Path) -> None:
    """Link a checkpoint's files into a folder that appears when it is whole; one removed meanwhile is passed over."""
    part = link.with_name(f".{link.name}")
    try:
        part.mkdir()
        for file in source.iterdir():
            try:
                os.link(file, part / file.name)
            except FileNotFoundError:
                raise
            except OSError:  # some file systems have no hard links
                shutil.copyfile(file, part / file.name)
        if (source / checkpoint.MANIFEST).exists():  # or its files may have been removed one by one
            part.rename(link)
    except FileNotFoundError:
        pass
    finally:
        shutil.rmtree(part, ignore_errors=True)


def follow_run(job: Job, folder: Path, selection: Selection, show: Callable[[Row], None]) -> list[str]:
    """Evaluate each checkpoint of a run as it comes, until the run has ended; gives notes for people."""
    notes: list[str] = []
    with open_session(job.plan, folder, "read", data_folder=job.data_folder, launch=job.launch) as session:
        world = session.world
        queue = Queue(folder, selection) if world.first else None
        try:
            while True:
                step, ended = world.broadcast_object(queue.look() if queue else (None, False))
                if ended:
                    break
                if step is None:
                    time.sleep(PAUSE)
                    continue
                files = None
                if queue:
                    try:
                        files = queue.files(step)
                    except Damaged as fault:
                        notes.append(f"passed over: {fault}")
                        queue.write({"kind": "damaged", "step": step, "why": str(fault)})
                if not world.broadcast_object(files is not None):
                    continue
                load_checkpoint(session, step, files)
                if queue is None:
                    evaluate_checkpoint(session, selection, step)
                    continue
                with queue.watched():
                    values, _ = evaluate_checkpoint(session, selection, step)
                row = {"kind": selection.kind, **values}
                queue.write(row)
                show(row)
            if queue:
                notes += queue.ending()
        finally:
            if queue:
                queue.close()
    return notes
