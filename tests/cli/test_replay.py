"""Steps that are not finite: skipped, counted, stopped at, and looked into."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import SMALL, Paceline, make_plan, make_session
from image_files import PAGE, WRITERS, clean_pictures
from paceline import checkpoint
from paceline.data.index.scan import open_index
from paceline.record import latest, rows_of
from paceline.settings.data import Files
from paceline.training.replay import replay


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "small.yaml").write_text(SMALL)
    return "small.yaml"


def test_bad_steps_are_skipped_and_counted_until_there_are_too_many_in_a_row(
    paceline: Paceline, small: str, tmp_path: Path
) -> None:
    words = ["train", small, "optimizer.lr=1e30", "epochs=3", "--out", "run"]
    done = paceline(*words, "bad_steps_in_a_row=4")
    assert done.returncode == 1
    assert "4 steps in a row were bad (a gradient or a statistic of a norm was not finite)" in done.stderr
    reports = latest(rows_of(tmp_path / "run"), "report")
    bad = reports[-1]["step"]
    assert f"paceline replay run --step {bad - 3}\n" in done.stderr  # the first of the row
    assert reports[-1]["bad_steps_in_a_row"] == 4
    assert reports[-1]["bad_steps"] == 4
    assert checkpoint.saved_steps(tmp_path / "run/checkpoints")[-1] == bad  # nothing is lost


def test_a_recipe_that_wants_no_bad_step_stops_at_the_first(paceline: Paceline, small: str, tmp_path: Path) -> None:
    done = paceline("train", small, "optimizer.lr=1e30", "epochs=3", "on_bad_step=stop", "--out", "run")
    assert done.returncode == 1
    last = latest(rows_of(tmp_path / "run"), "report")[-1]
    assert last["bad_steps"] == 1
    assert f"step {last['first_bad_step']} was bad (a gradient" in done.stderr


FP16 = ("on.device=cpu", "on.precision=fp16")


@pytest.mark.long
def test_too_many_bad_steps_in_a_row_end_a_run_though_good_ones_came_before_the_report(
    paceline: Paceline, small: str, tmp_path: Path
) -> None:
    steps = "on.loss_scale={0 steps: 1, 1 steps: 16777216, 4 steps: 1}"
    words = ["train", small, *FP16, steps, "report=1 epoch", "epochs=2"]
    assert paceline(*words, "bad_steps_in_a_row=4", "--out", "fine").returncode == 0
    done = paceline(*words, "bad_steps_in_a_row=3", "--out", "run")
    assert done.returncode == 1
    assert "3 steps in a row were bad" in done.stderr
    row = latest(rows_of(tmp_path / "run"), "report")[-1]
    assert (row["step"], row["bad_steps"], row["bad_steps_in_a_row"], row["first_bad_step"]) == (6, 3, 3, 2)
    rows = latest(rows_of(tmp_path / "fine"), "report")
    assert [(row["bad_steps"], row["bad_steps_in_a_row"], row["first_bad_step"]) for row in rows] == [
        (3, 3, 2), (3, 0, 0),
    ]  # fmt: skip


def test_a_variance_that_overflows_is_a_bad_step_and_named(paceline: Paceline, small: str, tmp_path: Path) -> None:
    words = ["train", small, "optimizer.lr=1e12", "epochs=3", "on.precision=fp32", "on_bad_step=stop", "--out", "run"]
    done = paceline(*words)
    assert done.returncode == 1
    bad = latest(rows_of(tmp_path / "run"), "report")[-1]["first_bad_step"]
    seen = paceline("replay", "run", "--step", str(bad))
    assert seen.returncode == 1, seen.stdout + seen.stderr
    found = json.loads(paceline("replay", "run", "--step", str(bad), "--json").stdout)
    assert found["layer"] is None
    assert "norm" in found["statistics"]
    assert f"in a step in which the mean or variance that {found['statistics']} finds is not finite" in seen.stdout
    assert len(found["images"]) == 16


@pytest.mark.long
def test_a_step_is_repeated_by_the_micro_batches_it_was_trained_with(
    paceline: Paceline, small: str, tmp_path: Path
) -> None:
    """In 16 bits a gradient that is summed over more images overflows sooner."""
    words = ["train", small, *FP16, "on.loss_scale=16384", "on.micro_batch=4", "norm_batch=4", "--out", "run"]
    assert paceline(*words).returncode == 0
    rows = latest(rows_of(tmp_path / "run"), "report")
    by_four, by_sixteen = [], []
    for row in rows:
        was_bad = row["first_bad_step"] == row["step"]
        step = ["replay", "run", "--step", str(row["step"])]
        by_four.append((paceline(*step).returncode == 1) == was_bad)
        by_sixteen.append((paceline(*step, "on.micro_batch=16").returncode == 1) == was_bad)
    assert all(by_four)
    assert not all(by_sixteen)  # or this test would show nothing


def test_a_bad_step_is_repeated_and_its_first_layer_and_images_are_named(
    paceline: Paceline, small: str, tmp_path: Path
) -> None:
    paceline("train", small, "optimizer.lr=1e30", "epochs=3", "on_bad_step=stop", "--out", "run")
    bad = latest(rows_of(tmp_path / "run"), "report")[-1]["first_bad_step"]
    done = paceline("replay", "run", "--step", str(bad), "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["layer"] is not None
    assert found["started_from"] < bad
    assert 1 <= len(found["images"]) <= 16
    assert all(image.keys() == {"image"} and 0 <= image["image"] < 96 for image in found["images"])
    parts = paceline("replay", "run", "--step", str(bad), "--json", "on.micro_batch=4")
    assert json.loads(parts.stdout)["images"] == found["images"]  # those of every micro-batch
    fine = paceline("replay", "run", "--step", "1")
    assert fine.returncode == 0, fine.stderr
    assert "Every output, statistic and gradient of this step is finite here." in fine.stdout


def test_the_way_to_a_step_shows_how_far_it_is(tmp_path: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    session = make_session(make_plan(), tmp_path)
    finding = replay(session, 4, lambda _: None, lambda *far: progress.append(far))
    assert finding.step == 4
    assert progress == [("training again", done, 3) for done in (1, 2, 3)]


def test_a_step_that_the_run_does_not_have_is_refused(paceline: Paceline, small: str) -> None:
    assert paceline("train", small, "--out", "run").returncode == 0
    for step in ("0", "7"):
        done = paceline("replay", "run", "--step", step)
        assert done.returncode == 2
        assert f"--step {step}, and the run has steps 1 to 6" in done.stderr


def test_more_than_one_replica_is_refused(paceline: Paceline, small: str, tmp_path: Path) -> None:
    assert paceline("train", small, "--out", "run").returncode == 0
    done = paceline("replay", "run", "--step", "5", "on.replicas=2", "on.micro_batch=8")
    assert done.returncode == 2
    assert done.stderr == (
        "error: 'on.replicas=2': replay sees all images of a step in one process; leave on.replicas out\n"
    )
    done = paceline("replay", "run", "--step", "5", "on.replicas=1", "on.micro_batch=8", "--json")
    assert done.returncode == 0, done.stderr
    expected = latest(rows_of(tmp_path / "run"), "report")[4]["last_loss"]
    assert json.loads(done.stdout)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_a_step_before_every_checkpoint_is_taken_again_from_the_initial_weights(
    paceline: Paceline, small: str, tmp_path: Path
) -> None:
    assert paceline("train", small, "--out", "first", "on.keep_last=1").returncode == 0
    words = ["init.from=first", "--out", "run", "on.keep_last=1"]
    assert paceline("train", small, *words).returncode == 0
    assert checkpoint.saved_steps(tmp_path / "run/checkpoints") == [6]
    done = paceline("replay", "run", "--step", "3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["started_from"], found["from_checkpoint"]) == (0, False)
    assert found["loss"] == pytest.approx(latest(rows_of(tmp_path / "run"), "report")[2]["last_loss"], rel=1e-5)
    assert "there is no intact checkpoint from before step 3: starting from the initial weights" in done.stderr
    assert f"init.from {tmp_path}/first: " in done.stderr
    shutil.rmtree(tmp_path / "first")
    gone = paceline("replay", "run", "--step", "3")
    assert gone.returncode == 2
    assert gone.stderr.count("\n") == 1, gone.stderr
    assert "no intact checkpoint from before step 3, and the weights that the run began with" in gone.stderr
    assert "/first is not there" in gone.stderr


@pytest.mark.parametrize("form", ["folder", pytest.param("webdataset", marks=pytest.mark.long)])
@pytest.mark.long
def test_images_in_files_are_named_by_number_and_path(paceline: Paceline, tmp_path: Path, form: str) -> None:
    WRITERS[form](clean_pictures(64), tmp_path / "data")
    (tmp_path / "files.yaml").write_text(PAGE)
    words = ["optimizer.lr=1e30", "global_batch=32", "on_bad_step=stop", "epochs=4", "--data", "data", "--out", "run"]
    assert paceline("train", "files.yaml", *words).returncode == 1
    bad = str(latest(rows_of(tmp_path / "run"), "report")[-1]["first_bad_step"])
    found = json.loads(paceline("replay", "run", "--step", bad, "--json").stdout)["images"]
    table = open_index(Files(name="images"), tmp_path / "data").training
    assert found
    for image in found:
        row = table.rows[image["image"]]
        assert image["name"] == table.name(image["image"])
        assert (image["path"], image["offset"]) == (table.shards[int(row["shard"])], row["offset"])
        assert (tmp_path / "data" / image["path"]).is_file()
        assert (image["offset"] > 0) == (form == "webdataset")
    done = paceline("replay", "run", "--step", bad)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("image ")] == [
        f"image {image['image']}  {image['name']}" for image in found[:16]
    ]
    assert ("and 16 more; --json lists all" in lines) == (len(found) == 32)
    assert any(line.startswith("started from  ") for line in lines)
