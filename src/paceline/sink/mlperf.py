"""mlperf.log: the lines that the compliance checker of MLPerf Training reads."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from paceline.errors import Broken
from paceline.files import Appender, disk_faults, write_whole
from paceline.planning import Plan
from paceline.record import INTACT, Row, Run, Sink
from paceline.settings.optimizer import Lars, Sgd
from paceline.settings.schedule import Polynomial
from paceline.visible import plural

MLPERF_LOG = "mlperf.log"
TOKEN = ":::MLLOG "
QUALITY = 0.759
"""Top-1 accuracy at which a run of ResNet-50 is one that converged, unless the recipe has a target of its own."""
SUBMISSION = {"org": "unnamed", "platform": "unnamed", "division": "open", "status": "research"}
"""Who measured, on what, and under which rules; the environment says it, as MLPERF_SUBMISSION_ORG and so on."""
_Kind = Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]
_Pairs = Iterator[tuple[str, Any]]


class MLPerfSink(Sink):
    """Writes a line for each event of a training, with the time of the event. A resumed run goes on in its log: the
    clock of these rules does not stop."""

    def __init__(self, plan: Plan, run: Run, _console: Console) -> None:
        self._plan, self._run, self._path = plan, run, run.folder / MLPERF_LOG
        self._log, self._opened = Appender(self._path), time.time()
        self._step: int | None = None
        """How far the training is, once one has begun; rows of other commands come without a start."""
        self._block: int | None = None
        """The first epoch of the block that is being trained."""
        self._trained_since: float | None = None
        """When the last validation ended, if nothing was trained since."""
        self._best = -math.inf

    def row(self, row: Row) -> None:
        if row["kind"] == "start":
            self._start(row["step"])
        elif self._step is not None and row["kind"] in ("validation-start", "validation", "end"):
            self._step = row["step"]
            self._take(row)

    def progress(self, what: str, done: int, total: int) -> None:  # noqa: ARG002 - see Sink
        if what == "training" and self._step is not None and self._block is None:
            self._begin_block(self._step)

    def _start(self, step: int) -> None:
        kept = [line for line in _lines(self._path) if line["metadata"]["step"] <= step]
        if kept and kept[-1]["key"] == "eval_start":  # of a validation that the end of the last start cut off
            kept.pop()
        begun = any(line["key"] == "run_start" for line in kept)
        if step and not begun:
            self._run.note(f"{MLPERF_LOG} is not written: it would lack the first {plural(step, 'step')} of the run")
            return
        with disk_faults(Broken, self._path, "cannot be written", INTACT):
            write_whole(self._path, "".join(f"{_text(line)}\n" for line in kept if begun))
        self._step = step
        if not begun:
            self._begin()
            return
        self._best = max((line["value"] for line in kept if line["key"] == "eval_accuracy"), default=-math.inf)
        blocks = [line for line in kept if line["key"] in ("block_start", "block_stop")]
        if blocks and blocks[-1]["key"] == "block_start":
            self._block = blocks[-1]["metadata"]["first_epoch_num"]

    def _begin(self) -> None:
        for key, value in preamble(self._plan):
            self._write(key, value, at=self._opened)
        self._write("init_start", None, "INTERVAL_START", at=self._opened)
        for key, value in rule_numbers(self._plan):
            self._write(key, value)
        self._write("init_stop", None, "INTERVAL_END")
        self._write("run_start", None, "INTERVAL_START")
        self._begin_block(0)

    def _take(self, row: Row) -> None:
        epoch = self._epoch(row["step"])
        match row["kind"]:
            case "validation-start":
                self._end_block()
                self._write("eval_start", None, "INTERVAL_START", epoch_num=epoch)
            case "validation":
                self._best, self._trained_since = max(self._best, row["top1"]), time.time()
                self._write("eval_stop", None, "INTERVAL_END", epoch_num=epoch)
                self._write("eval_accuracy", row["top1"], epoch_num=epoch)
            case _:
                self._end_block()  # where nothing is validated
                stop = self._plan.recipe.stop
                reached = self._best >= ((stop.target if stop.metric == "top1" else None) or QUALITY)
                self._write("run_stop", None, "INTERVAL_END", status="success" if reached else "aborted")

    def _begin_block(self, step: int) -> None:
        """The epochs until the next validation begin."""
        plan, end = self._plan, step + 1
        while end < plan.steps and not (plan.validations and plan.validations.due(end)):
            end += 1
        self._block, at, self._trained_since = math.floor(plan.epoch(step)) + 1, self._trained_since, None
        count = self._epoch(end) - self._block + 1
        self._write(
            "block_start", None, "INTERVAL_START", at=at, first_epoch_num=self._block, epoch_count=max(1, count)
        )

    def _end_block(self) -> None:
        if self._block is not None:
            first, self._block = self._block, None
            self._write("block_stop", None, "INTERVAL_END", first_epoch_num=first)

    def _epoch(self, step: int) -> int:
        """The number, counted from 1, of the epoch in which a step begins."""
        return math.floor(self._plan.epoch(step - 1)) + 1

    def _write(
        self, key: str, value: Any, event: _Kind = "POINT_IN_TIME", *, at: float | None = None, **metadata: Any
    ) -> None:
        line = {
            "namespace": "",
            "time_ms": round((time.time() if at is None else at) * 1000),
            "event_type": event,
            "key": key,
            "value": value,
            "metadata": {"file": "paceline", "lineno": 0, "step": self._step, **metadata},
        }
        with suppress(OSError):  # a line that a full disk does not take waits for the next one
            self._log.append(_text(line))


def preamble(plan: Plan) -> _Pairs:
    """What is known before anything is set up."""
    yield "cache_clear", False  # nobody cleared the caches of the operating system
    yield "submission_benchmark", "resnet" if plan.recipe.model.name == "resnet50" else plan.recipe.model.name
    for name, default in SUBMISSION.items():
        yield f"submission_{name}", os.environ.get(f"MLPERF_SUBMISSION_{name.upper()}") or default


def rule_numbers(plan: Plan) -> _Pairs:
    """The numbers of the recipe that the rules ask for."""
    recipe, optimizer = plan.recipe, plan.recipe.optimizer
    yield "seed", recipe.seed
    yield "global_batch_size", plan.global_batch
    yield "gradient_accumulation_steps", plan.rounds
    yield "train_samples", plan.facts.images
    yield "eval_samples", plan.evaluated_images
    if plan.norm_batch is not None:
        yield "model_bn_span", plan.norm_batch
    yield "opt_name", optimizer.name
    prefix = f"{optimizer.name}_opt"
    yield f"{prefix}_base_learning_rate", plan.peak_lr
    if isinstance(recipe.schedule, Polynomial):
        yield f"{prefix}_end_learning_rate", recipe.schedule.end
        yield f"{prefix}_learning_rate_decay_poly_power", recipe.schedule.power
        yield f"{prefix}_learning_rate_decay_steps", plan.steps
    if isinstance(optimizer, Lars | Sgd):
        yield f"{prefix}_momentum", optimizer.momentum
    yield f"{prefix}_weight_decay", optimizer.decay if isinstance(optimizer, Lars) else recipe.weight_decay.rate
    if isinstance(optimizer, Lars):
        yield "lars_epsilon", optimizer.epsilon
    warmup = float(plan.images_in(recipe.schedule.warmup) / plan.epoch_images)
    yield f"{'lars_' if isinstance(optimizer, Lars) else ''}opt_learning_rate_warmup_epochs", warmup


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, but for what a kill has left of one; none if there is no log."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line.removeprefix(TOKEN)))
    return lines


def _text(line: dict[str, Any]) -> str:
    return TOKEN + json.dumps(line)
