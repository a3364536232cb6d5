"""The run folder: plan.yaml, record.jsonl and checkpoints; one replica writes it, anyone may read it."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Protocol

from paceline import __version__, checkpoint
from paceline.errors import Broken, RunError
from paceline.files import Appender, cut_torn_line, disk_faults, open_lock, read_rows, read_whole, write_whole
from paceline.machine import Machine, processor_name, source_commit
from paceline.planning import Plan
from paceline.settings.build import build
from paceline.settings.page import MOST_BYTES
from paceline.settings.placement import Placement
from paceline.settings.placement import keys as placement_keys
from paceline.settings.read import Tree, changes, dump, parse
from paceline.settings.recipe import Recipe
from paceline.settings.stop import Stop
from paceline.settings.types import Settings
from paceline.stages import stage_numbers

Row = dict[str, Any]

PLAN, RECORD, FOLLOWED, REPORT = "plan.yaml", "record.jsonl", "follow.jsonl", "report.html"
SAMPLES = "samples"
"""The folder of pictures of the images of steps, and the kind of the rows that name them."""
Mode = Literal["own", "append", "read"]
INTACT = "all checkpoints so far are intact"
"""What to know when the disk refuses a row."""
NOT_FINITE = "a gradient or a statistic of a norm was not finite"
"""What makes a step one of a report's bad steps, for people."""


class Stored(Settings):
    """What plan.yaml holds: enough to train, validate or resume without repeating an option.

    Nothing that a run needs has a default, so that a file whose end is missing is noticed.
    """

    recipe: Recipe
    placement: Placement
    data_folder: str | None
    run_folder: str | None = None
    """Where the run folder was, by which files that were moved together with it are found again."""


class Sink(Protocol):
    """Shows or stores what happens in a run: a function of each row, and one of progress between rows."""

    def row(self, row: Row) -> None:
        """Take a row that was just written to the record."""

    def progress(self, what: str, done: int, total: int) -> None:  # noqa: ARG002 - sinks that show it need them
        """Take how far something has come that has no row yet: `training` in steps, `validation` in images, `averaging`
        in checkpoints, `saving` (a total of 0: nobody knows), or `stopping`, which a signal has just asked for; a sink
        may leave it alone."""
        return


class Run:
    """An open run folder. Everything that happens in a run is told once, as a row, and every sink gets every row.

    Who trains owns the folder, and only one process can. Others may append rows to the record, or only read it.
    """

    def __init__(self, folder: Path, mode: Mode) -> None:
        self.folder, self.mode = folder, mode
        self.checkpoints = folder / "checkpoints"
        self.sinks: list[Sink] = []
        self.patient = False
        """Whether rows that the disk does not take wait in memory, so that a full one does not end the training."""
        self._lines = Appender(folder / RECORD)
        self._lock: IO[str] | None = None
        if mode == "own":
            self._take()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def writes(self) -> bool:
        """Whether this process writes to the folder."""
        return self.mode != "read"

    def write(self, kind: str, **values: Any) -> Row:
        """Append a row to the record and hand it to the sinks; its numbers stay as they are, finite or not."""
        row = {"kind": kind, **values}
        if not self.writes:
            return row
        try:
            with disk_faults(Broken, self._lines.path, "cannot be written", INTACT):
                self._lines.append(json_text(row))  # only the owner may cut off what a kill left
        except Broken as fault:
            if not self.patient:
                raise
            if len(self._lines.waiting) == 1:
                self.note(f"{fault}; training goes on, and its rows wait in memory", warning=True)
        for sink in self.sinks:
            with suppress(Broken) if self.patient else nullcontext():  # that the disk is full has been told
                sink.row(row)
        return row

    def note(self, text: str, warning: bool = False) -> None:
        """Tell people something that is no event of the training itself."""
        self.write("note", text=text, warning=warning)

    def progress(self, what: str, done: int, total: int) -> None:
        """Tell the sinks how far something has come."""
        for sink in self.sinks:
            sink.progress(what, done, total)

    def rows(self) -> list[Row]:
        """Every row of the record so far, those that wait for the disk included."""
        return self._with_waiting(rows_of)

    def judged_rows(self) -> list[Row]:
        """Every row so far that tells of a validation, wherever it was made."""
        return self._with_waiting(judged_rows)

    def _with_waiting(self, read: Callable[[Path], list[Row]]) -> list[Row]:
        waiting = self._lines.waiting.copy()  # before the file is read: a row may get there meanwhile
        return read(self.folder) + [json.loads(line) for line in waiting]

    def try_own(self) -> bool:
        """Own the folder from now on, unless somebody trains in it."""
        try:
            self._take()
        except RunError:
            return False
        return True

    def close(self) -> None:
        """Let another process own the folder."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def _take(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = open_lock(self.folder / ".lock")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            cut_torn_line(self.folder / RECORD)
        except BlockingIOError:
            self.close()
            raise RunError(f"{self.folder}: another process is training in this folder") from None
        except OSError as fault:
            self.close()
            raise RunError(
                f"{self.folder}: cannot be written to: {fault.strerror}; choose another folder with --out"
            ) from None


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON, which knows neither NaN nor infinity: such a number is null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def rows_of(folder: Path) -> list[Row]:
    """The rows of a run's record; a line that a kill left unfinished is passed over."""
    with disk_faults(RunError, folder / RECORD, "cannot be read"):
        return [row for row in read_rows(folder / RECORD) if is_row(row)]


def follow_rows(folder: Path) -> list[Row]:
    """The rows of a process that evaluates the run's checkpoints while it trains."""
    with disk_faults(RunError, folder / FOLLOWED, "cannot be read"):
        return [row for row in read_rows(folder / FOLLOWED) if is_row(row)]


def judged_rows(folder: Path) -> list[Row]:
    """Every row that tells of a validation, wherever it was made."""
    return rows_of(folder) + follow_rows(folder)


_STEPPED = (
    "start", "report", "validation", "test", "average", "checkpoint", "stop", "end", "interrupted",
    "histograms", "samples",
)  # fmt: skip
_NUMBER = (int, float)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "report": {
        "bad_steps": (int,),
        **dict.fromkeys(("epoch", "last_top1", "top1", "step_seconds", "images_per_second", "total_seconds"), _NUMBER),
        **dict.fromkeys(("lr", "last_loss", "loss"), (*_NUMBER, type(None))),
    },
    "validation": {
        "images": (int,),
        **dict.fromkeys(("epoch", "top1", "top5", "seconds", "images_per_second"), _NUMBER),
        "loss": (*_NUMBER, type(None)),
    },
    "average": {"top1": _NUMBER, "steps": (list,)},
    "histograms": {"file": (str,)},
    "samples": {"file": (str,), "classes": (list,)},
}
"""What rows hold that are read back; not finite numbers are null."""


def is_row(row: Row) -> bool:
    """Whether a line of the record is a row, of a step where its kind has one."""
    kind, step = row.get("kind"), row.get("step", 0)
    return isinstance(kind, str) and type(step) is int and step >= 0 and ("step" in row or kind not in _STEPPED)


def is_whole(row: Row) -> bool:
    """Whether a row holds what its kind does: one that somebody has damaged is passed over like half a line."""
    if not is_row(row):
        return False
    fields = _FIELDS.get(row["kind"], {})
    return all(key in row and isinstance(row[key], types) for key, types in fields.items())


def latest(rows: list[Row], kind: str) -> list[Row]:
    """The last row of each step, in the order of steps: a resumed run writes some steps again."""
    return [
        row for _, row in sorted({row["step"]: row for row in rows if row["kind"] == kind and is_whole(row)}.items())
    ]


def trained_step(rows: list[Row]) -> int:
    """The last step that a record says was trained."""
    return max((row.get("step", 0) for row in rows if row["kind"] in ("report", "checkpoint", "validation")), default=0)


def best_step(rows: list[Row], steps: list[int], stop: Stop) -> int | None:
    """The step among `steps` with the best validation by `stop.metric`, the earliest of equals, if any has one.

    Partial validations count only where no other was made: a part of the images may be the easier part.
    """
    validations = [row for row in latest(rows, "validation") if row["step"] in steps]
    best: Row | None = None
    for row in [row for row in validations if not row.get("partial")] or validations:
        value = row.get(stop.metric)  # a loss that is not finite is null
        if value is not None and (best is None or stop.is_better(value, best[stop.metric])):
            best = row
    return None if best is None else int(best["step"])


def store_plan(
    folder: Path, plan: Plan, asked: Placement, data_folder: Path | None, written: Tree, placed: Tree
) -> None:
    """Write plan.yaml: the settings in full with where each came from, then the numbers that follow from them."""
    text = (
        "# Every setting of this run, and where its value came from. `paceline resume` reads this file.\n"
        f"recipe:\n{dump(plan.recipe, written, '  ')}"
        f"placement:\n{dump(asked, placed, '  ')}"
        f"data_folder: {json.dumps(str(data_folder.resolve()) if data_folder else None)}\n"
        f"run_folder: {json.dumps(str(folder.resolve()))}\n"
    )
    numbers = "".join(f"#   {name}: {value}\n" for name, value in numbers_of(plan).items())
    path = folder / PLAN
    with disk_faults(RunError, path, "cannot be written"):
        write_whole(path, text + "# What follows from them at the first start:\n" + numbers)


def _run_of(folder: Path) -> str:
    """What to write where a checkpoint stands in place of its run."""
    run, step = folder.parent.parent, folder.name.removeprefix("step-")
    if not step.isdigit() or not os.path.isfile(run / PLAN):  # noqa: PTH113
        return "; name the folder that `paceline train` printed as its run folder, such as runs/first"
    return f"; it is a checkpoint: write {run}, and --checkpoint {int(step)} to validate, predict or export with it"


def stored_plan(folder: Path) -> Stored:
    """The settings of the run in a folder."""
    path = folder / PLAN
    try:
        text = read_whole(path, MOST_BYTES).decode()
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder}: this is no run folder ('{PLAN}' is missing){_run_of(folder)}") from None
    except OSError as fault:
        raise RunError(f"{path}: cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError:
        raise RunError(f"{path}: is not text, so it is damaged; put the file back as it was") from None
    stored = build(Stored, parse(text, str(path)))
    _check_trained_recipe(stored.recipe, folder, path)
    return _found_again(stored, folder)


def _found_again(stored: Stored, folder: Path) -> Stored:
    """The settings of a run with the paths of files that have moved together with its folder."""
    if stored.run_folder is None:
        return stored
    began, now = stored.run_folder, os.path.realpath(folder)

    def found(_key: str, path: str) -> str:
        if not os.path.isabs(path) or os.path.exists(path):  # noqa: PTH110, PTH117
            return path
        moved = os.path.normpath(os.path.join(now, os.path.relpath(path, began)))  # noqa: PTH118
        return moved if os.path.exists(moved) else path  # noqa: PTH110

    data_folder = stored.data_folder and found("data_folder", stored.data_folder)
    return stored.model_copy(update={"recipe": stored.recipe.with_paths(found), "data_folder": data_folder})


def _check_trained_recipe(recipe: Recipe, folder: Path, path: Path) -> None:
    """Refuse a plan.yaml whose recipe is not the one that the run's newest checkpoint was trained by."""
    trained = checkpoint.recipe_text(folder / "checkpoints")
    if trained is None:
        return
    where, text = trained
    changed = recipe_changes(build(Recipe, parse(text, str(where))), recipe)
    if changed:
        more = f"; and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise RunError(
            f"{path}: this is not the recipe that was trained, which is in {where}; {'; '.join(changed[:5])}{more}; "
            f"put it back as it was, or train another run with --out and init.from={folder}"
        )


def recipe_changes(old: Recipe, new: Recipe) -> list[str]:
    """What differs between two recipes for the same run: what is said about them, and when to give up, may change; that
    files of labels say the same as before is told by the data themselves."""
    free = ("about:", "published:", "source:", "data.max_bad:", "data.labels:", "data.relabel:")
    return [line for line in changes(old, new) if not line.startswith(free)]


def numbers_of(plan: Plan) -> Row:
    """The arithmetic of a plan, ready to print."""
    return {
        "training images": plan.facts.images,
        "validation images": plan.facts.validation_images,
        "classes": plan.facts.classes,
        "image side": plan.facts.side,
        "evaluation side": plan.facts.evaluation_side or plan.facts.side,
        "global batch": plan.global_batch,
        "replicas": plan.replicas,
        **stage_numbers(plan),
        "micro-batch": plan.micro_batch,
        "micro-batch from": plan.chosen_by,
        **({"recomputed": ", ".join(plan.recomputed)} if plan.recomputed else {}),
        "micro-batches per step": plan.micro_batches,
        "rounds per step": plan.rounds,
        "replicas without work": max(0, plan.replicas - plan.micro_batches),
        "norm batch": plan.norm_batch,
        "norm groups per micro-batch": plan.norm_groups if plan.norm_batch else None,
        "replicas per norm group": plan.norm_replicas if plan.norm_batch else None,
        "images per epoch": plan.epoch_images,
        "steps per epoch": round(plan.epoch_images / plan.global_batch, 3),
        "total steps": plan.steps,
        "total images": plan.steps * plan.global_batch,
        "peak learning rate": plan.peak_lr,
        "device": plan.placement.device,
        "precision": plan.placement.precision,
        "weights": plan.placement.weights,
    }


def start_row(plan: Plan, machine: Machine, step: int, before: list[Row], command: list[str]) -> Row:
    """What a start writes into the record: placement, machine, versions, commit, and arithmetic that has changed."""
    placement = json.loads(plan.placement.model_dump_json())
    starts = (row.get("placement") for row in reversed(before) if row["kind"] == "start")
    last = next((each for each in starts if isinstance(each, dict)), placement)
    changed = {
        key: [last.get(key), placement[key]] for key in placement_keys("arithmetic") if last.get(key) != placement[key]
    }
    versions = {"paceline": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "safetensors"):
        versions[package] = metadata.version(package)
    return {
        "step": step,
        "steps": plan.steps,
        "epochs": plan.epoch(plan.steps),
        "metric": plan.recipe.stop.metric,
        "time": time.time(),
        "command": command,
        "placement": placement,
        "micro_batch_from": plan.chosen_by,
        "arithmetic_changed": changed,
        "machine": asdict(machine) | {"processor": processor_name(), "system": platform.platform()},
        "versions": versions,
        "commit": source_commit(),
    }
