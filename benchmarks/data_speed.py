"""Paceline's decoders against Pillow: JPEG bytes to 224 x 224 pixels, all ways in one process, turn by turn.

Ratios are of images for each second of one core's own time, so that neighbors on the machine matter little. The last
table is wall clock: one thread decodes while the main thread spins in Python, by how often Python is told to switch. It
needs two cores to itself: time that a thread waited for a core is taken off, but what the other one lost by it is not.

    python benchmarks/data_speed.py FOLDER_OF_JPEGS
    python benchmarks/data_speed.py FOLDER_OF_JPEGS --busy 20
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from paceline.augment.resized_crop import evaluation_boxes, training_boxes
from paceline.data.index.image_header import parse_header
from paceline.data.load.decode import decode_into
from paceline.data.pack import libjpeg
from paceline.data.pack.transcode import LossyPreset, SourceImage, transcode
from paceline.settings.augment import Crop
from paceline.settings.data import Center

SIDE, SHORT, PIECE = 224, 256, 20
OUT = np.empty((SIDE, SIDE, 3), np.uint8)
INTERVALS = (5.0, 1.0, 0.1, 0.05, 0.02, 0.01)
"""Milliseconds between switches of Python's threads; 5 is Python's own."""


@dataclass(frozen=True)
class Encoded:
    """A picture in one of its forms, with what the index of that form would know."""

    content: bytes
    width: int
    height: int
    flags: int


@dataclass
class Way:
    """One way from bytes to pixels, and how long it took in each round."""

    name: str
    images: list[Encoded]
    work: Callable[[Encoded, NDArray[np.generic], bool], None]
    boxes: NDArray[np.generic]
    seconds: list[float]


def pillow_training(image: Encoded, box: NDArray[np.generic], mirrored: bool) -> None:
    """As torchvision's transforms do it with Pillow."""
    top, left, tall, wide = box.tolist()
    picture = Image.open(io.BytesIO(image.content)).convert("RGB").crop((left, top, left + wide, top + tall))
    picture = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    OUT[:] = np.asarray(picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else picture)


def pillow_evaluation(image: Encoded, _: NDArray[np.generic], __: bool) -> None:
    """Resize and center crop, one after the other."""
    picture = Image.open(io.BytesIO(image.content)).convert("RGB")
    long = int(SHORT * max(picture.size) / min(picture.size))
    wide, tall = (SHORT, long) if picture.width <= picture.height else (long, SHORT)
    left, top = round((wide - SIDE) / 2), round((tall - SIDE) / 2)
    picture = picture.resize((wide, tall), Image.Resampling.BILINEAR)
    OUT[:] = np.asarray(picture.crop((left, top, left + SIDE, top + SIDE)))


def paceline(image: Encoded, box: NDArray[np.generic], mirrored: bool) -> None:
    decode_into(image.content, image.flags, image.width, image.height, box, mirrored, "bilinear", OUT)


def pillow_tier(image: Encoded, box: NDArray[np.generic], mirrored: bool) -> None:
    decode_into(image.content, image.flags, image.width, image.height, box, mirrored, "bilinear", OUT, decoder="pillow")


def sizes(images: list[Encoded]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.array([image.width for image in images]), np.array([image.height for image in images])


def cut(images: list[Encoded]) -> NDArray[np.int64]:
    return training_boxes(0, Crop(), np.arange(len(images)), *sizes(images))


def see(images: list[Encoded]) -> NDArray[np.float64]:
    return evaluation_boxes(Center(name="center", short=SHORT), SIDE, *sizes(images))


def packed(paths: list[Path], images: list[Encoded], smaller: LossyPreset | None) -> list[Encoded]:
    """The pictures as a pack holds them."""
    made = []
    for path, image in zip(paths, images, strict=True):
        job = SourceImage(str(path), 0, len(image.content), image.width, image.height, image.flags, smaller)
        picture = transcode(job)
        made.append(Encoded(picture.encoded, picture.width, picture.height, picture.flags))
    return made


def compare(ways: list[Way], rounds: int) -> None:
    """A few pictures one way, the same ones another way, and so on; a round is all of them."""
    count = len(ways[0].images)
    for turn in range(rounds + 1):
        spent = dict.fromkeys(range(len(ways)), 0.0)
        for first in range(0, count, PIECE):
            for number, way in enumerate(ways):
                start = time.thread_time()
                for place in range(first, min(first + PIECE, count)):
                    way.work(way.images[place], way.boxes[place], place % 2 == 1)
                spent[number] += time.thread_time() - start
        if turn:  # the first one warms up
            for number, way in enumerate(ways):
                way.seconds.append(spent[number])


def table(ways: list[Way], title: str) -> None:
    """The first way is what the others are compared with."""
    count = len(ways[0].images)
    print(f"\n| {title} | KB | images/s of a core | x Pillow | of each round |\n|---|---|---|---|---|")
    for way in ways:
        ratios = [base / own for base, own in zip(ways[0].seconds, way.seconds, strict=True)]
        size = statistics.mean(len(image.content) for image in way.images) / 1000
        rate = count / statistics.median(way.seconds)
        spread = f"{min(ratios):.2f} .. {max(ratios):.2f}"
        print(f"| {way.name} | {size:.1f} | {rate:.0f} | {statistics.median(ratios):.2f} | {spread} |")


def waited() -> float:
    """Seconds that this thread has waited for a core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@dataclass(frozen=True)
class Window:
    """What a decoding thread and the main thread did beside it, for each second that they did not wait for a core."""

    images: float
    turns: float
    waited: float
    """The larger share of the time that either of them waited for a core."""


def watch(way: Way, busy: bool, seconds: float = 0.25) -> Window:
    found: list[float] = []

    def decode() -> None:
        images, start, before = 0, time.perf_counter(), waited()
        while time.perf_counter() - start < seconds:
            place = images % len(way.images)
            way.work(way.images[place], way.boxes[place], place % 2 == 1)
            images += 1
        spent, lost = time.perf_counter() - start, waited() - before
        found.extend([images / (spent - lost), lost / spent])

    thread = threading.Thread(target=decode)
    turns, start, before = 0, time.perf_counter(), waited()
    thread.start()
    while busy and thread.is_alive():
        for _ in range(1000):
            pass
        turns += 1
    lost = waited() - before if busy else 0.0
    spent = time.perf_counter() - start
    thread.join()
    return Window(found[0], turns / (spent - lost), max(found[1], lost / spent))


def alone(seconds: float = 0.25) -> float:
    """Turns a second of the main thread by itself."""
    turns, start, before = 0, time.perf_counter(), waited()
    while time.perf_counter() - start < seconds:
        for _ in range(1000):
            pass
        turns += 1
    return turns / (time.perf_counter() - start - (waited() - before))


def beside(way: Way, seconds: float) -> None:
    """What one decoding thread and a main thread that never rests leave each other, in the calmest half of windows."""
    print("\n| switch after | thread keeps | main thread keeps | waited for a core |\n|---|---|---|---|")
    before = sys.getswitchinterval()
    for interval in INTERVALS:
        sys.setswitchinterval(interval / 1000)
        start, seen, turns = time.perf_counter(), [], []
        while time.perf_counter() - start < seconds / len(INTERVALS):
            turns.append(alone())
            seen.append((watch(way, busy=False), watch(way, busy=True)))
        calm = sorted(seen, key=lambda pair: max(one.waited for one in pair))[: (len(seen) + 1) // 2]
        idle, kept = (statistics.median(pair[busy].images for pair in calm) for busy in (False, True))
        main = statistics.median(pair[True].turns for pair in calm) / statistics.median(turns)
        lost = statistics.median(pair[True].waited for pair in calm)
        print(f"| {interval:g} ms | {kept / idle:.2f} of {idle:.0f} | {main:.2f} | {lost:.0%} |", flush=True)
    sys.setswitchinterval(before)


def main(folder: Path, rounds: int, busy: float) -> None:
    torch.set_num_threads(1)
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    contents = [path.read_bytes() for path in paths]
    images = [Encoded(content, *parse_header(content)) for content in contents]
    fast = packed(paths, images, LossyPreset())
    training = [
        Way("Pillow", images, pillow_training, cut(images), []),
        Way("Paceline, Pillow decodes", images, pillow_tier, cut(images), []),
        Way("Paceline", images, paceline, cut(images), []),
    ]
    evaluation = [
        Way("Pillow", images, pillow_evaluation, see(images), []),
        Way("Paceline", images, paceline, see(images), []),
    ]
    if libjpeg.available():
        lossless = packed(paths, images, None)
        training.append(Way("Paceline, lossless pack", lossless, paceline, cut(lossless), []))
        evaluation.append(Way("Paceline, lossless pack", lossless, paceline, see(lossless), []))
    training.append(Way("Paceline, fast pack", fast, paceline, cut(fast), []))
    evaluation.append(Way("Paceline, fast pack", fast, paceline, see(fast), []))
    print(f"{len(images)} images, {rounds} rounds, torch {torch.__version__}, Python {sys.version.split()[0]}")
    compare(training, rounds)
    table(training, f"random crop, {SIDE}")
    compare(evaluation, max(1, rounds // 2))
    table(evaluation, f"resize {SHORT}, center {SIDE}")
    if busy:
        beside(training[2], busy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--busy", type=float, default=30, help="seconds for the last table; 0 leaves it out")
    options = parser.parse_args()
    main(options.folder, options.rounds, options.busy)
