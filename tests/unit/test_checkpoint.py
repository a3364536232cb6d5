"""Checkpoints: whole or not at all, every byte checked, and a damaged one never the end of a run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import checkpoint
from paceline.checkpoint import MANIFEST
from paceline.errors import Broken, Damaged, RunError

FILES = {"state.json": b'{"step": 3}', "network.safetensors": bytes(range(256)) * 4, "empty.bin": b""}


def names(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path / "new" / "checkpoints", 3, FILES)
    assert path.name == "step-000000003"
    assert checkpoint.read(path) == FILES
    assert names(path.parent) == ["step-000000003"]


def test_saved_steps_are_those_with_a_folder_oldest_first(tmp_path: Path) -> None:
    assert checkpoint.saved_steps(tmp_path / "nowhere") == []
    for step in (5, 100, 20, 0):
        checkpoint.write(tmp_path, step, FILES)
    (tmp_path / ".step-000000007-abcd").mkdir()
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint.saved_steps(tmp_path) == [0, 5, 20, 100]


def test_the_same_bytes_written_again_leave_the_old_ones_in_place(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 3, FILES)
    before = path.stat().st_ino
    checkpoint.write(tmp_path, 3, FILES)
    assert path.stat().st_ino == before
    assert names(tmp_path) == ["step-000000003"]


def test_the_same_step_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 3, {"state.json": b"old", "gone.bin": b"x"})
    path = checkpoint.write(tmp_path, 3, FILES)
    assert checkpoint.read(path) == FILES
    assert names(tmp_path) == ["step-000000003"]


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        ("cut", "network.safetensors", "has 1,023 bytes instead of 1,024"),
        ("grown", "empty.bin", "has 1 bytes instead of 0"),
        ("flipped", "network.safetensors", "its content is not what was written"),
        ("missing", "state.json", "No such file or directory"),
        ("pipe", "state.json", "is not a file"),
        ("folder", "state.json", "is not a file"),
    ],
)
def test_a_damaged_file_is_named(damage: str, name: str, message: str, tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 3, FILES)
    content = FILES[name]
    if damage in ("missing", "pipe", "folder"):
        (path / name).unlink()
        if damage == "pipe":
            os.mkfifo(path / name)
        elif damage == "folder":
            (path / name).mkdir()
    else:
        changed = {"cut": content[:-1], "grown": content + b"x", "flipped": b"\x01" + content[1:]}
        (path / name).write_bytes(changed[damage])
    with pytest.raises(Damaged) as caught:
        checkpoint.read(path)
    assert str(caught.value) == f"{path / name}: {message}"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "[" * 10_000, '{"format": "x", "files": {}}', '{"format": 1}', '{"format": 1, "files": []}',
     '{"format": 1, "files": {"../x": {}}}', '{"format": 1, "files": {"x": {"bytes": "1", "sha256": ""}}}'],
)  # fmt: skip
def test_a_damaged_manifest_is_named(text: str, tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 3, FILES)
    (path / MANIFEST).write_text(text)
    with pytest.raises(Damaged) as caught:
        checkpoint.read(path)
    assert str(caught.value) == f"{path / MANIFEST}: is no manifest of a checkpoint"


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 3, FILES)
    (path / MANIFEST).unlink()
    with pytest.raises(Damaged, match=r"manifest\.json: No such file or directory"):
        checkpoint.read(path)


def test_a_manifest_of_another_version_is_not_damage(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 3, FILES)
    path = checkpoint.write(tmp_path, 6, FILES)
    (path / MANIFEST).write_text('{"format": 2, "what": "comes"}')
    with pytest.raises(
        RunError, match=r"another version of Paceline \(its format is 2, this version reads 1\)"
    ) as caught:
        checkpoint.newest_intact(tmp_path, refuse)
    assert not isinstance(caught.value, Damaged)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("name", ["manifest.json", "network.safetensors"])
def test_a_file_that_cannot_be_read_is_not_damage(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 6):
        checkpoint.write(tmp_path, step, FILES)

    def fails(path: Path) -> bytes:
        if path == tmp_path / "step-000000006" / name:
            raise OSError(number, os.strerror(number))
        return path.read_bytes()

    monkeypatch.setattr(checkpoint, "read_whole", fails)
    with pytest.raises(RunError, match=f"{name}: cannot be read: {os.strerror(number)}; nothing was changed") as caught:
        checkpoint.newest_intact(tmp_path, refuse)
    assert not isinstance(caught.value, Damaged)


def test_one_flipped_bit_of_a_manifest_gives_the_same_files_or_a_clear_fault(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, 3, FILES)
    whole = (path / MANIFEST).read_bytes()
    surprises: dict[str, str] = {}
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            (path / MANIFEST).write_bytes(changed)
            try:
                assert checkpoint.read(path) == FILES
            except RunError:
                continue
            except Exception as fault:  # noqa: BLE001 - whatever it is, a user would see its traceback
                surprises.setdefault(repr(fault), changed[place - 8 : place + 8].decode(errors="replace"))
    assert surprises == {}


def test_the_newest_falls_back_to_the_one_before_it(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        checkpoint.write(tmp_path, step, FILES)
    (tmp_path / "step-000000040" / "state.json").write_bytes(b"")
    (tmp_path / "step-000000030" / MANIFEST).unlink()
    damaged: list[RunError] = []
    assert checkpoint.newest_intact(tmp_path, damaged.append) == (20, FILES)
    assert [str(fault).partition("step-")[2][:9] for fault in damaged] == ["000000040", "000000030"]
    assert checkpoint.newest_intact(tmp_path, damaged.append, before=20) == (10, FILES)


def refuse(fault: RunError) -> None:
    pytest.fail(str(fault))


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert checkpoint.newest_intact(tmp_path, refuse) is None
    assert checkpoint.newest_intact(tmp_path / "nowhere", refuse) is None


def test_a_run_that_removes_faster_than_one_can_read_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"removed before they can be read; train with a larger on.keep_last$"):
        checkpoint.first_intact(tmp_path, lambda: [7], refuse)


@pytest.mark.parametrize("older", [[], [10, 20]])
@pytest.mark.parametrize("call", range(1, 6))
def test_a_write_that_fails_leaves_no_folder_and_names_the_newest(
    older: list[int], call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in older:
        checkpoint.write(tmp_path, step, FILES)
    left = call
    sync = os.fsync

    def fails_once_full(handle: int) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fails_once_full)
    with pytest.raises(Broken) as caught:
        checkpoint.write(tmp_path, 30, FILES)
    monkeypatch.undo()
    newest = "; the newest one is step-000000020" if older else ""
    reason = f"the checkpoint cannot be written: No space left on device{newest}"
    assert str(caught.value) == f"{tmp_path / 'step-000000030'}: {reason}"
    assert checkpoint.saved_steps(tmp_path) == older
    assert names(tmp_path) == [checkpoint.name_of(step) for step in older]


def test_a_file_too_large_for_the_disk_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, FILES)
    program = (
        "import resource, signal, sys; from pathlib import Path; from paceline import checkpoint, errors\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: checkpoint.write(Path(sys.argv[1]), 2, {'network.safetensors': bytes(2000)})\n"
        "except errors.Broken as fault: print(fault)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    message = "step-000000002: the checkpoint cannot be written: File too large; the newest one is step-000000001\n"
    assert done.stdout.endswith(message)
    assert names(tmp_path) == ["step-000000001"]
    assert checkpoint.read(tmp_path / "step-000000001") == FILES


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    checkpoint.clear_leftovers(tmp_path / "nowhere")
    path = checkpoint.write(tmp_path, 3, FILES)
    part = tmp_path / ".step-000000004-12345678"
    part.mkdir()
    (part / "network.safetensors").write_bytes(b"half")
    checkpoint.clear_leftovers(tmp_path)
    assert names(tmp_path) == [path.name]
    assert checkpoint.read(path) == FILES


def test_pruning_removes_what_is_not_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.write(tmp_path, step, FILES)
    checkpoint.prune(tmp_path, {1, 3, 99})
    assert checkpoint.saved_steps(tmp_path) == [1, 3]
