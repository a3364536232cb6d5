"""Histograms of weights and gradients: what NumPy counts, in the same places on every layout, at no cost to a run."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import make_plan, make_session
from paceline.histogram import Histogram, Histograms, read_histograms
from paceline.record import Row, rows_of
from paceline.training.histograms import HISTOGRAM_BINS, Counts
from paceline.training.loop import train
from paceline.training.session import Session
from paceline.training.step import begin_step


def counted(values: Tensor, divisor: float = 1.0) -> Histogram:
    counts = Counts(1, torch.device("cpu"))
    counts.take([values], divisor)
    (histogram,) = counts.read()
    return histogram


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_counts_are_those_of_numpy(dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 5, 10_007, dtype=torch.float64).sin().to(dtype)
    histogram, numbers = counted(values), values.double().numpy()
    counts, edges = np.histogram(numbers, HISTOGRAM_BINS)
    np.testing.assert_allclose(histogram.edges, edges, rtol=1e-6, atol=1e-6)
    assert np.abs(np.cumsum(counts) - np.cumsum(histogram.counts)).max() <= (0 if dtype == torch.float64 else 300)
    assert (sum(histogram.counts), histogram.not_finite) == (10_007, 0)


def test_a_layer_in_several_pieces_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.linspace(-3, 5, 1000, dtype=torch.float64).view(10, 10, 5, 2).to(memory_format=torch.channels_last)
    whole = counted(values)
    monkeypatch.setattr("paceline.training.histograms._PIECE", 7)
    assert counted(values) == whole
    assert whole.counts == np.histogram(values.numpy(), HISTOGRAM_BINS)[0].tolist()


def test_a_divisor_moves_the_edges_alone() -> None:
    values = torch.tensor([-4.0, 0.0, 12.0])
    histogram, divided = counted(values), counted(values, 4.0)
    assert (divided.low, divided.high) == (-1, 3)
    assert divided.counts == histogram.counts


def test_what_is_not_finite_is_counted_apart() -> None:
    histogram = counted(torch.tensor([math.nan, 1.0, math.inf, 2.0, -math.inf]))
    assert (histogram.low, histogram.high, histogram.not_finite) == (1, 2, 3)
    assert (histogram.counts[0], histogram.counts[-1], sum(histogram.counts)) == (1, 1, 2)
    nothing = counted(torch.full((3,), math.nan))
    assert (nothing.low, nothing.high, nothing.not_finite, sum(nothing.counts)) == (None, None, 3, 0)
    assert nothing.edges == []


@pytest.mark.parametrize("value", [0.0, 1.0, -1e30, 3e38, 1e-40])
def test_equal_numbers_stand_between_two_edges(value: float) -> None:
    histogram = counted(torch.full((5,), value))
    assert histogram.low is not None
    assert histogram.high is not None
    assert histogram.low < value < histogram.high
    assert (sum(histogram.counts), sum(histogram.counts[1:-1])) == (5, 5)


def test_numbers_too_far_apart_for_their_type_stop_nothing() -> None:
    assert sum(counted(torch.tensor([-3e38, 0.0, 3e38])).counts) == 3


def trained(folder: Path, *words: str) -> Session:
    """A run in float64 that has ended."""
    session = make_session(make_plan("on.precision=fp64", "evaluate.every=never", *words), folder, "own")
    train(session)
    session.run.close()
    return session


def rows(folder: Path) -> list[Row]:
    return [row for row in rows_of(folder) if row["kind"] == "histograms"]


def histograms(folder: Path, step: int = 6) -> Histograms:
    return read_histograms(folder / f"histograms/step-{step:09d}.json")


def test_a_row_names_the_file_of_each_step_that_was_asked_for_and_of_the_last(tmp_path: Path) -> None:
    session = trained(tmp_path, "on.histograms=4 steps")
    assert [row["step"] for row in rows(tmp_path)] == [4, 6]
    for row in rows(tmp_path):
        assert (tmp_path / row["file"]).is_file()
    found = histograms(tmp_path)
    named = dict(session.state.network.module.named_parameters())
    assert list(found) == ["weights", "gradients"]
    assert list(found["weights"]) == list(found["gradients"]) == list(named)
    for name, parameter in named.items():
        counts, _ = np.histogram(parameter.detach().numpy(), HISTOGRAM_BINS)
        assert found["weights"][name].counts == counts.tolist(), name


def test_gradients_are_the_mean_over_the_images_of_the_step(tmp_path: Path) -> None:
    trained(tmp_path, "on.histograms=1 steps", "epochs=0.2")
    session = make_session(make_plan("on.precision=fp64"))
    with closing(session.loader.training(0)) as steps:
        prepared, _ = begin_step(session, next(steps))
        session.state.network.forward_backward(prepared)
    found = histograms(tmp_path, 1)["gradients"]
    for name, parameter in session.state.network.module.named_parameters():
        assert parameter.grad is not None
        counts, edges = np.histogram(parameter.grad.numpy() / 16, HISTOGRAM_BINS)
        assert found[name].counts == counts.tolist(), name
        np.testing.assert_allclose(found[name].edges, edges, rtol=1e-9, atol=1e-15)


def test_histograms_change_no_bit_of_a_run(tmp_path: Path) -> None:
    states = [
        trained(tmp_path / every, f"on.histograms={every}").state.tensors()
        for every in ("never", "1 steps", "2 epochs")
    ]
    for other in states[1:]:
        for group, tensors in states[0].items():
            for name, values in tensors.items():
                assert torch.equal(values, other[group][name]), name


@pytest.mark.parametrize("word", ["on.micro_batch=4", "on.loss_scale=64", "optimizer={name: adamw, lr: 0.1}"])
def test_histograms_of_gradients_are_those_of_the_recipe(tmp_path: Path, word: str) -> None:
    for folder, words in (("one", ()), ("other", (word,))):
        trained(tmp_path / folder, "epochs=0.2", "on.histograms=1 steps", *words)
    one, other = (histograms(tmp_path / folder, 1)["gradients"] for folder in ("one", "other"))
    check_same({"gradients": one}, {"gradients": other})


def check_same(one: Histograms, other: Histograms) -> None:
    """The same bins, and the same counts but for a number on the edge of a bin."""
    for group, each in one.items():
        assert list(each) == list(other[group])
        for name, histogram in each.items():
            np.testing.assert_allclose(histogram.edges, other[group][name].edges, rtol=1e-9, atol=1e-14)
            moved = np.abs(np.subtract(histogram.counts, other[group][name].counts)).sum()
            assert moved <= 2, (group, name)


def test_a_bad_step_has_its_histograms_too(tmp_path: Path) -> None:
    session = make_session(make_plan("epochs=0.2", "on.histograms=1 steps"), tmp_path, "own")
    with torch.no_grad():
        session.state.network.parameters[0].fill_(math.inf)
    train(session)
    session.run.close()
    found, name = histograms(tmp_path, 1), "stem.conv.weight"
    assert found["weights"][name].not_finite == session.state.network.parameters[0].numel()
    assert found["gradients"][name].low is None


def test_a_disk_that_takes_no_histogram_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "histograms").write_text("a file in its place")
    trained(tmp_path, "on.histograms=1 epochs")
    assert rows(tmp_path) == []
    assert [row["text"] for row in rows_of(tmp_path) if row["kind"] == "note"] == [
        f"{tmp_path}/histograms: cannot be written: File exists; all checkpoints so far are intact; training goes on"
    ]
