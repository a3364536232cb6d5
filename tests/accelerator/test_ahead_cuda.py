"""Programs compiled ahead of the first step on a CUDA device: none is left for it, and no bit of training differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conftest import run_in

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BOTTLENECKS = (
    "model=resnet14", "data.side=64", "global_batch=64", "norm_batch=16", "on.micro_batch=32", "on.precision=bf16",
)  # fmt: skip
TRAINED = """
import hashlib, json, sys
import torch
from triton import knobs
from conftest import make_plan, make_session
from paceline.model.whole import Whole
from paceline.training.session import torch_settings
from paceline.training.step import take_step
from paceline.world import World

ahead, words = sys.argv[1] == "ahead", sys.argv[2:]
early, late = [], []
compile_ahead = Whole.compile_ahead

def noticed(*arguments):
    def look(**asked):
        late.append(asked["repr"])
        return False
    if ahead:
        compile_ahead(*arguments)
    knobs.runtime.jit_cache_hook = look

def compiled(**asked):
    early.append(asked["repr"])

Whole.compile_ahead, knobs.runtime.jit_post_compile_hook = noticed, compiled
plan = make_plan("epochs=3 steps", "on.device=cuda", "on.deterministic=true", "on.kernels=fused", *words)
with torch_settings(plan.placement):
    session = make_session(plan, world=World(torch.device("cuda", 0)))
    batches = session.loader.training(0)
    for _ in range(3):
        take_step(session, next(batches))
    digest = hashlib.sha256()
    for tensors in session.state.tensors().values():
        for tensor in tensors.values():
            digest.update(tensor.detach().cpu().numpy().tobytes())
    if ahead:  # else the hook that looks on keeps evaluation from compiling ahead, too
        knobs.runtime.jit_cache_hook = None
    images = next(session.loader.validation()).images
    for _ in range(3):
        digest.update(session.state.network.scores(images).cpu().numpy().tobytes())
numbers = session.state.numbers()
print(json.dumps({"digest": digest.hexdigest(), "numbers": numbers, "late": late, "early": len(early)}))
"""


def trained(folder: Path, how: str, *words: str) -> dict[str, object]:
    """What three steps and an evaluation leave in a process that has nothing compiled, and what they compile."""
    tests = str(Path(__file__).parent.parent)
    done = run_in(
        folder, how, *words, program=f"import sys; sys.path.insert(0, {tests!r})\n{TRAINED}",
        env={"TRITON_CACHE_DIR": str(folder / how)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    "words",
    [
        (*BOTTLENECKS, "on.graphs=true"),
        ("model=efficientnet-b0", "data.side=64", "on.precision=bf16", "on.graphs=false"),
    ],
)
def test_the_first_step_compiles_nothing_and_has_the_same_bits(tmp_path: Path, words: tuple[str, ...]) -> None:
    with_pass, without = (trained(tmp_path, how, *words) for how in ("ahead", "plain"))
    assert with_pass["late"] == []
    assert isinstance(without["late"], list)
    assert len(without["late"]) > 10
    assert with_pass["early"] == without["early"], "no program is compiled for nothing"
    assert with_pass["digest"] == without["digest"]
    assert with_pass["numbers"] == without["numbers"]
