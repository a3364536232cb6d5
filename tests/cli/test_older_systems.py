"""What users of older systems looked for in vain: each of it is found now, or the page for them says why not."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from conftest import Paceline
from paceline.command.bench_infer import usual_batches
from paceline.command.bench_job import infer_job, train_job

DOCS = Path(__file__).parents[2] / "docs"
FOUND = {
    "plan mk2_resnet50_mlperf_pod16_bs20": "mk2_resnet50_mlperf_pod16_bs20 is graphcore/resnet50-momentum-1920 --on",
    "plan mk2-resnet50-mlperf-pod64-bs20": "graphcore/resnet50-momentum-2560",
    "recipes graphcore --json": '"graphcore/mk2-resnet50-gn-16ipus"',
    "placements graphcore": "graphcore/mk2-resnet50-gn-16ipus",
    "plan nvcnn/resnet50 data=synthetic": "synthetic, drawn by Paceline",
    "plan graphcore/resnet50-lars-3200 data=generated": "1,281,167",
    "plan nvidia/resnet50 data.fraction=10%": "128,117",
    "plan cifar10/resnet20 data.fraction=10%": "5,000",
    "plan cifar10/resnet20 on.device=cuda on.precision=fp16 on.fp16_accumulation=true": "matrix products only",
    "plan graphcore/efficientnet-b4-g16-800": "19,328,168 parameters",
    "plan efficientnet-b4-g16-gn-mk2": "inference at a batch of 26: paceline bench infer efficientnet-b4-g16-gn-mk2",
    "plan habana/resnet50 global_batch=128 norm_batch=128": "0.128",
    "recipes mk2_resnet50_mlperf_pod16_bs20": "its README says 45 epochs and a cosine",
}
"""A command, and what it says."""

WRITTEN = {
    "data.md": ["<https://image-net.org/download>"],
    "results/published.md": ["28.3 minutes", "77.01 %", "78.8 %", "about 82 %", "not run: no ImageNet"],
    "record.md": ["type that `on.weights` says: 16-bit with `bf16` and `fp16`"],
}
"""What is told in words."""

WITHOUT_MEANING = [
    "there are no levels; log.txt has everything",
    "nvidia-smi -L lists CUDA devices",
    "optimizer state off the device | nothing: it stays on the device",
    "staged all-reduce over pods | nothing: NCCL chooses its own",
    "so no recipe of this name is shipped",
]
"""What has no meaning here, and the words with which the page for newcomers says so."""


@pytest.mark.parametrize("command", FOUND)
def test_a_command_that_they_would_type_finds_what_they_want(paceline: Paceline, command: str) -> None:
    done = paceline(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert FOUND[command] in done.stdout.replace("\n", " ")


@pytest.mark.parametrize("page", WRITTEN)
def test_what_they_would_look_up_is_written(page: str) -> None:
    text = (DOCS / page).read_text()
    assert [words for words in WRITTEN[page] if words not in text] == []


def test_few_things_have_no_meaning_and_the_page_says_why() -> None:
    page = (DOCS / "coming-from.md").read_text()
    assert [words for words in WITHOUT_MEANING if words not in page] == []
    assert len(WITHOUT_MEANING) <= 8


def test_a_checkpoint_in_place_of_its_run_is_told_what_to_write(paceline: Paceline, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/checkpoints/step-000000040"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run/plan.yaml").touch()
    done = paceline("validate", "run/checkpoints/step-000000040")
    assert done.returncode == 2
    assert "it is a checkpoint: write run, and --checkpoint 40" in done.stderr


def test_their_names_can_be_measured() -> None:
    job = train_job("mk2_resnet8_test", [], None, None, None, None)
    assert job.notes[0].startswith("mk2_resnet8_test is graphcore/resnet8 --on ")
    assert (job.job.plan.data.name, job.job.plan.placement.weights) == ("synthetic", "fp16")
    job = infer_job("resnet50-mk2", [], None, None, None, None, None)
    assert (job.job.plan.recipe.model.name, job.job.plan.placement.precision) == ("resnet50", "fp16")
    assert usual_batches("resnet50-mk2") == "90"
