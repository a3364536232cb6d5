"""`paceline bench train` and `bench infer` from outside, on networks that take milliseconds."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conftest import SMALL, Paceline, run_in

QUICK = ("--steps", "2", "--seconds", "0.05", "--device", "cpu")
SWEEP = ("--batch", "1,5", "--repeats", "10", "--seconds", "0.05", "--device", "cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and one result of it."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "small.yaml").write_text(SMALL)
    done = run_in(
        folder, "bench", "train", "small.yaml", *QUICK, "--out", "first.json", "--profile", "profile", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((folder / "first.json").read_text())
    return folder


@pytest.fixture
def first(place: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((place / "first.json").read_text())
    return result


def test_a_result_says_what_was_measured_and_how(first: dict[str, Any]) -> None:
    assert (first["bench"], first["recipe"], first["device"], first["precision"]) == (
        "train",
        "small.yaml",
        "cpu",
        "fp32",
    )
    assert (first["global_batch"], first["micro_batch"], first["replicas"]) == (16, 16, 1)
    assert first["images_per_second"] == pytest.approx(16_000 / first["ms_per_step"], rel=0.3)
    assert first["first_step_seconds"] > 0 < first["warm_up_seconds"]
    assert 0 <= first["waiting"] < 1
    assert first["peak_memory"] is None  # of a CPU
    assert first["versions"]["torch"]
    assert (first["recipe_epochs"], first["recipe_steps"]) == (1.0, 6)
    assert first["predicted_seconds"] == pytest.approx(6 * first["ms_per_step"] / 1000)


def test_a_profile_has_a_trace_and_a_table_of_kernels(place: Path, first: dict[str, Any]) -> None:
    profile = first["profile"]
    assert profile["files"] == ["trace.json", "kernels.csv", "operators.csv"]
    names = {event.get("name") for event in json.loads((place / "profile/trace.json").read_text())["traceEvents"]}
    assert "aten::conv2d" in names
    with (place / "profile/kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1)
    assert profile["kernels"][0]["share"] >= profile["kernels"][1]["share"] > 0
    (conv,) = [row for row in profile["operators"] if row["name"] == "aten::conv2d"]
    assert conv["calls_per_step"] == 7
    assert conv["share_of_matrix_peak"] > 0
    assert profile["memory_timeline"] is None


@pytest.mark.long
def test_a_pipeline_is_measured_with_the_time_in_which_its_stages_wait(place: Path) -> None:
    layout = ("on.stages=2", "on.micro_batch=4", "--out", "stages.json")
    done = run_in(place, "bench", "train", "small.yaml", *QUICK, *layout)
    assert done.returncode == 0, done.stderr
    assert "idle stages" in done.stdout
    assert "20.0% predicted for stages of equal work" in done.stdout
    idle = json.loads((place / "stages.json").read_text())["idle_share"]
    assert all(0 < share < 1 for share in idle["of_each"])
    assert len(idle["of_each"]) == 2


def test_an_earlier_result_gives_ratios(place: Path) -> None:
    done = run_in(place, "bench", "train", "small.yaml", *QUICK, "on.micro_batch=8", "--against", "first.json")
    assert done.returncode == 0, done.stderr
    assert "against first.json: " in done.stdout
    assert "x the images/s" in done.stdout
    assert "changed since: on.micro_batch 16 -> 8" in done.stdout
    assert "16 images: 2 x 8, norm batch 4" in done.stdout
    assert "1 epoch of 96 images" in done.stdout


def test_faults_are_one_line_and_come_before_torch(place: Path) -> None:
    program = (
        "import sys; from paceline.cli import main\n"
        "try:\n main()\nfinally:\n assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    for words, message in (
        (("train", "small.yaml", "global_batch=32", "--against", "first.json"), "global_batch was 16 and is 32"),
        (("train", "small.yaml", "optimizer.rate=3"), "sgd has no 'rate'; did you mean 'optimizer.lr'?"),
        (("infer", "small.yaml", "--batch", "1,x"), "expected sizes from 1"),
    ):
        done = run_in(place, "bench", *words, program=program)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_two_replicas_are_summed_and_divided_by_the_slower_one(place: Path) -> None:
    done = run_in(place, "bench", "train", "small.yaml", *QUICK, "--replicas", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    one, other = result["replica_blocks"]
    assert one["images"] == other["images"] == [16] * result["blocks"]  # two steps of eight images
    rates = [32 / max(pair) for pair in zip(one["seconds"], other["seconds"], strict=True)]
    assert result["images_per_second"] == pytest.approx(float(np.median(rates)))
    assert result["images_per_second_spread"]["least"] == pytest.approx(min(rates))


@pytest.mark.long
def test_inference_gives_latencies_and_speed_of_each_batch(place: Path) -> None:
    done = run_in(place, "bench", "infer", "small.yaml", *SWEEP, "--out", "infer.json", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["batch"] for row in result["batches"]] == [1, 5]
    for row in result["batches"]:
        latency = row["latency_ms"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
        assert row["repeats"] == 10
        assert row["images_per_second"] > 0
    assert (result["checkpoint"], result["weights_of"], result["loaded"]) == (None, None, None)
    again = run_in(place, "bench", "infer", "small.yaml", "--batch", "5", *SWEEP[2:], "--against", "infer.json")
    assert again.returncode == 0, again.stderr
    assert "small.yaml: random weights, generated images, 8 pixels, fp32 on 1 x cpu" in again.stdout
    assert "batch 5: against infer.json: " in again.stdout
    none = run_in(place, "bench", "infer", "small.yaml", "--batch", "2", "--against", "infer.json")
    assert (none.returncode, "write --batch 1,5" in none.stderr) == (2, True)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures that take far longer to decode than a tiny network to train on."""
    folder = tmp_path_factory.mktemp("photos")
    noise = np.arange(800 * 800 * 3, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)
    picture = Image.fromarray(noise.astype(np.uint8).reshape(800, 800, 3))
    for split, count in (("train", 8), ("val", 4)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            picture.save(folder / split / name / "0.jpg", quality=95)
            for number in range(1, count):
                shutil.copy(folder / split / name / "0.jpg", folder / split / name / f"{number}.jpg")
    return folder


TINY = """
model: resnet8
data: {name: images, side: 8}
global_batch: 16
epochs: 1
optimizer: {name: sgd, lr: 0.1}
schedule: constant
"""
SLOW = ("on.decoder=pillow", "on.loader_workers=1")


@pytest.mark.long
def test_a_slow_input_is_named_as_the_limit(paceline: Paceline, tmp_path: Path, photos: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    done = paceline("bench", "train", "tiny.yaml", *SLOW, "--data", str(photos), *QUICK)
    assert done.returncode == 0, done.stderr
    assert "verdict: the input is the limit: " in done.stdout
    assert f"images in {photos}, 8 pixels, 2 classes" in done.stdout


def trained(paceline: Paceline, folder: Path, photos: Path) -> None:
    (folder / "tiny.yaml").write_text(TINY)
    made = paceline("train", "tiny.yaml", *SLOW, "--data", str(photos), "--out", "run", "--device", "cpu")
    assert made.returncode == 0, made.stderr


@pytest.mark.long
def test_a_run_is_measured_by_its_own_weights(paceline: Paceline, tmp_path: Path, photos: Path) -> None:
    trained(paceline, tmp_path, photos)
    done = paceline("bench", "infer", "run", *SWEEP, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["checkpoint"], result["weights_of"], result["data"]) == (1, "run", "synthetic")
    fault = paceline("bench", "infer", "run", "epochs=3")
    assert (fault.returncode, "a run keeps its recipe" in fault.stderr) == (2, True)
    missing = paceline("bench", "infer", "run", "--checkpoint", "7")
    assert (missing.returncode, "there is no checkpoint of step '7'" in missing.stderr) == (2, True)


@pytest.mark.long
def test_a_run_is_measured_on_real_images_as_the_loader_brings_them(
    paceline: Paceline, tmp_path: Path, photos: Path
) -> None:
    trained(paceline, tmp_path, photos)
    done = paceline("bench", "infer", "run", *SWEEP, "--data", str(photos), "--checkpoint", "0", "--profile", "profile")
    assert done.returncode == 0, done.stderr
    assert f"weights of step 0, images of {photos}" in done.stdout
    assert "with the loader, batches of 8: " in done.stdout
    assert "verdict: the input is the limit: " in done.stdout
    assert (tmp_path / "profile/kernels.csv").is_file()
