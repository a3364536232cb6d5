"""mlperf.log: the lines that the compliance checker of MLPerf Training reads."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from paceline.errors import Broken
from paceline.files import disk_faults, write_whole
from paceline.planning import Plan
from paceline.record import INTACT, Row, Run, Sink
from paceline.settings.optimizer import Lars, Sgd
from paceline.settings.schedule import Polynomial

MLPERF_LOG = "mlperf.log"
TOKEN = ":::MLLOG "
QUALITY = 0.759
"""Top-1 accuracy at which a run of ResNet-50 is one that converged, unless the recipe has a target of its own."""
SUBMISSION = {"org": "unnamed", "platform": "unnamed", "division": "open", "status": "research"}
"""Who measured, on what, and under which rules; the environment says it, as MLPERF_SUBMISSION_ORG and so on."""
_Kind = Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]
_Pairs = Iterator[tuple[str, Any]]


class MLPerfSink(Sink):
    """Writes a line for each event of a training, at the time of the event. The log goes on where a run is resumed:
    the clock of these rules does not stop."""

    def __init__(self, plan: Plan, run: Run, _console: Console) -> None:
        self._plan, self._path = plan, run.folder / MLPERF_LOG
        self._opened = time.time()
        self._step: int | None = None
        """The step of the newest row, once a training has begun."""
        self._in_block = False
        self._since: float | None = None
        """When what comes next began, if that was not just now."""
        self._best = -math.inf

    def row(self, row: Row) -> None:
        if row["kind"] == "start":
            self._start(row["step"])
        elif self._step is not None:  # rows of other commands come without a start
            self._step = row.get("step", self._step)
            self._take(row)

    def progress(self, what: str, done: int, total: int) -> None:  # noqa: ARG002 - see Sink
        if what == "training" and self._step is not None and not self._in_block:
            self._begin_block(self._step)

    def _start(self, step: int) -> None:
        kept = [line for line in _lines(self._path) if line["metadata"]["step"] <= step] if step else []
        write_whole(self._path, "".join(map(_text, kept)))
        self._step = step
        self._best = max((line["value"] for line in kept if line["key"] == "eval_accuracy"), default=-math.inf)
        blocks = [line["key"] for line in kept if line["key"] in ("block_start", "block_stop")]
        self._in_block = blocks[-1:] == ["block_start"]
        if not kept:
            for key, value in preamble(self._plan):
                self._write(key, value, at=self._opened)
            self._write("init_start", None, "INTERVAL_START", at=self._opened)
            for key, value in rule_numbers(self._plan):
                self._write(key, value)
            self._write("init_stop", None, "INTERVAL_END")
            self._write("run_start", None, "INTERVAL_START")
        if not self._in_block and step < self._plan.steps:
            self._begin_block(step)

    def _take(self, row: Row) -> None:
        match row["kind"]:
            case "validation-start":
                self._end_block()
                self._write("eval_start", None, "INTERVAL_START", epoch_num=self._epoch(row["step"]))
            case "validation":
                self._write("eval_stop", None, "INTERVAL_END", epoch_num=self._epoch(row["step"]))
                self._write("eval_accuracy", row["top1"], epoch_num=self._epoch(row["step"]))
                self._best, self._since = max(self._best, row["top1"]), time.time()
            case "end":
                self._end_block()  # where nothing is validated
                target = self._plan.recipe.stop.target if self._plan.recipe.stop.metric == "top1" else None
                reached = self._best >= (target or QUALITY)
                self._write("run_stop", None, "INTERVAL_END", status="success" if reached else "aborted")
            case _:
                pass

    def _begin_block(self, step: int) -> None:
        """The epochs until the next validation begin."""
        plan, end = self._plan, step + 1
        while end < plan.steps and not (plan.validations and plan.validations.due(end)):
            end += 1
        first = math.floor(plan.epoch(step)) + 1
        count = max(1, self._epoch(end) - first + 1)
        self._write("block_start", None, "INTERVAL_START", at=self._since, first_epoch_num=first, epoch_count=count)
        self._in_block, self._since = True, None

    def _end_block(self) -> None:
        if self._in_block:
            starts = [line["metadata"] for line in _lines(self._path) if line["key"] == "block_start"]
            self._write("block_stop", None, "INTERVAL_END", first_epoch_num=starts[-1]["first_epoch_num"])
            self._in_block = False

    def _epoch(self, step: int) -> int:
        """The number of the epoch that a step belongs to, counted from 1."""
        return max(1, math.ceil(round(self._plan.epoch(step), 6)))

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
        with disk_faults(Broken, self._path, "cannot be written", INTACT), self._path.open("a") as file:
            file.write(_text(line))


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
        yield f"{prefix}_learning_rate_decay_steps", plan.steps - plan.warm_steps + recipe.schedule.extra_steps
    if isinstance(optimizer, Lars | Sgd):
        yield f"{prefix}_momentum", optimizer.momentum
    yield f"{prefix}_weight_decay", optimizer.decay if isinstance(optimizer, Lars) else recipe.weight_decay.rate
    lars = isinstance(optimizer, Lars)
    if isinstance(optimizer, Lars):
        yield "lars_epsilon", optimizer.epsilon
    yield f"{'lars_' if lars else ''}opt_learning_rate_warmup_epochs", plan.epoch(plan.warm_steps)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log that are whole; none if there is no log."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    whole = [line.removeprefix(TOKEN) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def _text(line: dict[str, Any]) -> str:
    return f"{TOKEN}{json.dumps(line)}\n"
