"""Decodes JPEGs on the accelerator: nvJPEG through torchvision, then crops and resizes there; the rest on the host."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.index.table import Flag
from paceline.data.load.decode import MOST_PIXELS
from paceline.data.load.files import Cuts, Finish, Opens, Stream
from paceline.data.load.image_files import Encoded, Numbers, Quarantine
from paceline.data.load.resample import resample
from paceline.data.load.validation_cache import Decoded
from paceline.errors import PlanError
from paceline.planning import Plan

PIECE = 128
"""Images that are decoded by one call."""
THREADS = 3
"""Threads that read and launch at most: one decodes while others read and crop, and more wait for each other."""
# The decoder only reads: that Python's bytes cannot be written to does not matter.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

END = b"\xff\xd9"


class DeviceStream(Stream):
    """Where a replica gets images in files that its accelerator decodes.

    What nvJPEG is not for (PNG, CMYK, files without an end) or refuses is decoded on the host, which also judges what
    is bad. Each thread has a CUDA stream of its own, so that one's copies go on beside another's kernels.
    """

    def __init__(self, plan: Plan, opens: Opens, replica: int, device: torch.device, bad: Quarantine) -> None:
        super().__init__(plan, opens, replica, device, bad)
        if importlib.util.find_spec("torchvision") is None:
            raise PlanError("on.decoder=gpu needs torchvision, which is not installed; write on.decoder=fast")
        if plan.recipe.augment.python is not None:
            raise PlanError("augment.python is for pictures on the host; write on.decoder=fast, or leave it out")
        self._pool = ThreadPoolExecutor(min(THREADS, plan.placement.loader_workers), "images")
        self._own_streams = threading.local()

    def close(self) -> None:
        """End those who decode."""
        self._pool.shutdown(cancel_futures=True)
        super().close()

    def _begin(self, split: Encoded, numbers: Numbers, cuts: Cuts, decoded: Decoded | None = None) -> Finish:
        if decoded is not None:  # kept by the host
            return super()._begin(split, numbers, cuts, decoded)
        shown = numbers.copy()
        boxes, mirrored = cuts.cut(np.arange(len(numbers)), numbers)
        pieces = [slice(first, min(first + PIECE, len(numbers))) for first in range(0, len(numbers), PIECE)]
        parts = [self._pool.submit(self._piece, split, where, numbers, boxes, mirrored, cuts) for where in pieces]

        def finish() -> tuple[Tensor, Tensor]:
            here = torch.cuda.current_stream(self._device)
            made = []
            for where, part in zip(pieces, parts, strict=True):
                pictures, done, left = part.result()
                here.wait_event(done)
                pictures.record_stream(here)
                for place in left:
                    shown[where.start + place] = self._on_host(
                        split, numbers, where.start + place, boxes, mirrored, cuts, pictures[place]
                    )
                made.append(pictures)
            return torch.cat(made) if len(made) > 1 else made[0], self._labels(split, shown)

        return finish

    def _piece(
        self, split: Encoded, where: slice, numbers: Numbers, boxes: NDArray[Any], mirrored: NDArray[np.bool_],
        cuts: Cuts,
    ) -> tuple[Tensor, torch.cuda.Event, list[int]]:  # fmt: skip
        """The pictures of a part of a batch on the device, when they will be there, and which are left to the host."""
        encoded = [split.read(number) for number in numbers[where].tolist()]
        rows = split.table.rows[numbers[where]]
        able = [place for place, data in enumerate(encoded) if self._can(rows[place], data)]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream()):
            found = self._by_nvjpeg([encoded[place] for place in able])
            # One that is not of the size that its box was drawn for is judged by the host.
            fit = [(p, d) for p, d in zip(able, found, strict=True) if d is not None and d.shape[1:] == _size(rows[p])]
            able, decoded = [place for place, _ in fit], [picture for _, picture in fit]
            pictures = torch.empty((len(encoded), cuts.side, cuts.side, 3), dtype=torch.uint8, device=self._device)
            if able:
                chosen = np.arange(where.start, where.stop)[able]
                inside = boxes.dtype.kind == "i"  # a training crop is cut out first; evaluation sees beyond its box
                made = resample(decoded, boxes[chosen], mirrored[chosen], cuts.side, self._data.resize, inside)
                if len(able) == len(encoded):
                    pictures = made
                else:
                    pictures[able] = made
            done = torch.cuda.Event()
            done.record()
        return pictures, done, sorted(set(range(len(encoded))) - set(able))

    def _on_host(
        self, split: Encoded, numbers: Numbers, place: int, boxes: NDArray[Any], mirrored: NDArray[np.bool_],
        cuts: Cuts, into: Tensor,
    ) -> int:  # fmt: skip
        """Decode one image here; gives the number of the one that is shown."""
        number, host = int(numbers[place]), np.empty(tuple(into.shape), np.uint8)
        fault = self._fill.decode(split, number, boxes[place], bool(mirrored[place]), host)
        if fault is not None:
            number = self._replace(split, number, place, cuts, host, fault)
        into.copy_(torch.from_numpy(host).pin_memory(), non_blocking=True)  # and no step waits for it
        return number

    def _can(self, row: Any, encoded: bytes) -> bool:
        """Whether the accelerator may decode it: it would not notice that a file is cut short, nor how large it is."""
        flags, (height, width) = int(row["flags"]), _size(row)
        turned = self._data.orientation == "honor" and flags & Flag.TURNED
        good = bool(flags & Flag.JPEG) and not flags & Flag.OTHER_LABEL and height * width <= MOST_PIXELS
        return good and not turned and encoded.endswith(END)

    def _by_nvjpeg(self, encoded: list[bytes]) -> list[Tensor | None]:
        """Pictures on the device; None for a file that is refused, whoever is decoded beside it."""
        from torchvision.io import ImageReadMode, decode_jpeg  # noqa: PLC0415 - optional, and slow to load

        held = [torch.frombuffer(data, dtype=torch.uint8) for data in encoded]
        try:
            return list(decode_jpeg(held, mode=ImageReadMode.RGB, device=self._device)) if held else []
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return [None] if len(encoded) == 1 else [one for data in encoded for one in self._by_nvjpeg([data])]

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._own_streams, "stream"):
            self._own_streams.stream = torch.cuda.Stream(self._device)
        stream: torch.cuda.Stream = self._own_streams.stream
        return stream


def _size(row: Any) -> tuple[int, int]:
    return int(row["height"]), int(row["width"])
