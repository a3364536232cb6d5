"""What is shown of a step of replicas and stages, its histograms and its images, is that of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from processes import write_small

from conftest import run_in
from paceline.histogram import Histograms, read_histograms
from paceline.record import latest, rows_of


def trained(folder: Path, *words: str) -> tuple[Histograms, list[float], list[str]]:
    """The histograms after the last step of a short run, the gradient norms of its reports, and the classes shown."""
    folder.mkdir()
    recipe = write_small(folder, epochs="0.4")
    words = ("on.precision=fp64", "on.histograms=1 steps", "on.samples=1 steps", "on.cpu_threads=1", *words)
    done = run_in(folder, "train", recipe, "--out", "run", *words)
    assert done.returncode == 0, done.stderr
    rows = rows_of(folder / "run")
    file = latest(rows, "histograms")[-1]["file"]
    norms, samples = [row["gradient_norm"] for row in latest(rows, "report")], latest(rows, "samples")[-1]
    assert (folder / "run" / samples["file"]).is_file()
    return read_histograms(folder / "run" / file), norms, samples["classes"]


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("on.replicas=2", "on.micro_batch=4"),
        ("on.stages=2", "on.micro_batch=4"),
        ("on.replicas=2", "on.micro_batch=8", "on.shard=optimizer"),
        ("on.replicas=2", "on.stages=2", "on.micro_batch=4", "on.pipeline=interleaved"),
    ],
    ids=" ".join,
)
def test_histograms_do_not_depend_on_the_layout(tmp_path: Path, words: tuple[str, ...]) -> None:
    one, one_norms, one_classes = trained(tmp_path / "one", "on.micro_batch=16")
    other, norms, classes = trained(tmp_path / "other", *words)
    assert (len(one_classes), classes) == (16, one_classes[: len(classes)])
    np.testing.assert_allclose(norms, one_norms, rtol=1e-11)
    for group, each in one.items():
        assert list(other[group]) == list(each)
        for name, histogram in each.items():
            np.testing.assert_allclose(other[group][name].edges, histogram.edges, rtol=1e-9, atol=1e-14)
            moved = np.abs(np.subtract(other[group][name].counts, histogram.counts)).sum()
            assert moved <= 2, (group, name)  # a number on the edge of a bin
