"""Snapshots of the state in the host's memory, and the thread that writes them while training goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from paceline.checkpoint import CheckpointFiles
from paceline.errors import Broken, UserError
from paceline.record import Row, json_text
from paceline.training.state import State

MOST_WAITING, MOST_BYTES = 16, 256 << 20
"""Snapshots that may wait for the disk, and bytes of them: a kill loses what waits. One may, however large it is."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a checkpoint of a step holds, copied, so that training may go on."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    numbers: dict[str, Any]
    copied: torch.cuda.Event | None
    """When the copies are there, which the host does not wait for."""
    seconds: float
    """How long training was held up by the copy."""

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())

    def files(self) -> CheckpointFiles:
        """The content of a checkpoint: each group of tensors as safetensors, everything else as JSON."""
        if self.copied:
            self.copied.synchronize()
        files = {}
        for group, tensors in self.tensors.items():
            # In plain memory order, which is what safetensors stores.
            plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
            files[f"{group}.safetensors"] = safetensors_bytes(plain)
        return files | {"state.json": json_text(self.numbers).encode()}


def take_snapshot(state: State) -> Snapshot:
    """Copy the state to the host; a CUDA device copies by itself, and changes nothing before it has."""
    start = time.perf_counter()
    tensors, device = state.tensors(), state.bad.device
    copied = None
    if device.type == "cuda":
        current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            copies = _on_host(tensors, pin=True)
            copied = torch.cuda.Event()
            copied.record()
        current.wait_event(copied)
    else:
        copies = _on_host(tensors, pin=False)
    if copied and state.network.plan.stages > 1:
        copied.synchronize()  # another process gets them
    copies = state.network.gather(copies)
    return Snapshot(state.step, copies, state.numbers(), copied, time.perf_counter() - start)


def _on_host(groups: dict[str, dict[str, Tensor]], pin: bool) -> dict[str, dict[str, Tensor]]:
    """Copies with the strides that the tensors have: to reorder them is no work for the training thread."""

    def copy(tensor: Tensor) -> Tensor:
        # Pinned memory may hold only what a device has; the rest, such as a counter on the host, is copied at once.
        host = torch.empty_like(tensor, device="cpu", pin_memory=pin, requires_grad=False)
        return host.copy_(tensor.detach(), non_blocking=pin)

    return {group: {name: copy(tensor) for name, tensor in tensors.items()} for group, tensors in groups.items()}


@dataclass(frozen=True)
class Written:
    """A checkpoint that is on disk."""

    row: Row
    kept: UserError | None = None
    """Why older checkpoints that need not stay could not be removed."""


@dataclass(frozen=True)
class LeftOut:
    """A snapshot that was never written, because the disk was still busy when newer ones came."""

    step: int


Ending = Written | LeftOut | BaseException
"""What has become of a snapshot; Broken is that the disk did not take it."""


@dataclass
class Saver:
    """Writes snapshots in the order of their steps, in a thread that lives as long as there is something to write.

    Only the thread that trains asks what became of them, so that the record and its sinks stay with one thread. The
    interpreter waits for the writing thread before it ends.
    """

    write: Callable[[Snapshot], Written]
    needed: frozenset[int] = frozenset()
    """Steps whose checkpoints are never left out."""
    fault: Broken | None = None
    """Why the checkpoint that was told of last is not on disk."""
    _waiting: deque[Snapshot] = field(default_factory=deque)
    _ended: deque[Ending] = field(default_factory=deque)
    _thread: threading.Thread | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, snapshot: Snapshot) -> None:
        """Have a snapshot written; if too much waits for the disk already, leave out the oldest that is not needed."""
        with self._changed:
            while self._is_full(snapshot.bytes):
                spare = next((each for each in self._waiting if each.step not in self.needed), None)
                if spare is None:
                    self._changed.wait()
                else:
                    self._waiting.remove(spare)
                    self._ended.append(LeftOut(spare.step))
            self._waiting.append(snapshot)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoints")
                self._thread.start()

    def _is_full(self, more: int) -> bool:
        size = more + sum(snapshot.bytes for snapshot in self._waiting)
        return bool(self._waiting) and (len(self._waiting) >= MOST_WAITING or size > MOST_BYTES)

    def ended(self) -> Iterator[Ending]:
        """What has become of snapshots since this was asked last."""
        while self._ended:
            yield self._ended.popleft()

    def join(self) -> None:
        """Wait until nothing is left to write."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                snapshot = self._waiting.popleft()
                self._changed.notify_all()
            try:
                self._ended.append(self.write(snapshot))
            except BaseException as fault:  # noqa: BLE001 - told, or raised again, by the thread that trains
                self._ended.append(fault)
            del snapshot  # its memory is free while this waits
