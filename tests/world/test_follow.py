"""paceline validate --follow: a process that evaluates the checkpoints of a run while that trains."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from processes import Training, write_small

from conftest import Paceline, make_plan
from paceline import checkpoint
from paceline.errors import RunError
from paceline.record import FOLLOWED, Row, follow_rows, rows_of
from paceline.training import save
from paceline.training.follow import FOLDER, Queue
from paceline.training.selection import Selection

NEVER = ["evaluate.every=never", "on.cpu_threads=1", "report=1 epoch"]


class Follower(Training):
    """A `paceline validate --follow` that runs in the background."""

    def __init__(self, folder: Path, replicas: int = 1) -> None:
        super().__init__(folder, "validate", "run", "--follow", "on.cpu_threads=1", f"on.replicas={replicas}")

    def judged(self, count: int) -> bool:
        """Whether so many checkpoints have been evaluated."""
        return len(follow_rows(self.run)) >= count


@pytest.mark.long
def test_a_follower_that_is_killed_judges_every_checkpoint_of_a_run_once(tmp_path: Path, paceline: Paceline) -> None:
    page = write_small(tmp_path, epochs="240")
    words = ["train", page, "--out", "run", "on.save=48 steps", "on.keep_last=99", *NEVER]
    training = Training(tmp_path, *words)
    training.wait_until(training.saved(1))
    first = Follower(tmp_path)
    first.wait_until(lambda: first.judged(2))
    first.kill()
    assert training.process.poll() is None  # it trains all the while
    before = len(follow_rows(first.run))
    training.kill()
    last = Follower(tmp_path, replicas=2)
    last.wait_until(lambda: last.judged(len(checkpoint.saved_steps(last.run / "checkpoints"))))
    assert Training(tmp_path, "resume", "run").end()[0] == 0
    status, out, errors = last.end()
    rows = follow_rows(last.run)
    best = max(rows, key=lambda row: (row["top1"], -row["step"]))
    told = f"the best top-1 is {best['top1']:.2%}, at step {best['step']}"
    assert (status, errors) == (0, f"the run has ended, with 31 checkpoints evaluated; {told}\n")
    assert Counter(row["step"] for row in rows) == Counter(range(0, 1441, 48))
    assert len(out.splitlines()) == len(rows) - before
    assert not (last.run / FOLDER).exists()
    assert all(row["images"] == 37 for row in rows)
    assert not [row for row in rows_of(last.run) if row["kind"] == "validation"]
    done = paceline("validate", "run", "--checkpoint", "best", "--json", "on.cpu_threads=1")
    assert [(row["step"], row["top1"]) for row in json.loads(done.stdout)] == [(best["step"], best["top1"])]


def saved_run(folder: Path, *steps: int) -> Path:
    for step in steps:
        checkpoint.write(folder / "checkpoints", step, {"state.json": str(step).encode()})
    return folder


def row_of(step: int, **values: object) -> Row:
    return {"kind": "validation", "step": step, **values}


def test_what_waits_stays_when_the_run_removes_it(tmp_path: Path) -> None:
    run = saved_run(tmp_path, 3, 6)
    queue = Queue(run, Selection())
    assert queue.look() == (3, False)
    checkpoint.prune(run / "checkpoints", keep={6})
    saved_run(tmp_path, 9)
    with queue.watched():
        while 9 not in checkpoint.saved_steps(queue.folder):
            time.sleep(0.01)
    checkpoint.prune(run / "checkpoints", keep=set())
    evaluated = []
    while (step := queue.look()[0]) is not None:
        assert queue.files(step) == {"state.json": str(step).encode()}
        queue.write(row_of(step))
        evaluated.append(step)
    assert evaluated == [3, 6, 9]
    queue.close()


def test_a_follower_goes_on_where_one_was_killed_and_ends_with_the_run(tmp_path: Path) -> None:
    run = saved_run(tmp_path, 3, 6)
    killed = Queue(run, Selection())
    assert killed.look() == (3, False)
    with pytest.raises(RunError, match="another process follows this run"):
        Queue(run, Selection())
    with (run / FOLLOWED).open("a") as file:  # evaluated, and killed before its link was removed and in the next row
        file.write(json.dumps(row_of(3, top1=0.5)) + '\n{"kind": "val')
    (killed.folder / ".step-000000009").mkdir()
    killed._lock.close()
    (run / "record.jsonl").write_text("".join(
        json.dumps(row) + "\n"
        for row in [*({"kind": "checkpoint", "step": step} for step in (0, 3, 6)), {"kind": "end", "step": 6}]
    ))  # fmt: skip
    queue = Queue(run, Selection())
    assert queue.look() == (6, False)
    queue.write(row_of(6, top1=0.75))
    assert queue.look() == (None, True)
    assert queue.missed() == [0]
    assert queue.ending() == [
        "not evaluated, since they were removed while nobody followed the run: steps 0",
        "the run has ended, with 2 checkpoints evaluated; the best top-1 is 75.00%, at step 6",
    ]
    assert follow_rows(run) == [row_of(3, top1=0.5), row_of(6, top1=0.75)]
    queue.close()
    queue = Queue(run, Selection(test=tmp_path))
    assert queue.look() == (3, False)  # other images are another evaluation
    queue.close()


def test_the_best_checkpoint_that_a_follower_found_stays() -> None:
    rest = {"epoch": 1.0, "loss": 1.0, "top5": 1.0, "images": 37, "seconds": 1.0, "images_per_second": 37.0}
    rows = [row_of(6, top1=0.9, **rest), row_of(12, top1=0.5, **rest)]
    assert save.to_keep(make_plan("epochs=6", "evaluate.every=never", "on.keep_last=1"), [0, 6, 12, 18], rows) == {
        6,
        18,
    }


def test_a_partial_evaluation_does_not_stand_in_for_a_whole_one(tmp_path: Path) -> None:
    run = saved_run(tmp_path, 3)
    (run / FOLLOWED).write_text(json.dumps(row_of(3, images=10, partial=True)) + "\n")
    for images, step in ((37, 3), (10, None)):
        queue = Queue(run, Selection(images=images))
        assert queue.look()[0] == step
        queue.close()
