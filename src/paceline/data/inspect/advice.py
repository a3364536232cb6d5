"""Suggests what to do where training waits for images in files: remedies that `bench data` measures, too."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import numpy as np

from paceline.data.index.table import Flag, Table
from paceline.planning import Plan

PRESET_SIDE = 500
"""The longest side of images in a pack that the usual preset makes smaller."""


class Remedy(NamedTuple):
    """A way to get images faster: its name, and what to write."""

    name: str
    write: str

    def __str__(self) -> str:
        return self.name if self.name == self.write else f"{self.name} ({self.write})"


PACK = Remedy("a lossless pack", "paceline data pack SOURCE OUT")
SMALLER_PACK = Remedy("a smaller pack", f"paceline data pack SOURCE OUT --max-side {PRESET_SIDE} --quality 90")
FAST_DECODER = Remedy("on.decoder=fast", "on.decoder=fast")
GPU_DECODER = Remedy("on.decoder=gpu", "on.decoder=gpu")


def more_threads(count: int) -> Remedy:
    """The remedy of loading with so many threads."""
    return Remedy(f"on.loader_workers={count}", f"on.loader_workers={count}")


def remedies(plan: Plan, table: Table, cores: int) -> list[Remedy]:
    """What this run does not do yet and this machine could do to get images faster."""
    placement, flags = plan.placement, table.rows["flags"]
    jpeg, tiled = (np.count_nonzero(flags & kind) > len(flags) / 2 for kind in (Flag.JPEG, Flag.TILED))
    most_threads, on_gpu = max(1, cores // plan.replicas), placement.decoder == "gpu"
    possible = {
        more_threads(most_threads): placement.loader_workers < most_threads,
        FAST_DECODER: placement.decoder == "pillow",
        PACK: jpeg and not tiled and not on_gpu,  # the GPU decodes whole images, in tiles or not
        SMALLER_PACK: True,
        GPU_DECODER: placement.device == "cuda" and not on_gpu and can_decode_on_gpu(plan),
    }
    return [remedy for remedy, applies in possible.items() if applies]


def can_decode_on_gpu(plan: Plan) -> bool:
    """Whether the GPU could decode: torchvision is there, and no function of the user's needs pixels on the host."""
    return plan.recipe.augment.python is None and importlib.util.find_spec("torchvision") is not None


def advice(plan: Plan, waiting: float, images_per_second: float, table: Table, cores: int) -> str:
    """One sentence for a run that waits for images in files: how much it waits, and what may help."""
    possible = remedies(plan, table, cores)
    if PACK in possible or _small_jpegs(table):  # a lossless pack comes first, and small images gain nothing
        possible.remove(SMALLER_PACK)
    remedy = f"what may help: {', or '.join(map(str, possible))}" if possible else "more cores would help"
    return (
        f"{waiting:.0%} of the time is spent waiting for images ({images_per_second:,.0f} images/s with "
        f"on.loader_workers={plan.placement.loader_workers}); {remedy}; paceline bench data measures it"
    )


def _small_jpegs(table: Table) -> bool:
    longest = np.maximum(table.rows["width"], table.rows["height"])
    jpeg = np.count_nonzero(table.rows["flags"] & Flag.JPEG) > len(table) / 2
    return bool(jpeg and np.median(longest) <= PRESET_SIDE)
