"""What the tests share: settings made in a line, and the command line as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from command_server import command_server
from paceline.job import plan_job
from paceline.launch import HYDRA, OPEN_MPI
from paceline.planning import Plan
from paceline.record import Mode, Row, Run
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, override, parse
from paceline.settings.recipe import Recipe

if TYPE_CHECKING:
    from paceline.training.session import Session
    from paceline.training.state import State
    from paceline.world import World

os.environ["OMP_NUM_THREADS"] = "1"
"""Before torch is loaded: small tensors are slower on several threads, and several processes test side by side."""
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
"""Threads that wait for each other give up their core: spinning, they would keep it from those that they wait for."""
# A shell ignores it for what it starts in the background, and so would every command that a test starts from there.
signal.signal(signal.SIGINT, signal.default_int_handler)
SMALL = """
model: resnet8
data: {name: generated, images: 96, validation_images: 37, classes: 10, side: 8}
global_batch: 16
norm_batch: 4
epochs: 1
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
schedule: constant
augment: {pad: 1, flip: true}
report: 1 steps
"""
"""A recipe small enough to train in a test."""


def validation_row(step: int, top1: float) -> Row:
    """A row of the record."""
    rest = {"epoch": 1.0, "loss": 1.0, "top5": 1.0, "images": 37, "seconds": 1.0, "images_per_second": 37.0}
    return {"kind": "validation", "step": step, "top1": top1, **rest}


def make_recipe(*words: str, text: str = SMALL) -> Recipe:
    """A recipe from a page and overrides."""
    tree = parse(text, "test.yaml")
    for word in words:
        override(tree, word, Recipe)
    return build(Recipe, tree)


def make_plan(*words: str, text: str = SMALL) -> Plan:
    """A plan from a page and overrides; on.* words place it, on one thread of the CPU unless they say otherwise."""
    placed = Tree({"device": "cpu", "cpu_threads": 1}, {(): "test"})
    for word in words:
        if word.startswith("on."):
            override(placed, word.removeprefix("on."), Placement)
    recipe = make_recipe(*(word for word in words if not word.startswith("on.")), text=text)
    return plan_job("test", recipe, build(Placement, placed), None, Tree(), placed).plan


def make_session(
    plan: Plan,
    folder: Path = Path("no run"),
    mode: Mode = "read",
    world: World | None = None,
    state: State | None = None,
) -> Session:
    """A session of a plan in this process, on the CPU unless a world says otherwise; its weights are initial ones."""
    import torch

    from paceline.training.requests import Requests
    from paceline.training.session import Session
    from paceline.training.state import initialize_state
    from paceline.world import World

    world = world or World(torch.device("cpu"))
    session = Session(plan, world, Run(folder, mode), Requests(world))
    if state is not None:
        session.state = state
    else:
        initialize_state(session.state, plan)
    return session


Paceline = Callable[..., "subprocess.CompletedProcess[str]"]


def run_in(
    folder: Path, *words: str, env: dict[str, str] | None = None, program: str | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a folder, as a user would; in a process of its own if anything is unusual about it."""
    if env is None and program is None and not options:
        return command_server(environment()).run(folder, words, environment())
    start = ["-m", "paceline"] if program is None else ["-c", program]
    return subprocess.run(
        [sys.executable, *start, *words],
        capture_output=True, text=True, timeout=300, check=False, cwd=folder,
        env=environment() | (env or {}), **options,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def shared_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """On an accelerator several processes test side by side: cuDNN, which tries convolutions in all memory that it can
    have, gets a fifth of it, and nothing that a test leaves in torch's allocator stays there."""
    if "accelerator" not in request.keywords:
        yield
        return
    import torch

    from paceline.training.probe import release_memory

    torch.cuda.set_per_process_memory_fraction(0.2)
    yield
    release_memory("cuda")


@pytest.fixture
def paceline(tmp_path: Path) -> Paceline:
    """Runs the command line in an empty folder."""
    return partial(run_in, tmp_path)


@pytest.fixture(autouse=True)
def same_start() -> None:
    """Networks that torch starts by itself start alike, whichever tests ran before."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def environment() -> dict[str, str]:
    """This environment without what a launcher, or the user's data folders, would add."""
    drop = {"RANK", "WORLD_SIZE", "DATA_DIR", "DATASETS_DIR", "SLURM_STEP_NUM_TASKS", "PMIX_RANK", *OPEN_MPI, *HYDRA}
    return {key: value for key, value in os.environ.items() if key not in drop} | {"OMP_NUM_THREADS": "1"}
