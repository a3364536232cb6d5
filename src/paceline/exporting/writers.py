"""Writes a trained network as each kind of file, and runs what was written."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.exporting.request import ExportKind
from paceline.exporting.torchvision_names import torchvision_names, twin
from paceline.model.network import mirrored_scores
from paceline.settings.recipe import Recipe
from paceline.training.opened import Classifier

Scores = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
"""Computes the class scores of images [images, side, side, 3]."""
_INPUT, _OUTPUT, _BATCH = "images", "scores", "batch"
"""What a graph calls what goes in, what comes out, and how many images there are."""


def write_model(
    kind: ExportKind,
    classifier: Classifier,
    recipe: Recipe,
    side: int,
    described: dict[str, Any],
    path: Path,
    half: bool,
) -> tuple[Scores, str]:
    """Write a network to a file with its class names; gives what computes scores by that file, and its name."""
    if half:
        classifier = copy.deepcopy(classifier)
        classifier.network.half()
    match kind:
        case "onnx":
            return _write_onnx(_graph(classifier, side), described, path), "onnxruntime"
        case "pt2":
            return _write_pt2(_graph(classifier, side), described, path), "torch.export"
        case "safetensors":
            tensors = {name: tensor.contiguous() for name, tensor in classifier.network.state_dict().items()}
            save_file(tensors, path, {key: json.dumps(value) for key, value in described.items()})
            return _read_back(classifier, load_file(path)), "torch"
        case "torchvision":
            return _write_torchvision(classifier, recipe, path)


def _graph(classifier: Classifier, side: int) -> torch.export.ExportedProgram:
    """The network as a graph of torch's operations, for any number of images."""
    example = torch.zeros(2, side, side, 3, dtype=torch.uint8)
    with _quiet():
        return torch.export.export(
            classifier.requires_grad_(False), (example,), dynamic_shapes=({0: torch.export.Dim(_BATCH)},)
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporters tell their own developers."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _write_onnx(graph: torch.export.ExportedProgram, described: dict[str, Any], path: Path) -> Scores:
    with _quiet():
        onnx = importlib.import_module("onnx")
        program = torch.onnx.export(graph, input_names=[_INPUT], output_names=[_OUTPUT], dynamo=True, verbose=False)
        assert program is not None
        model = program.model_proto
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = _BATCH
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in described.items()})
    onnx.save(model, path)
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def scores(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        return np.asarray(session.run([_OUTPUT], {_INPUT: pixels})[0], np.float32)

    return scores


def _write_pt2(graph: torch.export.ExportedProgram, described: dict[str, Any], path: Path) -> Scores:
    texts = {f"{key}.json": json.dumps(value) for key, value in described.items()}
    with _quiet():
        torch.export.save(graph, path, extra_files=dict(texts))
        return partial(_by_module, torch.export.load(path).module())


def _read_back(classifier: Classifier, tensors: dict[str, Tensor]) -> Scores:
    """Paceline's own network with the tensors of a file, in float32."""
    twin = copy.deepcopy(classifier).float()
    twin.network.load_state_dict(tensors)
    return partial(_by_module, twin)


def _write_torchvision(classifier: Classifier, recipe: Recipe, path: Path) -> tuple[Scores, str]:
    name, names = twin(recipe), torchvision_names(recipe.model, classifier.network)
    tensors = classifier.network.state_dict()
    torch.save({names[ours]: tensor.contiguous() for ours, tensor in tensors.items()}, path)
    read: dict[str, Tensor] = torch.load(path, weights_only=True)
    try:
        models: Any = importlib.import_module("torchvision.models")
    except Exception:  # noqa: BLE001 - one that does not fit this torch fails in many ways
        back = {ours: read[theirs] for ours, theirs in names.items()}
        return _read_back(classifier, back), "Paceline's own network, as torchvision cannot be loaded here"
    network = models.get_model(name, weights=None, num_classes=len(tensors[list(tensors)[-1]]))
    network.load_state_dict(read)
    normalize, flip = classifier.normalize.float(), classifier.flip

    def by_twin(images: Tensor) -> Tensor:
        return mirrored_scores(network.float().eval(), normalize(images.permute(0, 3, 1, 2)), flip)

    return partial(_by_module, by_twin), f"torchvision's {name}"


@torch.inference_mode()
def _by_module(module: nn.Module | Callable[[Tensor], Tensor], pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    scores: Tensor = module(torch.from_numpy(pixels))
    return np.asarray(scores.float().numpy(), np.float32)
