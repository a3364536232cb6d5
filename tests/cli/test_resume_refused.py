"""paceline resume on a run folder that cannot be trusted: it changes nothing, and goes on once that is mended."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SMALL, run_in
from paceline import checkpoint
from paceline.errors import UserError
from paceline.job import stored_job
from paceline.record import rows_of

UNREADABLE = """
import builtins, io, os
from paceline import cli
def failing(opens):
    def fails(path, *words, **more):
        if not isinstance(path, int) and "step-000000012" in os.fsdecode(path) and not os.path.isdir(path):
            raise OSError({number}, os.strerror({number}), path)
        return opens(path, *words, **more)
    return fails
builtins.open, io.open, os.open = failing(builtins.open), failing(io.open), failing(os.open)
cli.main()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 18 steps, which the tests copy."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(SMALL)
    done = run_in(folder, "train", "small.yaml", "epochs=3", "--out", "run", "on.keep_last=9", "on.save=6 steps")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The same run without its last checkpoint, so that there is something left to train."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.rmtree(place(run, 18))
    return run


def place(run: Path, step: int) -> Path:
    return run / "checkpoints" / checkpoint.name_of(step)


def content(run: Path) -> dict[str, bytes]:
    """Every file of the run but its record and the lock."""
    files = [
        path for path in run.rglob("*") if path.is_file() and path.name not in (".lock", "record.jsonl", "log.txt")
    ]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def refused(run: Path, said: str, program: str | None = None) -> None:
    """Resuming is refused in one line, and nothing is deleted or written."""
    before = content(run)
    check_refusal(run_in(run.parent, "resume", "run", program=program), said)
    assert content(run) == before


def check_refusal(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def obey_permissions() -> None:
    """Let permissions bind this process's program even if its user is root."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH leave the set that it may have
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


def continues(run: Path, trained: Path) -> None:
    """Resuming goes on and ends with the weights of the run that nothing happened to."""
    done = run_in(run.parent, "resume", "run")
    assert done.returncode == 0, done.stderr
    assert (place(run, 18) / checkpoint.NETWORK).read_bytes() == (place(trained, 18) / checkpoint.NETWORK).read_bytes()


@pytest.mark.parametrize(
    "number", [errno.EIO, *(pytest.param(other, marks=pytest.mark.long) for other in (errno.EACCES, errno.ESTALE))]
)
def test_a_checkpoint_that_cannot_be_read_is_waited_for(number: int, run: Path, trained: Path) -> None:
    said = f"cannot be read: {os.strerror(number)}; nothing was changed"
    refused(run, said, UNREADABLE.format(number=number))
    continues(run, trained)


@pytest.mark.skipif(sys.platform != "linux", reason="root gives up its rights in Linux's way")
@pytest.mark.parametrize("part", ["checkpoints", "checkpoints/step-000000012"])
def test_permissions_that_are_taken_away_for_one_resume_cost_nothing(part: str, run: Path, trained: Path) -> None:
    before = content(run)
    (run / part).chmod(0)
    try:
        done = run_in(run.parent, "resume", "run", preexec_fn=obey_permissions)
    finally:
        (run / part).chmod(0o755)
    check_refusal(done, "cannot be read: Permission denied; nothing was changed")
    assert content(run) == before
    continues(run, trained)


def test_a_checkpoint_of_a_newer_version_is_left_alone(run: Path, trained: Path) -> None:
    manifest = place(run, 12) / checkpoint.MANIFEST
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"format": 1', '"format": 2'))
    refused(run, "was written by another version of Paceline (its format is 2, this version reads 1)")
    manifest.write_text(whole)
    continues(run, trained)


@pytest.mark.long
def test_a_trained_run_without_checkpoints_is_not_started_again(run: Path, trained: Path, tmp_path: Path) -> None:
    away = (run / "checkpoints").rename(tmp_path / "away")
    refused(run, "no intact checkpoint is left of this run, which has trained 18 steps; put its checkpoints back")
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    away.rename(run / "checkpoints")
    continues(run, trained)


def test_a_run_whose_record_tells_of_trained_steps_alone_is_not_started_again(run: Path) -> None:
    lines = (run / "record.jsonl").read_text().splitlines(keepends=True)
    (run / "record.jsonl").write_text("".join(line for line in lines if json.loads(line)["kind"] != "checkpoint"))
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    refused(run, "no intact checkpoint is left of this run, which has trained 18 steps")


def test_checkpoints_that_are_gone_are_told_where_an_older_one_is_taken(run: Path, trained: Path) -> None:
    told = max(row["step"] for row in rows_of(run) if row["kind"] == "checkpoint")
    for step in checkpoint.saved_steps(run / "checkpoints"):
        if step > 6:
            shutil.rmtree(place(run, step))
    continues(run, trained)
    texts = [row["text"] for row in rows_of(run) if row["kind"] == "note"]
    assert f"the checkpoint of step {told} is gone, of which the record tells; going on from step 6" in texts


def test_a_trained_run_of_damaged_checkpoints_is_not_started_again(run: Path) -> None:
    for step in (0, 6, 12):
        (place(run, step) / checkpoint.NETWORK).write_bytes(b"damaged")
    before = content(run)
    done = run_in(run.parent, "resume", "run")
    assert done.returncode == 2
    assert "no intact checkpoint is left of this run" in done.stderr
    assert content(run) == before


def test_a_damaged_newest_checkpoint_stays_until_its_step_is_saved_again(run: Path, trained: Path) -> None:
    (place(run, 12) / checkpoint.NETWORK).write_bytes(b"damaged")
    continues(run, trained)
    assert checkpoint.read(place(run, 12)) == checkpoint.read(place(trained, 12))


@pytest.mark.parametrize("verb", ["resume", "validate", "average"])
def test_an_edited_recipe_is_refused_with_the_lines_that_differ(verb: str, run: Path, trained: Path) -> None:
    plan = run / "plan.yaml"
    whole = plan.read_text()
    assert "lr: 0.1" in whole
    plan.write_text(whole.replace("lr: 0.1", "lr: 0.2"))
    done = run_in(run.parent, verb, "run")
    assert done.returncode == 2
    assert "plan.yaml: this is not the recipe that was trained" in done.stderr
    assert "optimizer.lr: 0.1 -> 0.2" in done.stderr
    if verb == "resume":
        plan.write_text(whole)
        continues(run, trained)


def test_a_plan_that_is_cut_off_is_refused(run: Path) -> None:
    plan = run / "plan.yaml"
    lines = plan.read_text().partition("\ndata_folder:")[0].splitlines(keepends=True)
    for count in range(len(lines) + 1):
        plan.write_text("".join(lines[:count]))
        with pytest.raises(UserError) as caught:
            stored_job(run, [], None)
        assert str(caught.value).count("\n") == 0, count
    check_refusal(run_in(run.parent, "resume", "run"), "plan.yaml")


@pytest.mark.parametrize("kinds", [("end", "report"), ("end", "validation"), ("end", "report", "validation")])
def test_a_finished_run_whose_record_lost_rows_ends_again(
    kinds: tuple[str, ...], trained: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    lines = (run / "record.jsonl").read_text().splitlines(keepends=True)
    (run / "record.jsonl").write_text("".join(line for line in lines if json.loads(line)["kind"] not in kinds))
    done = run_in(tmp_path, "resume", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Run folder: run" in done.stdout


@pytest.mark.parametrize("words", [("seed=" + "9" * 5000,), ("--checkpoint", "x" * 5000)])
def test_a_very_long_word_about_a_run_is_not_repeated_whole(words: tuple[str, ...], trained: Path) -> None:
    done = run_in(trained.parent, "validate", "run", *words)
    check_refusal(done, "run")
    assert len(done.stderr) < 1000


def test_another_recipe_does_not_clear_away_a_trained_run_without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run.parent / "other.yaml").write_text(SMALL.replace("lr: 0.1", "lr: 0.3"))
    before = content(run)
    done = run_in(run.parent, "train", "other.yaml", "--out", "run")
    assert done.returncode == 2
    assert "holds a run of another recipe" in done.stderr
    assert content(run) == before
