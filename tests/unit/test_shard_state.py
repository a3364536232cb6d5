"""Runs whose replicas keep shares of the optimizer's state: the checkpoints are those of any other layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import make_plan, make_session
from paceline import checkpoint
from paceline.errors import Broken, DataError, ReadFailed
from paceline.planning import Plan
from paceline.training.requests import Stopped
from paceline.training.restore import restore_newest
from paceline.training.save import finish_saving, save, saved_if_aborted
from paceline.training.session import Session
from paceline.training.state import compare_replicas
from paceline.training.step import take_step
from replicas_made import Circle, ThreadWorld, in_threads

ADAM = ("optimizer={name: adamw, lr: 0.01}", "weight_decay.rate=0.1", "ema={decay: 0.9}")
WITHOUT = ("on.replicas=2", "on.micro_batch=4")
SHARES = (*WITHOUT, "on.shard=optimizer")


def on_replicas(plan: Plan, folder: Path, work: Callable[[Session], None]) -> None:
    """Do something with a session on each replica; the first one writes."""
    circle = Circle(plan.replicas)

    def on_one(replica: int) -> None:
        mode = "own" if replica == 0 else "read"
        session = make_session(plan, folder, mode, world=ThreadWorld(circle, replica))  # type: ignore[arg-type]
        with session.run:
            work(session)

    in_threads(plan.replicas, on_one)


def saved(folder: Path, steps: int, *words: str) -> checkpoint.CheckpointFiles:
    """The checkpoint after so many more steps than the folder's newest one."""

    def work(session: Session) -> None:
        restore_newest(session)
        batches = session.loader.training(session.state.step)
        for _ in range(steps):
            take_step(session, next(batches))
        compare_replicas(session.world, session.state)
        save(session)
        finish_saving(session)

    on_replicas(make_plan("on.precision=fp64", *ADAM, *words), folder, work)
    newest = max(checkpoint.saved_steps(folder / "checkpoints"))
    return checkpoint.read(folder / "checkpoints" / checkpoint.name_of(newest))


@pytest.mark.parametrize("resumed", [SHARES, WITHOUT], ids=["shares", "without"])
def test_a_checkpoint_is_the_same_bytes_with_shares_and_without_and_both_go_on_from_it(
    tmp_path: Path, resumed: tuple[str, ...]
) -> None:
    begun = SHARES if resumed == WITHOUT else WITHOUT
    assert saved(tmp_path / "one", 2, *begun) == saved(tmp_path / "other", 2, *resumed)
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    assert saved(tmp_path / "moved", 2, *resumed) == saved(tmp_path / "one", 2, *begun)


@pytest.mark.parametrize(
    ("fault", "words", "saves"),
    [
        (Stopped(), SHARES, True),
        (ReadFailed("gone"), SHARES, False),
        (DataError("damaged"), SHARES, False),
        (Broken("replica 1 stopped answering"), SHARES, False),
        (ReadFailed("gone"), WITHOUT, True),
        (Broken("replica 1 stopped answering"), WITHOUT, True),
    ],
)
def test_an_aborted_step_is_saved_only_if_every_replica_can_give_its_share(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, words: tuple[str, ...], saves: bool
) -> None:
    seen: list[Session] = []
    monkeypatch.setattr("paceline.training.save.save", seen.append)
    session = make_session(make_plan(*words))
    with pytest.raises(type(fault)), saved_if_aborted(session):
        raise fault
    assert len(seen) == saves
