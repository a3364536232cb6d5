"""MLflow: a run in a sqlite file of the run folder, or wherever MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from dataclasses import asdict
from pathlib import Path

from paceline import checkpoint
from paceline.files import write_whole
from paceline.histogram import GROUPS
from paceline.planning import Plan
from paceline.record import SAMPLES
from paceline.sink.tracked import SECTIONS, TrackedRow, tracked_settings

MLFLOW, MLFLOW_DATABASE, MLFLOW_FILES = "mlflow.id", "mlflow.db", "mlflow"
"""The id of the run there, the sqlite file, and the folder of what is no number."""
_STATUS = {"end": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_FILES = [(group, group, r"step-(\d+)\.json") for group in GROUPS] + [(SAMPLES, "images", r"\+step\+(\d+)\+")]
"""Sections that are files there: their folders, and how the names of the files tell a step."""
_MOST = 100
"""Settings that MLflow takes at a time, and characters of the longest value it takes."""
_LONGEST = 6000


class MLflow:
    """Logs the numbers of each row in one transaction; what is there already is asked of MLflow itself."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        from mlflow import MlflowClient  # noqa: PLC0415 - only who asks for MLflow needs its package
        from mlflow.entities import Metric  # noqa: PLC0415

        for name in ("mlflow", "alembic"):  # they tell on the terminal how a database is made
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric = Metric
        address = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(address or f"sqlite:///{(folder / MLFLOW_DATABASE).resolve()}")
        self._files = None if address else (folder / MLFLOW_FILES).resolve().as_uri()
        """Where files go, if no server knows."""
        path = folder / MLFLOW
        if path.is_file():
            self._id = path.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._create(plan, folder.resolve().name)
            write_whole(path, f"{self._id}\n")

    def last_steps(self) -> dict[str, int]:
        last = {}
        for section in SECTIONS.values():
            history = self._client.get_metric_history(self._id, f"{section}/epoch")  # every row has it
            if history:
                last[section] = max(metric.step for metric in history)
        for section, files, pattern in _FILES:
            found = [re.search(pattern, file.path) for file in self._client.list_artifacts(self._id, files)]
            if steps := [int(match[1]) for match in found if match]:
                last[section] = max(steps)
        return last

    def send(self, row: TrackedRow) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(key, value, now, row.step) for key, value in row.numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)
        if row.histograms:  # of which it draws none
            text = json.dumps({key: asdict(one) for key, one in row.histograms.items()})
            self._client.log_text(self._id, text, f"{row.section}/{checkpoint.name_of(row.step)}.json")
        from PIL import Image  # noqa: PLC0415 - MLflow takes open pictures

        for key, picture in row.pictures.items():
            with Image.open(picture.path) as image:
                self._client.log_image(self._id, image, key=key, step=row.step, synchronous=True)

    def close(self, kind: str) -> None:
        self._client.set_terminated(self._id, _STATUS[kind])

    def _create(self, plan: Plan, name: str) -> str:
        """Make the run there, with all settings."""
        from mlflow.entities import Param  # noqa: PLC0415

        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "paceline")
        experiment = self._client.get_experiment_by_name(title)
        number = experiment.experiment_id if experiment else self._client.create_experiment(title, self._files)
        run_id = str(self._client.create_run(number, run_name=name).info.run_id)
        params = [Param(key, value[:_LONGEST]) for key, value in tracked_settings(plan).items()]
        for first in range(0, len(params), _MOST):
            self._client.log_batch(run_id, params=params[first : first + _MOST])
        return run_id
