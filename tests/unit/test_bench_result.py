"""Two results of bench are compared only if they are of the same work, and what differs is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import SMALL
from paceline.command.bench_infer import read_batches
from paceline.command.bench_job import train_job
from paceline.command.bench_result import changes_since, check_places, differences, facts_of, ratio_of, read_result
from paceline.command.bench_train import against_lines
from paceline.errors import SpecError


def facts(folder: Path, *words: str) -> dict[str, Any]:
    page = folder / "small.yaml"
    page.write_text(SMALL)
    job = train_job(str(page), list(words), None, None, None, "cpu")
    return facts_of("train", job, list(words))


def measured(rate: float, least: float, most: float, memory: int | None = None) -> dict[str, Any]:
    spread = {"median": rate, "least": least, "most": most}
    speed = {"images_per_second": rate, "images_per_second_spread": spread, "ms_per_step": 1000 / rate}
    return speed | {"peak_memory": memory}


def kept(folder: Path, result: dict[str, Any]) -> Path:
    path = folder / "before.json"
    path.write_text(json.dumps(result))
    return path


def test_where_it_runs_and_how_long_may_differ(tmp_path: Path) -> None:
    before = facts(tmp_path)
    now = facts(
        tmp_path, "on.replicas=2", "on.compile=true", "epochs=9", "seed=3", "data.name=synthetic", "data.side=8"
    )
    assert differences(before["same"], now["same"]) == []
    assert read_result(kept(tmp_path, before), now)["recipe"] == before["recipe"]
    told = changes_since(before, now)
    assert told[:3] == ["on.compile false -> true", "on.micro_batch 16 -> 8", "on.replicas 1 -> 2"]
    assert told[-1] == "data generated -> synthetic"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("global_batch=32", "global_batch was 16 and is 32"),
        ("norm_batch=8", "norm_batch was 4 and is 8"),
        ("on.precision=bf16", 'on.precision was "fp32" and is "bf16"'),
        ("model=resnet14", 'model.name was "resnet8" and is "resnet14"'),
        ("data.classes=12", "data.classes was 10 and is 12"),
        ("ema.decay=0.9", "ema.decay was null and is 0.9"),
    ],
)
def test_other_work_is_refused_and_named(tmp_path: Path, word: str, message: str) -> None:
    with pytest.raises(SpecError, match="it measured other work") as fault:
        read_result(kept(tmp_path, facts(tmp_path)), facts(tmp_path, word))
    assert message in str(fault.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"bench": "train", "same": 3}', "[" * 9999, "no JSON"])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "before.json"
    path.write_text(content)
    with pytest.raises(SpecError, match="this is no result of paceline bench"):
        read_result(path, {})
    with pytest.raises(SpecError, match="cannot be read"):
        read_result(tmp_path / "none.json", {})


def test_a_result_of_another_kind_is_refused(tmp_path: Path) -> None:
    now = facts(tmp_path)
    with pytest.raises(SpecError, match="it is of paceline bench infer, not train"):
        read_result(kept(tmp_path, now | {"bench": "infer"}), now)


def test_ratios_are_now_over_before() -> None:
    ratio = ratio_of(measured(100.0, 98.0, 103.0, 4000), measured(150.0, 149.0, 152.0, 3000))
    assert ratio == {
        "images_per_second": 1.5, "ms_per_step": pytest.approx(2 / 3), "peak_memory": 0.75, "clear": True,
    }  # fmt: skip
    (line,) = against_lines(ratio | {"file": "before.json", "changes": []})
    assert line == "against before.json: 1.500x the images/s, 0.750x the memory"


def test_a_difference_within_the_blocks_is_called_doubtful() -> None:
    ratio = ratio_of(measured(100.0, 98.0, 103.0), measured(104.0, 102.0, 105.0))
    assert not ratio["clear"]
    assert ratio["peak_memory"] is None
    lines = against_lines(ratio | {"file": "before.json", "changes": ["torch 2.11.0 -> 2.13.0"]})
    assert lines[0].endswith("blocks of the two overlap, so this may be no difference")
    assert lines[1] == "  changed since: torch 2.11.0 -> 2.13.0"


def test_files_that_cannot_be_written_are_refused_beforehand(tmp_path: Path) -> None:
    check_places(tmp_path / "new.json", tmp_path / "profile")
    assert (tmp_path / "profile").is_dir()
    with pytest.raises(SpecError, match="this is a folder"):
        check_places(tmp_path)
    with pytest.raises(SpecError, match="there is no folder"):
        check_places(tmp_path / "none/new.json")
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="cannot be made"):
        check_places(None, tmp_path / "file")


def test_batch_sizes_are_read_as_they_are_written() -> None:
    assert read_batches("1, 8,32,8") == [1, 8, 32]
    for wrong in ("", "0", "1,,2", "x", "-1", "1e3", "65537", "²"):
        with pytest.raises(SpecError, match="expected sizes from 1 to 65,536"):
            read_batches(wrong)
