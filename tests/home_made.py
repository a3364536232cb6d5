"""A home folder with everything that the commands of the documents speak of, made small."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from PIL import Image

from paceline.command.bench_job import train_job
from paceline.command.bench_result import facts_of
from paceline.settings import shipped

COLORS = {"cat": (200, 80, 60), "dog": (60, 160, 80)}
"""What classes differ in."""
NET = "{model: resnet8, global_batch: 8, norm_batch: 8, epochs: 1, optimizer: {name: sgd, lr: 0.1}, schedule: cosine}"
"""A recipe for images of 32 pixels."""


def write_home(home: Path) -> Path:
    """Images, tables and pages in a home folder; the folder `work` in it is where commands run."""
    work = home / "work"
    write_pictures(work / "photos", cat=90, dog=30)
    write_pictures(work / "holiday", cat=2, dog=2)
    write_pictures(home / "photos", cat=10, dog=10)
    write_pictures(home / "imagenet/train", cat=1050, dog=1050)
    write_pictures(home / "imagenet/val", cat=10, dog=10)
    (work / "new-photos").mkdir()
    (work / "more").mkdir()
    (home / "flat").mkdir()
    rows = ["file,class"]
    for number, name in enumerate(list(COLORS) * 10):
        write_picture(home / "flat" / f"{number}.jpg", name, number)
        rows.append(f"{number}.jpg,{name}")
    (home / "flat/classes.csv").write_text("\n".join([*rows, ""]))
    for path in (work / "photo.jpg", work / "new-photos/a.jpg", work / "more/b.png"):
        write_picture(path, "dog", 1)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        write_zeros(home / "cifar10" / f"{name}.bin", 30_730_000)
        write_zeros(work / "cifar-10-batches-py" / name, 1)
    (work / "list.csv").write_text("file\nphoto.jpg\n")
    (work / "fixes.csv").write_text("file,class\ncat/0031.jpg,dog\ncat/0044.jpg,\n")
    (work / "mine.yaml").write_text(shipped.page("recipes", "shapes/resnet8")[0])
    (work / "net.yaml").write_text(NET)
    (work / "broken.yaml").write_text(
        "model: resnet20\nglobal_batch: 128\nepochs: 10\noptimizer: sgd\nschedule: cosine\n"
    )
    (work / "laptop.yaml").write_text("replicas: 2\nmicro_batch: 32\nsave: 10 minutes\n")
    words = ["global_batch=8192", "norm_batch=32", "on.micro_batch=32"]
    facts = facts_of("train", train_job("nvidia/resnet50", words, None, None, 1, "cpu"), words)
    measured = {"images_per_second": 2500.0, "ms_per_step": 12.8, "steady": True}
    (work / "one.json").write_text(json.dumps(facts | measured))
    return work


def write_pictures(folder: Path, **counts: int) -> None:
    """So many pictures of each class, in class folders; each thirtieth is new."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            path = folder / name / f"{number + 1:04d}.jpg"
            if number < 30:
                write_picture(path, name, number)
            else:
                os.link(folder / name / f"{number % 30 + 1:04d}.jpg", path)


def write_picture(path: Path, name: str, number: int) -> None:
    """Noise around the color of a class."""
    noise = np.random.default_rng([*COLORS[name], number]).normal(0, 40, (120, 160, 3))
    Image.fromarray(np.clip(noise + COLORS[name], 0, 255).astype(np.uint8)).save(path)


def write_zeros(path: Path, size: int) -> None:
    """A file of zeros, which takes no space."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
