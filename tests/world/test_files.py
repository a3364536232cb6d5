"""Data in files from end to end: one run in every format, bad images that end nothing, and disks that come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from processes import Training, fingerprint, newest_step

from conftest import environment
from image_files import (
    PAGE,
    WRITERS,
    Seen,
    clean_pictures,
    every_pitfall,
    file_plan,
    judged,
    keys_of,
    same,
    spoilt,
    trained,
    write_every_format,
)
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag
from paceline.data.load import decode
from paceline.data.load.quarantine import QUARANTINE, quarantined
from paceline.data.pack import writer
from paceline.numpy_types import UInt8s
from paceline.record import latest, rows_of
from paceline.settings.data import Files
from paceline.training.trials import Outcome, Trial, compare_outcomes
from pictures_made import Made, make_pictures, split, write_folder, write_tars

FORMATS = [*WRITERS, "pack"]
WORDS = ("on.loader_workers=2", "on.micro_batch=4")
EXACT = ("on.precision=fp64", "on.cpu_threads=1", *WORDS)
TIMES = {"step_seconds", "images_per_second", "waiting", "total_seconds", "seconds", "memory"}


def lessons(run: Path) -> list[dict[str, object]]:
    """The record without what depends on the clock."""
    rows = rows_of(run)
    kept = latest(rows, "report") + latest(rows, "validation")
    return [{key: value for key, value in row.items() if key not in TIMES} for row in kept]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with every oddity but wrong labels, in every format, each with the labels of that format."""
    place = tmp_path_factory.mktemp("made")
    pictures = [picture for picture in make_pictures(80, 10) if picture.odd != "wrong"]
    write_every_format(pictures, place)
    for kind, write in WRITERS.items():
        write(pictures, place / f"{kind}-whole", 0)
    whole = open_index(Files(name="images"), place / "folder-whole", whole=True)
    writer.write_pack(whole, place / "pack-whole", processes=1)
    return place


@pytest.fixture(scope="module")
def as_folder(made: Path) -> tuple[Seen, Seen]:
    plan = file_plan(made / "folder", *WORDS)
    return trained(plan, made / "folder", 0, 10), judged(plan, made / "folder")


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_every_format_shows_the_same_pixels_and_labels_in_the_same_order(
    made: Path, as_folder: tuple[Seen, Seen], kind: str
) -> None:
    plan = file_plan(made / kind, *WORDS)
    assert open_index(Files(name="images", classes=10), made / kind).kind == kind
    assert same(trained(plan, made / kind, 0, 10), as_folder[0])
    assert same(judged(plan, made / kind), as_folder[1])
    assert len(np.unique(as_folder[0][1])) == 10


def test_the_pack_is_of_tiles_that_are_cut_and_no_more_images_are_left_to_pillow(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = open_index(Files(name="images"), made / "pack").training
    assert ((table.rows["flags"] & Flag.TILED) > 0).mean() > 0.7
    original, left = decode._read_with_pillow, list[set[bytes]]()

    def counted(encoded: bytes, width: int, height: int, window: decode.Window) -> UInt8s:
        left[-1].add(bytes(encoded))
        return original(encoded, width, height, window)

    monkeypatch.setattr(decode, "_read_with_pillow", counted)
    for kind in ("folder", "pack"):
        left.append(set())
        trained(file_plan(made / kind, *WORDS), made / kind, 0, 10)
    assert 0 < len(left[1]) <= len(left[0]) < 15


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_shares_of_the_data_are_the_same_images_in_every_format(made: Path, kind: str) -> None:
    words = (*WORDS, "data.validation=20%", "data.fraction=60%")
    seen = []
    for name in (f"{kind}-whole", "folder-whole"):
        plan = file_plan(made / name, *words)
        assert plan.facts.images < 65
        assert 4 < plan.facts.validation_images < 30
        seen.append((trained(plan, made / name, 0, 4), judged(plan, made / name)))
    assert all(same(one, other) for one, other in zip(*seen, strict=True))
    given = {"validation": 0.2, "fraction": 0.6}
    assert keys_of(made / f"{kind}-whole", **given) == keys_of(made / "folder-whole", **given)


def run_trial(folder: Path, data: Path, steps: int, *words: str) -> Outcome:
    folder.mkdir(parents=True)
    return Trial(folder, data, steps).finish(file_plan(data, *EXACT, *words))


def test_two_formats_train_the_same_network(made: Path, tmp_path: Path) -> None:
    one, other = (run_trial(tmp_path / kind, made / kind, 3) for kind in ("folder", "pack"))
    assert max(compare_outcomes(one, other).values()) == 0
    assert len(set(one.losses)) == 3


LABELED = ("data.labels=labels.csv", "data.first_label=0")


@pytest.mark.long
def test_600_pictures_with_every_pitfall_are_one_run_in_every_format(tmp_path: Path) -> None:
    data = every_pitfall(600, tmp_path / "data")
    (tmp_path / "page.yaml").write_text(PAGE.replace("max_bad: 0.2", "max_bad: 0.05"))
    bad, seen, runs = [], [], []
    for kind in FORMATS:
        words = () if kind == "pack" else LABELED
        plan = file_plan(data / kind, *WORDS, *words)
        seen.append((trained(plan, data / kind, 0, 40), judged(plan, data / kind)))
        run = tmp_path / kind
        training = Training(
            tmp_path, "train", "page.yaml", *words, *EXACT, "epochs=2", "--data", str(data / kind), "--out", kind
        )
        status, out, errors = training.end(600)
        assert (status, errors) == (0, "")
        assert "6 damaged images were replaced by a neighbor" in out
        bad.append(sorted((row["split"], row["image"], row["reason"]) for row in quarantined(run)))
        runs.append((lessons(run), fingerprint(run)))
    for kind, found, others, learned in zip(FORMATS, seen, bad, runs, strict=True):
        assert all(same(one, other) for one, other in zip(found, seen[0], strict=True)), kind
        assert others == bad[0], kind
        assert learned == runs[0], kind
    assert len(seen[0][1][0]) == 83
    reasons = "\n".join(str(reason) for _, _, reason in bad[0])
    for said in ("it is empty", "65,500 x 65,500", "its label 4010 is none of the 10 classes", "Pillow cannot decode"):
        assert said in reasons


@pytest.mark.long
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_the_same_run_on_other_layouts_too(made: Path, tmp_path: Path, kind: str) -> None:
    one = run_trial(tmp_path / "one", made / "folder", 4)
    other = run_trial(tmp_path / "other", made / kind, 4, "on.replicas=2", "on.micro_batch=8", "on.loader_workers=3")
    assert max(compare_outcomes(one, other).values()) <= 1e-12


BAD = 5


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder to work in: a page, and tars of which some images are bad, two of them neighbors."""
    pictures = clean_pictures(60)
    training, judged_ones = (sorted(part, key=lambda picture: picture.key) for part in split(pictures, 1 / 7))
    ways = ["empty", "truncated", "corrupt", "bomb"]
    bad = dict(zip([training[3].key, training[4].key, training[-1].key, judged_ones[2].key], ways, strict=True))
    made = [spoilt(picture, bad[picture.key]) if picture.key in bad else picture for picture in pictures]
    wrong = training[10].key
    made = [replace(picture, wrong_label=4321) if picture.key == wrong else picture for picture in made]
    write_tars(made, tmp_path / "data", 1 / 7)
    write_folder(made, tmp_path / "files", 1 / 7)
    (tmp_path / "page.yaml").write_text(PAGE)
    return tmp_path


def start(work: Path, *words: str) -> Training:
    training = Training(work, *words)
    training.run = work / "run"
    return training


def train(out: str = "run", *words: str) -> list[str]:
    return ["train", "page.yaml", "--data", "data", "--out", out, "on.cpu_threads=1", *WORDS, *words]


def test_too_many_bad_images_end_a_run_with_one_line(work: Path) -> None:
    status, _, errors = start(work, *train("run", "data.max_bad=0")).end()
    assert status == 2
    assert errors.count("\n") == 1
    assert errors.startswith("error: train-")
    assert (
        "with it 1 image cannot be decoded, and data.max_bad allows 0; they are listed in run/quarantine.jsonl"
        in errors
    )
    assert rows_of(work / "run")[-1]["kind"] == "failed"
    [row] = quarantined(work / "run")
    assert set(row) == {"split", "image", "name", "path", "offset", "reason"}


@pytest.mark.long
def test_a_signal_to_every_process_of_a_run_saves_it_whoever_decodes(work: Path) -> None:
    words = train("run", "epochs=500", "on.save=3 steps", "on.loader_workers=5")
    training = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words], cwd=work, env=environment(), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while newest_step(work / "run") < 3:
        assert training.poll() is None, training.communicate()
        time.sleep(0.01)
    os.killpg(training.pid, signal.SIGTERM)
    _, errors = training.communicate(timeout=120)
    assert (training.returncode, errors) == (75, "")
    assert rows_of(work / "run")[-1]["step"] == newest_step(work / "run")


@pytest.mark.long
def test_replicas_end_with_that_one_line_too(work: Path) -> None:
    status, _, errors = start(work, *train("run", "data.max_bad=0", "--replicas", "2")).end()
    assert status == 2
    assert errors.count("\n") == 1
    assert "cannot be decoded, and data.max_bad allows 0" in errors


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_killed_run_lists_bad_images_once_and_goes_on_exactly(work: Path, replicas: int) -> None:
    words = ("epochs=12", "on.save=3 steps", "--replicas", str(replicas))
    whole = start(work, *train("whole", *words))
    status, out, _ = whole.end()
    assert status == 0
    assert f"{BAD} damaged images were replaced by a neighbor: whole/{QUARANTINE}" in out
    part = start(work, *train("run", *words))
    part.wait_until(part.saved(9))
    part.kill()
    with (work / "run" / QUARANTINE).open("a") as file:
        file.write('{"split": "training", "im')  # what the kill may have cut short
    before = newest_step(work / "run")
    last = start(work, "resume", "run", "--data", "data")
    assert last.end()[0] == 0
    assert before < newest_step(work / "run")
    assert fingerprint(work / "run") == fingerprint(work / "whole")
    assert lessons(work / "run") == lessons(work / "whole")
    names = [
        [(row["split"], row["image"], row["reason"]) for row in quarantined(work / run)] for run in ("run", "whole")
    ]
    assert sorted(names[0]) == sorted(names[1])
    assert len(names[0]) == BAD


FRAIL = """
import sys
from pathlib import Path
from paceline.data.load import image_files
image_files.PAUSES = (0.02,) * 5
sound = image_files.ImageFiles._read
def frail(self, number):
    if Path("gone").exists() and f"{self.split} {number}" == Path("gone").read_text():
        raise OSError(5, "Input/output error")
    return sound(self, number)
image_files.ImageFiles._read = frail
from paceline.cli import main
main()
"""


def frail(work: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that cannot read the image that the file `gone` names."""
    return subprocess.run(
        [sys.executable, "-c", FRAIL, *words], cwd=work, env=environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_a_read_that_keeps_failing_ends_the_run_saved_and_resume_goes_on_exactly(work: Path) -> None:
    words = ("epochs=2", "on.save=1000 steps")
    assert frail(work, *train("whole", *words)).returncode == 0
    (work / "gone").write_text("training 17")
    ended = frail(work, *train("run", *words))
    assert ended.returncode == 75
    assert ended.stderr.count("\n") == 1
    assert "cannot be read (Input/output error; 6 attempts); go on with paceline resume" in ended.stderr
    assert rows_of(work / "run")[-1]["kind"] == "failed"
    assert newest_step(work / "run") == len(latest(rows_of(work / "run"), "report"))
    (work / "gone").unlink()
    assert frail(work, "resume", "run", "--data", "data").returncode == 0
    assert fingerprint(work / "run") == fingerprint(work / "whole")
    assert lessons(work / "run") == lessons(work / "whole")


@pytest.mark.long
@pytest.mark.parametrize(("data", "replicas"), [("data", 1), ("data", 2), ("files", 1)])
def test_a_file_that_goes_away_and_comes_back_changes_nothing(work: Path, data: str, replicas: int) -> None:
    words = ("epochs=40", "on.save=10 steps", "--replicas", str(replicas), "--data", data)
    assert start(work, *train("whole", *words)).end()[0] == 0
    part = start(work, *train("run", *words))
    part.wait_until(part.saved(10))
    file = work / data / "train-000001.tar" if data == "data" else next((work / data / "train" / "class003").iterdir())
    file.rename(work / "away")
    status, _, errors = part.end()
    assert (status, errors.count("\n")) == (75, 1)
    assert f"{file.relative_to(work / data)}" in errors
    assert "No such file or directory" in errors
    (work / "away").rename(file)
    assert start(work, "resume", "run", "--data", data).end()[0] == 0
    assert fingerprint(work / "run") == fingerprint(work / "whole")
    assert lessons(work / "run") == lessons(work / "whole")


@pytest.mark.long
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_validation_image_that_cannot_be_read_loses_no_judgment(work: Path, epochs: int) -> None:
    assert frail(work, *train("whole", f"epochs={epochs}")).returncode == 0
    (work / "gone").write_text("validation 3")
    assert frail(work, *train("run", f"epochs={epochs}")).returncode == 75
    saved = newest_step(work / "run")
    assert saved == latest(rows_of(work / "run"), "report")[-1]["step"]
    (work / "gone").unlink()
    assert frail(work, "resume", "run", "--data", "data").returncode == 0
    assert lessons(work / "run") == lessons(work / "whole")
    assert fingerprint(work / "run") == fingerprint(work / "whole")


ONE_REPLICA_FAILS = """
import os
if os.environ.get("RANK") == "1" and os.path.exists("gone"):
    from paceline.data.load import image_files
    image_files.PAUSES = (0.02,) * 5
    sound, reads = image_files.ImageFiles._read, []
    def frail(self, number):
        reads.append(number)
        if len(reads) > 60:
            raise OSError(5, "Input/output error")
        return sound(self, number)
    image_files.ImageFiles._read = frail
"""


@pytest.mark.long
def test_the_first_replica_saves_when_another_cannot_read(work: Path) -> None:
    words = ("epochs=8", "on.save=1000 steps", "--replicas", "2")
    assert start(work, *train("whole", *words)).end()[0] == 0
    (work / "site").mkdir()
    (work / "site" / "sitecustomize.py").write_text(ONE_REPLICA_FAILS)
    (work / "gone").touch()
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", *train("run", *words)], cwd=work, capture_output=True, text=True,
        timeout=120, check=False, env=environment() | {"PYTHONPATH": str(work / "site")},
    )  # fmt: skip
    assert ended.returncode == 75
    assert "cannot be read (Input/output error" in ended.stderr
    assert 0 < newest_step(work / "run") == latest(rows_of(work / "run"), "report")[-1]["step"]
    (work / "gone").unlink()
    assert start(work, "resume", "run", "--data", "data").end()[0] == 0
    assert fingerprint(work / "run") == fingerprint(work / "whole")
    assert lessons(work / "run") == lessons(work / "whole")


@pytest.mark.long
def test_kept_and_cached_images_change_no_judgment(work: Path) -> None:
    plain = ("epochs=2", "on.precision=fp64")
    kept = ("on.decoded_validation=true", "on.cache=100 KB")
    for out, words in (("plain", ()), ("first", kept), ("second", kept), ("many", (*kept, "on.loader_workers=5"))):
        assert start(work, *train(out, *plain, *words)).end()[0] == 0
    for out in ("first", "second", "many"):
        assert lessons(work / out) == lessons(work / "plain")
        assert fingerprint(work / out) == fingerprint(work / "plain")
        assert len(quarantined(work / out)) == BAD


@pytest.mark.long
def test_a_function_of_ones_own_works_from_the_command_line_on_replicas(work: Path) -> None:
    (work / "mine.py").write_text("def lighter(picture, words):\n    return picture // 2 + int(words[0] % 64)\n")
    words = ("augment.python=mine:lighter", "on.precision=fp64", "epochs=1")
    for out, placed in (("one", ()), ("two", ("--replicas", "2", "on.loader_workers=5")), ("none", ())):
        asked = words if out != "none" else words[1:]
        status, _, errors = start(work, *train(out, *asked, *placed)).end()
        assert (status, errors) == (0, "")
    losses = {
        out: [float(row["loss"]) for row in latest(rows_of(work / out), "report")] for out in ("one", "two", "none")
    }
    assert losses["one"] == pytest.approx(losses["two"], rel=1e-12)
    assert losses["one"] != pytest.approx(losses["none"], rel=1e-3)
    (work / "mine.py").write_text("def lighter(picture, words):\n    return picture + 1j\n")
    status, _, errors = start(work, *train("wrong", *words)).end()
    assert (status, errors.count("\n")) == (2, 1)
    assert "augment.python=mine:lighter gave complex128 (16, 16, 3); it should give uint8 (16, 16, 3)" in errors


def test_settings_that_do_not_fit_the_data_are_refused_in_one_line(work: Path) -> None:
    status, _, errors = start(work, *train("run", "augment.pad=4")).end()
    assert (status, errors.count("\n")) == (2, 1)
    assert "augment.pad is for pictures of one size" in errors


MEMORY = """
import os
import sys
from contextlib import closing
from pathlib import Path
from image_files import file_plan, loading

def family(process):
    below = [child for file in Path(f"/proc/{process}/task").glob("*/children") for child in file.read_text().split()]
    return [process, *(one for child in below for one in family(child))]

def resident():
    lines = [line for one in family(os.getpid()) for line in Path(f"/proc/{one}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

folder = Path(sys.argv[1])
plan = file_plan(folder, "epochs=3", "global_batch=64", "data.side=64", "data.evaluation.short=72", *sys.argv[2:])
steps = plan.facts.images // plan.global_batch + 1
with loading(plan, folder, 0, folder / "..") as loader, closing(loader.training(0)) as shares:
    for epoch in range(3):
        for step in range(steps):
            next(shares)
        for batch in loader.validation():
            pass
        print(resident())
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its memory from /proc")
@pytest.mark.parametrize(
    ("word", "megabytes"), [("on.loader_workers=2", 20), ("on.cache=1 MB", 20), ("on.loader_workers=5", 60)]
)
def test_memory_is_flat_over_three_epochs(tmp_path: Path, word: str, megabytes: int) -> None:
    """That of all processes: each of the five loads what it needs for a rare image when it meets the first."""
    folder = write_folder(many(1200), tmp_path / "data", 1 / 7)
    found = subprocess.run(
        [sys.executable, "-c", MEMORY, str(folder), word], capture_output=True, text=True, check=True, timeout=500,
        env=environment() | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
    )  # fmt: skip
    first, _, third = map(float, found.stdout.split())
    print(f"{word}: {first:.1f} MB after the first epoch, {third:.1f} MB after the third")
    assert third - first < megabytes


def many(count: int) -> list[Made]:
    """Pictures with a few oddities, most of them the same few over and over."""
    few = make_pictures(120, 10)
    return [replace(few[number % 120], key=f"{number:06d}") for number in range(count)]
