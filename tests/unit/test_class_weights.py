"""How much each class counts: by the recipe and the training images alone, with a mean of 1 over them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from conftest import make_plan, make_session
from folders_made import put
from paceline.data.load.arrays import open_split
from paceline.data.load.class_weights import class_weights
from paceline.errors import PlanError, SpecError
from paceline.job import make_job
from paceline.training.evaluate import evaluate
from paceline.training.session import Session

IMAGES = {"cat": 12, "dog": 4, "emu": 2}


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def photos(folder: Path) -> Path:
    for name, count in IMAGES.items():
        put(folder, *(f"train/{name}/{number}.jpg" for number in range(count)), f"val/{name}/v.jpg")
    return folder


def weights_of(folder: Path, setting: str, *words: str) -> dict[str, float] | None:
    small = ["data.side=32", "global_batch=4", "norm_batch=4"]
    job = make_job("images/resnet18", [*small, f"loss.class_weights={setting}", *words], folder, None, None, "cpu")
    return class_weights(job.plan, job.data_folder)


def test_balanced_weights_let_every_class_count_the_same(tmp_path: Path) -> None:
    assert weights_of(photos(tmp_path), "balanced") == {"cat": 18 / 36, "dog": 18 / 12, "emu": 18 / 6}
    assert weights_of(tmp_path, "none") is None


def test_written_weights_keep_their_ratios_and_get_a_mean_of_1_over_the_training_images(tmp_path: Path) -> None:
    weights = weights_of(photos(tmp_path), "{emu: 6, dog: 3}")
    assert weights is not None
    assert weights["dog"] == pytest.approx(3 * weights["cat"])
    assert weights["emu"] == pytest.approx(6 * weights["cat"])
    assert sum(weights[name] * count for name, count in IMAGES.items()) == pytest.approx(18)


def test_only_images_that_are_trained_on_count(tmp_path: Path) -> None:
    folder = photos(tmp_path)
    put(folder, *(f"val/emu/more{number}.jpg" for number in range(50)))
    (tmp_path / "fixes.csv").write_text("file,class\n" + "".join(f"train/cat/{n}.jpg,emu\n" for n in range(4)))
    assert weights_of(folder, "balanced") == {"cat": 18 / 36, "dog": 18 / 12, "emu": 18 / 6}
    relabeled = weights_of(folder, "balanced", f"data.relabel={tmp_path}/fixes.csv")
    assert relabeled == {"cat": 18 / 24, "dog": 18 / 12, "emu": 18 / 18}


def test_a_name_that_no_class_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^loss.class_weights: no class is named 'cats'; did you mean 'cat'\?$"):
        weights_of(photos(tmp_path), "{cats: 2}")
    with pytest.raises(PlanError, match=r"no class is named 'zebra'; the classes are cat, dog, emu$"):
        weights_of(tmp_path, "{zebra: 2}")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("auto", "expected none, balanced, or weights such as {cat: 3, dog: 1}; found 'auto'"),
        ("[1, 2]", "expected none, balanced, or weights such as {cat: 3, dog: 1}; found [1, 2]"),
        ("{}", "expected none, balanced, or weights such as {cat: 3, dog: 1}; found {}"),
        ("{cat: 0}", "expected a weight above 0 for class 'cat', such as 3, found 0"),
        ("{cat: much}", "expected a weight above 0 for class 'cat', such as 3, found 'much'"),
        ("{cat: true}", "expected a weight above 0 for class 'cat', such as 3, found True"),
    ],
)
def test_what_is_no_weight_is_refused(setting: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(f"loss.class_weights={setting}")
    assert message in str(caught.value)


def test_made_up_images_have_the_weights_of_their_labels_and_pass_over_names() -> None:
    weights = class_weights(make_plan("loss.class_weights=balanced", "data.images=1000"), None)
    counts = np.bincount(np.resize(labels_of("data.images=1000"), 1000), minlength=10).tolist()
    assert weights == pytest.approx({str(number): 100 / count for number, count in enumerate(counts)})
    ones = class_weights(make_plan("loss.class_weights={cat: 2}"), None)
    assert set((ones or {}).values()) == {1.0}


def labels_of(*words: str) -> list[int]:
    labels: list[int] = open_split(make_plan(*words).recipe, None, "training").labels.tolist()
    return labels


def test_a_class_without_images_counts_as_a_mean_one() -> None:
    weights = class_weights(make_plan("loss.class_weights=balanced", "data.images=16"), None)
    assert weights is not None
    there = set(labels_of("data.images=16"))
    assert len(there) < 10
    assert all(weights[str(number)] == 1.0 for number in range(10) if number not in there)


def test_the_built_in_shapes_have_names() -> None:
    weights = class_weights(make_plan("data=shapes", "augment.pad=0", "loss.class_weights={disc: 2}"), None)
    assert weights is not None
    assert weights["disc"] == pytest.approx(2 * weights["ring"])


def losses(session: Session) -> tuple[float, float]:
    """The loss of the first step, and what torch's weighted sum gives for the same scores."""
    plan, network = session.plan, session.state.network
    weights = class_weights(plan, None)
    batches = next(session.loader.training(0))
    table = torch.tensor([*weights.values()], dtype=torch.float64) if weights else None
    theirs = 0.0
    with torch.no_grad():
        for batch in batches:
            images, labels, parts = network._mixed(batch)
            target: Tensor = labels
            if parts is not None:
                target = torch.zeros(len(images), 10, dtype=torch.float64).scatter_add_(1, labels, parts)
            theirs += float(F.cross_entropy(network.module(images), target, table, reduction="sum"))
    return float(network.forward_backward(batches)[0]), theirs


@pytest.mark.parametrize("mixed", [(), ("mix.mixup=0.4",)], ids=["plain", "mixed"])
def test_a_step_has_the_weighted_sum_of_torch(mixed: tuple[str, ...]) -> None:
    words = ("norm=none", "on.precision=fp64", "on.micro_batch=8", *mixed)
    ours, theirs = losses(make_session(make_plan(*words, "loss.class_weights=balanced")))
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert ours != pytest.approx(losses(make_session(make_plan(*words)))[1], rel=1e-3)


def test_validation_weights_nothing() -> None:
    plans = [make_plan("on.precision=fp64", *words) for words in ((), ("loss.class_weights=balanced",))]
    equal, weighted = (evaluate(make_session(plan)).row for plan in plans)
    assert weighted == equal
