"""Measures how many images a second this machine reads, decodes, loads and copies to its device."""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from paceline.data.index.table import Flag, Index, Strings, Table
from paceline.data.load.cache import Cache
from paceline.data.load.decode import Undecodable, decode_into
from paceline.data.load.files import CHUNK, FileLoader, TrainingCrops
from paceline.data.load.files_nvjpeg import NvjpegLoader
from paceline.data.load.image_files import ImageFiles
from paceline.data.load.order import training_order
from paceline.data.load.quarantine import Quarantine
from paceline.data.load.workers import quick_switches, server, start_worker
from paceline.data.pack import shards
from paceline.data.pack.transcode import LossyPreset
from paceline.data.pack.writer import write_pack
from paceline.errors import DataError
from paceline.planning import Plan
from paceline.progress import Progress, silent
from paceline.settings.data import Files
from paceline.settings.placement import MOST_THREADS

Stage = Literal["read", "decode"]
STAGES: tuple[Stage, Stage] = ("read", "decode")
CPU = torch.device("cpu")
WARM = 3.0
"""Seconds at most from the first batch of a loader until its rate is measured: processes take a while to start."""
_PATIENCE = 10.0
"""Seconds at most until a worker that was told to end has ended."""


@dataclass(frozen=True)
class Rates:
    """Images a second on so many threads; each rate includes the work of those before it."""

    threads: int
    read: float
    decode: float
    """Only what the loader decodes of an image is decoded: all, or the tiles under the crop."""
    whole: float
    """Read, decoded, cropped, resized and flipped into a batch: all that the loader does on the host."""

    @property
    def limit(self) -> str:
        """What takes most of the time."""
        seconds = {
            "reading": 1 / self.read,
            "decode": 1 / self.decode - 1 / self.read,
            "crop and resize": 1 / self.whole - 1 / self.decode,
        }
        return max(seconds, key=lambda name: seconds[name])


@dataclass(frozen=True)
class Sample:
    """Some training images as a data set of their own, and the plan to load them by."""

    plan: Plan
    folder: Path
    images: int

    @classmethod
    def of(cls, plan: Plan, index: Index, images: int, folder: Path) -> Sample:
        """Index the first images of the endless list in a new folder; the images stay where they are."""
        positions = np.arange(min(images, plan.epoch_images), dtype=np.int64)
        chosen = np.sort(training_order(plan).images(positions))
        table = index.training
        chosen = chosen[(table.rows["flags"][chosen] & Flag.OTHER_LABEL) == 0]
        if not len(chosen):
            raise DataError(f"{index.folder}: none of the first {images:,} training images has a label of a class")
        folder.mkdir(parents=True)
        # The index of a pack whose shards are the data set's own files, by absolute paths.
        paths = Strings.of(str(index.folder.resolve() / name) for name in table.shards)
        keys = Strings.of(table.keys[image] for image in chosen.tolist())
        few, checksums = Table(table.rows[chosen], paths, keys, table.objects), np.zeros(len(chosen), np.uint32)
        shards.write_split(folder, shards.PackedSplit("all", index.classes, few, checksums))
        return cls._warm(plan, folder, len(chosen))

    @classmethod
    def _warm(cls, plan: Plan, folder: Path, images: int) -> Sample:
        """Read every image once, so that later reads come from memory."""
        sample = cls(plan, folder, images)
        split, _ = sample.open()
        for image in range(split.count):
            split.read(image)
        return sample

    def open(self) -> tuple[ImageFiles, ImageFiles]:
        """The images, as a training and as a validation split."""
        table, cache = shards.read_split(self.folder, "all").table, Cache(0)
        return ImageFiles(table, self.folder, "training", cache), ImageFiles(table, self.folder, "validation", cache)

    def packed(
        self, out: Path, preset: LossyPreset | None, processes: int | None = None, progress: Progress = silent
    ) -> Sample:
        """Write these images into a pack of their own."""
        split = shards.read_split(self.folder, "all")
        empty = Table(split.table.rows[:0], Strings.of([]), Strings.of([]), split.table.objects[:0])
        write_pack(Index("pack", self.folder, split.classes, split.table, empty), out, preset, processes, progress)
        return self._warm(self.plan, out, self.images)

    def plan_for(self, threads: int, device: str = "cpu", decoder: str | None = None) -> Plan:
        """The plan of a run on these images alone, in batches that are small but keep all threads busy."""
        batch = max(2 * CHUNK, 2 * threads)
        augment = self.plan.recipe.augment.model_copy(update={"side": {}})  # images of full side take the longest
        data = self.plan.data.model_copy(update={"images": self.images})
        changes = {"data": data, "global_batch": batch, "drop_last": False, "augment": augment}
        host = "pillow" if self.plan.placement.decoder == "pillow" else "fast"
        where = {
            "device": device, "decoder": decoder or host, "replicas": 1, "micro_batch": batch, "cache": 0,
            "loader_workers": threads, "decoded_validation": False,
        }  # fmt: skip
        placement = self.plan.placement.model_copy(update=where)
        return replace(self.plan, recipe=self.plan.recipe.model_copy(update=changes), placement=placement)


def measure_rates(sample: Sample, threads: int, seconds: float) -> Rates:
    """Measure the rates of a sample on so many threads, each for so many seconds."""
    with quick_switches():
        with _workers(threads) as pool:
            read, decode = (_rate(pool, sample, stage, threads, seconds) for stage in STAGES)
        return Rates(threads, read, decode, whole=loader_rate(sample, threads, seconds, CPU))


def best_rates(rates: Sequence[Rates]) -> Rates:
    """The highest of each rate among several measurements on the same threads."""
    highest = (max(getattr(one, name) for one in rates) for name in ("read", "decode", "whole"))
    return Rates(rates[0].threads, *highest)


def _workers(threads: int) -> Executor:
    """Workers like those of the loader: threads, or processes."""
    if threads > MOST_THREADS:
        context = server()
        return ProcessPoolExecutor(threads, context, _begin, (context.Barrier(threads),))
    return ThreadPoolExecutor(threads)


def _rate(pool: Executor, sample: Sample, stage: Stage, threads: int, seconds: float) -> float:
    """How many images a second the workers read or decode, all of them together."""
    futures = [pool.submit(_go_round, sample, stage, worker / threads, seconds) for worker in range(threads)]
    return sum(future.result() for future in futures)


_barrier: multiprocessing.synchronize.Barrier | None = None


def _begin(barrier: multiprocessing.synchronize.Barrier) -> None:
    """What a worker process does first; the work of each begins when all are there."""
    start_worker()
    global _barrier  # noqa: PLW0603 - a process works for one measurement
    _barrier = barrier


def _go_round(sample: Sample, stage: Stage, start_at: float, seconds: float) -> float:
    """Images a second of one worker that goes round the sample, starting at a fraction of it."""
    split, _ = sample.open()
    work: Callable[[int], object] = split.read if stage == "read" else _decoding(sample.plan_for(1), split)
    if _barrier is not None:
        _barrier.wait()
    image, done = int(start_at * split.count), 0
    start = time.perf_counter()
    while (took := time.perf_counter() - start) < seconds or not done:
        for _ in range(CHUNK):
            work(image % split.count)
            image += 1
        done += CHUNK
    return done / took


def _decoding(plan: Plan, split: ImageFiles) -> Callable[[int], None]:
    """A function that decodes as much of an image as its first crop needs, and resizes nothing."""
    assert isinstance(plan.data, Files)
    data, decoder = plan.data, plan.placement.decoder
    images = np.arange(split.count, dtype=np.int64)
    boxes, _ = TrainingCrops(plan, split, training_order(plan), images).boxes(images, images)

    def decode(image: int) -> None:
        row = split.table.rows[image]
        width, height = int(row["width"]), int(row["height"])
        top, left, tall, wide = boxes[image].tolist()
        # A square of the crop's area, copied to an array of its own size: nothing is left to resize.
        side = max(1, min(round((tall * wide) ** 0.5), width, height))
        box = (min(top, height - side), min(left, width - side), side, side)
        with suppress(Undecodable):
            decode_into(
                split.read(image), int(row["flags"]), width, height, box, False, data.resize,
                np.empty((side, side, 3), np.uint8), decoder="pillow" if decoder == "pillow" else "fast",
            )  # fmt: skip

    return decode


def loader_rate(
    sample: Sample, threads: int, seconds: float, device: torch.device, decoder: str | None = None
) -> float:
    """Measure how many images a second the loader itself delivers to a device, once it has started."""
    others = {*multiprocessing.active_children()}
    try:
        return _loader_rate(sample, threads, seconds, device, decoder)
    finally:  # a worker that has only just begun would disturb what is measured next, or find the images gone
        for process in {*multiprocessing.active_children()} - others:
            process.join(_PATIENCE)


def _loader_rate(sample: Sample, threads: int, seconds: float, device: torch.device, decoder: str | None) -> float:
    plan = sample.plan_for(threads, device.type, decoder)
    kind = NvjpegLoader if decoder == "gpu" else FileLoader
    loader = kind(plan, sample.open, 0, device, Quarantine(None, most=sample.images))
    slow_start = threads > MOST_THREADS or device.type != "cpu"
    with closing(loader), closing(loader.training(0)) as shares:
        next(shares)
        start, left = time.perf_counter(), 4 * CHUNK if slow_start else 0
        while left and time.perf_counter() - start < WARM:
            next(shares)
            left -= 1
        _wait_for(device)
        start, images = time.perf_counter(), 0
        while time.perf_counter() - start < seconds or not images:
            images += sum(batch.count for batch in next(shares))
        _wait_for(device)
        return images / (time.perf_counter() - start)


def transfer_rate(plan: Plan, device: torch.device, seconds: float) -> float:
    """Measure how many images a second are copied to a device, in micro-batches of the plan."""
    side, pin = plan.facts.side, device.type == "cuda"
    images = torch.zeros((plan.micro_batch, side, side, 3), dtype=torch.uint8, pin_memory=pin)
    images.to(device)
    _wait_for(device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or not count:
        images.to(device, non_blocking=True, copy=True)
        _wait_for(device)
        count += len(images)
    return count / (time.perf_counter() - start)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
