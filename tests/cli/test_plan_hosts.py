"""paceline plan --hosts: what a step takes on many devices, where limits bind, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import SMALL, Paceline
from paceline.command import plan_hosts
from paceline.command.bench_job import train_job
from paceline.command.bench_result import facts_of
from paceline.errors import SpecError

FLAGS = ("--hosts", "4", "--devices-per-host", "8", "--link", "400Gb,5us", "--inside", "300GB")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    page = tmp_path / "small.yaml"
    page.write_text(SMALL)
    return str(page)


def predict(
    capsys: pytest.CaptureFixture[str], recipe: str, *words: str, measured: str = "1000", device: str = "cpu"
) -> dict[str, Any]:
    asked = plan_hosts.Hosts(4, 8, "400Gb,5us", "300GB", measured)
    plan_hosts.run(recipe, list(words), None, None, None, device, asked, as_json=True, other_form=False)
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


def result_file(folder: Path, recipe: str, *words: str, **changed: Any) -> str:
    job = train_job(recipe, list(words), None, None, None, "cpu")
    rate = {"images_per_second": 800.0, "ms_per_step": 20.0, "steady": True}
    path = folder / "measured.json"
    path.write_text(json.dumps(facts_of("train", job, list(words)) | rate | changed))
    return str(path)


def test_a_prediction_is_a_table_with_the_curve_and_loads_no_torch(paceline: Paceline) -> None:
    program = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
    done = paceline(
        "plan", "nvidia/resnet50", "data=synthetic", "--device", "cuda", *FLAGS, "--measured", "2500", program=program
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].rstrip() == "nvidia/resnet50 on 4 hosts of 8 devices, predicted"
    assert "102.2 MB of gradients" in done.stdout
    curve = [line.split() for line in lines if line.lstrip()[:1].isdigit()]
    assert [int(row[0]) for row in curve] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert "100.0%" in curve[0]
    assert "note: global_batch 2,048 is 8 times the 256 images of the measured micro-batch" in done.stdout


def test_devices_beyond_the_micro_batches_have_no_work(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    result = predict(capsys, recipe)  # a global batch of 16
    rows = {row["devices"]: row for row in result["curve"]}
    assert rows[1]["limits"] == []
    assert rows[32]["limits"][0] == "16 without work"
    assert rows[32]["images_per_second"] <= rows[16]["images_per_second"]
    assert rows[16]["limits"] == ["smaller micro-batch", "norm over 4"]
    assert result["devices"] == 32
    assert result["efficiency"] == pytest.approx(rows[32]["efficiency"])


def test_a_layout_that_is_written_stays_and_says_where_it_does_not_fit(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    rows = {row["devices"]: row for row in predict(capsys, recipe, "on.micro_batch=2", "on.replicas=8")["curve"]}
    assert rows[1]["efficiency"] is None
    assert "norm_batch 4 spans 2 replicas of on.micro_batch 2" in rows[1]["limits"][0]
    assert (rows[8]["micro_batch"], rows[8]["rounds"], rows[8]["limits"]) == (2, 1, ["norm over 2"])


def test_a_result_of_bench_gives_speed_micro_batch_and_precision(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: str
) -> None:
    file = result_file(tmp_path, recipe, "on.micro_batch=8", "global_batch=32", "on.precision=fp64")
    result = predict(capsys, recipe, measured=file)
    assert result["curve"][0]["images_per_second"] == pytest.approx(800)
    assert result["curve"][0]["micro_batch"] == 8
    assert "800 images/s on one" in result["measured"]
    assert "fp64, in micro-batches of 8" in result["measured"]
    assert result["bytes"]["gradients"] == 8 * 75_290
    assert not any("not steady" in note for note in result["notes"])
    file = result_file(tmp_path, recipe, steady=False)
    assert any("was not steady" in note for note in predict(capsys, recipe, measured=file)["notes"])


@pytest.mark.parametrize(
    ("words", "changed", "message"),
    [
        (["model=resnet14-cifar"], {}, 'it measured other work: model.name was "resnet14-cifar" and is "resnet8"'),
        (["data.side=16"], {}, "data.side was 16 and is 8"),
        ([], {"replicas": 2}, "it is of paceline bench train with on.replicas=2; measure one device with"),
        ([], {"bench": "infer"}, "it is of paceline bench infer"),
        ([], {"images_per_second": None}, "this result is not whole"),
        ([], {"images_per_second": 0.0}, "this result is not whole"),
        ([], {"machine": []}, "this result is not whole"),
    ],
)
def test_a_result_of_other_work_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: str, words: list[str], changed: Any, message: str
) -> None:
    file = result_file(tmp_path, recipe, *words, **changed)
    with pytest.raises(SpecError, match=message.replace("[", r"\[")):
        predict(capsys, recipe, measured=file)


@pytest.mark.parametrize(
    ("asked", "replicas", "message"),
    [
        ((4, None, "400Gb", None, "9"), None, "a prediction needs --hosts N, --devices-per-host N"),
        ((4, 8, "400", None, "9"), None, "--link 400: expected a speed"),
        ((4, 8, "0Gb", None, "9"), None, "--link 0Gb: expected a speed"),
        ((4, 8, "400Gb", "fast", "9"), None, "--inside fast: expected a speed"),
        ((4, 8, "400Gb", None, "0.0"), None, "--measured 0.0: expected the images/s of one device"),
        ((4, 8, "400Gb", None, "no.json"), None, "--measured takes a file that --out has written"),
        ((4, 8, "400Gb", None, "9"), 3, "--replicas 3: there is one on each device"),
        ((10**6, 8, "400Gb", None, "9"), None, "write at most 1,000,000"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(asked: Any, replicas: int | None, message: str) -> None:
    with pytest.raises(SpecError) as fault:
        plan_hosts.run(None, [], None, None, replicas, None, plan_hosts.Hosts(*asked), as_json=False, other_form=False)
    assert message in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("word", "speed", "latency"),
    [
        ("400Gb", 50e9, 0),
        ("50GB/s", 50e9, 0),
        ("800Mbps", 1e8, 0),
        ("1.6Tb,2.5us", 2e11, 2.5e-6),
        (".5GB, 1 ms", 5e8, 1e-3),
    ],
)
def test_a_link_is_read_in_bits_or_bytes(word: str, speed: float, latency: float) -> None:
    link = plan_hosts.read_link("--link", word)
    assert link.bytes_per_second == pytest.approx(speed)
    assert link.latency == pytest.approx(latency)
