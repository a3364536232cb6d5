"""What is summed over validation images, and what it says of each class."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline import keyed
from paceline.model import metrics
from paceline.model.metrics import BINS, EvaluationSums, judge

CPU = torch.device("cpu")
TRUTH, ANSWER = [0, 0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 2, 2, 0]


def scored(answers: list[int], classes: int = 3, confidence: float = 4.0) -> Tensor:
    """Scores by which a network gives these answers."""
    scores = torch.zeros(len(answers), classes, dtype=torch.float64)
    scores[torch.arange(len(answers)), torch.tensor(answers)] = confidence
    return scores


def summed(scores: Tensor, labels: Tensor, count: int | None = None, size: int | None = None) -> EvaluationSums:
    """The sums over batches of `size`."""
    sums = EvaluationSums(scores.shape[1], CPU)
    for begin in range(0, len(scores), size or len(scores)):
        end = begin + (size or len(scores))
        sums.add(judge(scores[begin:end], labels[begin:end], len(scores[begin:end]) if count is None else count))
    return sums


def test_means_are_over_the_images_that_were_counted() -> None:
    scores = torch.eye(8, dtype=torch.float64)[:4]
    means = summed(scores, torch.tensor([0, 1, 7, 3]), count=3).means()
    assert means["images"] == 3
    assert means["top1"] == pytest.approx(2 / 3)
    assert list(means)[:4] == ["loss", "top1", "top5", "images"]


def test_every_class_is_counted() -> None:
    counts = summed(scored(ANSWER), torch.tensor(TRUTH)).counts()
    assert counts.confusion is not None
    assert counts.confusion.tolist() == [[3, 1, 0], [0, 1, 1], [1, 0, 1]]
    assert counts.support.tolist() == [4, 2, 2]
    assert counts.precision.tolist() == [0.75, 0.5, 0.5]
    assert counts.recall.tolist() == [0.75, 0.5, 0.5]


def test_balanced_accuracy_and_f1_are_means_over_classes() -> None:
    means = summed(scored(ANSWER), torch.tensor(TRUTH)).means()
    assert means["balanced_accuracy"] == pytest.approx((0.75 + 0.5 + 0.5) / 3)
    assert means["macro_f1"] == pytest.approx((0.75 + 0.5 + 0.5) / 3)


def test_a_class_without_images_is_in_no_mean_of_recalls() -> None:
    sums = summed(scored([0, 1, 1, 3], classes=5), torch.tensor([0, 0, 1, 1]))
    assert sums.means()["balanced_accuracy"] == 0.5
    assert sums.means()["macro_f1"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)  # class 3 was answered, 2 and 4 never
    recall, f1 = sums.counts().recall, sums.counts().f1
    assert recall.isnan().tolist() == [False, False, True, True, True]
    assert f1.isnan().tolist() == [False, False, True, False, True]


@pytest.mark.parametrize(("truth", "share"), [([0, 0, 0, 1], 0.75), ([0, 1, 0, 1], None), ([0, 0, 0, 1, 1], None)])
def test_the_largest_class_is_told_where_classes_are_unequal(truth: list[int], share: float | None) -> None:
    means = summed(scored([0] * len(truth), classes=2), torch.tensor(truth)).means()
    assert means.get("majority") == (None if share is None else pytest.approx(share))


def test_calibration_is_the_distance_of_confidence_from_accuracy() -> None:
    sure, unsure = math.log(9), math.log(1.5)  # of two classes, 90 % and 60 %
    scores = torch.cat([scored([0] * 4, 2, sure), scored([1] * 4, 2, unsure)])
    means = summed(scores, torch.tensor([0, 0, 0, 1, 1, 1, 0, 0])).means()
    assert means["ece"] == pytest.approx((abs(0.75 - 0.9) + abs(0.5 - 0.6)) / 2, abs=1e-6)


def test_counts_are_the_same_bits_in_batches_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.from_numpy(keyed.host_uniforms(keyed.key(1, "scores"), 350)).view(50, 7)
    labels = torch.arange(50) % 7
    for most in (metrics.MOST_CLASSES, 5):
        monkeypatch.setattr(metrics, "MOST_CLASSES", most)
        whole = summed(scores, labels)
        for size in (1, 3, 16):
            assert torch.equal(summed(scores, labels, size=size).flat[1:], whole.flat[1:])
        assert whole.flat[2 : 2 + BINS].sum() == 50


def test_above_so_many_classes_there_is_no_matrix_and_everything_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with_matrix = summed(scored(ANSWER), torch.tensor(TRUTH))
    monkeypatch.setattr(metrics, "MOST_CLASSES", 2)
    without = summed(scored(ANSWER), torch.tensor(TRUTH))
    assert without.counts().confusion is None
    assert without.means() == with_matrix.means()
    assert all(torch.equal(a, b) for a, b in zip(without.counts()[:3], with_matrix.counts()[:3], strict=True))


def test_scores_that_are_not_finite_are_counted_and_told() -> None:
    scores = scored([0, 1, 1])
    scores[1] = torch.nan
    means = summed(scores, torch.tensor([0, 0, 1])).means()
    assert means["images"] == 3
    assert math.isnan(means["loss"])
    assert math.isnan(means["ece"])


@pytest.mark.parametrize("nan", [0, 1, slice(None)])
def test_an_image_with_a_score_of_nan_counts_as_wrong(nan: int | slice) -> None:
    scores = scored([0, 0, 1])
    scores[0, nan] = torch.nan  # its class, another one, or all
    means = summed(scores, torch.tensor([0, 0, 1])).means()
    assert (means["top1"], means["top5"]) == (2 / 3, 2 / 3)
