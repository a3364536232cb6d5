"""Exported networks: files that other programs read, which answer as the run's own network does."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open

from conftest import environment, make_recipe
from paceline.errors import RunError, SpecError
from paceline.exporting import comparison
from paceline.exporting.folder import Exported, export_run
from paceline.exporting.request import read_request
from paceline.exporting.torchvision_names import torchvision_names, twin
from paceline.facts import DataFacts
from paceline.model.build import build_network
from paceline.model.pretrained import load_weights
from paceline.training.opened import open_run
from trained_run import CLASSES, train_on_images


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return train_on_images(tmp_path_factory.mktemp("exported"), "ema.decay=0.8", "evaluate.flip=true")


def export(run: Path, to: str, out: Path | None = None, half: bool = False, **more: Any) -> Exported:
    return export_run(read_request(run, to, out, None, half, more.pop("images", ()), None), **more)


def own_scores(run: Path, pixels: np.ndarray[Any, Any]) -> Any:
    opened = open_run(run, "best")
    return opened.scores(torch.from_numpy(pixels).permute(0, 3, 1, 2)).numpy()


@pytest.fixture(scope="module")
def onnx(run: tuple[Path, Path]) -> Exported:
    return export(run[0], "onnx")


def test_an_onnx_file_answers_from_pixels_as_the_run_does(run: tuple[Path, Path], onnx: Exported) -> None:
    result = onnx.comparison
    assert (result.images, result.equal) == (15, 15)
    assert result.difference <= 1e-4 * result.largest
    session = onnxruntime.InferenceSession(onnx.file)
    (images,) = session.get_inputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["batch", 16, 16, 3])
    described = session.get_modelmeta().custom_metadata_map
    assert json.loads(described["classes"]) == list(CLASSES)
    for count in (1, 5):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        (scores,) = session.run(["scores"], {"images": pixels})
        assert np.allclose(scores, own_scores(run[0], pixels), atol=1e-4)


def test_what_lies_beside_the_file_prepares_images_and_tells_what_was_measured(
    run: tuple[Path, Path], onnx: Exported
) -> None:
    assert onnx.folder == run[0] / "exported" / "onnx"
    names = {path.name for path in onnx.folder.iterdir()}
    assert names == {"README.md", "model.onnx", "preprocess.json", "preprocess.py"}
    prepare = runpy.run_path(str(onnx.folder / "preprocess.py"))["preprocess"]
    opened = open_run(run[0], "best")
    for path in sorted((run[1] / "val").rglob("*.jpg")):
        assert np.array_equal(prepare(path), opened.preprocess(path.read_bytes()))
    card = (onnx.folder / "README.md").read_text()
    assert card.startswith("---\nlicense: unknown\npipeline_tag: image-classification\n")
    result = onnx.comparison
    for words in (
        f"{result.equal} of {result.images} answers are equal",
        f"{result.difference:.2g}",
        "| class | images | right | precision | recall | F1 |\n",
        f"| apple | {result.classes['apple'][0]} | {result.classes['apple'][1]} | ",
        json.loads((run[0] / "data.json").read_text())["training"]["digest"],
        f"--to onnx --checkpoint {onnx.step}",
    ):
        assert words in card


def test_the_example_of_the_card_runs(run: tuple[Path, Path], onnx: Exported) -> None:
    program = (onnx.folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    photo = next((run[1] / "val" / "pear").iterdir())
    done = subprocess.run(
        [sys.executable, "-c", program.replace("photo.jpg", str(photo))],
        cwd=onnx.folder, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in CLASSES


def test_a_pt2_file_answers_as_the_run_does(run: tuple[Path, Path], tmp_path: Path) -> None:
    exported = export(run[0], "pt2", tmp_path / "out")
    assert exported.comparison.equal == exported.comparison.images
    assert exported.comparison.difference < 1e-5
    files = {"classes.json": ""}
    network = torch.export.load(exported.file, extra_files=files).module()
    assert json.loads(files["classes.json"]) == list(CLASSES)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    assert np.allclose(network(torch.from_numpy(pixels)).numpy(), own_scores(run[0], pixels), atol=1e-5)


def test_a_safetensors_file_holds_the_evaluated_weights_and_the_classes(run: tuple[Path, Path], tmp_path: Path) -> None:
    exported = export(run[0], "safetensors", tmp_path / "out", images=[str(run[1] / "val" / "pear")])
    assert exported.comparison.images == 5
    assert exported.comparison.difference == 0
    assert exported.comparison.classes == {}
    with safe_open(exported.file, "pt") as file:
        assert json.loads(file.metadata()["classes"]) == list(CLASSES)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    network = open_run(run[0], "best").whole.module.state_dict()
    assert tensors.keys() == network.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in network.items())


@pytest.mark.long
def test_half_precision_halves_the_file_and_keeps_the_answers(run: tuple[Path, Path], onnx: Exported) -> None:
    for kind in ("onnx", "pt2"):
        small = export(run[0], kind, half=True, allow_difference=True)
        assert 0 < small.comparison.difference < 0.01 * small.comparison.largest
        assert small.folder.name == f"{kind}-half"
    assert (run[0] / "exported/onnx-half/model.onnx").stat().st_size < 0.7 * onnx.file.stat().st_size


def test_a_file_that_answers_differently_is_not_handed_over(
    run: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_own_scores", lambda _opened, pixels: np.eye(len(pixels), 3, dtype=np.float32))
    with pytest.raises(RunError, match=r"answers are those of the run's own network .* accept it with --allow-diff"):
        export(run[0], "safetensors", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert export(run[0], "safetensors", tmp_path / "out", allow_difference=True).file.is_file()


def test_what_cannot_be_exported_is_refused_before_anything_is_written(run: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(SpecError, match="--to tflite: expected onnx, pt2, safetensors, torchvision"):
        export(run[0], "tflite")
    with pytest.raises(RunError, match="holds something else than an export"):
        export(run[0], "pt2", tmp_path / "mine")
    with pytest.raises(RunError, match="torchvision has no network that computes what this resnet8 does"):
        export(run[0], "torchvision", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "theirs", "names"),
    [
        ("resnet18", "resnet18", {"layer2.0.downsample.1.running_var", "layer4.1.bn2.bias", "fc.weight"}),
        ("resnext50", "resnext50_32x4d", {"conv1.weight", "layer1.0.conv3.weight", "layer4.2.bn3.weight"}),
        ("vgg11-bn", "vgg11_bn", {"features.0.bias", "features.26.running_mean", "classifier.6.weight"}),
        ("alexnet", "alexnet", {"features.10.weight", "classifier.1.weight", "classifier.4.bias"}),
        ("mobilenet-v2", "mobilenet_v2", {"features.1.conv.2.weight", "features.17.conv.3.bias", "features.18.1.bias"}),
        ("mobilenet-v3-small", "mobilenet_v3_small", {"features.1.block.1.fc1.bias", "classifier.0.weight"}),
        ("efficientnet-b0", "efficientnet_b0", {"features.1.0.block.2.1.bias", "features.8.0.weight"}),
    ],
)
def test_tensors_have_the_names_that_torchvision_gives_them(name: str, theirs: str, names: set[str]) -> None:
    recipe = make_recipe(f"model={name}")
    with torch.device("meta"):
        network = build_network(recipe, DataFacts(10, 10, 1000, 224))
    renamed = torchvision_names(recipe.model, network)
    assert twin(recipe) == theirs
    assert names <= set(renamed.values())
    assert len(set(renamed.values())) == len(renamed)


@pytest.mark.parametrize("words", ["model={name: resnet50, version: v1}", "norm=group", "model=googlenet"])
def test_a_network_that_torchvision_does_not_have_is_refused(words: str) -> None:
    with pytest.raises(RunError, match="torchvision has no network"):
        twin(make_recipe("model=resnet50", words))


def test_weights_with_names_of_torchvision_come_back_by_init_from(tmp_path: Path) -> None:
    recipe = make_recipe("model=resnet18")
    network = build_network(recipe, DataFacts(10, 10, 5, 32))
    names = torchvision_names(recipe.model, network)
    renamed = {names[name]: torch.randn(tensor.shape) for name, tensor in network.state_dict().items()}
    load_weights(network, renamed, "model.pth")
    assert all(torch.equal(tensor, renamed[names[name]]) for name, tensor in network.state_dict().items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "side"),
    [("resnet50", 64), ("efficientnet-b0", 64), ("mobilenet-v3-large", 64), ("{name: inception-v3, auxiliary: 0}", 96)],
)
def test_networks_of_every_family_answer_the_same_from_onnx(tmp_path: Path, model: str, side: int) -> None:
    run, _ = train_on_images(
        tmp_path, f"model={model}", f"data.side={side}", f"data.evaluation.short={side}", "epochs=2"
    )
    result = export(run, "onnx", tmp_path / "out").comparison
    assert result.equal == result.images
    assert result.difference <= 1e-4 * result.largest
