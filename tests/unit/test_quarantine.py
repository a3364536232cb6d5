"""The quarantine: bad images are counted once, listed, and too many end the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from image_files import clean_pictures, file_plan
from paceline.data.load.image_files import ImageFiles, open_splits
from paceline.data.load.quarantine import QUARANTINE, Quarantine, quarantined
from paceline.errors import DataError
from paceline.settings.data import Files
from pictures_made import write_folder, write_tars

PICTURES = clean_pictures(40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(PICTURES, tmp_path_factory.mktemp("files"), 1 / 7)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tars(PICTURES, tmp_path_factory.mktemp("tars"), 1 / 7)


def opened(folder: Path) -> tuple[ImageFiles, ImageFiles]:
    plan = file_plan(folder)
    assert isinstance(plan.data, Files)
    return open_splits(plan, plan.data, folder)


def test_a_bad_image_is_listed_once_with_path_offset_and_reason(tars: Path, tmp_path: Path) -> None:
    part = opened(tars)[0]
    bad = Quarantine.of(tmp_path, 20)
    for _ in range(3):
        bad.add(part, 4, "it is cut short")
    row = part.table.rows[4]
    [line] = (tmp_path / QUARANTINE).read_text().splitlines()
    assert json.loads(line) == {
        "split": "training",
        "image": 4,
        "name": f"{part.table.shards[int(row['shard'])]} at byte {int(row['offset']):,}",
        "path": part.table.shards[int(row["shard"])],
        "offset": int(row["offset"]),
        "reason": "it is cut short",
    }
    assert len(bad) == 1


def test_training_and_validation_images_of_one_number_are_two(tars: Path, tmp_path: Path) -> None:
    bad = Quarantine.of(tmp_path, 20)
    for part in opened(tars):
        bad.add(part, 3, "it is empty")
    assert len(bad) == len(quarantined(tmp_path)) == 2


def test_replicas_and_later_starts_count_an_image_once(tars: Path, tmp_path: Path) -> None:
    part = opened(tars)[0]
    one, other = Quarantine.of(tmp_path, 2), Quarantine.of(tmp_path, 2)
    one.add(part, 1, "it is empty")
    other.add(part, 1, "it is empty")
    assert len(quarantined(tmp_path)) == len(one) == len(other) == 1
    third = Quarantine.of(tmp_path, 2)
    third.add(part, 1, "it is empty")
    assert len((tmp_path / QUARANTINE).read_text().splitlines()) <= 2
    third.add(part, 2, "it is empty")
    with pytest.raises(DataError, match=r"with it 3 images cannot be decoded, and data\.max_bad allows 2"):
        other.add(part, 3, "it is empty")


def test_zero_allows_no_bad_image_and_one_allows_one(tars: Path, tmp_path: Path) -> None:
    part = opened(tars)[0]
    with pytest.raises(DataError, match=r"\.tar at byte .*with it 1 image .* allows 0; mend them, or write a larger"):
        Quarantine.of(None, 0).add(part, 0, "it is empty")
    few = Quarantine.of(tmp_path, 1)
    few.add(part, 0, "it is empty")
    with pytest.raises(DataError, match=f"listed in {tmp_path / QUARANTINE}"):
        few.add(part, 1, "it is empty")


def test_a_line_that_a_kill_cut_short_is_passed_over(tars: Path, tmp_path: Path) -> None:
    part = opened(tars)[0]
    Quarantine.of(tmp_path, 20).add(part, 1, "it is empty")
    with (tmp_path / QUARANTINE).open("a") as file:
        file.write('{"split": "training", "image": 2, "na')
    assert [row["image"] for row in quarantined(tmp_path)] == [1]
    after = Quarantine.of(tmp_path, 20)
    after.add(part, 2, "it is empty")
    after.add(part, 3, "it is empty")
    assert sorted(int(row["image"]) for row in quarantined(tmp_path)) == [1, 2, 3]


def test_nothing_is_listed_where_there_is_no_run(tmp_path: Path) -> None:
    assert quarantined(tmp_path) == []


def test_too_many_bad_images_end_a_resumed_run_too(folder: Path, tmp_path: Path) -> None:
    part = opened(folder)[0]
    first = Quarantine.of(tmp_path, 0)
    with pytest.raises(DataError, match=r"data.max_bad allows 0"):
        first.add(part, 3, "it is empty")
    with pytest.raises(DataError, match=r"data.max_bad allows 0"):
        Quarantine.of(tmp_path, 0).add(part, 3, "it is empty")
    assert len(quarantined(tmp_path)) == 1


def test_images_of_an_earlier_start_count_until_they_are_mended(folder: Path, tmp_path: Path) -> None:
    parts = {part.split: part for part in opened(folder)}
    before = Quarantine.of(tmp_path, 3)
    for split_name, number in (("training", 1), ("training", 2), ("validation", 1)):
        before.add(parts[split_name], number, "it is empty")
    bad = {("training", 2)}
    looked = list[tuple[str, int]]()

    def is_bad(split_name: str, number: int) -> bool:
        looked.append((split_name, number))
        return (split_name, number) in bad

    replicas = [Quarantine.of(tmp_path, 3) for _ in range(2)]
    for number in (4, 5):
        for replica in replicas:
            replica.add(parts["training"], number, "it is empty", is_bad)
            assert len(replica) == number - 2
    assert sorted(looked) == sorted([("training", 1), ("training", 2), ("validation", 1)] * 2)
    bad.add(("training", 1))  # which is damaged once more
    with pytest.raises(DataError, match=r"with it 4 images cannot be decoded, and data\.max_bad allows 3"):
        replicas[0].add(parts["training"], 1, "it is empty", is_bad)
    assert len(quarantined(tmp_path)) == 5


def test_a_full_disk_costs_the_list_and_not_the_training(tars: Path, tmp_path: Path) -> None:
    part, bad = opened(tars)[0], Quarantine.of(tmp_path, 20)
    (tmp_path / QUARANTINE).symlink_to("/dev/full")
    bad.add(part, 4, "it is cut short")
    assert len(bad) == 1
