"""The cache of encoded images: one for all processes, within its budget, and never half an image."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from paceline.data.load.cache import Cache


def again(cache: Cache) -> Cache:
    """The same cache as another process opens it."""
    kind, given = cache.__reduce__()
    return kind(*given)


def test_all_processes_together_stay_within_the_budget() -> None:
    one = Cache(1000, (50, 50))
    others = [again(one) for _ in range(3)]
    for number in range(50):
        for place, cache in enumerate([one, *others]):
            cache.put(("training", "validation")[place % 2], number, bytes([number]) * 30)
    kept = [one.get(split, number) for split in ("training", "validation") for number in range(50)]
    assert sum(len(found) for found in kept if found is not None) == 33 * 30
    assert [one.get("validation", number) for number in range(16)] == [bytes([n]) * 30 for n in range(16)]
    assert all(cache.get("training", 3) == bytes([3]) * 30 for cache in others)


class Slow:
    """Bytes whose copy is watched: what others see of them before they are all there."""

    def __init__(self, real: object, seen: Callable[[], object]) -> None:
        self.real, self.seen, self.found = real, seen, list[object]()

    def __getitem__(self, where: slice) -> bytes:
        return self.real[where]  # type: ignore[index,no-any-return]

    def __setitem__(self, where: slice, content: bytes) -> None:
        half = (where.start + where.stop) // 2
        self.real[where.start : half] = content[: half - where.start]  # type: ignore[index]
        self.found.append(self.seen())
        self.real[half : where.stop] = content[half - where.start :]  # type: ignore[index]


def test_half_an_image_is_never_given_and_never_written_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Cache(1000, (4, 0))
    other = again(one)
    assert one._memory is not None
    watched = Slow(one._memory.mapped, lambda: (other.get("training", 2), other.put("training", 2, b"y" * 10)))
    monkeypatch.setattr(one._memory, "mapped", watched)
    one.put("training", 2, b"x" * 10)
    assert watched.found == [(None, b"y" * 10)]
    assert other.get("training", 2) == one.get("training", 2) == b"x" * 10
    assert one._used[0] == 10


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="counts the pages of a memory file")
def test_a_cache_takes_the_memory_of_what_is_in_it() -> None:
    cache = Cache(1 << 40, (1000, 1000))
    assert cache._memory is not None
    cache.put("training", 1, b"x" * 100_000)
    assert os.fstat(cache._memory.file).st_blocks * 512 < 1_000_000
