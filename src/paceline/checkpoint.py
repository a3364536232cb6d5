"""Checkpoints on disk: written completely or not at all, and read only if every byte is what was written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import Broken, RunError
from paceline.files import disk_faults, write_whole

MANIFEST, NETWORK, EMA = "manifest.json", "network.safetensors", "ema.safetensors"
CheckpointFiles = dict[str, bytes]
"""The content of a checkpoint by file name."""
ATTEMPTS = 20
"""How often checkpoints are chosen anew because a run that trains has removed one in the meantime."""
_NAME = re.compile(r"step-(\d{9})")


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint; names sort as steps do."""
    return f"step-{step:09d}"


def saved_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for child in folder.iterdir() if (match := _NAME.fullmatch(child.name)))


def write(folder: Path, step: int, files: CheckpointFiles) -> Path:
    """Commit the checkpoint of a step to the folder of a run's checkpoints."""
    return write_to(folder / name_of(step), step, files)


def write_to(final: Path, step: int, files: CheckpointFiles) -> Path:
    """Commit a checkpoint: files and a manifest under a temporary name, synced, then renamed into place.

    A kill at any moment leaves either the complete checkpoint or a temporary folder that the next start removes.
    """
    folder = final.parent
    part = folder / f".{final.name}-{uuid.uuid4().hex[:8]}"
    try:
        part.mkdir(parents=True)
        for name, content in files.items():
            write_whole(part / name, content, sync=True)
        listing = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in files.items()}
        manifest = json.dumps({"format": 1, "step": step, "files": listing}, indent=1)
        write_whole(part / MANIFEST, manifest, sync=True)
        _sync_folder(part)
        if final.exists():  # a damaged one of the same step, or the same bytes again
            _remove(final)
        part.rename(final)
        _sync_folder(folder)
    except OSError as fault:
        shutil.rmtree(part, ignore_errors=True)
        good = saved_steps(folder)
        newest = f"; the newest one is {name_of(good[-1])}" if good else ""
        raise Broken(f"{final}: the checkpoint cannot be written: {fault.strerror}{newest}") from None
    return final


def read(path: Path) -> CheckpointFiles:
    """The files of a checkpoint, each checked against the manifest; a RunError says what is damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        listing = manifest["files"]
        assert manifest["format"] == 1
        assert all(re.fullmatch(r"[\w.]+", name) and row.keys() == {"bytes", "sha256"} for name, row in listing.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError):
        raise RunError(f"{path}: the manifest is missing or damaged") from None
    files = {}
    for name, written in listing.items():
        with disk_faults(RunError, path / name, "cannot be read"):
            content = (path / name).read_bytes()
        if len(content) != written["bytes"]:
            raise RunError(f"{path / name}: has {len(content):,} bytes instead of {written['bytes']:,}")
        if hashlib.sha256(content).hexdigest() != written["sha256"]:
            raise RunError(f"{path / name}: its content is not what was written")
        files[name] = content
    return files


def first_intact(
    folder: Path, choose: Callable[[], Sequence[int]], damaged: Callable[[RunError], None]
) -> tuple[int, CheckpointFiles] | None:
    """The first intact checkpoint among the steps chosen; every damaged one before it is reported.

    A run that trains may remove a checkpoint after it was chosen: then the steps are chosen anew.
    """
    for _ in range(ATTEMPTS):
        faults = []
        for step in choose():
            path = folder / name_of(step)
            try:
                files = read(path)
            except RunError as fault:
                if not path.is_dir():
                    break
                faults.append(fault)
            else:
                for each in faults:
                    damaged(each)
                return step, files
        else:
            for each in faults:
                damaged(each)
            return None
    raise RunError(f"{folder}: checkpoints are removed before they can be read; train with a larger on.keep_last")


def newest_intact(
    folder: Path, damaged: Callable[[RunError], None], before: int | None = None
) -> tuple[int, CheckpointFiles] | None:
    """The newest intact checkpoint, if there is one; with `before`, of the steps before that one."""

    def choose() -> list[int]:
        return [step for step in reversed(saved_steps(folder)) if before is None or step < before]

    return first_intact(folder, choose, damaged)


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed writer left behind."""
    if folder.is_dir():
        for child in folder.glob(".step-*"):
            shutil.rmtree(child, ignore_errors=True)


def prune(folder: Path, keep: set[int]) -> None:
    """Remove the checkpoints whose steps are not to be kept."""
    for step in saved_steps(folder):
        if step not in keep:
            _remove(folder / name_of(step))


def _remove(path: Path) -> None:
    """Take a checkpoint out of sight before removing it, so that a kill leaves none half there."""
    hidden = path.with_name(f".{path.name}-old")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
