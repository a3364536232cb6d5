"""Notes on a job: what was hardly meant by its numbers, its images, or where it would run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from folders_made import picture, put
from paceline.command.notes import describe_found, index_of, notes_of, precision_notes
from paceline.job import Job, make_job
from paceline.machine import Machine, bf16_instructions


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.delenv("DATASETS_DIR", raising=False)


def folder_of(folder: Path, **classes: tuple[int, int]) -> Path:
    for name, (trained, validated) in classes.items():
        put(folder, *(f"train/{name}/{name}{number}.jpg" for number in range(trained)))
        put(folder, *(f"val/{name}/v{name}{number}.jpg" for number in range(validated)))
    return folder


def job_of(folder: Path | None, *words: str, recipe: str = "images/resnet18") -> Job:
    small = ["data.side=32", "global_batch=8", "norm_batch=8"] if folder is not None else []
    return make_job(recipe, [*small, *words], folder, None, None, "cpu", look=False)


def notes(job: Job) -> list[str]:
    return notes_of(job, index_of(job))


def test_images_are_described_in_a_line(tmp_path: Path) -> None:
    classes = dict.fromkeys("abcdef", (3, 1))
    index = index_of(job_of(folder_of(tmp_path, **classes)))
    assert index is not None
    assert describe_found(index) == (
        "18 images to train on and 6 to validate on, of 6 classes (a 3, b 3, c 3, d 3, 2 more), median 24 x 16 pixels"
    )


def test_nothing_is_said_of_what_is_as_it_should_be(tmp_path: Path) -> None:
    assert notes(job_of(folder_of(tmp_path, cat=(40, 30), dog=(40, 30)))) == []
    assert notes(job_of(None, recipe="cifar10/resnet20")) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["schedule.warmup=5 epochs", "epochs=4"], "its peak of 0.00313, only to 0.00"),
        (["schedule.warmup=70%"], "its peak of 0.00313, only to 0.00"),
    ],
)
def test_a_peak_that_is_never_reached_is_noted(tmp_path: Path, words: list[str], said: str) -> None:
    (note,) = notes(job_of(folder_of(tmp_path, cat=(40, 30), dog=(40, 30)), *words))
    assert said in note
    assert note.endswith("write schedule.warmup=5%")


@pytest.mark.parametrize(("images", "said"), [(81, ["epochs is 2, and whole steps make 1.99 (40 steps)"]), (80, [])])
def test_epochs_that_whole_steps_do_not_make_are_noted(tmp_path: Path, images: int, said: list[str]) -> None:
    assert notes(job_of(folder_of(tmp_path, cat=(80, 30), dog=(images, 30)), "epochs=2")) == said


def test_a_validation_of_few_images_is_noted(tmp_path: Path) -> None:
    folder = put(tmp_path / "photos", *(f"{number}/{number}.jpg" for number in range(20)), "1/a.jpg", "2/b.jpg")
    (note,) = notes(job_of(folder, "data.validation=20%"))
    assert note == (
        "there are only 2 validation images for data.validation=20%, since a class of one image is only trained on: "
        "each is 50.0% of top-1"
    )


def test_one_validation_image_is_no_images(tmp_path: Path) -> None:
    (note,) = notes(job_of(folder_of(tmp_path, cat=(40, 1), dog=(40, 0))))
    assert note == "there is only 1 validation image: each is 100.0% of top-1"


def test_unequal_classes_are_noted_with_the_share_of_the_largest(tmp_path: Path) -> None:
    (note,) = notes(job_of(folder_of(tmp_path, cat=(30, 90), dog=(10, 10))))
    assert note.startswith("classes are unequal: 'cat' has 30 training images, 'dog' 10; ")
    advice = "; loss.class_weights=balanced lets all classes count the same"
    assert note.endswith(f"; always answering the largest would be 90.00% top-1{advice}")
    (note,) = notes(job_of(tmp_path, "loss.class_weights=balanced"))
    assert note.endswith("90.00% top-1")


def test_a_class_without_a_readable_image_is_noted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, cat=(40, 30), dog=(40, 30))
    put(folder, *(f"train/bird/{number}.jpg" for number in range(40)), content=picture()[:20])
    (folder / "train" / "cow").mkdir()
    assert notes(job_of(folder)) == [
        "1 class has no readable training image: bird",
        "1 folder has no images: train/cow",
    ]


def test_a_variable_that_is_passed_over_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    (note,) = notes(job_of(None, recipe="shapes/resnet8"))
    assert note == "DATA_DIR is set and passed over, since shapes/resnet8 draws its own images"


def test_a_device_that_is_not_here_is_noted() -> None:
    job = make_job("shapes/resnet8", [], None, None, None, "cuda", look=False)
    (note,) = notes(replace(job, machine=Machine(cores=2, memory=1 << 30)))
    assert re.search("no CUDA device is visible", note)
    assert notes(replace(job, machine=Machine(cores=2, memory=1 << 30, accelerators=1))) == []


@pytest.mark.parametrize(
    ("facts", "instructions"),
    [
        ("model name\t: X\nflags\t\t: fpu avx512f avx512_bf16 sse2\n", "avx512_bf16"),
        ("flags\t\t: avx512_bf16 amx_bf16\n", "amx_bf16"),
        ("Features\t: fp asimd bf16 i8mm\n", "bf16"),
        ("model name\t: bf16\nflags\t\t: avx2\n", ""),
        ("", ""),
    ],
)
def test_a_processor_says_whether_it_multiplies_bfloat16(facts: str, instructions: str) -> None:
    assert bf16_instructions(facts) == instructions


@pytest.mark.parametrize(
    ("instructions", "recipe", "word", "said"),
    [
        ("avx512_bf16", "cifar10/resnet20", "seed=1", ["(avx512_bf16), so on.precision=bf16 is usually faster"]),
        ("amx_bf16", "cifar10/resnet20", "seed=1", ["(amx_bf16), so on.precision=bf16 may be faster"]),
        ("avx512_bf16", "cifar10/resnet20", "on.precision=fp32", []),
        ("avx512_bf16", "cifar10/resnet20", "on.device=cuda", []),
        (
            "avx512_bf16",
            "cifar10/resnet20",
            "model=mobilenet-v2",
            ["(avx512_bf16), so on.precision=bf16 is usually faster"],
        ),
        ("avx512_bf16", "cifar10/resnet20", "model=mobilenet-v3-small", []),
        ("avx512_bf16", "graphcore/efficientnet-b4", "seed=1", []),
        ("", "cifar10/resnet20", "seed=1", []),
    ],
)
def test_a_plan_says_where_bf16_would_be_faster_on_the_cpu(
    instructions: str, recipe: str, word: str, said: list[str]
) -> None:
    job = make_job(recipe, ["on.device=cpu", word], None, None, None, None, look=False)
    job = replace(job, machine=replace(job.machine, bf16=instructions))
    assert [note.removeprefix("this CPU multiplies in bfloat16 ") for note in precision_notes(job)] == said


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("on.shard=optimizer",), "on.shard has no effect with one replica"),
        (("on.offload=optimizer",), "on.offload has no effect on cpu"),
        (("on.offload=optimizer", "on.device=cuda"), "so on.graphs is off"),
        (("on.shard=optimizer", "on.replicas=2", "on.micro_batch=64"), None),
    ],
)
def test_a_plan_says_what_becomes_of_a_wish_for_less_state(words: tuple[str, ...], note: str | None) -> None:
    job = make_job("cifar10/resnet20", list(words), None, None, None, None, look=False)
    said = [line for line in notes(job) if "on.shard" in line or "on.offload" in line]
    assert [note is not None and note in line for line in said] == [True] * (note is not None)
    assert job.plan.placement.graphs is False
