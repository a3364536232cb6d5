"""paceline plan --probe: what is printed, what is chosen in how much memory, and that runs go by it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conftest import SMALL, Paceline, make_plan
from paceline.record import rows_of

WORDS = ("small.yaml", "--device", "cpu", "on.data_on_device=false", "on.cpu_threads=1")


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def test_a_probe_says_where_the_memory_is_and_leaves_runs_its_choice(paceline: Paceline, tmp_path: Path) -> None:
    done = paceline("plan", *WORDS, "--probe", "--json", "on.memory=1 GiB")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["micro_batch"], found["fits"]) == (16, True)
    assert found["peak_memory"] <= found["room"] == 0.9 * 2**30
    assert found["seconds"] == pytest.approx(6 * found["seconds_per_step"])
    rows = {row["block"]: row for row in found["blocks"]}
    assert list(rows) == [*make_plan().network.blocks, "there at the peak", "images", "workspace"]
    total = sum(rows["there at the peak"][key] for key in ("weights", "gradients", "optimizer", "kept"))
    assert total + rows["images"]["kept"] + rows["workspace"]["kept"] == found["peak_memory_of_a_step"]
    assert "a probe of" in paceline("plan", *WORDS, "on.memory=1 GiB").stdout
    less = int(found["peak_memory"] / 0.9 - 1)
    assert json.loads(paceline("plan", *WORDS, f"on.memory={less}", "--json").stdout)["micro_batch"] == 8
    words = (f"on.memory={less}", "on.micro_batch=16", "on.recompute=auto", "on.sinks=[]")
    done = paceline("train", *WORDS, *words, "--out", "run")
    assert done.returncode == 0, done.stderr
    start = next(row for row in rows_of(tmp_path / "run") if row["kind"] == "start")
    assert (start["placement"]["micro_batch"], start["placement"]["memory"]) == (16, less)
    assert start["placement"]["recompute"] == ["stage1/unit1"]
    assert start["micro_batch_from"] == "the placement"


def test_people_get_a_table(paceline: Paceline) -> None:
    done = paceline("plan", *WORDS, "--probe", "on.recompute=all", "on.micro_batch=8")
    assert done.returncode == 0, done.stderr
    lines = [re.split(r"\s{2,}", line.rstrip()) for line in done.stdout.splitlines()]
    rows = {line[0]: line[1:] for line in lines if len(line) > 1}
    assert rows["probed"] == ["micro-batches of 4, 8 and 16 images, fp32"]
    assert rows["micro-batch"] == ["8, from the placement; 2 in a step"]
    assert rows["recomputed"] == ["stem, stage1/unit1, stage2/unit1, stage3/unit1, head"]
    assert rows["block"][:4] == ["weights MiB", "gradients MiB", "optimizer MiB", "kept MiB"]
    assert rows["stage3/unit1"][0] == "0.2"
    assert "note: memory is counted, tensor by tensor, and not measured" in done.stdout
    assert "note: what is recomputed was not measured so" in done.stdout
    assert "runs on this machine" not in done.stdout  # the micro-batch was written


@pytest.mark.parametrize(("frozen", "begin"), [("[stem, stage1]", "stage3/unit1"), ("[stem, stage1, stage2]", "head")])
def test_stages_are_cut_where_each_has_something_to_train(paceline: Paceline, frozen: str, begin: str) -> None:
    words = (*WORDS, "on.stages=2", f"freeze={frozen}")
    for flags in ((), ("--probe",), ()):  # counted, probed, and by the probe
        done = paceline("plan", *words, *flags, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["splits"] if flags else [found["stages_begin_at"]]) == [begin]


@pytest.mark.parametrize("flags", [(), ("--probe",)])
def test_more_stages_than_blocks_that_train_are_refused(paceline: Paceline, flags: tuple[str, ...]) -> None:
    done = paceline("plan", *WORDS, "on.stages=2", "freeze=[stem, stage1, stage2, stage3]", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert "on.stages=2, and freeze leaves 1 block to train" in done.stderr


@pytest.mark.parametrize("flags", [("--yaml", "--probe"), ("--rehearse", "0", "--probe"), ("--hosts", "2", "--probe")])
def test_a_probe_is_no_other_form_of_a_plan(paceline: Paceline, flags: tuple[str, ...]) -> None:
    done = paceline("plan", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--probe" in done.stderr


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("on.memory=0", "memory: expected an amount of memory such as 20 GiB, or auto; found 0"),
        ("on.memory=much", "memory: expected an amount of memory such as 500 MB or 8 GiB, found 'much'"),
        ("on.memory=900000 GiB", "on.memory is 966,367,641,600,000 bytes, and there are "),
        ("on.recompute=[auto, stem]", "on.recompute: the network has no block 'auto'; it has stem, stage1/unit1, "),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(paceline: Paceline, word: str, said: str) -> None:
    done = paceline("plan", *WORDS, word, "--probe")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
