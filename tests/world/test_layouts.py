"""The promise: the same recipe is the same run on every layout, and after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import make_plan
from paceline.training.trials import Outcome, Trial, compare_outcomes

EXACT = 1e-12
STEPS = 6


def run(folder: Path, *words: str) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    return Trial(folder, None, STEPS).finish(make_plan("on.precision=fp64", "on.cpu_threads=1", *words))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("whole"), "on.micro_batch=16")


@pytest.mark.parametrize(
    ("replicas", "micro_batch"),
    [(1, 8), (1, 4), (2, 8), (2, 4), (3, 4), (2, 2), (4, 2), (4, 1), (3, 16)],
    ids=str,
)
def test_layout_does_not_change_the_run(tmp_path: Path, whole: Outcome, replicas: int, micro_batch: int) -> None:
    found = compare_outcomes(whole, run(tmp_path, f"on.replicas={replicas}", f"on.micro_batch={micro_batch}"))
    assert max(found.values()) <= EXACT, found


@pytest.mark.parametrize("words", [(), ("on.recompute=all",)], ids=str)
@pytest.mark.long
def test_replicas_without_a_micro_batch_in_the_last_round_wait_for_the_norm_groups_of_the_others(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    recipe = ("global_batch=24", "norm_batch=8", "epochs=2")
    one = run(tmp_path / "one", *recipe, "on.micro_batch=24")
    four = run(tmp_path / "four", *recipe, "on.micro_batch=4", "on.replicas=4", *words)
    assert max(compare_outcomes(one, four).values()) <= EXACT


@pytest.mark.parametrize("words", [("on.data_on_device=true",), ("on.loader_workers=3",), ("on.timeout=77",)])
def test_other_layout_keys_do_not_change_a_bit(tmp_path: Path, whole: Outcome, words: tuple[str, ...]) -> None:
    assert max(compare_outcomes(whole, run(tmp_path, "on.micro_batch=16", *words)).values()) == 0


@pytest.mark.parametrize("norm", ["group", "none"])
def test_norms_of_one_image_give_the_same_run_too(tmp_path: Path, norm: str) -> None:
    words = (f"norm={norm}", "optimizer.lr=0.01")
    one = run(tmp_path / "one", *words, "on.micro_batch=16")
    three = run(tmp_path / "three", *words, "on.micro_batch=2", "on.replicas=3")
    assert max(compare_outcomes(one, three).values()) <= EXACT


def test_a_data_set_smaller_than_the_global_batch_gives_the_same_run(tmp_path: Path) -> None:
    words = ("data.images=11", "epochs=20")
    one = run(tmp_path / "one", *words, "on.micro_batch=16")
    two = run(tmp_path / "two", *words, "on.micro_batch=4", "on.replicas=2")
    assert max(compare_outcomes(one, two).values()) <= EXACT


def test_float32_layouts_agree_on_the_first_loss(tmp_path: Path) -> None:
    losses = []
    for replicas in (1, 2):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        plan = make_plan("on.precision=fp32", f"on.replicas={replicas}", "on.micro_batch=4")
        losses.append(Trial(folder, None, 1).finish(plan).losses[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_killed_run_goes_on_exactly_on_the_same_layout_and_to_rounding_on_another(
    tmp_path: Path, whole: Outcome
) -> None:
    here = make_plan("on.precision=fp64", "on.cpu_threads=1", "on.micro_batch=16")
    there = make_plan("on.precision=fp64", "on.cpu_threads=1", "on.micro_batch=2", "on.replicas=2")
    for plan, limit in ((here, 0.0), (there, EXACT)):
        folder = tmp_path / str(plan.replicas)
        folder.mkdir()
        trial = Trial(folder, None, STEPS)
        assert 2 <= trial.kill_after(here, 2) < STEPS
        assert max(compare_outcomes(whole, trial.finish(plan)).values()) <= limit


def test_class_weights_give_the_same_run_on_another_layout_and_after_a_kill(tmp_path: Path) -> None:
    words = ("loss.class_weights=balanced", "loss.kind=binary", "mix.cutmix=beta")
    one = run(tmp_path / "one", *words, "on.micro_batch=16")
    layout = ("on.precision=fp64", "on.cpu_threads=1", "on.micro_batch=4", "on.replicas=2")
    (tmp_path / "two").mkdir()
    trial = Trial(tmp_path / "two", None, STEPS)
    assert 2 <= trial.kill_after(make_plan(*words, *layout), 2) < STEPS
    assert max(compare_outcomes(one, trial.finish(make_plan(*words, *layout))).values()) <= EXACT
    assert compare_outcomes(one, run(tmp_path / "three", *words[1:], "on.micro_batch=16"))["loss"] > 1e-3


def test_another_seed_is_another_run(tmp_path: Path, whole: Outcome) -> None:
    other = run(tmp_path, "on.micro_batch=16", "seed=1")
    assert compare_outcomes(whole, other)["weights"] > 0.1
    assert not torch.equal(whole.tensors["network.stem.conv.weight"], other.tensors["network.stem.conv.weight"])
