"""Images in files: every position shows the same pixels and label, whatever the layout and wherever one starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from image_files import Seen, clean_pictures, file_plan, judged, same, spoilt, trained
from paceline.data.load.quarantine import quarantined
from paceline.planning import Plan
from paceline.settings.placement import MOST_THREADS
from pictures_made import split, write_folder

PICTURES = clean_pictures(30)
RANKED = [sorted(part, key=lambda picture: picture.key) for part in split(PICTURES, 1 / 7)]
BAD = {0: [3, 4, len(RANKED[0]) - 1], 1: [len(RANKED[1]) - 1]}
"""Training images next to each other, and the last of each part: its replacement is the first."""
STEPS, BATCH = 6, 12
WORDS = ("norm=none", "norm_batch=null", f"global_batch={BATCH}", "augment.crop.area=[0.3, 1]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bad = {RANKED[part][number].key for part, numbers in BAD.items() for number in numbers}
    ways = iter(["empty", "truncated", "corrupt", "text"])
    made = [spoilt(picture, next(ways)) if picture.key in bad else picture for picture in PICTURES]
    return write_folder(made, tmp_path_factory.mktemp("files"), 1 / 7)


@dataclass(frozen=True)
class Case:
    """A layout, and where it starts."""

    seed: int
    threads: int
    replicas: int
    micro_batch: int
    start: int

    def plan(self, folder: Path) -> Plan:
        placed = (
            f"on.loader_workers={self.threads}", f"on.replicas={self.replicas}", f"on.micro_batch={self.micro_batch}"
        )  # fmt: skip
        return file_plan(folder, *WORDS, f"seed={self.seed}", *placed)


@cache
def alone(folder: Path, seed: int) -> tuple[Seen, Seen]:
    """What one thread of one replica shows from the beginning."""
    plan = Case(seed, 1, 1, BATCH, 0).plan(folder)
    return trained(plan, folder, 0, STEPS), judged(plan, folder)


def rest(seen: Seen, start: int) -> Seen:
    return seen[0][start * BATCH :], seen[1][start * BATCH :]


cases = st.builds(
    Case,
    seed=st.integers(0, 3),
    threads=st.sampled_from([1, 2, MOST_THREADS]),
    replicas=st.sampled_from([1, 2, 3]),
    micro_batch=st.sampled_from([1, 2, 3, 4, 6, 12]),
    start=st.integers(0, STEPS - 1),
)


@given(case=cases)
@settings(deadline=None, max_examples=20, derandomize=True)
def test_layout_and_resume_point_change_neither_pixels_nor_labels(folder: Path, case: Case) -> None:
    training, validation = alone(folder, case.seed)
    plan = case.plan(folder)
    assert same(trained(plan, folder, case.start, STEPS - case.start), rest(training, case.start))
    assert same(judged(plan, folder), validation)


@given(case=cases)
@settings(deadline=None, max_examples=400, derandomize=True)
@pytest.mark.long
def test_layout_and_resume_point_change_neither_pixels_nor_labels_at_length(folder: Path, case: Case) -> None:
    training, validation = alone(folder, case.seed)
    plan = case.plan(folder)
    assert same(trained(plan, folder, case.start, STEPS - case.start), rest(training, case.start))
    assert same(judged(plan, folder), validation)


@pytest.mark.parametrize("replicas", [1, 2])
def test_worker_processes_show_what_threads_show(folder: Path, replicas: int, tmp_path: Path) -> None:
    case = Case(1, MOST_THREADS + 1, replicas, 3, 2)
    training, validation = alone(folder, case.seed)
    assert same(trained(case.plan(folder), folder, 2, STEPS - 2, tmp_path), rest(training, 2))
    assert same(judged(case.plan(folder), folder, tmp_path), validation)
    assert {(row["split"], row["image"]) for row in quarantined(tmp_path)} == BAD_ROWS


BAD_ROWS = {(part, number) for which, part in enumerate(("training", "validation")) for number in BAD[which]}


@given(case=cases)
@settings(deadline=None, max_examples=6, derandomize=True)
def test_every_layout_lists_the_same_bad_images_once(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    run = tmp_path_factory.mktemp("run")
    plan = case.plan(folder)
    trained(plan, folder, 0, STEPS, run)
    judged(plan, folder, run)
    assert {(row["split"], row["image"]) for row in quarantined(run)} == BAD_ROWS
    assert len(quarantined(run)) == len(BAD_ROWS)


def test_seeds_differ_so_that_equal_means_something(folder: Path) -> None:
    one, other = alone(folder, 0)[0], alone(folder, 1)[0]
    assert not same(one, other)
    pictures = {picture.tobytes() for picture in one[0]}
    assert len(pictures) > 60
    assert len(np.unique(one[1])) > 3
