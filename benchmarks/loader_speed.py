"""Images per second of Paceline's loader alone, from files to tensors on the device, beside torchvision's in one run.

Both give random-resized crops of 224 pixels, half of them mirrored, in 8 bits, to the device; nothing is trained.

    python benchmarks/loader_speed.py FOLDER_OF_CLASS_FOLDERS --threads 16 --device cuda --peer
    python benchmarks/loader_speed.py PACK --threads 16 --device cuda --decoder gpu
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from paceline.data.index import locate
from paceline.data.load.loader import open_loader
from paceline.data.load.workers import quick_switches
from paceline.job import plan_job
from paceline.planning import Plan
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, parse
from paceline.settings.recipe import Recipe

RECIPE = """
model: resnet50
data: {name: images, max_bad: 1.0}
global_batch: BATCH
epochs: 1
optimizer: {name: sgd, lr: 0.1}
schedule: constant
augment: {flip: true}
"""


def planned(folder: Path, batch: int, words: dict[str, Any]) -> Plan:
    """A plan whose loader is the one to measure."""
    recipe = build(Recipe, parse(RECIPE.replace("BATCH", str(batch)), "loader_speed"))
    whole = recipe.data.model_copy(update={"validation": 0.05}) if not _has_validation(folder) else recipe.data  # type: ignore[union-attr]
    data, _ = locate.locate(whole, folder)
    placement = Placement(replicas=1, micro_batch=batch, **words)
    return plan_job("bench", recipe.model_copy(update={"data": data}), placement, folder, Tree(), Tree()).plan


def _has_validation(folder: Path) -> bool:
    return any(child.name.startswith(("val", "test", "pack")) for child in folder.iterdir())


def ours(folder: Path, batch: int, words: dict[str, Any]) -> Iterator[int]:
    """Sizes of the batches that Paceline's loader gives, without end."""
    device = torch.device(words["device"])
    plan = planned(folder, batch, words)
    torch.set_num_threads(1)
    with quick_switches(), closing(open_loader(plan, folder, 0, device).training(0)) as steps:
        for step in steps:
            yield sum(len(micro_batch.images) for micro_batch in step)


def peers(folder: Path, batch: int, workers: int, device: str) -> Iterator[int]:
    """The same of torchvision's ImageFolder in a DataLoader with processes."""
    from torchvision import datasets, transforms

    change = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    images = datasets.ImageFolder(str(folder), transforms.Compose(change))
    loader = torch.utils.data.DataLoader(
        images, batch, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=True,
        pin_memory=device == "cuda",
    )  # fmt: skip
    while True:
        for pictures, _ in loader:
            yield len(pictures.to(device, non_blocking=True))


def rate(batches: Iterator[int], warm: int, count: int) -> tuple[float, float]:
    """Seconds to the first batch, and images per second after `warm` of them."""
    start = time.perf_counter()
    next(batches)
    first = time.perf_counter() - start
    for _ in itertools.islice(batches, warm):
        pass
    start, images = time.perf_counter(), sum(itertools.islice(batches, count))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return first, images / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--warm", type=int, default=10, help="batches that do not count")
    parser.add_argument("--count", type=int, default=40, help="batches that count")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--decoder", nargs="+", default=["fast"])
    parser.add_argument("--cache", default="0 MB")
    parser.add_argument("--peer", action="store_true", help="measure torchvision's loader too")
    asked = parser.parse_args()
    for decoder, threads in itertools.product(asked.decoder, asked.threads):
        words = {"device": asked.device, "loader_workers": threads, "decoder": decoder, "cache": asked.cache}
        with closing(ours(asked.folder, asked.batch, words)) as batches:  # type: ignore[type-var]
            first, speed = rate(batches, asked.warm, asked.count)
        print(json.dumps({"loader": "paceline", "decoder": decoder, "threads": threads, "first_batch": round(first, 2),
                          "images_per_second": round(speed)}), flush=True)  # fmt: skip
    if asked.peer:
        first, speed = rate(peers(asked.folder, asked.batch, max(asked.threads), asked.device), asked.warm, asked.count)
        print(json.dumps({"loader": "torchvision", "processes": max(asked.threads), "first_batch": round(first, 2),
                          "images_per_second": round(speed)}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
