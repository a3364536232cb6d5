"""Optimizer state in the host's memory: a piece of it is on the device only while its weights are updated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.device import pinned
from paceline.optim.flat import ParameterGroup
from paceline.optim.rounding import Rounding
from paceline.optim.rule import FlatGroup, Rule

PIECE_BYTES = 8 << 20
"""State travels in pieces that end once they have this much: large enough for the bus, small beside all of it."""


class HostGroup(FlatGroup):
    """A group whose state lies in pinned memory of the host, all of it side by side."""

    def __init__(self, group: ParameterGroup, rule: Rule, rounding: Rounding | None, lane: Lane) -> None:
        self._lane = lane
        super().__init__(group, rule, rounding)
        self._place = lane.add(self.packed)

    @property
    def state(self) -> dict[str, Tensor]:
        self._lane.finish()
        return self._state

    def _first_state(self) -> dict[str, Tensor]:
        first, host = self.rule.initial_state, torch.device("cpu")
        rows = [self.flat.full(value, host) for value in first.values()]
        self.packed = pinned(torch.stack(rows), self.flat.stored.device) if rows else torch.empty(0)
        return dict(zip(first, self.packed, strict=True))

    @contextmanager
    def _state_at_hand(self) -> Iterator[dict[str, Tensor]]:
        with self._lane.at_hand(self._place) as packed:
            yield dict(zip(self._state, packed, strict=True))


class Lane:
    """Carries pieces of state to the device and back, in turn.

    While a piece is updated, the next one comes and the one before goes. There is room on the device for two: pieces
    with even numbers use one room, those with odd numbers the other. Each comes once the last one has left, for which
    the device waits, and never the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on = device, torch.get_device_module(device)
        self._coming, self._going = self._on.Stream(), self._on.Stream()
        self._pieces: list[Tensor] = []
        self._rooms: list[Tensor] = []
        self._there: dict[int, Tensor] = {}
        """The pieces on the device, or on their way, by number."""
        self._came = [self._on.Event(), self._on.Event()]
        self._left = [self._on.Event(), self._on.Event()]

    def add(self, piece: Tensor) -> int:
        """Take over a piece on the host, which gets the next number."""
        self._pieces.append(piece)
        return len(self._pieces) - 1

    @contextmanager
    def at_hand(self, number: int) -> Iterator[Tensor]:
        """A piece on the device; what is changed there goes back to the host. Pieces come one after another."""
        room, now = number % 2, self._on.current_stream()
        for each in (number, number + 1):
            self._fetch(each)
        self._came[room].wait(now)
        piece = self._there.pop(number)
        yield piece
        self._going.wait_stream(now)
        with self._on.stream(self._going):
            self._pieces[number].copy_(piece, non_blocking=True)
            self._left[room].record(self._going)

    def finish(self) -> None:
        """Wait until everything is back on the host."""
        for event in self._left:
            event.synchronize()

    def _fetch(self, number: int) -> None:
        """Let a piece come, unless it is there or there is none of this number."""
        if number in self._there or number >= len(self._pieces):
            return
        if not self._rooms:
            self._make_rooms()
        piece, room = self._pieces[number], number % 2
        with self._on.stream(self._coming):
            self._left[room].wait(self._coming)
            there = self._rooms[room][: piece.nbytes].view(piece.dtype).view(piece.shape)
            there.copy_(piece, non_blocking=True)
            self._came[room].record(self._coming)
        self._there[number] = there

    def _make_rooms(self) -> None:
        """Make room for the largest piece of each kind, and let the streams wait until it is there."""
        sizes = [max((piece.nbytes for piece in self._pieces[room::2]), default=0) for room in (0, 1)]
        self._rooms = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        self._coming.wait_stream(self._on.current_stream())
