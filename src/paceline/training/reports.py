"""How long a run takes and waits, and the rows that its record gets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paceline import schedule
from paceline.device import peak_memory
from paceline.model.metrics import TRAIN_SUMS, Means
from paceline.planning import Plan
from paceline.record import Row, latest
from paceline.training.bad_steps import longest_streak
from paceline.training.state import State
from paceline.training.timing import spread


class Clock:
    """Seconds of training, of waiting for images and of pauses; time between a kill and a resume does not count."""

    def __init__(self, plan: Plan, rows: list[Row], step: int) -> None:
        self._plan = plan
        before = [row for row in latest(rows, "report") if row["step"] <= step]
        self._total = before[-1]["total_seconds"] if before else 0.0
        self._mark = time.perf_counter()
        self._step = step
        self._waited = self._paused = self._last_pause = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens inside is waiting for images."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside is validating or saving, not training; steps still under way are waited for first."""
        if self._plan.placement.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        yield
        self._last_pause = time.perf_counter() - start
        self._paused += self._last_pause

    def report(self, state: State, gradient_norm: Tensor) -> dict[str, Any]:
        """The row of a report, and the sums start anew. The one place where the host waits for the device."""
        plan, count = self._plan, len(TRAIN_SUMS)
        *read, norm = torch.cat([state.sums, state.last_sums, gradient_norm[None]]).tolist()
        sums, last_sums = (dict(zip(TRAIN_SUMS, values, strict=True)) for values in (read[:count], read[count:]))
        bad = state.bad_steps()
        now = time.perf_counter()
        seconds = max(now - self._mark - self._paused, 1e-9)
        self._total += now - self._mark
        images = (state.step - state.reported) * plan.global_batch
        done = (state.step - self._step) * plan.global_batch
        row = {
            "step": state.step,
            "epoch": plan.epoch(state.step),
            "lr": schedule.lr(plan, state.step - 1),
            "loss": sums["loss"] / images,
            "top1": sums["hits"] / images,
            "last_loss": last_sums["loss"] / plan.global_batch,
            "last_top1": last_sums["hits"] / plan.global_batch,
            "gradient_norm": norm,
            "bad_steps": len(bad),
            "bad_steps_in_a_row": len(longest_streak(bad, state.reported)),
            "first_bad_step": next((step for step in bad if step > state.reported), 0),
            "images": images,
            "step_seconds": seconds / max(1, state.step - self._step),
            "images_per_second": done / seconds,
            "waiting": self._waited / seconds,
            "total_seconds": self._total,
            "memory": peak_memory(plan.placement.device),
        }
        state.sums.zero_()
        state.reported = self._step = state.step
        self._mark, self._waited, self._paused = now, 0.0, 0.0
        return row

    def validation(self, step: int, row: Means) -> dict[str, Any]:
        """The row of a validation."""
        seconds = max(self._last_pause, 1e-9)
        return {
            "step": step,
            "epoch": self._plan.epoch(step),
            **row,
            "seconds": seconds,
            "images_per_second": row["images"] / seconds,
        }


def run_speed(rows: list[Row]) -> dict[str, Any]:
    """The speed of a run over its reports, the first of each start left out if there are others: it warms up."""
    reports = [row for row in rows if row["kind"] in ("start", "report")]
    warm = [row for before, row in pairwise(reports) if before["kind"] == row["kind"] == "report"]
    speeds = [row["images_per_second"] for row in latest(warm or reports, "report")]
    if not speeds:
        return {}
    return {"images_per_second": median(speeds), "images_per_second_spread": asdict(spread(speeds))}


def stop_row(state: State, plan: Plan) -> dict[str, Any]:
    """The row of a validation that has ended a run: why, and which validation was the best."""
    stop, stopping = plan.recipe.stop, state.stopping
    return {
        "step": state.step,
        "epoch": plan.epoch(state.step),
        "reason": stopping.reason,
        "metric": stop.metric,
        "best": stopping.best,
        "best_step": stopping.best_step,
        "no_better": stopping.no_better,
        "target": stop.target,
    }
