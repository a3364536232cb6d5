"""How long the index of many images takes to open with its checksums, from a file that was just written.

python benchmarks/index_speed.py --images 1000000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from paceline.data.index.file import read_arrays, write_arrays
from paceline.data.index.table import ROW

KEY_LENGTH = 24
TURNS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000_000)
    count = parser.parse_args().images
    keys = np.random.default_rng(0).integers(97, 123, KEY_LENGTH * count, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "index")
        write_arrays(path, {}, {"rows": np.zeros(count, ROW), "keys": keys})
        seconds = []
        for _ in range(TURNS):
            start = time.perf_counter()
            assert read_arrays(path) is not None
            seconds.append(time.perf_counter() - start)
        size = path.stat().st_size / 1e6
    print(f"{count:,} images, {size:.0f} MB: {statistics.median(seconds):.3f} s (to {max(seconds):.3f} s)")


if __name__ == "__main__":
    main()
