"""MLflow: a run in a sqlite file of the run folder, or wherever MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from paceline.files import write_whole
from paceline.planning import Plan
from paceline.sink.tracked import SECTIONS, TrackedRow, tracked_settings

MLFLOW, MLFLOW_DATABASE = "mlflow.id", "mlflow.db"
"""The id of the run there, and the sqlite file."""
_STATUS = {"end": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
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
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / MLFLOW_DATABASE).resolve()}"
        self._client = MlflowClient(address)
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
        return last

    def send(self, row: TrackedRow) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(key, value, now, row.step) for key, value in row.numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, kind: str) -> None:
        self._client.set_terminated(self._id, _STATUS[kind])

    def _create(self, plan: Plan, name: str) -> str:
        """Make the run there, with all settings."""
        from mlflow.entities import Param  # noqa: PLC0415

        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "paceline")
        experiment = self._client.get_experiment_by_name(title)
        number = experiment.experiment_id if experiment else self._client.create_experiment(title)
        run_id = str(self._client.create_run(number, run_name=name).info.run_id)
        params = [Param(key, value[:_LONGEST]) for key, value in tracked_settings(plan).items()]
        for first in range(0, len(params), _MOST):
            self._client.log_batch(run_id, params=params[first : first + _MOST])
        return run_id
