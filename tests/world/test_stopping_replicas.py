"""Where validations end a run: after the same step for every number of replicas, killed on the way or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import Training, write_small

from conftest import Paceline
from paceline import checkpoint
from paceline.record import latest, rows_of

WORDS = (
    "on.precision=fp64", "on.cpu_threads=1", "norm=none", "epochs=4", "optimizer.lr=0.01", "evaluate.every=1 steps",
    "on.save=3 steps",
)  # fmt: skip
STOPS = {
    "patience": ("stop.metric=loss", "stop.patience=2 validations"),
    "target": ("stop.target=18%",),
}


def outcome(run: Path) -> dict[str, Any]:
    """Where and why a run ended, and what every validation counted."""
    rows = rows_of(run)
    (stop,) = latest(rows, "stop")
    return {
        "stop": {key: stop[key] for key in ("step", "reason", "best_step", "no_better")},
        "newest": checkpoint.saved_steps(run / "checkpoints")[-1],
        "validations": [(row["step"], row["top1"], row["top5"]) for row in latest(rows, "validation")],
        "tables": {path.parent.name: path.read_text() for path in run.glob("validation/*/confusion.csv")},
    }


@pytest.mark.parametrize("kind", [*STOPS][:1] + [pytest.param(kind, marks=pytest.mark.long) for kind in [*STOPS][1:]])
def test_a_run_ends_after_the_same_step_for_every_number_of_replicas(
    tmp_path: Path, paceline: Paceline, kind: str
) -> None:
    page, ends = write_small(tmp_path), []
    for name, layout in (("one", (1, 16)), ("two", (2, 4)), ("three", (3, 4))):
        words = (f"on.replicas={layout[0]}", f"on.micro_batch={layout[1]}", *WORDS, *STOPS[kind])
        done = paceline("train", page, "--out", name, *words)
        assert done.returncode == 0, done.stderr
        ends.append(outcome(tmp_path / name))
    assert 2 < ends[0]["stop"]["step"] < 24
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.long
def test_a_run_of_two_replicas_that_is_killed_ends_after_the_same_step(tmp_path: Path, paceline: Paceline) -> None:
    page, words = write_small(tmp_path), (*WORDS, *STOPS["patience"])
    assert paceline("train", page, "--out", "whole", "on.micro_batch=16", *words).returncode == 0
    training = Training(tmp_path, "train", page, "--out", "run", "on.replicas=2", "on.micro_batch=4", *words)
    training.wait_until(training.saved(3))
    training.kill()
    assert paceline("resume", "run", "on.replicas=3").returncode == 0
    assert outcome(training.run) == outcome(tmp_path / "whole")
