"""Worker processes of one replica: they share what one of them has read, and the index that the replica has made."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from conftest import environment
from image_files import CPU, clean_pictures, file_plan, judged, loading, same, trained
from paceline.data.index import file
from paceline.data.index.scan import open_index
from paceline.data.load.cache import Cache
from paceline.data.load.image_files import ImageFiles, open_splits
from paceline.data.load.workers import Chunk, Faults, Fill, Processes
from paceline.errors import DataError
from paceline.settings.data import Files
from pictures_made import split, write_folder
from workers_made import failing, meeting, scanning

PICTURES = clean_pictures(60)
WORDS = ("on.loader_workers=5", "on.micro_batch=8", "norm=none", "norm_batch=null")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(PICTURES, tmp_path / "data", 1 / 3)


def opened(folder: Path, *words: str) -> tuple[ImageFiles, ImageFiles]:
    plan = file_plan(folder, *WORDS, *words)
    assert isinstance(plan.data, Files)
    return open_splits(plan, plan.data, folder)


@contextmanager
def two_workers(makes: Callable[[], Fill]) -> Iterator[Processes]:
    workers = Processes(makes, 2, CPU)
    try:
        yield workers
    finally:
        workers.close()


def asked(workers: Processes, split: str, count: int, together: bool = False) -> Callable[[], tuple[Faults, bytes]]:
    """Have a worker fill a batch with the first images; with `together`, when another one does too."""
    batch = workers.batch((count, 4, 4, 3))
    chunk = Chunk(split, np.arange(count), np.zeros((count, 4)), np.full(count, together), None)
    answer = batch.decode(chunk, 0)
    return lambda: (answer(), batch.to_device().numpy().tobytes())


def test_an_image_that_one_worker_has_read_is_read_by_no_other(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    plan = file_plan(folder, *WORDS, "on.cache=1 GiB")
    replica, _ = opened(folder, "on.cache=1 GiB")
    with two_workers(partial(meeting, plan, folder, tmp_path / "meet", replica.cache)) as workers:
        [(reads, _)], first = asked(workers, "training", 30)()
        assert reads == 30
        both = [asked(workers, "training", 30, together=True) for _ in range(2)]
        answers = [answer() for answer in both]
        assert [found for found, _ in answers] != [answers[0][0]] * 2  # two processes
        assert [found[0][0] for found, _ in answers] == [0, 0]
        assert {pixels for _, pixels in answers} == {first}
    assert all(replica.cache.get("training", number) == replica._read(number) for number in range(30))
    assert replica.cache.get("training", 30) is None
    assert replica.cache.get("validation", 0) is None


def test_without_room_every_worker_reads_for_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    with two_workers(partial(meeting, file_plan(folder, *WORDS), folder, tmp_path / "meet", Cache(0))) as workers:
        first = asked(workers, "training", 9)()
        answers = [answer() for answer in [asked(workers, "training", 9, together=True) for _ in range(2)]]
    assert [found[0][0] for found, _ in [first, *answers]] == [9, 9, 9]


def test_a_validation_that_was_read_once_needs_no_files_whoever_decodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = judged(file_plan(folder, *WORDS, "on.loader_workers=2"), folder)
    with loading(file_plan(folder, *WORDS, "on.cache=1 GiB"), folder) as loader:
        for spoil in (True, False, False):
            batches = [(batch.images[: batch.count], batch.labels[: batch.count]) for batch in loader.validation()]
            pixels = np.concatenate([images.permute(0, 2, 3, 1).numpy() for images, _ in batches])
            assert same((pixels, np.concatenate([labels.numpy() for _, labels in batches])), plain)
            for file in (folder / "val").rglob("*.*") if spoil else []:
                file.write_bytes(b"")  # in place: a worker that only begins now finds the index as it was


@pytest.mark.parametrize("budget", ["20 KB", "1 GiB"])
def test_workers_that_share_a_cache_show_the_same_images(folder: Path, budget: str) -> None:
    plain = trained(file_plan(folder, *WORDS, "on.loader_workers=2"), folder, 0, 9)
    assert same(trained(file_plan(folder, *WORDS, f"on.cache={budget}"), folder, 0, 9), plain)


def test_memory_is_given_back_with_the_last_that_holds_it() -> None:
    files = Path("/proc/self/fd")
    gc.collect()  # what earlier tests left open is closed now, and not between the two counts
    before = len(list(files.iterdir())) if files.is_dir() else 0
    cache = Cache(1000, (4, 0))
    del cache
    assert not files.is_dir() or len(list(files.iterdir())) <= before


def test_a_worker_that_cannot_begin_says_why() -> None:
    with two_workers(failing) as workers:
        for _ in range(2):
            with pytest.raises(DataError, match=r"^the disk is gone$"):
                asked(workers, "training", 1)()


STOPPED = """
import os
import signal
import sys
import threading
import time
import numpy as np
import torch
from image_files import marking
from paceline.data.inspect.measure import _workers
from paceline.data.load.workers import Chunk, Processes

heard = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: heard.append(number))

def decoded(workers):
    batch = workers.batch((9, 4, 4, 3))
    return batch.decode(Chunk("training", np.arange(9), np.zeros((9, 4)), np.zeros(9, bool), None), 0)() == []

def stopped(number):
    os.killpg(0, number)
    time.sleep(0.3)  # until all that it ends are gone

if sys.argv[1] == "loader":
    made = []  # by a thread that hears no signals, as some loaders are
    maker = threading.Thread(target=lambda: made.append(Processes(marking, 2, torch.device("cpu"))))
    maker.start()
    maker.join()
    for number in (signal.SIGINT, signal.SIGTERM):
        stopped(number)  # the first time, their server still loads torch
        assert decoded(made[0])
    made[0].close()
else:
    with _workers(5) as pool:
        for number in (signal.SIGINT, signal.SIGTERM):
            stopped(number)
            assert [pool.submit(abs, -3).result() for _ in range(5)] == [3] * 5
assert heard == [signal.SIGINT, signal.SIGTERM]
"""
"""A process that is asked to stop together with all that it started, as by Ctrl-C or by a cluster."""


@pytest.mark.parametrize("whose", ["loader", "measurement"])
@pytest.mark.long
def test_what_asks_all_processes_to_stop_leaves_it_to_the_replica(whose: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, whose], env=environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def nowhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Neither the data's folder nor the user's cache can be written, by nobody."""
    (folder / ".paceline").write_text("a file where the folder would be")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    environment = {"PACELINE_CACHE": str(folder / ".paceline" / "below a file")}
    monkeypatch.setenv("PACELINE_CACHE", environment["PACELINE_CACHE"])
    return environment


def test_where_nothing_lasting_can_be_written_workers_open_the_index_of_the_replica(
    folder: Path, nowhere: dict[str, str], tmp_path: Path
) -> None:
    plan = file_plan(folder, *WORDS)
    makes = partial(scanning, plan, folder, str(tmp_path / "temporary"), nowhere)
    with two_workers(makes) as workers:
        assert asked(workers, "training", 1)()[0] == [(0, str(plan.facts.images))]
    for kept in (tmp_path / "temporary").rglob("*.safetensors"):
        kept.unlink()
    with two_workers(makes) as workers:  # so that the count is known to count
        [(scanned, _)], _ = asked(workers, "training", 1)()
        assert scanned > 10


@pytest.mark.usefixtures("nowhere")
def test_an_index_among_temporary_files_is_this_users_alone(folder: Path, tmp_path: Path) -> None:
    data = Files(name="images", classes=10)
    expected = open_index(data, folder).training.rows
    [place] = (tmp_path / "temporary").iterdir()
    assert place.stat().st_mode & 0o777 == 0o700
    assert file.index_folders(folder)[-1] == file.writable_folder(folder) == place
    assert file.lasting_folder(folder) is None  # decoded pictures do not go there
    place.chmod(0o777)  # anybody may have put anything there
    assert place not in file.index_folders(folder)
    assert file.writable_folder(folder) is None
    assert np.array_equal(open_index(data, folder).training.rows, expected)
    shutil.rmtree(place)
    place.symlink_to(folder)
    assert file.writable_folder(folder) is None


@pytest.mark.usefixtures("nowhere")
def test_where_nothing_at_all_can_be_written_the_data_is_still_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert file.writable_folder(folder) is None
    assert len(open_index(Files(name="images", classes=10), folder).training) == len(split(PICTURES, 1 / 3)[0])
