"""The keyed generator: published answers, even spread, independence of neighbors, and exact normal numbers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline import keyed

MANY = 1 << 16
GOLDEN_KEY = 12199752852984971372
GOLDEN_PERMUTATION = [8, 10, 1, 2, 4, 3, 11, 9, 0, 7, 6, 5]
GOLDEN_NORMALS = "fd54c96a974f905965493ae04ae2abdf23d40f48df625cdba13508207410def9"


def shares(key: int = 0, first: int = 0, index: int = 0, word: int = 0) -> NDArray[np.float64]:
    """One word of many positions, scaled to [0, 1)."""
    found = keyed.words(key, np.arange(first, first + MANY, dtype=np.int64), index)[word]
    return found.astype(np.float64) / 2**32


def surprise(counts: NDArray[np.int64]) -> float:
    """How many deviations the chi-square of counts of equally likely things is above its mean."""
    expected = counts.sum() / len(counts)
    free = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free))


@pytest.mark.parametrize(
    ("key", "position", "index", "expected"),
    [
        (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**64 - 1, -1, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x299F31D0A4093822,
            0x85A308D3243F6A88 - 2**64,
            0x0370734413198A2E,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_words_are_the_published_answers_of_philox(key: int, position: int, index: int, expected: str) -> None:
    found = keyed.words(key, np.array([position], np.int64), index)
    assert " ".join(f"{int(word[0]):08x}" for word in found) == expected
    tensors = keyed.words(key, torch.tensor([position]), index)
    assert " ".join(f"{int(word[0]):08x}" for word in tensors) == expected


def test_keys_and_streams_do_not_change_between_versions() -> None:
    assert keyed.key(7, "order", 3) == GOLDEN_KEY
    assert keyed.permutation(keyed.key(7, "order", 3), 12).tolist() == GOLDEN_PERMUTATION
    assert hashlib.sha256(keyed.normals(5, 10_000).tobytes()).hexdigest() == GOLDEN_NORMALS


def test_a_key_depends_on_every_part_of_it() -> None:
    parts: list[tuple[int, str, *tuple[str | int, ...]]] = [
        (0, "a"),
        (1, "a"),
        (0, "b"),
        (0, "a", "x"),
        (0, "a", "y"),
        (0, "a", 1),
        (0, "a", 1, 2),
        (0, "a", 12),
        (-1, "a"),
    ]
    keys = {keyed.key(seed, purpose, *names) for seed, purpose, *names in parts}
    assert len(keys) == len(parts)
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize("bound", [1, 2, 7, 10, 1000, 2**24])
def test_integers_are_spread_evenly_below_their_bound(bound: int) -> None:
    drawn = keyed.integers(keyed.words(keyed.key(1, "even"), np.arange(MANY, dtype=np.int64))[0], bound)
    assert drawn.min() >= 0
    assert drawn.max() < bound
    if 1 < bound <= 1000:
        assert abs(surprise(np.bincount(drawn, minlength=bound))) < 5


def test_the_largest_word_stays_below_every_bound() -> None:
    words = np.array([0, 2**32 - 1], np.int64)
    for bound in (1, 2, 3, 2**31 - 1):
        assert keyed.integers(words, bound).tolist() == [0, bound - 1]


@pytest.mark.parametrize("bins", [2, 10, 1000])
def test_uniforms_are_spread_evenly_from_0_to_1(bins: int) -> None:
    drawn = keyed.host_uniforms(keyed.key(2, "even"), MANY)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(surprise(np.bincount((drawn * bins).astype(np.int64), minlength=bins))) < 5


def test_uniforms_reach_both_ends_and_never_1() -> None:
    ends = np.array([0, 2**32 - 1], np.int64)
    assert keyed.uniforms(ends, ends).tolist() == [0.0, 1 - 2**-53]
    assert keyed.uniforms(torch.tensor(ends), torch.tensor(ends)).tolist() == [0.0, 1 - 2**-53]


@pytest.mark.parametrize(
    ("this", "that"),
    [
        ({"key": 0}, {"key": 1}),
        ({"key": 0}, {"key": 1 << 32}),
        ({"key": keyed.key(0, "a")}, {"key": keyed.key(1, "a")}),
        ({"first": 0}, {"first": 1}),
        ({"first": 0}, {"first": 1 << 32}),
        ({"index": 0}, {"index": 1}),
        ({"index": 0}, {"index": 1 << 32}),
        ({"word": 0}, {"word": 1}),
        ({"word": 1}, {"word": 2}),
        ({"word": 2}, {"word": 3}),
    ],
)
def test_neighboring_streams_are_not_correlated(this: dict[str, int], that: dict[str, int]) -> None:
    correlation = float(np.corrcoef(shares(**this), shares(**that))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(MANY)


@pytest.mark.parametrize("limit", [None, 2.0, 0.5])
def test_normals_are_the_quantiles_of_their_uniforms(limit: float | None) -> None:
    key, count = keyed.key(3, "normal"), 20_000
    tail = 0.0 if limit is None else NormalDist().cdf(-limit)
    exact = [NormalDist().inv_cdf(tail + (1 - 2 * tail) * u) for u in keyed.host_uniforms(key, count).tolist()]
    np.testing.assert_allclose(keyed.normals(key, count, limit), exact, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("limit", "variance", "kurtosis"), [(None, 1.0, 3.0), (2.0, 0.87962566103423978**2, None)])
def test_normals_have_the_moments_of_their_distribution(
    limit: float | None, variance: float, kurtosis: float | None
) -> None:
    drawn = keyed.normals(keyed.key(4, "normal"), 200_000, limit)
    spread = 5 / math.sqrt(len(drawn))
    assert abs(drawn.mean()) < spread
    assert abs((drawn**2).mean() - variance) < spread * math.sqrt(2)
    assert abs((drawn**3).mean()) < spread * math.sqrt(15)
    if kurtosis is not None:
        assert abs((drawn**4).mean() - kurtosis) < spread * math.sqrt(96)
    if limit is not None:
        assert abs(drawn).max() <= limit
        assert abs(drawn).max() > 0.99 * limit


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, -8.2924), (0.5, 0.0), (1 - 2**-53, 8.2)])
def test_normals_of_the_outermost_uniforms_are_the_outermost_numbers(
    uniform: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "uniforms", lambda high, low: np.full(len(high), uniform))
    assert keyed.normals(0, 1)[0] == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 131_071, 131_072, 131_073])
def test_any_count_of_numbers_can_be_made_and_is_the_start_of_a_longer_list(count: int) -> None:
    assert np.array_equal(keyed.host_uniforms(9, count), keyed.host_uniforms(9, count + 5)[:count])
    assert np.array_equal(keyed.normals(9, count), keyed.normals(9, count + 5)[:count])
    assert keyed.permutation(9, count).tolist() != list(range(count)) or count < 5


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 131_071, 131_074])
def test_words_of_the_host_are_those_of_one_position_after_another(count: int) -> None:
    expected = np.stack(keyed.words(9, np.arange(count, dtype=np.int64)), axis=1).reshape(-1)[:count]
    assert np.array_equal(keyed.host_words(9, count), expected)


@pytest.mark.parametrize("make", [keyed.host_uniforms, keyed.host_words, keyed.normals])
def test_numbers_have_the_same_bits_on_any_number_of_threads(
    make: Callable[[int, int], NDArray[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "_BLOCK", 1 << 10)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, threads=threads: range(threads), raising=False)
        found.append(make(7, 100_003).tobytes())
    monkeypatch.undo()
    assert {*found} == {make(7, 100_003).tobytes()}


def test_a_permutation_holds_everything_once_and_differs_by_key() -> None:
    orders = [keyed.permutation(key, 5000) for key in range(4)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(5000))
    fixed = [(one == other).sum() for i, one in enumerate(orders) for other in [np.arange(5000), *orders[:i]]]
    assert max(fixed) < 10  # two random orders agree at one place on average


def test_every_image_is_as_likely_to_come_first() -> None:
    firsts = [int(keyed.permutation(keyed.key(0, "order", epoch), 10)[0]) for epoch in range(3000)]
    assert abs(surprise(np.bincount(firsts, minlength=10))) < 5
