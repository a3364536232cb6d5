"""NumPy and torch give the same keyed bits for any key, position and index."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import keyed

SETTINGS = settings(deadline=None, max_examples=100, derandomize=True)

KEYS = st.integers(0, 2**64 - 1)
POSITIONS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20)
INDICES = st.integers(0, 2**64 - 1)


@SETTINGS
@given(key=KEYS, positions=POSITIONS, index=INDICES, bound=st.integers(1, 2**31 - 1))
def test_numpy_and_torch_give_the_same_bits(key: int, positions: list[int], index: int, bound: int) -> None:
    host = keyed.words(key, np.array(positions, np.int64), index)
    device = keyed.words(key, torch.tensor(positions, dtype=torch.int64), index)
    for ours, theirs in zip(host, device, strict=True):
        assert np.array_equal(ours, theirs.numpy())
        assert ours.min() >= 0
        assert ours.max() < 2**32
        assert np.array_equal(keyed.integers(ours, bound), keyed.integers(theirs, bound).numpy())
    flat = keyed.uniforms(host[0], host[1])
    assert np.array_equal(flat, keyed.uniforms(device[0], device[1]).numpy())
    assert np.all((flat >= 0) & (flat < 1))


@SETTINGS
@given(key=KEYS, positions=POSITIONS, index=INDICES)
def test_a_number_does_not_depend_on_what_is_asked_beside_it(key: int, positions: list[int], index: int) -> None:
    together = np.stack(keyed.words(key, np.array(positions, np.int64), index))
    alone = [np.stack(keyed.words(key, np.array([position], np.int64), index))[:, 0] for position in positions]
    assert np.array_equal(together, np.stack(alone, axis=1))


@SETTINGS
@given(key=KEYS, count=st.integers(0, 300))
def test_a_permutation_holds_everything_once(key: int, count: int) -> None:
    assert sorted(keyed.permutation(key, count).tolist()) == list(range(count))
