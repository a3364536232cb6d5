"""Weights & Biases: one of its runs for each run folder, online or offline as its own environment variables say."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import numpy as np

from paceline.files import write_whole
from paceline.planning import Plan
from paceline.record import json_text
from paceline.sink.tracked import TrackedRow, tracked_settings

WANDB = "wandb.json"
"""The id of the run there, how many rows it has got, and the last step of each section."""


class WeightsAndBiases:
    """Sends each row as one line of the run's history; the key `step` is the axis of all others.

    What was sent is written down first: offline nobody can be asked, and a row that a kill in between loses is better
    than one that is there twice.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        import wandb  # noqa: PLC0415 - only who asks for it needs the package

        self._histogram, self._image = wandb.Histogram, wandb.Image
        self._path = folder / WANDB
        old = json.loads(self._path.read_text()) if self._path.is_file() else None
        self._sent = old or {"id": uuid.uuid4().hex[:8], "rows": 0, "last_steps": {}}
        quiet = wandb.Settings(console="off", silent=True)  # the terminal and its output stay as they are
        offline = os.environ.get("WANDB_MODE", "online") != "online"
        if not offline and not wandb.login(prompt=False):
            raise ConnectionError("not logged in; write wandb login, or WANDB_MODE=offline before the command")
        self._run = wandb.init(
            id=self._sent["id"],
            resume=None if offline else "allow",  # offline, each start has a folder with the same id
            dir=folder,
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            config=tracked_settings(plan) if old is None else None,
            settings=quiet,
        )
        self._run.define_metric("*", step_metric="step")
        if old is None:
            self._store()

    def last_steps(self) -> dict[str, int]:
        return dict(self._sent["last_steps"])

    def send(self, row: TrackedRow) -> None:
        number = self._sent["rows"]
        self._sent["rows"] += 1
        self._sent["last_steps"][row.section] = row.step
        self._store()
        histograms = {
            key: self._histogram(np_histogram=(np.array(one.counts), np.array(one.edges)))
            for key, one in row.histograms.items()
        }
        pictures = {key: self._image(str(one.path), caption=one.caption) for key, one in row.pictures.items()}
        self._run.log({**row.numbers, **histograms, **pictures, "step": row.step}, step=number, commit=True)

    def close(self, kind: str) -> None:
        self._run.finish(exit_code=int(kind == "failed"))

    def _store(self) -> None:
        write_whole(self._path, json_text(self._sent))
