"""Averages of weights: what they are, that every layout has the same, and that training does not notice them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as tensors_from
from safetensors.torch import load_file
from torch import Tensor, nn

from conftest import make_plan, make_session
from paceline import checkpoint
from paceline.data.load.loader import open_loader
from paceline.errors import PlanError, RunError
from paceline.model.norm import BatchNormAct
from paceline.optim.averages import Ema, average_networks
from paceline.planning import Plan
from paceline.record import latest
from paceline.training.averaging import average_at_end, recalibrate
from paceline.training.evaluate import evaluate_network
from paceline.training.loop import train
from paceline.training.restore import copy_tensors, load_files, restore_newest
from paceline.training.save import to_files, to_keep
from paceline.training.session import Session
from paceline.training.state import build_state, initialize_state
from paceline.training.trials import Outcome, Trial, compare_outcomes
from paceline.world import T, World

EXACT = 1e-12
WORLD = World(torch.device("cpu"))
GOOD, BAD = torch.zeros(()), torch.ones(())


class Little(nn.Module):
    """A network of every kind of tensor."""

    seen: Tensor

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 2, dtype=dtype)
        self.register_buffer("running_mean", torch.zeros(4, dtype=dtype))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def walk(self, step: int) -> None:
        """Other numbers for each step."""
        with torch.no_grad():
            for place, tensor in enumerate(self.state_dict().values()):
                if tensor.is_floating_point():
                    count = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
                    tensor.copy_(torch.sin(count + 1.7 * step + place))


def numbers(module: nn.Module) -> list[float]:
    found = [t.double().flatten().tolist() for t in module.state_dict().values() if t.is_floating_point()]
    return [value for some in found for value in some]


def averaged(average: Ema) -> list[float]:
    return [value for t in average.tensors().values() for value in t.double().flatten().tolist()]


@pytest.mark.parametrize(
    ("words", "moves"),
    [
        ((), list(range(1, 19))),
        (("ema.every=1 epoch",), [6, 12, 18]),
        (("ema.every=4 steps",), [4, 8, 12, 16]),
        (("ema.start=7 steps",), list(range(7, 19))),
        (("ema.start=1 epoch", "ema.every=5 steps"), [6, 11, 16]),
    ],
)
def test_the_average_is_its_definition(words: tuple[str, ...], moves: list[int]) -> None:
    plan = make_plan("epochs=3", *words)
    module = Little()
    average = Ema(plan, module, 0.7)
    expected: list[float] | None = None
    for step in range(1, 19):
        module.walk(step)
        average.update(step, GOOD)
        if step in moves:
            now = numbers(module)
            expected = now if expected is None else [0.7 * a + 0.3 * w for a, w in zip(expected, now, strict=True)]
        assert average.started(step) == (expected is not None)
        if expected is not None:
            assert averaged(average) == pytest.approx(expected, rel=0, abs=EXACT)


def test_a_bad_step_does_not_move_it() -> None:
    module = Little()
    average = Ema(make_plan(), module, 0.5)
    module.walk(1)
    average.update(1, GOOD)
    before = averaged(average)
    module.walk(2)
    average.update(2, BAD)
    assert averaged(average) == before
    average.update(3, GOOD)
    assert averaged(average) != before


def test_one_that_moves_once_an_epoch_moves_though_that_step_is_bad() -> None:
    module = Little()
    average = Ema(make_plan("ema.every=1 epoch"), module, 0.5)
    module.walk(6)
    average.update(6, GOOD)
    before = averaged(average)
    module.walk(11)
    average.update(12, BAD)
    assert averaged(average) == pytest.approx(
        [0.5 * a + 0.5 * w for a, w in zip(before, numbers(module), strict=True)], rel=0, abs=EXACT
    )


def test_it_begins_as_a_copy_even_where_the_first_step_is_bad() -> None:
    module = Little()
    average = Ema(make_plan(), module, 0.5)
    module.walk(1)
    average.update(1, BAD)
    assert averaged(average) == numbers(module)


@pytest.mark.parametrize(
    ("weights", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_it_is_kept_in_float32_or_wider_and_counts_are_left_out(weights: torch.dtype, wide: torch.dtype) -> None:
    module = Little(weights)
    average = Ema(make_plan(), module, 0.9)
    for step in (1, 2):
        module.walk(step)
        average.update(step, GOOD)
    assert {tensor.dtype for tensor in average.tensors().values()} == {wide}
    assert set(average.tensors()) == {"dense.weight", "dense.bias", "running_mean"}
    one, two = Little(weights), Little(weights)
    one.walk(1)
    two.walk(2)
    expected = [0.9 * a + 0.1 * b for a, b in zip(numbers(one), numbers(two), strict=True)]
    assert averaged(average) == pytest.approx(expected, abs=1e-6)  # and so finer than the weights themselves


@pytest.mark.parametrize("fails", [False, True])
def test_showing_the_average_leaves_every_bit_of_the_weights(fails: bool) -> None:
    module = Little(torch.bfloat16)
    average = Ema(make_plan(), module, 0.5)
    for step in (1, 2):
        module.walk(step)
        average.update(step, GOOD)
    own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    try:
        with average.swapped_in():
            assert numbers(module) == pytest.approx(averaged(average), abs=1e-2)
            assert not torch.equal(module.dense.weight, own["dense.weight"])
            if fails:
                raise ValueError("in the midst of a validation")
    except ValueError:
        assert fails
    assert all(torch.equal(tensor, own[name]) for name, tensor in module.state_dict().items())


def trained(plan: Plan, folder: Path) -> Session:
    """A whole run in this process."""
    session = make_session(plan, folder, "own")
    assert train(session)
    return session


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_does_not_notice_the_average(tmp_path: Path, precision: str) -> None:
    words = (
        "epochs=2",
        "evaluate.every=4 steps",
        f"on.precision={precision}",
        f"on.weights={precision}",
        "on.cpu_threads=1",
    )
    runs = {}
    for name, more in (("without", ()), ("with", ("ema.decay=0.8",))):
        session = trained(make_plan(*words, *more), tmp_path / name)
        tree = session.state.tensors()
        runs[name] = session.run.rows(), tree["network"] | tree["optimizer"]
        session.run.close()
    (rows, tensors), (rows_with, tensors_with) = runs.values()
    assert tensors.keys() == tensors_with.keys()
    assert all(torch.equal(tensor, tensors_with[name]) for name, tensor in tensors.items())
    losses = [[row["last_loss"] for row in latest(some, "report")] for some in (rows, rows_with)]
    assert losses[0] == losses[1]
    judged = [latest(some, "validation") for some in (rows, rows_with)]
    assert [row["step"] for row in judged[0]] == [row["step"] for row in judged[1]] == [4, 8, 12]
    assert all("averaged" not in row for row in judged[0])
    assert all(row["averaged"] is True for row in judged[1])
    assert all(a["loss"] != b["loss"] for a, b in zip(*judged, strict=True))


def test_validation_judges_the_average_and_statistics_with_it(tmp_path: Path) -> None:
    plan = make_plan("ema.decay=0.8", "evaluate.every=3 steps", "on.save=3 steps", "on.keep_last=9")
    session = trained(plan, tmp_path)
    run = session.run
    for row in latest(run.rows(), "validation"):
        files = checkpoint.read(run.checkpoints / checkpoint.name_of(row["step"]))
        average = tensors_from(files["ema.safetensors"])
        assert any("running_var" in name for name in average)
        copy_tensors(average, session.state.network.module.state_dict(), "test")
        found = evaluate_network(session).row
        assert found["loss"] == pytest.approx(row["loss"], rel=1e-6)
        assert found["top1"] == row["top1"]
    run.close()


def test_each_step_of_a_run_moves_it_after_the_weights(tmp_path: Path) -> None:
    words = ("on.precision=fp64", "on.save=1 step", "on.keep_last=9")
    run = trained(make_plan("ema.decay=0.8", "ema.start=2 steps", *words), tmp_path).run
    expected: dict[str, Tensor] = {}
    for step in range(2, 7):
        files = checkpoint.read(run.checkpoints / checkpoint.name_of(step))
        weights, average = (tensors_from(files[f"{name}.safetensors"]) for name in ("network", "ema"))
        expected = {name: 0.8 * expected.get(name, w) + 0.2 * w for name, w in weights.items()}
        assert average.keys() == expected.keys()
        for name, tensor in average.items():
            assert torch.allclose(tensor, expected[name], rtol=0, atol=EXACT), (step, name)
    run.close()


def test_before_it_begins_the_weights_themselves_are_judged(tmp_path: Path) -> None:
    plan = make_plan("ema.decay=0.8", "ema.start=4 steps", "evaluate.every=2 steps", "on.save=2 steps")
    session = trained(plan, tmp_path)
    run, state = session.run, session.state
    assert [row["averaged"] for row in latest(run.rows(), "validation")] == [False, True, True]
    early = checkpoint.read(run.checkpoints / checkpoint.name_of(2))
    assert "ema.safetensors" not in early
    assert load_files(state, early, "step 2").step == 2
    run.close()


def test_a_checkpoint_without_the_average_is_refused_for_a_run_that_has_one() -> None:
    plan = make_plan("ema.decay=0.8")
    state = build_state(plan, WORLD)
    initialize_state(state, plan)
    state.step = 5
    files = to_files(state)
    load_files(build_state(plan, WORLD), files, "step-5")
    del files["ema.safetensors"]
    with pytest.raises(RunError, match=r"step-5: 'ema.safetensors' is missing, .*ema.decay.*init.from"):
        load_files(build_state(plan, WORLD), files, "step-5")
    files["ema.safetensors"] = b"nonsense"
    with pytest.raises(RunError, match="not a checkpoint that this version reads"):
        load_files(build_state(plan, WORLD), files, "step-5")


class Listening(World):
    """A first replica that remembers what it gave to the others."""

    given: list[Tensor]

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self.given = [*getattr(self, "given", []), *tensors]

    def broadcast_object(self, value: T) -> T:
        return value


def test_a_restored_average_is_given_to_every_replica(tmp_path: Path) -> None:
    plan = make_plan("ema.decay=0.8")
    before = trained(plan, tmp_path)
    before.run.close()
    world = Listening(torch.device("cpu"))
    session = make_session(plan, tmp_path, "own", world, build_state(plan, world))
    world.replicas = 2
    restore_newest(session)
    session.run.close()
    given = {tensor.data_ptr() for tensor in world.given}
    for name, tensor in session.state.tensors()["ema"].items():
        assert tensor.data_ptr() in given, name
        assert torch.equal(tensor, before.state.tensors()["ema"][name])


STEPS = 6
LAYOUT = ("on.precision=fp64", "on.cpu_threads=1", "ema.decay=0.6", "ema.every=2 steps")


def trial(folder: Path, *words: str) -> Outcome:
    folder.mkdir()
    return Trial(folder, None, STEPS).finish(make_plan(*LAYOUT, *words))


@pytest.mark.long
def test_layouts_and_kills_give_the_same_average(tmp_path: Path) -> None:
    whole = trial(tmp_path / "whole", "on.micro_batch=16")
    parts = [name for name in whole.tensors if name.startswith("ema.")]
    assert any("running_mean" in name for name in parts)
    assert not torch.equal(whole.tensors["ema.stem.conv.weight"], whole.tensors["network.stem.conv.weight"])
    assert max(compare_outcomes(whole, trial(tmp_path / "accumulated", "on.micro_batch=4")).values()) <= EXACT
    assert max(compare_outcomes(whole, trial(tmp_path / "two", "on.micro_batch=2", "on.replicas=2")).values()) <= EXACT
    here = make_plan(*LAYOUT, "on.micro_batch=16")
    there = make_plan(*LAYOUT, "on.micro_batch=4", "on.replicas=2")
    for plan, limit in ((here, 0.0), (there, EXACT)):
        folder = tmp_path / f"killed-{plan.replicas}"
        folder.mkdir()
        killed = Trial(folder, None, STEPS)
        assert 3 <= killed.kill_after(here, 3) < STEPS
        found = killed.finish(plan)
        assert found.tensors.keys() == whole.tensors.keys()
        assert max(compare_outcomes(whole, found).values()) <= limit


def networks(count: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    made = []
    for step in range(count):
        module = Little(dtype)
        module.walk(step)
        module.seen += step
        made.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
    return made


@pytest.mark.parametrize("decay", [None, 0.0, 0.8])
def test_blending_is_a_plain_loop_in_float64(decay: float | None) -> None:
    some = networks(5, torch.float64)
    kept = [{name: tensor.clone() for name, tensor in one.items()} for one in some]
    made = average_networks(some, decay)
    for name in ("dense.weight", "dense.bias", "running_mean"):
        rows = [one[name].flatten().tolist() for one in some]
        if decay is None:
            expected = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        else:
            expected = rows[0]
            for row in rows[1:]:
                expected = [decay * v + (1 - decay) * r for v, r in zip(expected, row, strict=True)]
        assert made[name].flatten().tolist() == pytest.approx(expected, rel=0, abs=EXACT)
    assert int(made["seen"]) == 4
    assert all(torch.equal(t, one[name]) for one, old in zip(some, kept, strict=True) for name, t in old.items())


def test_blending_rounds_once_to_the_stored_type() -> None:
    some = networks(3, torch.bfloat16)
    made = average_networks(some, None)
    expected = torch.stack([one["dense.weight"].double() for one in some]).mean(0).to(torch.bfloat16)
    assert torch.equal(made["dense.weight"], expected)
    assert made["running_mean"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("average.last=3", "epochs=2"), "2 are 1 epoch apart; write average.last=2 or a shorter average.every"),
        (("average.last=9", "epochs=2", "average.every=2 steps"), "6 are 2 steps apart; write average.last=6"),
    ],
)
def test_checkpoints_that_will_not_be_there_cannot_be_averaged(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(*words)


@pytest.mark.parametrize("words", [(), ("on.save=10 minutes",), ("on.save=5 steps",)])
def test_the_end_averages_what_the_recipe_names_whatever_else_is_saved(words: tuple[str, ...]) -> None:
    plan = make_plan("epochs=6", "average.last=3", "average.every=7 steps", *words)
    assert plan.steps == 36
    assert plan.averaged_steps == [28, 35, 36]
    assert to_keep(plan, [0, 7, 14, 21, 28, 33, 34, 35, 36], []) == {28, 34, 35, 36}
    assert to_keep(plan, [21, 28, 29, 30, 31], []) == {28, 29, 30, 31}
    assert make_plan("epochs=6").averaged_steps == []


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_ends_with_the_mean_of_its_last_checkpoints(tmp_path: Path, damaged: bool) -> None:
    plan = make_plan("epochs=2", "average.last=3", "average.every=4 steps", "on.save=100%")
    session = trained(plan, tmp_path)
    run = session.run
    saved = {step: run.checkpoints / checkpoint.name_of(step) / "network.safetensors" for step in (4, 8, 12)}
    if damaged:
        saved.pop(8).write_bytes(b"damaged")
    some = [load_file(path) for path in saved.values()]
    average_at_end(session)
    made = load_file(tmp_path / "averaged" / "network.safetensors")
    for name, tensor in made.items():
        expected = torch.stack([one[name].double() for one in some]).mean(0)
        assert torch.allclose(tensor.double(), expected, rtol=1e-6, atol=1e-7)
    row = run.rows()[-1]
    assert row["kind"] == "average"
    assert row["steps"] == sorted(saved)
    assert row["last_top1"] == latest(run.rows(), "validation")[-1]["top1"]
    how = json.loads((tmp_path / "averaged" / "average.json").read_text())
    assert how == {key: value for key, value in row.items() if key != "kind"}
    copy_tensors(made, session.state.network.module.state_dict(), "test")
    assert evaluate_network(session).row["top1"] == row["top1"]
    run.close()


def seen_by_hand(plan: Plan, steps: int, start: int) -> dict[str, Tensor]:
    """The mean over groups of what each norm sees in so many steps, from its inputs."""
    state = build_state(plan, WORLD)
    initialize_state(state, plan)
    inputs: dict[str, list[Tensor]] = {}
    for name, part in state.network.module.named_modules():
        if isinstance(part, BatchNormAct):
            part.register_forward_pre_hook(lambda _, x, name=name: inputs.setdefault(name, []).append(x[0].clone()))
    shares = open_loader(plan, None, 0, WORLD.device).training(start)
    for _ in range(steps):
        state.network.forward_backward(next(shares))
    shares.close()
    assert plan.norm_batch is not None
    found = {}
    for name, some in inputs.items():
        groups = [group.detach().transpose(0, 1).flatten(1) for x in some for group in x.split(plan.norm_batch)]
        found[f"{name}.running_mean"] = torch.stack([group.mean(1) for group in groups]).mean(0)
        found[f"{name}.running_var"] = torch.stack([group.var(1) for group in groups]).mean(0)
    return found


@pytest.mark.parametrize(("micro_batch", "start"), [(16, 0), (4, 0), (16, 6)])
def test_recalibrated_statistics_are_the_mean_over_norm_groups(tmp_path: Path, micro_batch: int, start: int) -> None:
    plan = make_plan("on.precision=fp64", f"on.micro_batch={micro_batch}")
    session = make_session(plan)
    state = session.state
    weights = state.network.module.state_dict()["head.dense.weight"].clone()
    assert recalibrate(session, 40, start) == 48
    after = state.network.module.state_dict()
    expected = seen_by_hand(plan, 3, start)
    assert len(expected) == sum("running_" in name for name in after) > 0
    for name, tensor in expected.items():
        assert torch.allclose(after[name], tensor, rtol=1e-11, atol=EXACT), name
    assert torch.equal(after["head.dense.weight"], weights)


def test_a_network_without_running_statistics_has_none_to_recalibrate(tmp_path: Path) -> None:
    session = make_session(make_plan("norm=group"))
    with pytest.raises(RunError, match="no running statistics"):
        recalibrate(session, 40, 0)
