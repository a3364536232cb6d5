"""What one replica's signal or clock asks for, and all replicas then do after the same step."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from types import FrameType

import torch
from torch import Tensor

from paceline.world import World

STOP, SAVE = range(2)


class Stopped(Exception):
    """A signal came to some replica in the middle of a validation, and all have left it."""


LAG = 4
"""Steps between a wish and its fulfillment on an accelerator, so that reading it never waits for the device."""


class Signals:
    """SIGTERM and SIGINT as a wish to stop; a second one exits at once."""

    def __init__(self) -> None:
        self.stop = False
        self._first_at = 0.0

    def listen(self) -> None:
        """Take over the two signals; the handler only sets a flag."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_at and now - self._first_at > 0.3:  # launchers may deliver one signal twice
            os._exit(128 + number)
        self._first_at = self._first_at or now
        self.stop = True


class Wishes:
    """Stop (a signal came) and save (the clock says so).

    Wishes travel with the gradients: every replica sees the same sum for the same step. On an accelerator the sum of
    LAG steps ago is read, which has long arrived.
    """

    def __init__(self, world: World, signals: Signals, save_seconds: float | None) -> None:
        self._world, self._signals, self._seconds = world, signals, save_seconds
        self._saved_at = time.monotonic()
        self._coming: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._granted = [False, False]

    def _asked(self) -> list[bool]:
        save = self._seconds is not None and self._world.first and time.monotonic() - self._saved_at >= self._seconds
        if save:
            self._saved_at = time.monotonic()
        return [self._signals.stop, save]

    def ask(self, dtype: torch.dtype) -> Tensor | None:
        """This step's wishes, to be added up over the replicas; None where there is nobody to agree with."""
        asked = self._asked()
        if self._world.replicas == 1:
            self._granted = asked
            return None
        wishes = torch.zeros(2, dtype=dtype, device=self._world.device)
        for which in range(2):
            if asked[which]:
                wishes[which] = 1
        return wishes

    def hear(self, summed: Tensor | None) -> None:
        """Take in the sum over all replicas."""
        if summed is None:
            return
        if summed.device.type != "cuda":
            self._granted = [wish > 0 for wish in summed.tolist()]
            return
        copy = torch.empty(2, dtype=summed.dtype, pin_memory=True)
        copy.copy_(summed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._coming.append((copy, event))
        self._granted = [False, False]
        if len(self._coming) > LAG:
            copy, event = self._coming.popleft()
            event.synchronize()
            self._granted = [wish > 0 for wish in copy.tolist()]

    @property
    def urgent(self) -> bool:
        """A signal came to this replica, though perhaps to no other."""
        return self._signals.stop

    @property
    def stop(self) -> bool:
        """All replicas end after this step."""
        return self._granted[STOP]

    @property
    def save(self) -> bool:
        """All replicas save after this step."""
        return self._granted[SAVE]
