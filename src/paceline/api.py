"""Paceline from Python: each function does what the command of its name does, and a fault of a person is a UserError.

Torch is loaded by the functions that need it, not by `import paceline`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import planning
from paceline.command.train import begin
from paceline.data.index.given import find_images
from paceline.errors import INTERRUPTED, DataError, RunError, SpecError
from paceline.evaluating import evaluation_job, network_job
from paceline.exporting.request import ExportKind, read_request
from paceline.files import disk_faults
from paceline.job import ask, flag_words, make_job
from paceline.record import Row, latest, rows_of
from paceline.settings.read import flow
from paceline.training.selection import Selection, check_top, steps_to_evaluate
from paceline.worker import run_verb

if TYPE_CHECKING:
    from paceline.exporting.folder import Exported
    from paceline.prediction import Prediction, TrainedNetwork

RunPath = str | os.PathLike[str]
"""A run folder, or what `train` gave."""


@dataclass(frozen=True)
class TrainedRun(os.PathLike[str]):
    """A run that was trained to its end; every function that takes a run folder takes it too."""

    folder: Path

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def rows(self) -> list[Row]:
        """Everything that its record tells."""
        return rows_of(self.folder)

    @property
    def validations(self) -> list[Row]:
        """Its validations, in the order of steps, each with step, top1, top5, loss and images."""
        return latest(self.rows, "validation")


def plan(
    recipe: RunPath | None = None, *words: str, data: RunPath | None = None, on: str | Mapping[str, Any] | None = None,
    replicas: int | None = None, device: str | None = None, **settings: Any,
) -> planning.Plan:  # fmt: skip
    """Every number of a run of a recipe, or of one that is fitted to a folder of images, without running it.

    Settings are words such as "optimizer.lr=0.2", or arguments such as epochs=10 and optimizer={"lr": 0.2}. `on` is a
    placement by name, or settings of one, such as on={"micro_batch": 32}.
    """
    asked = ask(_text(recipe), [*words, *_words(settings), *_placed(on)], _path(data))
    return make_job(asked.name, asked.words, asked.data, _page(on), replicas, device, choices=asked.choices).plan


def train(
    recipe: RunPath | None = None, *words: str, data: RunPath | None = None, out: RunPath | None = None,
    on: str | Mapping[str, Any] | None = None, replicas: int | None = None, device: str | None = None, **settings: Any,
) -> TrainedRun:  # fmt: skip
    """Train a recipe, or on a folder of images, into a run folder; one that holds the same recipe goes on.

    Settings are given as for `plan`. An interrupt saves after the step that is under way, and is then raised as a
    KeyboardInterrupt.
    """
    all_words = [*words, *_words(settings), *_placed(on)]
    job, folder = begin(_text(recipe), all_words, _path(data), _path(out), _page(on), replicas, device)
    status = int(run_verb("train", job, folder, command=["paceline.train", job.name, *all_words]))
    if status == INTERRUPTED:
        raise KeyboardInterrupt(f"saved; go on with the same call and out={str(folder)!r}")
    if status:
        raise RunError(f"{folder}: a replica failed; its message is above")
    return TrainedRun(folder)


def validate(
    run: RunPath, *words: str, checkpoint: int | str | None = None, test: RunPath | None = None,
    data: RunPath | None = None, details: bool = False,
) -> Row:  # fmt: skip
    """Evaluate a checkpoint, the newest if none is named, on every validation image or on those of the folder `test`.

    Gives the row of the record: step, loss, top1, top5, images and more; with `details` also the worst classes, the
    most confused pairs, and the folder with the tables of all. Words place it, such as "on.device=cpu".
    """
    folder, selection = Path(run), Selection(_which(checkpoint), test=_path(test))
    job = evaluation_job(folder, list(words), _path(data), selection.test)
    steps_to_evaluate(folder, selection)
    rows, _, found = run_verb(
        "validate", job, folder, checkpoint=selection.checkpoint, every=False, details=details
    )  # fmt: skip
    return {**rows[0], **({"details": found[0]} if details else {})}


def predict(
    run: RunPath, images: RunPath | Sequence[RunPath], *words: str, checkpoint: int | str | None = None, top: int = 5,
    heatmap: RunPath | None = None, device: str | None = None,
) -> list[Prediction]:  # fmt: skip
    """Predict images: files, folders, patterns or a CSV file of paths; those without an answer are left out.

    The best checkpoint is taken unless another is named. All images of the run's validation get the bits of `validate`.
    """
    named = [images] if isinstance(images, str | os.PathLike) else images
    given = find_images([os.fspath(each) for each in named], iter(()))
    if not given.paths:
        raise DataError("none of the images can be read; name JPEG, PNG or other image files")
    check_top(top)
    folder, which, placed = Path(run), _which(checkpoint) or "best", [*words, *flag_words(None, device)]
    network_job(folder, placed, len(given.table))
    steps_to_evaluate(folder, Selection(which))
    if heatmap is not None:
        with disk_faults(RunError, Path(heatmap), "cannot be made", "choose another folder"):
            Path(heatmap).mkdir(parents=True, exist_ok=True)
    from paceline.prediction import predict_images
    from paceline.training.opened import open_run

    opened, skipped = open_run(folder, which, placed, len(given.table)), dict(given.unreadable)
    predictions = list(predict_images(opened, given.table, skipped, top, _path(heatmap)))
    if not predictions:
        path, reason = next(iter(skipped.items()))
        more = f" (and {len(skipped) - 1:,} more)" if len(skipped) > 1 else ""
        raise DataError(f"{path}: {reason}{more}, so that nothing can be predicted")
    return predictions


def load(run: RunPath, checkpoint: int | str | None = None, device: str = "cpu") -> TrainedNetwork:
    """The network of a run as a torch module, which has `classes`, `preprocess` and `predict`; the best checkpoint is
    taken unless another is named."""
    folder, which = Path(run), _which(checkpoint) or "best"
    network_job(folder, [])
    steps_to_evaluate(folder, Selection(which))
    from paceline.prediction import TrainedNetwork
    from paceline.training.opened import REFERENCE, open_run

    return TrainedNetwork(open_run(folder, which, [*REFERENCE, f"on.device={device}"]))


def export(
    run: RunPath, to: ExportKind = "onnx", out: RunPath | None = None, *, checkpoint: int | str | None = None,
    half: bool = False, images: RunPath | Sequence[RunPath] = (), data: RunPath | None = None,
    allow_difference: bool = False,
) -> Exported:  # fmt: skip
    """Write the network of a run as a file for other programs, with what prepares its images and a model card.

    The result has `folder`, `file`, `step`, and in `comparison` how the file's answers compare with the run's own.
    """
    words = [os.fspath(each) for each in ([images] if isinstance(images, str | os.PathLike) else images)]
    request = read_request(Path(run), to, _path(out), _which(checkpoint), half, words, _path(data))
    from paceline.exporting.folder import export_run

    return export_run(request, allow_difference)


def _words(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Settings as words; a section that names its kind is set whole, any other key by key."""
    for key, value in settings.items():
        is_python = key.endswith("_") and iskeyword(key[:-1])  # from_
        address = f"{prefix}{key[:-1] if is_python else key}"
        # Names of classes, which may be any text, are no keys.
        if isinstance(value, Mapping) and "name" not in value and all(str(each).isidentifier() for each in value):
            yield from _words(value, f"{address}.")
        else:
            yield f"{address}={_flow(address, dict(value) if isinstance(value, Mapping) else value)}"


def _flow(address: str, value: Any) -> str:
    try:
        return flow(value)
    except Exception:  # noqa: BLE001 - YAML has a fault of its own for what it cannot write
        raise SpecError(f"{address}: expected text, a number, a list or a dict, found {type(value).__name__}") from None


def _placed(on: str | Mapping[str, Any] | None) -> Iterator[str]:
    if on is not None and not isinstance(on, str | Mapping):
        raise SpecError(f"on: expected a placement's name or a dict such as {{'micro_batch': 32}}, found {on!r}")
    return _words(on, "on.") if isinstance(on, Mapping) else iter(())


def _page(on: str | Mapping[str, Any] | None) -> str | None:
    return on if isinstance(on, str) else None


def _text(path: RunPath | None) -> str | None:
    return None if path is None else str(_path(path)) if not isinstance(path, str) else path


def _path(path: RunPath | None) -> Path | None:
    if path is not None and not isinstance(path, str | os.PathLike):
        raise SpecError(f"expected a path, found {path!r}; settings are words such as 'data.side=64'")
    return None if path is None else Path(path)


def _which(checkpoint: int | str | None) -> str | None:
    return None if checkpoint is None else str(checkpoint)
