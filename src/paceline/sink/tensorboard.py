"""TensorBoard: event files in the run folder, one for each start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.histogram import Histogram
from paceline.planning import Plan
from paceline.sink.tracked import Picture, TrackedRow, tracked_settings

EVENTS = "tensorboard"
"""The folder of the event files; `tensorboard --logdir` takes it, the run folder or the folder of all runs."""


class TensorBoard:
    """Writes one event for each row, so that a kill leaves all numbers of a row or none."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        # Only who asks for TensorBoard needs its package.
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._event, self._summary, self._histogram = Event, Summary, HistogramProto
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
        value = self._summary.Value
        numbers = [value(tag=key, simple_value=number) for key, number in row.numbers.items()]
        histograms = [value(tag=key, histo=self._histogram_of(one)) for key, one in row.histograms.items()]
        pictures = [value(tag=key, image=self._image_of(one)) for key, one in row.pictures.items()]
        self._write(row.step, numbers + histograms + pictures)

    def close(self, _kind: str) -> None:
        self._writer.close()

    def _histogram_of(self, one: Histogram) -> Any:
        limits = one.edges[1:]
        return self._histogram(min=one.low, max=one.high, num=sum(one.counts), bucket_limit=limits, bucket=one.counts)

    def _image_of(self, one: Picture) -> Any:
        from PIL import Image  # noqa: PLC0415 - few rows have pictures

        with Image.open(one.path) as image:
            width, height = image.size
        content = one.path.read_bytes()
        return self._summary.Image(width=width, height=height, colorspace=3, encoded_image_string=content)

    def _write(self, step: int, values: list[Any]) -> None:
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()


def _settings_value(plan: Plan) -> Any:
    """All settings as a table that TensorBoard shows under Text."""
    from tensorboard.plugins.text.summary_v2 import text_pb  # noqa: PLC0415

    rows = "".join(f"| {address} | {value} |\n" for address, value in tracked_settings(plan).items())
    return text_pb("settings", f"| setting | value |\n|---|---|\n{rows}").value[0]
