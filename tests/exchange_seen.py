"""Trials in which each process writes down how many gradients left it while the passes of its pipeline ran."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from paceline.pipelining import Pipeline
from paceline.planning import Plan
from paceline.training.session import Session
from paceline.training.trials import Trial
from paceline.world import World


class SeenTrial(Trial):
    """A trial whose processes are watched."""

    def _start(self, plan: Plan, task: Callable[[Session], None]) -> list[BaseProcess]:
        return super()._start(plan, partial(_seen, self._folder, task))

    def left_early(self, process: int) -> int:
        """How many buckets this process sent before its passes were done, over all steps."""
        count: int = json.loads((self._folder / f"left-{process}.json").read_text())
        return count


def _seen(folder: Path, task: Callable[[Session], None], session: Session) -> None:
    """Run a process of a trial, and count."""
    passing, early = [False], [0]
    step, all_reduce = Pipeline.step, World.all_reduce_async

    def watched_step(pipeline: Pipeline, *words: Any) -> None:
        passing[0] = True
        step(pipeline, *words)
        passing[0] = False

    def watched_all_reduce(world: World, *words: Any, **options: Any) -> Any:
        early[0] += passing[0]
        return all_reduce(world, *words, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "step", watched_step)
        patch.setattr(World, "all_reduce_async", watched_all_reduce)
        task(session)
    (folder / f"left-{session.world.process}.json").write_text(json.dumps(early[0]))
