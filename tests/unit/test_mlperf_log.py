"""mlperf.log: the events of a run in the order and form that MLPerf's rules ask for, also where a run is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conftest import make_plan
from paceline import files
from paceline.planning import Plan
from paceline.record import Run
from paceline.settings import shipped
from paceline.sink.mlperf import MLPERF_LOG, TOKEN, MLPerfSink

LARS = shipped.page("recipes", "mlperf/resnet50-3264")[0]
CLOSED = {"MLPERF_SUBMISSION_ORG": "Acme", "MLPERF_SUBMISSION_PLATFORM": "one", "MLPERF_SUBMISSION_DIVISION": "closed"}


@pytest.fixture
def plan() -> Plan:
    """Six steps an epoch and three epochs, evaluated after every one."""
    return make_plan("epochs=3", "evaluate.every=1 epochs")


def opened(plan: Plan, folder: Path) -> MLPerfSink:
    return MLPerfSink(plan, Run(folder, "read"), Console(quiet=True))


def train(sink: MLPerfSink, plan: Plan, begin: int, end: int, top1: float = 0.5) -> None:
    """What a training from one step to another tells a sink."""
    sink.row({"kind": "start", "step": begin})
    for step in range(begin + 1, end + 1):
        sink.progress("training", step, plan.steps)
        if step % 6 == 0:
            sink.row({"kind": "report", "step": step})
            sink.row({"kind": "validation-start", "step": step, "epoch": step / 6})
            sink.progress("validation", 3, 3)
            sink.row({"kind": "validation", "step": step, "epoch": step / 6, "top1": top1 + step / 100})
    if end == plan.steps:
        sink.row({"kind": "end", "step": end})


def interrupted(sink: MLPerfSink, plan: Plan, step: int) -> None:
    """What a start tells that a signal ends in a validation."""
    for kind in ("validation-start", "checkpoint"):
        sink.row({"kind": kind, "step": step, "epoch": plan.epoch(step)})


def events(folder: Path) -> list[dict[str, Any]]:
    text = (folder / MLPERF_LOG).read_text()
    assert all(line.startswith(TOKEN) for line in text.splitlines())
    return [json.loads(line.removeprefix(TOKEN)) for line in text.splitlines()]


def told(folder: Path) -> list[str]:
    """Keys, with the epochs that belong to them."""
    words = ("first_epoch_num", "epoch_count", "epoch_num", "status")
    return [" ".join([e["key"], *(str(e["metadata"][w]) for w in words if w in e["metadata"])]) for e in events(folder)]


def test_events_come_in_the_order_of_the_rules(plan: Plan, tmp_path: Path) -> None:
    train(opened(plan, tmp_path), plan, 0, 18)
    lines = told(tmp_path)
    submission = [f"submission_{name}" for name in ("benchmark", "org", "platform", "division", "status")]
    assert lines[:7] == ["cache_clear", *submission, "init_start"]
    assert lines[lines.index("init_stop") :] == [
        "init_stop", "run_start",
        *("block_start 1 1", "block_stop 1", "eval_start 1", "eval_stop 1", "eval_accuracy 1"),
        *("block_start 2 1", "block_stop 2", "eval_start 2", "eval_stop 2", "eval_accuracy 2"),
        *("block_start 3 1", "block_stop 3", "eval_start 3", "eval_stop 3", "eval_accuracy 3"),
        "run_stop aborted",
    ]  # fmt: skip
    times = [event["time_ms"] for event in events(tmp_path)]
    assert times == sorted(times)
    assert [event["value"] for event in events(tmp_path) if event["key"] == "eval_accuracy"] == pytest.approx(
        [0.56, 0.62, 0.68]
    )
    values = {event["key"]: event["value"] for event in events(tmp_path)}
    assert values["global_batch_size"] == plan.global_batch
    assert values["train_samples"] == plan.facts.images
    assert values["submission_division"] == "open"


def test_a_run_succeeds_by_its_own_target_or_that_of_the_rules(tmp_path: Path) -> None:
    for number, (words, top1, status) in enumerate(
        [((), 0.6, "success"), ((), 0.57, "aborted"), (("stop.target=0.7",), 0.57, "success")]
    ):
        plan = make_plan("epochs=3", "evaluate.every=1 epochs", *words)
        folder = tmp_path / str(number)
        folder.mkdir()
        train(opened(plan, folder), plan, 0, 18, top1)  # the last validation is 0.18 better
        assert told(folder)[-1] == f"run_stop {status}"


def test_a_block_is_what_lies_between_validations(tmp_path: Path) -> None:
    plan = make_plan("epochs=7", "evaluate={every: 2 epochs, offset: 1 epochs}")
    train(opened(plan, tmp_path), plan, 0, 1)
    sink = opened(plan, tmp_path)
    sink.row({"kind": "start", "step": 6})
    assert [line for line in told(tmp_path) if line.startswith("block")] == ["block_start 1 1"]
    for kind in ("validation-start", "validation"):
        sink.row({"kind": kind, "step": 6, "epoch": 1.0, "top1": 0.1})
    sink.progress("training", 7, plan.steps)
    assert [line for line in told(tmp_path) if line.startswith("block")][1:] == ["block_stop 1", "block_start 2 2"]


def test_a_run_that_is_never_validated_ends_its_block(tmp_path: Path) -> None:
    plan = make_plan("epochs=3", "evaluate.every=never")
    sink = opened(plan, tmp_path)
    sink.row({"kind": "start", "step": 0})
    sink.row({"kind": "end", "step": 18})
    assert told(tmp_path)[-3:] == ["block_start 1 3", "block_stop 1", "run_stop aborted"]


def test_a_resumed_run_goes_on_in_its_log_without_what_it_trains_again(plan: Plan, tmp_path: Path) -> None:
    train(opened(plan, tmp_path), plan, 0, 13)
    with (tmp_path / MLPERF_LOG).open("a") as file:
        file.write(f'{TOKEN}{{"namespace": "", "ti')  # a kill
    train(opened(plan, tmp_path), plan, 9, 18)
    whole = tmp_path / "whole"
    whole.mkdir()
    train(opened(plan, whole), plan, 0, 18)
    assert told(tmp_path) == told(whole)


def test_a_validation_that_was_cut_off_is_told_once(plan: Plan, tmp_path: Path) -> None:
    sink = opened(plan, tmp_path)
    train(sink, plan, 0, 5)
    interrupted(sink, plan, 6)
    sink = opened(plan, tmp_path)
    sink.row({"kind": "start", "step": 6})
    for kind in ("validation-start", "validation"):
        sink.row({"kind": kind, "step": 6, "epoch": 1.0, "top1": 0.56})
    train_on = [line for line in told(tmp_path) if line.startswith(("block", "eval"))]
    assert train_on == [
        "eval_samples",
        "block_start 1 1",
        "block_stop 1",
        "eval_start 1",
        "eval_stop 1",
        "eval_accuracy 1",
    ]


def test_a_log_is_not_begun_in_the_middle_of_a_run(plan: Plan, tmp_path: Path) -> None:
    run = Run(tmp_path, "append")
    sink = MLPerfSink(plan, run, Console(quiet=True))
    train(sink, plan, 6, 18)
    assert not (tmp_path / MLPERF_LOG).exists()
    assert [row["text"] for row in run.rows() if row["kind"] == "note"] == [
        "mlperf.log is not written: it would lack the first 6 steps of the run"
    ]


def test_a_run_that_begins_again_keeps_its_clock(plan: Plan, tmp_path: Path) -> None:
    train(opened(plan, tmp_path), plan, 0, 3)
    before = events(tmp_path)
    train(opened(plan, tmp_path), plan, 0, 6)
    assert events(tmp_path)[: len(before)] == before
    assert told(tmp_path).count("run_start") == 1


def test_lines_wait_for_a_disk_that_is_full(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = opened(plan, tmp_path)
    train(sink, plan, 0, 5)

    def full(_path: Path, _line: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "append_line", full)
        for kind in ("validation-start", "validation"):
            sink.row({"kind": kind, "step": 6, "epoch": 1.0, "top1": 0.56})
        sink.progress("training", 7, plan.steps)
    sink.row({"kind": "validation-start", "step": 12, "epoch": 2.0})
    lines = told(tmp_path)
    assert lines[lines.index("block_start 1 1") :] == [
        "block_start 1 1", "block_stop 1", "eval_start 1", "eval_stop 1", "eval_accuracy 1", "block_start 2 1",
        "block_stop 2", "eval_start 2",
    ]  # fmt: skip


def test_epochs_that_no_step_ends_with_have_their_own_numbers(tmp_path: Path) -> None:
    plan = make_plan("on.micro_batch=204", "on.replicas=2", text=LARS)
    sink, step = opened(plan, tmp_path), 0
    sink.row({"kind": "start", "step": 0})
    while step < plan.steps:
        step += 1
        if step == plan.steps or (plan.validations and plan.validations.due(step)):
            sink.progress("training", step, plan.steps)
            for kind in ("validation-start", "validation"):
                sink.row({"kind": kind, "step": step, "epoch": plan.epoch(step), "top1": 0.5})
    blocks = [e["metadata"] for e in events(tmp_path) if e["key"] == "block_start"]
    evaluated = [e["metadata"]["epoch_num"] for e in events(tmp_path) if e["key"] == "eval_accuracy"]
    assert evaluated == [*range(1, 38, 4)]
    assert sum(block["epoch_count"] for block in blocks) == 37
    assert [block["first_epoch_num"] for block in blocks] == [1, *(number + 1 for number in evaluated[:-1])]


def test_rows_of_other_commands_leave_the_log_alone(plan: Plan, tmp_path: Path) -> None:
    sink = opened(plan, tmp_path)
    sink.row({"kind": "validation", "step": 6, "epoch": 1.0, "top1": 0.5})
    sink.progress("validation", 1, 2)
    assert not (tmp_path / MLPERF_LOG).exists()


def test_a_recipe_of_the_rules_has_the_numbers_of_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CLOSED.items():
        monkeypatch.setenv(name, value)
    plan = make_plan("on.micro_batch=204", "on.replicas=2", text=LARS)
    opened(plan, tmp_path).row({"kind": "start", "step": 0})
    values = {event["key"]: event["value"] for event in events(tmp_path)}
    words = {
        "submission_benchmark": "resnet",
        "submission_org": "Acme",
        "submission_division": "closed",
        "opt_name": "lars",
    }
    expected = {
        "lars_opt_base_learning_rate": 10.5, "lars_opt_end_learning_rate": 1e-4, "lars_epsilon": 0,
        "lars_opt_momentum": 0.9, "lars_opt_learning_rate_decay_poly_power": 2,
        "lars_opt_learning_rate_warmup_epochs": 2, "lars_opt_weight_decay": 5e-5, "train_samples": 1281167,
        "eval_samples": 50000, "global_batch_size": 3264, "gradient_accumulation_steps": 8,
        "model_bn_span": plan.norm_batch,
    }  # fmt: skip
    assert {key: values[key] for key in words} == words
    assert {key: values[key] for key in expected} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("division", ["open", "closed"])
def test_the_official_checker_passes_a_log(division: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    for name, value in (CLOSED | {"MLPERF_SUBMISSION_DIVISION": division}).items():
        monkeypatch.setenv(name, value)
    plan = make_plan("on.micro_batch=204", "on.replicas=2", text=LARS)
    sink = opened(plan, tmp_path)
    sink.row({"kind": "start", "step": 0})
    for kind in ("validation-start", "validation", "end"):
        sink.row({"kind": kind, "step": plan.steps, "epoch": plan.epochs, "top1": 0.7591})
    checker.enqueued_configs.clear()
    passes, *_ = checker.main(
        str(tmp_path / MLPERF_LOG), "training_4.0.0/common.yaml", checker.make_checker("training", "4.0.0", False, True)
    )
    assert passes
