"""Published names of tensors: their network's order is found again, whatever order a file has them in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.model.tensor_names import in_network_order, is_efficientnet_pytorch, is_transformers

NORM = ("weight", "bias", "running_mean", "running_var")
LITE0 = (1, 2, 2, 3, 3, 4, 1)


def tensors(*layers: str) -> list[str]:
    """The tensors of layers: four of a norm, one of a convolution, and a bias too of those that end with +."""
    made = []
    for layer in layers:
        last = layer.rpartition(".")[2]
        words = NORM if "bn" in last else ("weight", "bias") if layer.endswith("+") else ("weight",)
        made += [f"{layer.removesuffix('+')}.{word}" for word in words]
    return made


def resnet50() -> list[str]:
    """Of torchvision and timm."""
    layers = ["conv1", "bn1"]
    for stage, count in enumerate((3, 4, 6, 3), 1):
        for unit in range(count):
            parts = ["conv1", "bn1", "conv2", "bn2", "conv3", "bn3"]
            layers += [f"layer{stage}.{unit}.{part}" for part in parts]
            if unit == 0:
                layers += [f"layer{stage}.0.downsample.0", f"layer{stage}.0.downsample.1.bn"]
    return [name.replace("downsample.1.bn.", "downsample.1.") for name in tensors(*layers, "fc+")]


def efficientnet_pytorch() -> list[str]:
    layers = ["_conv_stem", "_bn0"]
    for unit in range(16):
        wide = ["_expand_conv", "_bn0"] if unit else []
        parts = [*wide, "_depthwise_conv", "_bn1", "_se_reduce+", "_se_expand+", "_project_conv", "_bn2"]
        layers += [f"_blocks.{unit}.{part}" for part in parts]
    return tensors(*layers, "_conv_head", "_bn1", "_fc+")


def timm_efficientnet() -> list[str]:
    layers = ["conv_stem", "bn1"]
    for stage, count in enumerate(LITE0):
        for unit in range(count):
            squeeze = ["se.conv_reduce+", "se.conv_expand+"]
            parts = ["conv_dw", "bn1", *squeeze, "conv_pw", "bn2"]
            if stage > 0:
                parts = ["conv_pw", "bn1", "conv_dw", "bn2", *squeeze, "conv_pwl", "bn3"]
            layers += [f"blocks.{stage}.{unit}.{part}" for part in parts]
    return tensors(*layers, "conv_head", "bn2", "classifier+")


def torchvision_efficientnet() -> list[str]:
    def unit(place: str, widens: bool) -> Iterator[str]:
        for part in range(4 if widens else 3):
            if part == (2 if widens else 1):
                yield from (f"{place}.block.{part}.fc1+", f"{place}.block.{part}.fc2+")
            else:
                yield from (f"{place}.block.{part}.0", f"{place}.block.{part}.1.bn")

    layers = ["features.0.0", "features.0.1.bn"]
    for stage, count in enumerate(LITE0, 1):
        layers += [layer for each in range(count) for layer in unit(f"features.{stage}.{each}", stage > 1)]
    names = tensors(*layers, "features.8.0", "features.8.1.bn", "classifier.1+")
    return [name.replace(".bn.", ".") for name in names]


def inception(modules: dict[str, list[str]]) -> list[str]:
    return [
        name for module, parts in modules.items() for part in parts
        for name in tensors(f"{module}.{part}.conv".replace("..", "."), f"{module}.{part}.bn".replace("..", "."))
    ]  # fmt: skip


def inception_v3() -> list[str]:
    """Of torchvision and timm, without the auxiliary head, whose place differs."""
    pool, double = ["branch_pool"], [f"branch3x3dbl_{n}" for n in (1, 2, 3)]
    seven = ["branch7x7_1", "branch7x7_2", "branch7x7_3", *(f"branch7x7dbl_{n}" for n in (1, 2, 3, 4, 5))]
    forked = ["branch3x3_1", "branch3x3_2a", "branch3x3_2b", *double[:2], "branch3x3dbl_3a", "branch3x3dbl_3b"]
    modules = {
        "Conv2d_1a_3x3": [""], "Conv2d_2a_3x3": [""], "Conv2d_2b_3x3": [""], "Conv2d_3b_1x1": [""],
        "Conv2d_4a_3x3": [""], "Mixed_5b": ["branch1x1", "branch5x5_1", "branch5x5_2", *double, *pool],
        "Mixed_6a": ["branch3x3", *double], "Mixed_6b": ["branch1x1", *seven, *pool],
        "Mixed_7a": ["branch3x3_1", "branch3x3_2", *(f"branch7x7x3_{n}" for n in (1, 2, 3, 4))],
        "Mixed_7b": ["branch1x1", *forked, *pool],
    }  # fmt: skip
    return [*inception(modules), *tensors("fc+")]


def googlenet() -> list[str]:
    branches = ["branch1", "branch2.0", "branch2.1", "branch3.0", "branch3.1", "branch4.1"]
    modules = {"conv1": [""], "conv2": [""], "conv3": [""], "inception3a": branches, "inception4e": branches}
    return [*inception(modules), *tensors("aux1.conv.conv", "aux1.conv.bn", "aux1.fc1+", "aux1.fc2+", "fc+")]


def inception_resnet() -> list[str]:
    """timm's."""
    first = {"conv2d_1a": [""], "conv2d_4a": [""], "mixed_5b": ["branch0", "branch1.0", "branch1.1"]}
    names = inception(first)
    for repeat, mixed in (("repeat", "mixed_6a"), ("repeat_1", "mixed_7a"), ("repeat_2", "conv2d_7b")):
        for unit in range(11):
            names += inception({f"{repeat}.{unit}": ["branch0", "branch1.0"]}) + tensors(f"{repeat}.{unit}.conv2d+")
        if mixed == "conv2d_7b":
            names += inception({"block8": ["branch0"]}) + tensors("block8.conv2d+")
        names += inception({mixed: [""]})
    return [*names, *tensors("classif+")]


NETWORKS = [
    resnet50, efficientnet_pytorch, timm_efficientnet, torchvision_efficientnet, inception_v3, googlenet,
    inception_resnet,
]  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "module.", "model.net."])
@pytest.mark.parametrize("network", NETWORKS)
def test_sorted_names_are_put_into_the_order_of_their_network(network: object, prefix: str) -> None:
    assert callable(network)
    names = [prefix + name for name in network()]
    assert sorted(names) != names
    assert in_network_order(sorted(names)) == names
    assert in_network_order(reversed(names)) == names


def test_numbers_are_counted_and_not_spelled() -> None:
    names = tensors(*(f"features.{place}+" for place in range(12)), "classifier.1+")
    assert in_network_order(sorted(names)) == names


@pytest.mark.parametrize("odd", ["layer1.0.se.fc.weight", "more.weight", "layer1.0.conv4x.weight", "layerx.0.bn1.bias"])
def test_one_unknown_word_leaves_the_order_unknown(odd: str) -> None:
    assert in_network_order(resnet50()) is not None
    assert in_network_order([*resnet50(), odd]) is None
    assert in_network_order([]) is None


def test_whose_names_they_are_shows() -> None:
    assert is_efficientnet_pytorch(efficientnet_pytorch())
    assert not is_efficientnet_pytorch(timm_efficientnet())
    theirs = [
        "resnet.embedder.embedder.convolution.weight",
        "resnet.encoder.stages.0.layers.0.layer.0.normalization.bias",
    ]
    assert is_transformers(theirs)
    assert is_transformers(["vit.embeddings.cls_token", "vit.embeddings.patch_embeddings.projection.weight"])
    assert not any(is_transformers(network()) for network in NETWORKS)
