"""The network on its device: the loss is summed over images by either smoothing, and only real images are judged."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import make_plan
from paceline.data.load.batches import MicroBatch
from paceline.data.load.loader import open_loader
from paceline.model.init import initialize, published
from paceline.model.whole import Whole
from paceline.planning import Plan
from paceline.world import World

WORLD = World(torch.device("cpu"))
EXACT = ("on.precision=fp64",)


def make_whole(plan: Plan) -> Whole:
    whole = Whole(plan, WORLD)
    initialize(whole.module, published(plan.recipe.init, plan.recipe.model), plan.recipe.seed)
    return whole


def first_step(plan: Plan) -> list[MicroBatch]:
    steps = open_loader(plan, None, 0, WORLD.device).training(0)
    return next(steps)


@torch.no_grad()
def log_shares(plan: Plan, whole: Whole, batch: MicroBatch) -> Tensor:
    """Log-probabilities by hand: pixels on a scale of 0 to 1, mean off, divided by the spread."""
    mean, std = (torch.tensor(row, dtype=torch.float64).view(3, 1, 1) for row in (plan.data.mean, plan.data.std))
    scores: Tensor = whole.module((batch.images.double() / 255 - mean) / std)
    return scores.log_softmax(1)


@pytest.mark.parametrize(
    ("smoothing", "over", "classes"),
    [(0.0, "all", 10), (0.1, "all", 10), (0.1, "others", 10), (0.3, "others", 2), (0.5, "others", 2), (0.99, "all", 3)],
)
def test_label_smoothing_spreads_over_all_or_over_the_other_classes(smoothing: float, over: str, classes: int) -> None:
    words = (f"data.classes={classes}", f"loss.label_smoothing={smoothing}", f"loss.smooth_over={over}", "norm=none")
    plan = make_plan(*words, *EXACT)
    whole, share = make_whole(plan), first_step(plan)
    loss, hits = whole.forward_backward(share).tolist()
    expected = right = 0.0
    for batch in share:
        logs = log_shares(plan, whole, batch)
        own = F.one_hot(batch.labels, classes).double()
        if over == "all":
            target = (1 - smoothing) * own + smoothing / classes
        else:
            target = (1 - smoothing) * own + smoothing / (classes - 1) * (1 - own)
        expected -= float((target * logs).sum())
        right += int((logs.argmax(1) == batch.labels).sum())
    assert loss == pytest.approx(expected, rel=1e-12)
    assert hits == right


def gradients(whole: Whole) -> dict[str, Tensor]:
    return {name: p.grad for name, p in whole.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_gradients_are_sums_over_images_however_a_step_is_cut(micro_batch: int) -> None:
    plan = make_plan("on.micro_batch=16", *EXACT)
    cut = make_plan(f"on.micro_batch={micro_batch}", *EXACT)
    one, other = make_whole(plan), make_whole(cut)
    tallies = [one.forward_backward(first_step(plan)), other.forward_backward(first_step(cut))]
    assert torch.allclose(tallies[0], tallies[1], rtol=1e-12)
    theirs = gradients(other)
    for name, gradient in gradients(one).items():
        assert torch.allclose(gradient, theirs[name], rtol=1e-11, atol=1e-11)
    sums, again = one.statistics.collect(), other.statistics.collect()
    assert sums is not None
    assert again is not None
    assert torch.allclose(sums, again, rtol=1e-11, atol=1e-12)


def test_a_replica_without_images_learns_nothing_and_adds_zeros() -> None:
    whole = make_whole(make_plan(*EXACT))
    assert whole.forward_backward([]).tolist() == [0, 0]
    assert gradients(whole) == {}


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_gradient_that_is_not_finite_makes_a_step_bad(value: float) -> None:
    plan = make_plan(*EXACT)
    whole = make_whole(plan)
    whole.forward_backward(first_step(plan))
    before = {name: gradient.clone() for name, gradient in gradients(whole).items()}
    sums = whole.statistics.collect()
    assert whole.non_finite(sums).item() == 0
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients(whole).items())
    gradients(whole)["head.dense.bias"][3] = value
    assert whole.non_finite(sums).item() == 1


def test_a_variance_that_is_not_finite_makes_a_step_bad_though_every_gradient_is_finite() -> None:
    plan = make_plan("on.precision=fp32")
    whole = make_whole(plan)
    with torch.no_grad():
        whole.module.get_parameter("stem.conv.weight").mul_(1e25)
    whole.forward_backward(first_step(plan))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(whole).values())
    assert whole.non_finite(torch.zeros(1)).item() == 0
    assert whole.non_finite(whole.statistics.collect()).item() == 1


@pytest.mark.parametrize("count", [1, 5, 8])
def test_only_the_real_images_of_a_batch_are_judged(count: int) -> None:
    plan = make_plan("on.micro_batch=8", *EXACT)
    whole = make_whole(plan)
    batch = first_step(plan)[0]
    whole.module.eval()
    logs = log_shares(plan, whole, batch)[:count]
    labels = batch.labels[:count]
    best = logs.topk(5).indices
    answers = whole.answers(MicroBatch(batch.images, batch.labels, count))
    assert answers.real.tolist() == [index < count for index in range(8)]
    assert torch.allclose(answers.loss[:count], -logs.gather(1, labels[:, None])[:, 0], rtol=1e-12)
    assert torch.allclose(answers.probability[:count], logs.exp().amax(1), rtol=1e-12)
    assert torch.equal(answers.answer[:count], best[:, 0])
    assert torch.equal(answers.top5[:count], (best == labels[:, None]).any(1))


def test_mirrored_judging_takes_the_mean_of_both_scores() -> None:
    plan = make_plan("evaluate.flip=true", "norm=none", *EXACT)
    whole, (batch, *_) = make_whole(plan), first_step(plan)
    mean, std = (torch.tensor(row, dtype=torch.float64).view(3, 1, 1) for row in (plan.data.mean, plan.data.std))
    seen = (batch.images.double() / 255 - mean) / std
    with torch.no_grad():
        scores, mirrored = whole.module(seen), whole.module(seen.flip(3))
    assert not torch.allclose(scores, mirrored)
    answers = whole.answers(batch)
    expected = (scores + mirrored) / 2
    assert torch.allclose(answers.loss, F.cross_entropy(expected, batch.labels, reduction="none"), rtol=1e-12)
    assert torch.equal(answers.answer, expected.argmax(1))


def test_class_scores_are_the_network_s_in_evaluation() -> None:
    plan = make_plan("evaluate.flip=true", *EXACT)
    whole, (batch, *_) = make_whole(plan), first_step(plan)
    images = whole.augment.normalize(batch.images)
    whole.module.eval()
    with torch.no_grad():
        expected = (whole.module(images) + whole.module(images.flip(3))) / 2
    whole.module.train()
    assert torch.allclose(whole.scores(batch.images), expected, rtol=1e-12)


def test_judging_moves_nothing() -> None:
    plan = make_plan("data.classes=3", *EXACT)
    whole = make_whole(plan)
    before = {name: value.clone() for name, value in whole.module.state_dict().items()}
    for batch in itertools.chain(first_step(plan), first_step(plan)):
        assert whole.answers(batch).top5.all()  # among three classes, every image is in the best five
    assert all(torch.equal(value, before[name]) for name, value in whole.module.state_dict().items())
    whole.forward_backward(first_step(plan))  # and training goes on from there
    assert whole.module.training
