"""Probes on an accelerator: what they predict is what larger micro-batches take, and what is chosen by them trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import torch

from conftest import SMALL, Paceline, make_plan
from paceline.facts import Probe
from paceline.machine import this_machine
from paceline.memory import best_that_fits, demand, room_of
from paceline.planning import Plan
from paceline.probing import probe_plan
from paceline.record import rows_of
from paceline.settings.placement import AUTO, Placement
from paceline.training import probe as probe_module
from paceline.training.probe import release_memory, take_probe
from paceline.training.session import open_session
from paceline.training.step import take_step

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
GIB = 1 << 30
NETWORKS = {
    "efficientnet-b0": ("model=efficientnet-b0", "data.side=224", "norm_batch=8"),
    "resnet50": ("model=resnet50", "data.side=224", "norm_batch=32"),
    "vgg16": ("model=vgg16", "data.side=224", "norm_batch=1"),
}
COMMON = ("data.name=synthetic", "data.classes=1000", "data.images=1000000", "augment.pad=0", "epochs=1000 steps",
          "on.device=cuda", "on.precision=bf16")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Time is not what these tests are about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module, "TIMES", 1)
        yield


def plan_of(name: str, size: int, *words: str, global_batch: int | None = None) -> Plan:
    batch = f"global_batch={global_batch or 4 * size}"
    return make_plan(*NETWORKS[name], *COMMON, batch, f"on.micro_batch={size}", *words)


@cache
def probed(name: str) -> Probe:
    probe = take_probe(plan_of(name, 256), this_machine())
    release_memory("cuda")  # a command takes its probe in a process of its own
    return probe


def twice(name: str) -> int:
    """A micro-batch twice as large as any that was probed."""
    return 2 * max(probed(name).sizes)


def peak_of_steps(plan: Plan, folder: Path, steps: int = 4) -> int:
    """The most bytes in tensors in the first steps of a plan, those included that choose kernels and are recorded."""
    left = release_memory("cuda")
    torch.cuda.reset_peak_memory_stats()
    with open_session(plan, folder) as session, closing(session.loader.training(0)) as batches:
        for _ in range(steps):
            take_step(session, next(batches))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - left


@pytest.mark.parametrize("name", NETWORKS)
def test_the_peak_of_a_micro_batch_twice_as_large_is_predicted_within_5_percent(name: str, tmp_path: Path) -> None:
    size = twice(name)
    probe, plan = probed(name), plan_of(name, size)
    assert not probe.counted
    predicted, real = demand(plan, probe).step, peak_of_steps(plan, tmp_path)
    print(f"{name}: {probe.sizes} predict {predicted / GIB:.3f} GiB at {size}, and it takes {real / GIB:.3f} GiB")
    assert predicted == pytest.approx(real, rel=0.05)


def test_a_single_micro_batch_is_predicted_too(tmp_path: Path) -> None:
    size = twice("resnet50")
    plan = plan_of("resnet50", size, global_batch=size)
    assert demand(plan, probed("resnet50")).step == pytest.approx(peak_of_steps(plan, tmp_path), rel=0.05)


def test_the_memory_has_names() -> None:
    probe = probed("resnet50")
    needs = demand(plan_of("resnet50", twice("resnet50")), probe)
    parameters = 25_557_032
    assert needs.weights == pytest.approx(4 * parameters, rel=0.01)
    assert sum(block.gradients for block in probe.blocks) == pytest.approx(4 * parameters, rel=0.01)
    assert needs.kept > 0.4 * needs.step
    assert 0 < needs.workspace < 0.5 * needs.step
    assert probe.held.slope > 0  # the memory of CUDA graphs
    assert probe.evaluation.slope > 0
    assert all(min(block.forward, block.backward, block.working.slope) > 0 for block in probe.blocks[:-1])


def test_the_automatic_micro_batch_trains_and_validates_in_20_gib(tmp_path: Path) -> None:
    words = ("data.validation_images=4096", "on.memory=20 GiB")
    plan, probe = plan_of("resnet50", 32, *words, global_batch=1024), probed("resnet50")
    best = best_that_fits(plan, Placement.model_validate({"device": "cuda"}), probe)
    assert demand(best, probe).peak <= room_of(best, probe) == 0.9 * 20 * GIB
    larger = plan_of("resnet50", 2 * best.micro_batch, *words, global_batch=1024)
    assert demand(larger, probe).peak > room_of(best, probe)
    torch.cuda.reset_peak_memory_stats()  # the probe took more
    with open_session(best, tmp_path) as session:  # torch takes no more than on.memory
        with closing(session.loader.training(0)) as batches:
            for _ in range(4):
                take_step(session, next(batches))
        with closing(session.loader.validation()) as batches, session.state.network.evaluating():
            images = next(batches).images
            for _ in range(3):
                session.state.network.scores(images)
        torch.cuda.synchronize()
        assert 0.3 * 20 * GIB < torch.cuda.max_memory_reserved() <= 20 * GIB


def test_as_little_is_recomputed_as_fits_three_quarters_of_the_memory(tmp_path: Path) -> None:
    probe, size, words = probed("resnet50"), twice("resnet50"), ("on.graphs=false",)
    kept = demand(plan_of("resnet50", size, *words, global_batch=size), probe)
    less = plan_of("resnet50", size, *words, f"on.memory={int(0.75 * kept.peak)}", global_batch=size)
    best = best_that_fits(less, Placement.model_validate({"micro_batch": size, "recompute": AUTO}), probe)
    assert best.recomputed
    assert best.placement.recompute != ("all",)
    assert demand(best, probe).seconds > kept.seconds
    with open_session(best, tmp_path) as session, closing(session.loader.training(0)) as batches:
        for _ in range(3):
            take_step(session, next(batches))
        torch.cuda.synchronize()


def test_a_run_that_runs_out_of_memory_for_real_goes_on_with_less(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    words = ("model=resnet20", "data=synthetic", "data.side=32", "data.images=16384", "global_batch=4096",
             "norm_batch=256", "--device", "cuda", "on.memory=1 GiB", "on.micro_batch=4096")  # fmt: skip
    done = paceline("train", "small.yaml", *words, "--out", "run", env={})
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["kind"] == "end"
    sizes = [row["placement"]["micro_batch"] for row in rows if row["kind"] == "start"]
    assert sizes[0] == 4096
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes) > 1
    notes = [row["text"] for row in rows if row["kind"] == "note" and "ran out of memory" in row["text"]]
    assert len(notes) == len(sizes) - 1


def test_the_command_says_where_the_memory_is(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    words = ("model=resnet20", "data=synthetic", "data.side=32", "global_batch=1024", "norm_batch=64")
    done = paceline("plan", "small.yaml", *words, "--device", "cuda", "--probe", "--json", env={"PACELINE_CACHE": "c"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["micro_batch"] == 1024
    assert found["fits"]
    assert not found["probe"]["counted"]
    assert found["images_per_second"] > 1000


def test_a_probe_leaves_the_allocator_as_it_was() -> None:
    plan = make_plan(*COMMON, "model=resnet20", "data.side=32", "data.classes=10", "global_batch=64", "norm_batch=16")
    before = release_memory("cuda")
    take_probe(plan, this_machine())
    assert release_memory("cuda") <= before + (8 << 20)
    assert probe_plan(plan, this_machine(), 16).placement.graphs
