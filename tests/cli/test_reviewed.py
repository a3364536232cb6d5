"""Things that once went wrong from outside, each held by a test."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from conftest import SMALL, Paceline
from paceline.record import rows_of


def test_a_validation_set_larger_than_its_pool_is_judged_whole(paceline: Paceline) -> None:
    words = ["data.name=generated", "data.images=256", "data.validation_images=600", "data.side=8", "data.classes=10"]
    done = paceline("train", "shapes/resnet8", *words, "epochs=0.5", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "of 600 validation images" in done.stdout


def test_a_folder_name_in_brackets_is_shown_as_it_is(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    done = paceline("train", "small.yaml", "--out", "runs/[lr=0.1]")
    assert done.returncode == 0, done.stderr
    assert "Run folder: runs/[lr=0.1]" in done.stdout


def test_a_module_in_the_users_folder_is_not_imported_by_replicas(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "safetensors.py").write_text("raise RuntimeError('not this one')\n")
    program = "import sys; sys.path.pop(0); from paceline.cli import main; main()"
    done = paceline("train", "small.yaml", "--out", "run", "--replicas", "2", program=program)
    assert done.returncode == 0, done.stderr


def test_a_run_that_diverges_says_so_and_its_record_stays_json(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    done = paceline("train", "small.yaml", "optimizer.lr=1e30", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "steps were skipped" in done.stdout

    def refuse(word: str) -> None:
        raise AssertionError(word)

    for line in (tmp_path / "run/record.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_rewording_a_recipe_does_not_make_it_another_run(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    assert paceline("train", "small.yaml", "--out", "run").returncode == 0
    assert paceline("train", "small.yaml", "about=other words", "--out", "run").returncode == 0


def test_keys_alone_are_those_of_the_default_kind(paceline: Paceline) -> None:
    assert "momentum: 0.2" in paceline("plan", "norm.momentum=0.2", "--yaml").stdout


def test_a_moved_data_folder_asks_for_its_new_place(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    assert paceline("train", "small.yaml", "--out", "run").returncode == 0
    plan = tmp_path / "run/plan.yaml"
    text = plan.read_text().replace("data_folder: null", 'data_folder: "/gone/cifar10"')
    start = text.index("  data:\n")
    end = text.index("  global_batch:")
    plan.write_text(text[:start] + "  data: cifar10\n" + text[end:])
    shutil.rmtree(tmp_path / "run/checkpoints")  # they know that this is not the recipe that was trained
    done = paceline("resume", "run")
    assert done.returncode == 2
    assert "write --data FOLDER" in done.stderr
    assert rows_of(tmp_path / "run")[-1]["kind"] == "end"
