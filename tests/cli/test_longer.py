"""paceline resume --until: a run goes on as a longer one in a folder of its own, and stays as it was."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from conftest import SMALL, Paceline
from paceline import checkpoint
from paceline.record import rows_of

ONE = ["on.cpu_threads=1", "on.device=cpu"]
STOPS = ["stop.patience=1 validations", "optimizer.lr=0", "evaluate.every=1 steps"]


def digests(folder: Path) -> dict[str, str]:
    """What every file of a folder holds."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def short(tmp_path: Path, paceline: Paceline) -> Path:
    """A run of two epochs that has ended."""
    (tmp_path / "small.yaml").write_text(SMALL)
    done = paceline("train", "small.yaml", "epochs=2", "ema.decay=0.9", "--out", "short", *ONE)
    assert done.returncode == 0, done.stderr
    return tmp_path / "short"


@pytest.mark.long
def test_a_run_that_goes_on_is_the_run_that_was_so_long_from_the_beginning(
    tmp_path: Path, short: Path, paceline: Paceline
) -> None:
    before = digests(short)
    done = paceline("resume", "short", "--until", "18 steps", "--out", "longer")
    assert done.returncode == 0, done.stderr
    assert "short goes on after step 12 in longer: epochs was 2.0 and is 18 steps" in done.stdout
    assert digests(short) == before
    assert paceline("train", "small.yaml", "epochs=18 steps", "ema.decay=0.9", "--out", "whole", *ONE).returncode == 0
    last = [checkpoint.read(tmp_path / name / "checkpoints" / checkpoint.name_of(18)) for name in ("longer", "whole")]
    assert last[0] == last[1]
    first, start = rows_of(tmp_path / "longer")[:2]
    assert first == {"kind": "continued", "run": str(short), "step": 12, "epochs": ["2.0", "18 steps"]}
    assert (start["kind"], start["step"]) == ("start", 12)
    again = paceline("resume", "short", "--until", "18 steps", "--out", "longer")
    assert "This run is complete: 18 steps are trained" in again.stdout
    for words, fault in {
        ("--until", "12 steps", "--out", "new"): "short has trained 12 steps (2 epochs), and this would be a run of 12",
        ("--until", "4 epochs"): "write both --until 'N epochs' and --out NEW",
        ("--out", "new"): "write both --until 'N epochs' and --out NEW",
        ("--until", "4 epochs", "--out", "short"): "--out short is the run itself, which keeps its length",
        ("--until", "4 epochs", "--out", "longer"): "longer: holds another run; choose another folder with --out",
        ("--until", "18 steps", "--out", "whole"): "whole: holds another run; choose another folder with --out",
        ("--until", "50%", "--out", "new"): "'50%' would be a part of the run's own length",
    }.items():
        refused = paceline("resume", "short", *words)
        assert (refused.returncode, fault in refused.stderr) == (2, True), refused.stderr
    assert not (tmp_path / "new").exists()


def test_a_run_that_its_validations_ended_goes_on(tmp_path: Path, paceline: Paceline) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    assert paceline("train", "small.yaml", *STOPS, "--out", "stopped", *ONE).returncode == 0
    assert rows_of(tmp_path / "stopped")[-1] | {"kind": "end", "step": 2} == rows_of(tmp_path / "stopped")[-1]
    assert paceline("resume", "stopped", "--until", "2 epochs", "--out", "new").returncode == 0
    assert [row["step"] for row in rows_of(tmp_path / "new") if row["kind"] == "validation"] == [3]
