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
from paceline.data.load.files import Crops, FileLoader, Finish, Opens, Share
from paceline.data.load.image_files import ImageFiles
from paceline.data.load.quarantine import Quarantine
from paceline.data.load.resample import resample
from paceline.data.load.validation_cache import ValidationCache
from paceline.device import pinned
from paceline.errors import PlanError
from paceline.numpy_types import Bools, Int64s
from paceline.planning import Plan

PIECE = 128
"""Images that are decoded by one call."""
THREADS = 3
"""Most threads that read and launch: one decodes while others read and crop, and more would wait for each other."""
# The decoder only reads: that Python's bytes cannot be written to does not matter.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

END = b"\xff\xd9"


class NvjpegLoader(FileLoader):
    """Loads images in files, decoded by the accelerator.

    What nvJPEG is not for (PNG, CMYK, files without an end) or refuses is decoded on the host, which also decides what
    is bad. Each thread has a CUDA stream of its own, so that one's copies go on beside another's kernels.
    """

    def __init__(
        self, plan: Plan, opens: Opens, replica: int, device: torch.device, bad: Quarantine, share: Share | None = None
    ) -> None:
        super().__init__(plan, opens, replica, device, bad, share)
        if importlib.util.find_spec("torchvision") is None:
            raise PlanError("on.decoder=gpu needs torchvision, which is not installed; write on.decoder=fast")
        if plan.recipe.augment.python is not None:
            raise PlanError("augment.python is for pictures on the host; write on.decoder=fast, or leave it out")
        self._pool = ThreadPoolExecutor(min(THREADS, plan.placement.loader_workers), "images")
        self._own_streams = threading.local()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)
        super().close()

    def _begin(self, split: ImageFiles, indices: Int64s, crops: Crops, cache: ValidationCache | None = None) -> Finish:
        if cache is not None:  # which the host fills
            return super()._begin(split, indices, crops, cache)
        shown = indices.copy()
        boxes, flipped = crops.boxes(np.arange(len(indices)), indices)
        pieces = [slice(first, min(first + PIECE, len(indices))) for first in range(0, len(indices), PIECE)]
        futures = [self._pool.submit(self._piece, split, piece, indices, boxes, flipped, crops) for piece in pieces]

        def finish() -> tuple[Tensor, Tensor, Int64s]:
            here = torch.cuda.current_stream(self._device)
            decoded = []
            for piece, future in zip(pieces, futures, strict=True):
                images, ready, left = future.result()
                here.wait_event(ready)
                images.record_stream(here)
                for offset in left:
                    at = piece.start + offset
                    shown[at] = self._on_host(split, indices, at, boxes, flipped, crops, images[offset])
                decoded.append(images)
            batch = torch.cat(decoded) if len(decoded) > 1 else decoded[0]
            return batch.permute(0, 3, 1, 2), self._labels(split, shown), shown

        return finish

    def _piece(
        self, split: ImageFiles, piece: slice, indices: Int64s, boxes: NDArray[Any], flipped: Bools, crops: Crops
    ) -> tuple[Tensor, torch.cuda.Event, list[int]]:
        """The images of a piece of a batch, the event after which they are there, and which are left to the host."""
        encoded = [split.read(index) for index in indices[piece].tolist()]
        rows = split.table.rows[indices[piece]]
        able = [offset for offset, data in enumerate(encoded) if self._can(rows[offset], data)]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream()):
            results = self._by_nvjpeg([encoded[offset] for offset in able])
            # An image of another size than its box was drawn for is left to the host.
            fit = [
                (at, one) for at, one in zip(able, results, strict=True)
                if one is not None and one.shape[1:] == _size(rows[at])
            ]  # fmt: skip
            able, decoded = [offset for offset, _ in fit], [image for _, image in fit]
            images = torch.empty((len(encoded), crops.side, crops.side, 3), dtype=torch.uint8, device=self._device)
            if able:
                chosen = np.arange(piece.start, piece.stop)[able]
                inside = boxes.dtype.kind == "i"  # a training crop is cut out first; evaluation sees beyond its box
                resized = resample(decoded, boxes[chosen], flipped[chosen], crops.side, self._data.resize, inside)
                if len(able) == len(encoded):
                    images = resized
                else:
                    images[able] = resized
            ready = torch.cuda.Event()
            ready.record()
        return images, ready, sorted(set(range(len(encoded))) - set(able))

    def _on_host(
        self, split: ImageFiles, indices: Int64s, at: int, boxes: NDArray[Any], flipped: Bools, crops: Crops,
        out: Tensor,
    ) -> int:  # fmt: skip
        """Decode one image on the host, or a good one in its place; returns the index of the one that is shown."""
        index, image = int(indices[at]), np.empty(tuple(out.shape), np.uint8)
        fault = self._decoder.decode(split, index, boxes[at], bool(flipped[at]), image)
        if fault is not None:
            index = self._replace(split, index, at, crops, image, fault)
        out.copy_(pinned(image, self._device), non_blocking=True)
        return index

    def _can(self, row: Any, encoded: bytes) -> bool:
        """Whether the accelerator may decode an image: it would not notice that a file is cut short, or too large."""
        flags, (height, width) = int(row["flags"]), _size(row)
        turned = self._data.turns and flags & Flag.TURNED
        good = bool(flags & Flag.JPEG) and not flags & Flag.OTHER_LABEL and height * width <= MOST_PIXELS
        return good and not turned and encoded.endswith(END)

    def _by_nvjpeg(self, encoded: list[bytes]) -> list[Tensor | None]:
        """Images on the device; None for a file that nvJPEG refuses, whatever is decoded beside it."""
        from torchvision.io import ImageReadMode, decode_jpeg  # noqa: PLC0415 - optional, and slow to load

        buffers = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in encoded]
        try:
            return list(decode_jpeg(buffers, mode=ImageReadMode.RGB, device=self._device)) if buffers else []
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
