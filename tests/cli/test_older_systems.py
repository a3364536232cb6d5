"""What users of older systems looked for in vain: each of it is found now, or the page for them says why not."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from conftest import Paceline
from paceline.command.bench_infer import usual_batches
from paceline.command.bench_job import infer_job, train_job

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
FOUND = {
    (1, "plan mk2_resnet50_mlperf_pod16_bs20"): "mlperf_pod16_bs20 is graphcore/resnet50-momentum-1920 --on",
    (1, "plan mk2-resnet50-mlperf-pod64-bs20"): "graphcore/resnet50-momentum-2560",
    (1, "recipes graphcore --json"): '"graphcore/mk2-resnet50-gn-16ipus"',
    (1, "placements graphcore"): "graphcore/mk2-resnet50-gn-16ipus",
    (2, "plan nvcnn/resnet50 data=synthetic"): "synthetic, drawn by Paceline",
    (2, "plan graphcore/resnet50-lars-3200 data=generated"): "1,281,167",
    (4, "plan habana/resnet50 'epochs=500 steps'"): "128,000",
    (7, "plan nvidia/resnet50 data.fraction=10%"): "128,117",
    (7, "plan cifar10/resnet20 data.fraction=10%"): "5,000",
    (12, "plan cifar10/resnet20 on.device=cuda on.precision=fp16 on.fp16_accumulation=true"): "matrix products only",
    (18, "plan graphcore/efficientnet-b4-g16-800"): "19,328,168 parameters",
    (22, "plan nvcnn/resnet50 data=synthetic on.sinks=[console,csv,log,tensorboard]"): "synthetic, drawn by Paceline",
    (
        23,
        "plan efficientnet-b4-g16-gn-mk2",
    ): "inference at a batch of 26: paceline bench infer efficientnet-b4-g16-gn-mk2",
    (26, "plan habana/resnet50 global_batch=128 norm_batch=128"): "0.128",
    (26, "recipes mk2_resnet50_mlperf_pod16_bs20"): "its README says 45 epochs and a cosine",
}
"""What was missing, by its number, a command that they would type, and what it says."""

TESTED = {
    3: ["unit/test_session.py::test_a_run_without_validations_trains_the_same_weights"],
    5: ["cli/test_validate.py::test_replicas_evaluate_by_a_micro_batch_that_could_not_train"],
    6: [
        "unit/test_launch.py::test_one_of_several_that_cannot_find_the_others_does_not_train_alone",
        "world/test_mpiexec.py::test_what_mpiexec_starts_is_the_run_of_one_process",
    ],
    8: [
        "cli/test_plan_command.py::test_a_plan_of_a_folder_says_what_was_found_and_why_what_was_chosen",
        "unit/test_arrays.py::test_the_folder_comes_from_the_flag_then_data_dir_then_datasets_dir",
    ],
    9: ["unit/test_file_loader.py::test_replicas_of_a_host_share_one_cache"],
    10: ["unit/test_exchange.py::test_buckets_leave_in_the_last_micro_batch_while_it_runs"],
    13: ["cli/test_validate.py::test_a_part_of_the_images_is_evaluated_and_said_to_be_one"],
    14: ["cli/test_longer.py::test_a_run_that_goes_on_is_the_run_that_was_so_long_from_the_beginning"],
    15: [
        "unit/test_duration.py::test_checkpoints_come_after_their_offset",
        "unit/test_requests.py::test_the_clock_of_reports_is_not_that_of_checkpoints",
        "unit/test_save.py::test_the_newest_the_best_and_one_of_each_stretch_stay",
    ],
    16: ["unit/test_locate.py::test_datasets_dir_may_be_the_parent"],
    17: [
        "unit/test_console.py::test_a_plain_report_has_the_learning_rate_and_the_time_left",
        "unit/test_console.py::test_the_end_says_how_fast_the_run_was_and_counts_in_words",
    ],
    18: ["cli/test_models.py::test_parameters_of_a_changed_network_are_its_own"],
    22: ["world/test_trackers.py::test_tensorboard_holds_the_numbers_of_the_tables"],
    25: ["cli/test_older_systems.py::test_a_checkpoint_in_place_of_its_run_is_told_what_to_write"],
}
"""What takes more than a command to show, and the test that shows it."""

WRITTEN = {
    (19, "record.md"): ["type that `on.weights` says: 16-bit with `bf16` and `fp16`"],
    (20, "results/published.md"): ["28.3 minutes", "77.01 %", "78.8 %", "about 82 %", "not run: no ImageNet"],
    (21, "coming-from.md"): ["optimizer state off the device | `on.device=cuda on.offload=optimizer`"],
    (24, "coming-from.md"): ["mpiexec --host a,b -np 16 paceline train RECIPE"],
    (26, "data.md"): ["<https://image-net.org/download>"],
}
"""What is told in words, and on which page."""

WITHOUT_MEANING = [
    (10, "staged all-reduce over pods | nothing: NCCL chooses its own"),
    (11, "No accuracy on ImageNet was reproduced"),
    (23, "nor was the speed of EfficientNet's groups of 16 against the usual ones"),
    (24, "there are no levels; log.txt has everything"),
    (24, "nvidia-smi -L lists CUDA devices"),
    (26, "so no recipe of this name is shipped"),
    (26, '`schedule.warmup="5 epochs"` is not automatic here'),
]
"""What has no meaning here, or is not here, and the words with which the page for newcomers says so."""


def test_nothing_that_was_missing_is_left_out() -> None:
    answered = {*TESTED, *(number for number, _ in [*FOUND, *WRITTEN, *WITHOUT_MEANING])}
    assert answered == set(range(1, 27))


@pytest.mark.parametrize(("number", "command"), FOUND)
def test_a_command_that_they_would_type_finds_what_they_want(paceline: Paceline, number: int, command: str) -> None:
    done = paceline(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert FOUND[number, command] in done.stdout.replace("\n", " ")


@pytest.mark.parametrize("test", [test for tests in TESTED.values() for test in tests])
def test_what_takes_more_than_a_command_has_its_test(test: str) -> None:
    file, name = test.split("::")
    assert f"\ndef {name}(" in (TESTS / file).read_text()


@pytest.mark.parametrize(("number", "page"), WRITTEN)
def test_what_they_would_look_up_is_written(number: int, page: str) -> None:
    text = (DOCS / page).read_text()
    assert [words for words in WRITTEN[number, page] if words not in text] == []


def test_few_things_have_no_meaning_and_the_page_says_why() -> None:
    page = " ".join((DOCS / "coming-from.md").read_text().split())
    assert [words for _, words in WITHOUT_MEANING if words not in page] == []
    assert len(WITHOUT_MEANING) <= 12


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
