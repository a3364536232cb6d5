"""What the tests of data in files share: a page, plans for a folder, the formats, and what loaders give."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from conftest import make_recipe
from paceline.data.index import locate
from paceline.data.index.scan import open_index
from paceline.data.load.files import FileLoader
from paceline.data.load.loader import open_loader
from paceline.data.load.workers import Chunk, Faults, Fill
from paceline.data.pack import writer
from paceline.job import plan_job
from paceline.planning import Plan
from paceline.settings.build import build
from paceline.settings.data import Files
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, override
from pictures_made import Made, make_pictures, write_folder, write_tars, write_tfrecord

PAGE = """
model: resnet8
data: {name: images, side: 16, evaluation: {name: center, short: 18}, classes: 10, max_bad: 0.2}
global_batch: 16
norm_batch: 4
epochs: 1
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
schedule: constant
augment: {flip: true}
report: 1 steps
"""
"""A recipe for pictures in files, small enough to train in a test."""

CPU = torch.device("cpu")
Pixels = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Seen = tuple[Pixels, Numbers]
"""Pictures and their labels, one after the other."""

WRITERS: dict[str, Callable[..., Path]] = {"folder": write_folder, "tfrecord": write_tfrecord, "webdataset": write_tars}


def file_plan(folder: Path, *words: str, text: str = PAGE) -> Plan:
    """A plan of this page, with overrides, for the images in a folder."""
    placed = Tree({"device": "cpu"}, {(): "test"})
    for word in words:
        if word.startswith("on."):
            override(placed, word.removeprefix("on."), Placement)
    recipe = make_recipe(*(word for word in words if not word.startswith("on.")), text=text)
    found, _ = locate.locate(recipe.data, folder)
    recipe = recipe.model_copy(update={"data": found})
    return plan_job("test", recipe, build(Placement, placed), folder, Tree(), placed).plan


def write_every_format(pictures: Sequence[Made], folder: Path, validation: float = 1 / 7, **settings: Any) -> None:
    """The same pictures as class folders, TFRecords, tars, and as a lossless pack of the folders."""
    for kind, write in WRITERS.items():
        write(pictures, folder / kind, validation)
    data = Files.model_validate({"name": "images", **settings})
    writer.write_pack(open_index(data, folder / "folder", whole=True), folder / "pack", processes=1)


def clean_pictures(count: int, classes: int = 10) -> list[Made]:
    """Pictures of which every one can be decoded and has the right label."""
    bad = {"truncated", "corrupt", "empty", "wrong"}
    made = [picture for picture in make_pictures(count + len(bad), classes) if picture.odd not in bad]
    assert len(made) == count
    return made


def spoilt(picture: Made, how: str) -> Made:
    """The same picture with bytes that nobody can decode."""
    return replace(picture, bytes=BAD_BYTES[how](picture.bytes))


def bomb(width: int = 65_500, height: int = 65_500) -> bytes:
    """A small JPEG whose header claims any size."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 10, 10)).save(buffer, "JPEG")
    content = bytearray(buffer.getvalue())
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(content)


BAD_BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) * 3 // 5],
    "corrupt": lambda content: content[: len(content) // 2] + b"\xff\xc0" + content[len(content) // 2 + 2 :],
    "bomb": lambda content: bomb(),
    "text": lambda content: b"not an image at all, but a page of text",
}


def every_pitfall(count: int, folder: Path) -> Path:
    """So many pictures with everything odd that there is, their labels in a file beside each format."""
    pictures = make_pictures(count, 10)
    ordinary = next(number for number in range(30, count) if number % 7 != 6)
    pictures[ordinary] = replace(pictures[ordinary], bytes=bomb())
    judged_too = next(number for number in range(40, count) if number % 7 == 6)
    pictures[judged_too] = spoilt(pictures[judged_too], "truncated")
    lines = [f"{p.key},{p.label if p.wrong_label is None else p.wrong_label}\n" for p in pictures]
    for kind, write in WRITERS.items():
        write(pictures, folder / kind, 1 / 7)
        (folder / kind / "labels.csv").write_text("file,class\n" + "".join(lines))
    data = Files(name="images", classes=10, labels="labels.csv", first_label=0)
    writer.write_pack(open_index(data, folder / "folder", whole=True), folder / "pack", processes=2)
    return folder


@contextmanager
def loading(
    plan: Plan, folder: Path, replica: int = 0, run: Path | None = None, device: torch.device = CPU
) -> Iterator[FileLoader]:
    """The loader of a replica, closed at the end."""
    loader = open_loader(plan, folder, replica, device, run)
    assert isinstance(loader, FileLoader)
    with closing(loader):
        yield loader


def trained(plan: Plan, folder: Path, start: int, steps: int, run: Path | None = None) -> Seen:
    """The training images of some steps in the order of the endless list, put together from all replicas."""
    size, total = plan.micro_batch, steps * plan.global_batch
    pixels: dict[int, Pixels] = {}
    labels: dict[int, Numbers] = {}
    for replica in range(plan.replicas):
        with loading(plan, folder, replica, run) as loader, closing(loader.training(start)) as shares:
            for batch in itertools.chain.from_iterable(itertools.islice(shares, steps)):
                assert batch.count == size
                assert batch.images.is_contiguous(memory_format=torch.channels_last)
                assert batch.positions is not None
                first = int(batch.positions[0])
                pixels[first], labels[first] = (
                    batch.images.permute(0, 2, 3, 1).numpy(),
                    batch.labels.numpy(),
                )
    places = sorted(pixels)
    assert places == list(range(start * plan.global_batch, start * plan.global_batch + total, size))
    return np.concatenate([pixels[place] for place in places]), np.concatenate([labels[place] for place in places])


def judged(plan: Plan, folder: Path, run: Path | None = None) -> Seen:
    """The validation images in the order of their numbers, put together from all replicas."""
    batches: dict[int, Seen] = {}
    for replica in range(plan.replicas):
        with loading(plan, folder, replica, run) as loader:
            for number, batch in enumerate(loader.validation()):
                assert len(batch.images) == plan.evaluation_batch
                real = batch.images.permute(0, 2, 3, 1).numpy()[: batch.count], batch.labels.numpy()[: batch.count]
                batches[number * plan.replicas + replica] = real
    found = [batches[number] for number in sorted(batches)]
    return np.concatenate([pixels for pixels, _ in found]), np.concatenate([labels for _, labels in found])


def same(one: Seen, other: Seen) -> bool:
    """Whether two rows of pictures and labels are equal bit for bit."""
    return np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def keys_of(folder: Path, **settings: Any) -> tuple[list[str], list[str]]:
    """The keys of training and validation images, by number."""
    found = open_index(Files.model_validate({"name": "images", "classes": 10, **settings}), folder)
    return list(found.training.keys), list(found.validation.keys)


def marking() -> Fill:
    """What a worker process decodes with that only writes an image's number into its pixels."""
    return _mark


def _mark(chunk: Chunk, into: NDArray[np.uint8]) -> Faults:
    into[:] = chunk.indices[:, None, None, None]
    return []
