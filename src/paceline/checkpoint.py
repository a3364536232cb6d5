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
from typing import Any

from paceline.errors import Broken, Damaged, RunError
from paceline.files import read_whole, write_whole

MANIFEST, NETWORK, EMA, RECIPE = "manifest.json", "network.safetensors", "ema.safetensors", "recipe.yaml"
FORMAT = 1
"""The format of a checkpoint's files; one that this version cannot read has another number."""
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
    try:
        names = [child.name for child in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as fault:
        raise RunError(_unreadable(folder, fault)) from None
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


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
        manifest = json.dumps({"format": FORMAT, "step": step, "files": listing}, indent=1)
        write_whole(part / MANIFEST, manifest, sync=True)
        _sync_folder(part)
        if _holds(final, files):  # to replace it would leave a moment without it
            shutil.rmtree(part)
            return final
        if final.exists():
            _remove(final)
        part.rename(final)
        _sync_folder(folder)
    except OSError as fault:
        shutil.rmtree(part, ignore_errors=True)
        good = saved_steps(folder)
        newest = f"; the newest one is {name_of(good[-1])}" if good else ""
        raise Broken(f"{final}: the checkpoint cannot be written: {fault.strerror}{newest}") from None
    return final


def _holds(path: Path, files: CheckpointFiles) -> bool:
    try:
        return read(path) == files
    except RunError:
        return False


def read(path: Path) -> CheckpointFiles:
    """The files of a checkpoint, each checked against the manifest.

    What was read and is wrong, or is missing, is Damaged. A file that cannot be read, or is of another version of
    Paceline, may be as good as ever: that is any other RunError, and nobody goes on without it.
    """
    return {name: _checked(path / name, written) for name, written in _listing(path).items()}


def recipe_text(folder: Path) -> tuple[Path, str] | None:
    """The recipe that the newest checkpoint was trained by, and where it is; damaged ones are passed over."""
    for step in reversed(saved_steps(folder)):
        path = folder / name_of(step)
        try:
            if written := _listing(path).get(RECIPE):
                return path / RECIPE, _checked(path / RECIPE, written).decode()
        except Damaged:
            continue
    return None


def _checked(path: Path, written: dict[str, Any]) -> bytes:
    """The content of a file, if it is what was written."""
    content = _read_file(path)
    if len(content) != written["bytes"]:
        raise Damaged(f"{path}: has {len(content):,} bytes instead of {written['bytes']:,}")
    if hashlib.sha256(content).hexdigest() != written["sha256"]:
        raise Damaged(f"{path}: its content is not what was written")
    return content


def _listing(path: Path) -> dict[str, dict[str, Any]]:
    """The size and checksum of each file of a checkpoint, as its manifest has them."""
    try:
        manifest = json.loads(_read_file(path / MANIFEST))
        number, listing = manifest["format"], manifest.get("files")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{path / MANIFEST}: is no manifest of a checkpoint") from None
    if number != FORMAT and isinstance(number, int):
        raise RunError(
            f"{path}: was written by another version of Paceline (its format is {number}, this version reads "
            f"{FORMAT}); use that version"
        )
    try:
        assert number == FORMAT
        assert all(re.fullmatch(r"[\w.]+", name) and row.keys() == {"bytes", "sha256"} for name, row in listing.items())
        assert all(isinstance(row["bytes"], int) for row in listing.values())
    except (AttributeError, TypeError, AssertionError):
        raise Damaged(f"{path / MANIFEST}: is no manifest of a checkpoint") from None
    return dict(listing)


def _read_file(path: Path) -> bytes:
    try:
        return read_whole(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as fault:
        raise Damaged(f"{path}: {fault.strerror}") from None
    except OSError as fault:
        raise RunError(_unreadable(path, fault)) from None


def _unreadable(path: Path, fault: OSError) -> str:
    return (
        f"{path}: cannot be read: {fault.strerror}; nothing was changed: run the same command again when it can be read"
    )


def first_intact(
    folder: Path, choose: Callable[[], Sequence[int]], damaged: Callable[[Damaged], None]
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
                if is_gone(path):
                    break
                if not isinstance(fault, Damaged):
                    raise
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
    folder: Path, damaged: Callable[[Damaged], None], before: int | None = None
) -> tuple[int, CheckpointFiles] | None:
    """The newest intact checkpoint, if there is one; with `before`, of the steps before that one."""

    def choose() -> list[int]:
        return [step for step in reversed(saved_steps(folder)) if before is None or step < before]

    return first_intact(folder, choose, damaged)


def is_gone(path: Path) -> bool:
    """Whether a checkpoint is no longer there: a run that trains removes old ones."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


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
