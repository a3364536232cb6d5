"""One start of a run: a signal in the middle of a validation, and what is said at the beginning and the end."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from conftest import make_plan
from paceline import checkpoint
from paceline.data.load.loader import open_loader
from paceline.planning import Plan
from paceline.record import Run
from paceline.sink import Sink
from paceline.sink.console import Terminal
from paceline.training.loop import train
from paceline.training.messages import say_goodbye, say_hello, too_large
from paceline.training.requests import Requests, Signals, Stopped
from paceline.training.session import take_up
from paceline.training.state import fresh
from paceline.world import World

pytestmark = pytest.mark.usefixtures("one_thread")

WORLD = World(torch.device("cpu"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "a run", writer=True)
    yield made
    made.close()


class Impatient(Sink):
    """Sends the signal once the first images of a validation are judged."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self.seen: list[int] = []

    def judged(self, images: int) -> None:
        self.seen.append(images)
        self._signals.stop = True


def go_on(plan: Plan, run: Run, sink: Sink, signals: Signals) -> bool:
    state = take_up(plan, WORLD, run)
    loader = open_loader(plan, None, 0, WORLD.device)
    return train(plan, WORLD, run, state, loader, sink, Requests(WORLD, signals))


@pytest.mark.parametrize("every", ["1 epoch", "1 step"])
def test_a_signal_ends_a_validation_saved_and_the_next_start_judges(run: Run, every: str) -> None:
    plan = make_plan(f"evaluate.every={every}", "on.micro_batch=4", "on.save=1 epoch")
    signals = Signals()
    sink = Impatient(signals)
    with pytest.raises(Stopped):
        go_on(plan, run, sink, signals)
    step = 1 if every == "1 step" else plan.steps
    assert sink.seen == [plan.evaluation_batch]
    assert checkpoint.saved_steps(run.checkpoints)[-1] == step
    assert not [row for row in run.rows() if row["kind"] == "validation"]
    assert go_on(plan, run, Sink(), Signals())
    judged = [row["step"] for row in run.rows() if row["kind"] == "validation"]
    assert judged == (list(range(1, plan.steps + 1)) if every == "1 step" else [plan.steps])


def test_a_long_validation_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("data.validation_images=1234")
    now = [100.0]
    monkeypatch.setattr("paceline.sink.console.time.monotonic", lambda: now[0])
    out = io.StringIO()
    with Terminal(plan, 0, Console(file=out)) as terminal:
        for images in (100, 200, 300, 400):
            now[0] += 4
            terminal.judged(images)
    assert out.getvalue().splitlines() == ["validation: 300 of 1,234 images"]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("global_batch=32", "norm_batch=8", "on.micro_batch=32"), "such as on.micro_batch=16"),
        (("global_batch=30", "norm_batch=15", "on.micro_batch=30"), "such as on.micro_batch=15"),
        (("global_batch=32", "norm_batch=32", "on.micro_batch=32"), "write on.recompute=all, or more on.replicas"),
        (("global_batch=30", "norm_batch=15", "on.micro_batch=15"), "write on.recompute=all, or more on.replicas"),
    ],
)
def test_what_is_said_of_too_little_memory_fits(words: tuple[str, ...], remedy: str) -> None:
    plan = make_plan(*words)
    said = too_large(plan)
    assert said.endswith(remedy)
    if "such as" in remedy:
        assert make_plan(*words[:2], said.split("such as ")[1])  # it is not refused in turn


def test_a_run_says_what_it_trains_and_what_came_out(run: Run) -> None:
    plan = make_plan("data.classes=4")
    assert go_on(plan, run, Sink(), Signals())
    out = io.StringIO()
    console = Console(file=out, width=200)
    say_hello(plan, run, fresh(plan, WORLD), console)
    say_goodbye(plan, run, plan.steps, True, console)
    said = out.getvalue()
    assert said.startswith("resnet8 (74,900 parameters) on generated: 96 images of 4 classes, for 6 steps of 16, fp32")
    assert "top-1" in said
    assert "top-5" not in said  # of four classes the right one is always among five
    assert f"Next: paceline validate '{run.folder}'" in said
    assert "cifar10" not in said


def test_a_better_checkpoint_than_the_last_is_named(run: Run) -> None:
    plan = make_plan()
    assert go_on(plan, run, Sink(), Signals())
    last = [row for row in run.rows() if row["kind"] == "validation"][-1]
    checkpoint.write(run.checkpoints, 3, {})
    run.write(**{**last, "step": 3, "top1": 0.99})
    out = io.StringIO()
    say_goodbye(plan, run, plan.steps, True, Console(file=out, width=200))
    assert (
        f"The best that is kept: 99.00% after step 3: paceline validate '{run.folder}' --checkpoint best"
        in out.getvalue()
    )
