"""`paceline bench data` keeps to its time: how many rounds it takes, and what it tells while it measures."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from image_files import clean_pictures, file_plan
from paceline.command import bench_data
from paceline.data.index.scan import open_index
from paceline.data.inspect import measure
from paceline.data.inspect.advice import GPU_DECODER, PACK, SMALLER_PACK
from paceline.data.inspect.measure import Rates, Sample
from paceline.data.pack.transcode import LossyPreset
from paceline.settings.data import Files
from pictures_made import write_folder


@dataclass
class Clock:
    """A clock that only measuring moves."""

    cost: float
    """Seconds that go by in one measurement beside those that were asked for, such as to start processes."""
    now: float = 1000.0
    asked: list[tuple[int, float]] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def measure(self, sample: Sample, threads: int, seconds: float) -> Rates:
        self.now += self.cost + 3 * seconds
        self.asked.append((threads, seconds))
        return Rates(threads, 300.0 + len(self.asked), 200.0, 100.0)


@pytest.fixture
def sample() -> Sample:
    plan: Any = None
    return Sample(plan, Path("nowhere"), 1)


def measured(
    monkeypatch: pytest.MonkeyPatch, sample: Sample, clock: Clock, budget: float = 30, seconds: float = 1.0
) -> tuple[int, list[dict[str, Any]], list[tuple[str, int, int]]]:
    monkeypatch.setattr(bench_data, "time", clock)
    monkeypatch.setattr(measure, "measure_rates", clock.measure)
    told: list[tuple[str, int, int]] = []
    todo = [("as it is", sample, count) for count in bench_data.thread_counts(16, 16)]
    rounds, found = bench_data._measure_in_turn(todo, seconds, clock.now + budget, lambda *said: told.append(said))
    return rounds, found, told


@pytest.mark.parametrize(("cost", "rounds"), [(0.0, 5), (1.0, 5), (2.0, 3), (5.0, 1), (60.0, 1)])
def test_rounds_that_do_not_fit_the_time_are_left_out(
    monkeypatch: pytest.MonkeyPatch, sample: Sample, cost: float, rounds: int
) -> None:
    clock = Clock(cost)
    found, rows, _ = measured(monkeypatch, sample, clock)
    assert found == rounds
    assert clock.asked == [(threads, 0.2) for threads in (1, 8, 16)] * rounds
    assert [row["read"] for row in rows] == [300.0 + 3 * (rounds - 1) + place for place in (1, 2, 3)]  # the best
    assert rounds == 1 or clock.now <= 1030


def test_every_measurement_shows_that_it_goes_on(monkeypatch: pytest.MonkeyPatch, sample: Sample) -> None:
    _, _, told = measured(monkeypatch, sample, Clock(2.0))
    assert [done for _, done, _ in told] == list(range(10))
    assert {what for what, _, _ in told} == {"measuring"}
    assert told[0][2] == 15
    assert told[-1][1] == told[-1][2] == 9


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 12, 16, 48, 96, 128, 256])
def test_large_machines_take_no_more_points(cores: int) -> None:
    assert len(bench_data.thread_counts(cores, cores)) <= 4
    assert {1, cores} <= set(bench_data.thread_counts(cores, cores))
    assert len(bench_data.thread_counts(cores, 5)) <= 5


def test_reading_and_decoding_are_measured_by_the_same_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(clean_pictures(20), tmp_path / "data", 1 / 7)
    found = Sample.of(file_plan(folder), open_index(Files(name="images", classes=10), folder), 8, tmp_path / "few")
    made, real = list[int](), measure._workers

    def counted(threads: int) -> Executor:
        made.append(threads)
        return real(threads)

    monkeypatch.setattr(measure, "_workers", counted)
    got = measure.measure_rates(found, 2, 0.001)
    assert made == [2]
    assert min(got.read, got.decode, got.whole) > 0


def test_a_pack_is_told_of_while_it_is_made(tmp_path: Path) -> None:
    folder = write_folder(clean_pictures(20), tmp_path / "data", 1 / 7)
    found = Sample.of(file_plan(folder), open_index(Files(name="images", classes=10), folder), 8, tmp_path / "few")
    told: list[str] = []
    found.packed(tmp_path / "pack", LossyPreset(), 1, progress=lambda what, done, total: told.append(what))
    assert "packing" in told


@pytest.mark.parametrize(
    ("cores", "threads", "counts"),
    [(1, 1, [1]), (2, 2, [1, 2]), (6, 4, [1, 2, 4, 6]), (16, 5, [1, 5, 8, 16]), (4, 16, [1, 2, 4, 16])],
)
def test_one_half_and_all_of_the_cores_are_measured(cores: int, threads: int, counts: list[int]) -> None:
    assert bench_data.thread_counts(cores, threads) == counts


def test_a_busy_machine_is_warned_of() -> None:
    assert "load 4.3 on 2 cores" in bench_data.busy_warning(4.3, 2)
    assert bench_data.busy_warning(0.4, 2) == ""


def rates_row(what: str, threads: int, whole: float, limit: str | None = "decode") -> dict[str, Any]:
    return {"images": what, "threads": threads, "read": 9e9, "decode": 9e9, "whole": whole, "limit": limit}


def test_the_sentence_names_the_limit_and_what_was_measured_to_help() -> None:
    rows = [
        rates_row(bench_data.AS_IT_IS, 1, 210), rates_row(bench_data.AS_IT_IS, 2, 410),
        rates_row(PACK.name, 2, 861), rates_row(SMALLER_PACK.name, 2, 1394), rates_row(GPU_DECODER.name, 2, 4100, None),
    ]  # fmt: skip
    facts = {"rates": rows, "threads": 2, "limit": "decode", "transfer": None, "remedies": bench_data.gains(rows, 2)}
    assert bench_data.sentence(facts) == (
        "decode limits: 410 images/s on 2 threads; a lossless pack (paceline data pack SOURCE OUT) would give 2.1x, "
        "a smaller pack (paceline data pack SOURCE OUT --max-side 500 --quality 90) would give 3.4x, "
        "on.decoder=gpu would give 10.0x"
    )
    one = facts | {"threads": 1, "remedies": bench_data.gains(rows[:2], 1)}
    assert bench_data.sentence(one) == "decode limits: 210 images/s on 1 thread; on.loader_workers=2 would give 2.0x"


def test_what_does_not_help_is_not_advised() -> None:
    rows = [rates_row(bench_data.AS_IT_IS, 2, 410), rates_row(PACK.name, 2, 420)]
    facts = {"rates": rows, "threads": 2, "limit": "decode", "transfer": None, "remedies": bench_data.gains(rows, 2)}
    assert bench_data.sentence(facts).endswith("; nothing that was measured would give more")
    rows[1]["whole"] = 4000
    slow = facts | {"limit": "transfer", "transfer": 99.0, "remedies": bench_data.gains(rows, 2)}
    assert bench_data.sentence(slow) == ("transfer limits: 99 images/s; nothing that was measured would give more")
