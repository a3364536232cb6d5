"""TensorBoard: event files in the run folder, one for each start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.planning import Plan
from paceline.sink.tracked import TrackedRow, tracked_settings

EVENTS = "tensorboard"
"""The folder of the event files; `tensorboard --logdir` takes it, the run folder or the folder of all runs."""


class TensorBoard:
    """Writes one event for each row, so that a kill leaves all numbers of a row or none."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        # Only who asks for TensorBoard needs its package.
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._event, self._summary = Event, Summary
        self._old = sorted((folder / EVENTS).glob("events.out.tfevents.*"))
        self._writer = EventFileWriter(str(folder / EVENTS))
        if not self._old:
            self._write(0, [_settings_value(plan)])

    def last_steps(self) -> dict[str, int]:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader  # noqa: PLC0415

        last: dict[str, int] = {}
        for path in self._old:
            for event in LegacyEventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    section = value.tag.partition("/")[0]
                    last[section] = max(event.step, last.get(section, -1))
        return last

    def send(self, row: TrackedRow) -> None:
        self._write(row.step, [self._summary.Value(tag=key, simple_value=row.numbers[key]) for key in row.numbers])

    def close(self, _kind: str) -> None:
        self._writer.close()

    def _write(self, step: int, values: list[Any]) -> None:
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()


def _settings_value(plan: Plan) -> Any:
    """All settings as a table that TensorBoard shows under Text."""
    from tensorboard.plugins.text.summary_v2 import text_pb  # noqa: PLC0415

    rows = "".join(f"| {address} | {value} |\n" for address, value in tracked_settings(plan).items())
    return text_pb("settings", f"| setting | value |\n|---|---|\n{rows}").value[0]
