"""What is told of the gradients of single steps."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
import torch

from conftest import make_plan, make_session
from paceline.record import Row, rows_of
from paceline.training.loop import train
from paceline.training.step import begin_step, take_step


def trained_reports(folder: Path, *words: str) -> list[Row]:
    """The reports of a short run."""
    session = make_session(make_plan("evaluate.every=never", *words), folder, "own")
    train(session)
    session.run.close()
    return [row for row in rows_of(folder) if row["kind"] == "report"]


def test_a_report_tells_the_norm_of_the_mean_gradient() -> None:
    session = make_session(make_plan("on.precision=fp64", "on.micro_batch=16"))
    network = session.state.network
    with closing(session.loader.training(0)) as steps:
        batches = next(steps)
        prepared, _ = begin_step(session, batches)
        network.forward_backward(prepared)
        squares = sum(float((p.grad / 16).square().sum()) for p in network.parameters if p.grad is not None)
        for parameter in network.parameters:
            parameter.grad = None
        take_step(session, batches)
    assert math.isclose(float(session.gradient_norm.value), math.sqrt(squares), rel_tol=1e-12)


@pytest.mark.parametrize("word", ["on.micro_batch=4", "on.loss_scale=64", "clip.norm=0.01", "report=1 hour"])
def test_the_norm_of_a_gradient_is_that_of_the_recipe(tmp_path: Path, word: str) -> None:
    first = trained_reports(tmp_path / "one", "on.precision=fp64", "epochs=0.2")[0]
    other = trained_reports(tmp_path / "other", "on.precision=fp64", "epochs=0.2", word)[0]
    assert math.isclose(other["gradient_norm"], first["gradient_norm"], rel_tol=1e-9)


def test_a_bad_step_has_no_norm(tmp_path: Path) -> None:
    session = make_session(make_plan("epochs=0.2", "on_bad_step=skip"), tmp_path, "own")
    with torch.no_grad():
        session.state.network.parameters[0].fill_(math.inf)
    train(session)
    session.run.close()
    assert [row["gradient_norm"] for row in rows_of(tmp_path) if row["kind"] == "report"] == [None]


def test_the_norm_is_computed_only_in_steps_that_a_report_follows() -> None:
    session = make_session(make_plan("report=4 steps"))  # of 6
    wanted = []
    with closing(session.loader.training(0)) as steps:
        for step in range(1, 7):
            session.gradient_norm.value.zero_()
            take_step(session, next(steps))
            if session.gradient_norm.value > 0:
                wanted.append(step)
    assert wanted == [4, 6]
