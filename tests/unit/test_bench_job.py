"""Every recipe can be measured without its images: what bench puts in their place, and what it leaves out and says."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from conftest import SMALL
from paceline.command.bench_job import LONGEST, BenchJob, infer_job, train_job
from paceline.command.bench_train import predicted
from paceline.errors import DataError, PlanError, SpecError
from paceline.settings import shipped
from paceline.settings.augment import Crop
from paceline.settings.data import Made

ROOT = Path(__file__).parents[2]


def train(name: str, *words: str, page: str | None = None, device: str | None = "cpu") -> BenchJob:
    return train_job(name, list(words), None, page, None, device)


def infer(name: str, *words: str) -> BenchJob:
    return infer_job(name, list(words), None, None, None, "cpu", None)


@pytest.mark.long
@pytest.mark.parametrize("name", shipped.names("recipes"))
def test_every_recipe_has_a_plan_to_measure(name: str) -> None:
    measured = train(name)
    plan = measured.job.plan
    assert isinstance(plan.data, Made)
    assert plan.steps >= LONGEST
    assert measured.steps is not None or name.startswith("images/")
    assert infer(name).job.plan.facts.classes == plan.facts.classes


def test_crops_of_files_are_left_out_and_told() -> None:
    measured = train("nvidia/resnet50")
    plan = measured.job.plan
    assert (plan.data.name, plan.facts.side, plan.facts.classes) == ("synthetic", 224, 1000)
    assert plan.recipe.augment.crop == Crop()
    assert plan.recipe.augment.flip
    assert measured.notes == ["left out, as only images in files need it: augment.crop"]
    assert measured.steps == 1_281_167 // 2048 * 90
    assert predicted(measured, {"ms_per_step": 200.0}) == {
        "recipe_epochs": 90.0, "recipe_steps": 56_250, "predicted_seconds": 11_250.0,
    }  # fmt: skip


def test_the_data_of_the_machine_are_not_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    plan = train("cifar10/resnet20").job.plan
    assert (plan.data.name, plan.facts.side, plan.facts.classes, plan.facts.images) == ("synthetic", 32, 10, 50_000)


def test_images_of_ones_own_are_not_counted_so_no_time_is_predicted() -> None:
    measured = train("images/resnet50-finetune")
    assert measured.steps is None
    assert predicted(measured, {"ms_per_step": 200.0})["predicted_seconds"] is None
    assert [note.partition(",")[0] for note in measured.notes] == [
        "nobody knows how many classes there are",
        "nobody knows how many images there are",
        "left out",
        "left out",
    ]
    assert measured.job.plan.recipe.init.from_ is None
    counted = train("images/resnet18", "data.images=6400", "data.classes=7", "epochs=2")
    assert (counted.steps, counted.job.plan.facts.classes) == (200, 7)
    assert not any("nobody knows" in note for note in counted.notes)


def test_a_side_that_grows_is_measured_at_its_largest() -> None:
    measured = train("ffcv/resnet50-16")
    assert measured.job.plan.recipe.augment.side == {}
    assert measured.job.plan.facts.side == 192
    assert "measured is its largest, 192" in measured.notes[-1]
    smaller = train("ffcv/resnet50-16", "augment.side={0 epochs: 128, 12 epochs: 160}")
    assert smaller.job.plan.recipe.augment.side == {"0%": 160}


def test_evaluation_has_its_own_side_and_no_augmentation() -> None:
    measured = infer("ffcv/resnet50-16")
    assert measured.job.plan.facts.side == 256
    assert measured.notes == ["evaluate.flip is on: each image is evaluated twice, mirrored too"]
    assert infer("timm/resnet50-a3").job.plan.recipe.mix.active is False


def test_a_recipe_of_few_steps_is_made_longer_and_says_its_own_length(tmp_path: Path) -> None:
    page = tmp_path / "small.yaml"
    page.write_text(SMALL)
    measured = train(str(page))
    assert (measured.steps, measured.epochs) == (6, 1.0)
    assert measured.job.plan.steps >= LONGEST
    assert measured.job.plan.data.name == "generated"


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "open.yaml"
    page.write_text(re.sub(r"data: .*\n", "", SMALL))
    with pytest.raises(SpecError, match="leaves its data open; write --data FOLDER"):
        train(str(page))
    assert train(str(page), "data.name=synthetic", "data.side=32", "data.classes=10").job.plan.facts.side == 32
    with pytest.raises(PlanError, match="does not divide global_batch"):
        train("nvidia/resnet50", "on.micro_batch=3")
    with pytest.raises(DataError, match="draws its own images"):
        train_job("shapes/resnet8", [], tmp_path, None, None, None)
    with pytest.raises(SpecError, match="a recipe has none"):
        infer_job("shapes/resnet8", [], None, None, None, None, "best")


def commands() -> list[str]:
    """Every command of the page on measuring that would measure a network on made-up images."""
    found = re.findall(r"paceline bench (?:train|infer) [a-z][^`|\n]*", (ROOT / "docs/measuring.md").read_text())
    return sorted({command.strip() for command in found if "--data" not in command and "runs/" not in command})


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_docs_have_a_plan(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, verb, name, *rest = shlex.split(command)
    pages = [after for word, after in itertools.pairwise(rest) if word == "--on"]
    words = [word for word in rest if re.match(r"[a-z_.]+=", word)]
    monkeypatch.setattr("paceline.machine._nvidia", lambda: [["0", "H200", "140000", "GPU"]] * 16)
    if verb == "train":
        assert train(name, *words, page=pages[0] if pages else None, device=None).steps
    else:
        assert infer_job(name, words, None, pages[0] if pages else None, None, None, None)
