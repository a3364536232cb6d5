"""Tiles of matrix kernels: the measured ones where they fit, and others where they do not."""

from __future__ import annotations

import pytest

from paceline.model.kernels.tiles import Tile, measured, tile

H200 = 227 << 10
"""Bytes of shared memory that a program may have."""


@pytest.mark.parametrize("name", measured())
def test_the_measured_tiles_fit_the_device_they_were_measured_on(name: str) -> None:
    kernel, columns, inner = name.split()
    assert tile(kernel, int(columns), int(inner), H200) == measured()[name]


def test_a_device_with_less_shared_memory_gets_smaller_tiles() -> None:
    for name in measured():
        kernel, columns, inner = name.split()
        small = tile(kernel, int(columns), int(inner), 99 << 10)
        needed = small.streaming_bytes if small.inner == int(inner) else small.bytes
        assert needed <= 99 << 10, name
    assert tile("product_norm", 1024, 256, 99 << 10).inner == 64


def test_a_shape_that_was_never_measured_has_a_tile_that_divides_it() -> None:
    assert tile("product_norm", 384, 192, H200) == Tile(64, 128, 64, 4, 3)
    assert tile("product_norm", 320, 192, H200) == Tile(128, 64, 64, 4, 3)
