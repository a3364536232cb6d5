"""The order of tensors that only their names still tell, as in a .safetensors file, which sorts them (no torch).

Weights are matched to a network in the order in which their own network lists them. Each naming here is that of a
published family: its words in the order in which it registers them, first those that a name begins with, then those
inside. A word also stands for itself with a number, such as layer2, branch1_3a or inception4b.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LAST = ("weight", "bias", "running_mean", "running_var")
_TRANSFORMERS = re.compile(r"\.(convolution|normalization|embedder|embeddings|attention\.attention)\.")
_NUMBER = re.compile(r"(\d[0-9a-z_]*)?")
Place = tuple[int, tuple[tuple[int, int, str], ...]]


@dataclass(frozen=True)
class Naming:
    """The words of a published family's names, in the order of its network."""

    first: tuple[str, ...]
    inside: tuple[str, ...]

    def key(self, name: str) -> tuple[Place, ...] | None:
        """What a name is sorted by; None if it has a word that this family does not use."""
        first, *inside = name.split(".")
        places = [_place(first, self.first), *(_place(word, (*self.inside, *_LAST)) for word in inside)]
        known = [place for place in places if place is not None]
        return tuple(known) if len(known) == len(places) else None


def _place(word: str, words: tuple[str, ...]) -> Place | None:
    """Where a word stands: at the longest known word that it is, or begins with before a number; then its number."""
    known = [each for each in ("", *words) if word.startswith(each) and _NUMBER.fullmatch(word, len(each))]
    if not known:
        return None
    longest = max(known, key=len)
    parts = re.findall(r"\d+|\D+", word[len(longest) :])
    return words.index(longest) if longest else -1, tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts
    )


def _naming(first: str, inside: str) -> Naming:
    return Naming(tuple(first.split()), tuple(inside.split()))


NAMINGS = (
    # ResNet and ResNeXt of torchvision and timm.
    _naming("conv1 bn1 layer fc", "conv1 bn1 conv2 bn2 conv3 bn3 downsample"),
    # torchvision's AlexNet, VGG, EfficientNet and MobileNet, timm's VGG and Inception v4.
    _naming("features pre_logits classifier head last_linear", "block conv bn fc branch"),
    # EfficientNet-PyTorch.
    _naming(
        "_conv_stem _bn0 _blocks _conv_head _bn1 _fc",
        "_expand_conv _bn0 _depthwise_conv _bn1 _se_reduce _se_expand _project_conv _bn2",
    ),
    # EfficientNet and MobileNet of timm.
    _naming(
        "conv_stem bn1 blocks conv_head bn2 classifier",
        "conv conv_pw bn1 conv_dw bn2 se conv_reduce conv_expand conv_pwl bn3",
    ),
    # torchvision's GoogLeNet.
    _naming("conv inception aux fc", "branch conv bn fc"),
    # Inception v3 of torchvision and timm.
    _naming(
        "Conv2d_ Mixed_ AuxLogits fc",
        "branch1x1 branch5x5_ branch3x3 branch3x3_ branch3x3dbl_ branch7x7_ branch7x7dbl_ branch7x7x3_ branch_pool "
        "conv bn fc",
    ),
    # timm's Inception-ResNet v2.
    _naming(
        "conv2d_ mixed_5b repeat mixed_6a repeat_1 mixed_7a repeat_2 block8 conv2d_7b classif", "branch conv bn conv2d"
    ),
)


_WIDER = {"bn1": "bn2", "conv_pw": "conv_pwl", "bn2": "bn3"}


def in_network_order(names: Iterable[str]) -> list[str] | None:
    """The names in the order in which their network lists them; None if they are of no naming known here."""
    bare = _without_prefix({name: name for name in names})
    separable = _separable(bare.values())
    for naming in NAMINGS:
        keys = {name: naming.key(_as_inverted(short, separable)) for name, short in bare.items()}
        if bare and None not in keys.values():
            return sorted(keys, key=lambda name: keys[name] or ())
    return None


def _without_prefix(names: dict[str, str]) -> dict[str, str]:
    """Names without the words that all of them begin with, such as model."""
    starts = {short.partition(".")[0] for short in names.values()}
    if len(starts) != 1 or not all("." in short for short in names.values()):
        return names
    return _without_prefix({name: short.partition(".")[2] for name, short in names.items()})


def _separable(names: Iterable[str]) -> set[str]:
    """timm's units that do not widen: they number their norms from the middle convolution on."""
    units = {word: {n.partition(word)[0] for n in names if word in n} for word in (".conv_dw.", ".conv_pwl.")}
    return units[".conv_dw."] - units[".conv_pwl."]


def _as_inverted(name: str, separable: set[str]) -> str:
    """A name of a unit that does not widen as it would be in one that does."""
    layer, _, last = name.rpartition(".")
    unit, _, part = layer.rpartition(".")
    return f"{unit}.{_WIDER.get(part, part)}.{last}" if unit in separable else name


def is_efficientnet_pytorch(names: Iterable[str]) -> bool:
    """Whether names are those of EfficientNet-PyTorch, whose weights come from TensorFlow."""
    return any(name.endswith("_conv_stem.weight") for name in names)


def is_transformers(names: Iterable[str]) -> bool:
    """Whether names are those of transformers, whose networks are divided in another way."""
    return any(_TRANSFORMERS.search(name) for name in names)
