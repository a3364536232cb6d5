"""The packages that networks and published weights may come from; torch is loaded only when one makes a network."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.data.index.file import cache_folder
from paceline.errors import PlanError, UserError
from paceline.facts import DataFacts
from paceline.settings.model import External
from paceline.settings.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn


Maker = Callable[[], "nn.Module"]
"""Makes a network. Its package has been imported: what that draws by torch comes before the recipe's seed is set."""


class Package(NamedTuple):
    """Where networks come from that are not Paceline's; each function takes the key that names it in the recipe and the
    network's name there."""

    check: Callable[[str, str], None]
    """Refuse, without loading torch, what cannot be there."""
    create: Callable[[str, str, DataFacts], Maker]
    """Of the network for images of these facts, its weights drawn by torch."""
    published: Callable[[str, str], Maker] | None
    """Of the network with its published weights, as these need it; None where there are none."""


def _installed(package: str) -> Callable[[str, str], None]:
    """The check of a package that must be installed."""

    def check(key: str, _network: str) -> None:
        if find_spec(package) is None:
            raise PlanError(f"{key}: {package} is not installed; {_remedy(package, key)}")
        if find_spec("torchvision") is None and any(line.startswith("torchvision") for line in _needs(package)):
            raise PlanError(f"{key}: {package} needs torchvision, which is not installed; {_remedy(package, key)}")
        if (misfit := _misfit()) is not None:
            raise PlanError(f"{key}: {misfit}; {_remedy(package, key)}")

    return check


def _needs(package: str) -> list[str]:
    """What an installed package needs, as it says itself."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:  # a folder that somebody put there
        return []


def _misfit() -> str | None:
    """Why the installed torchvision, which timm needs too, does not fit the installed torch; None if it may."""
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:  # then the import says what is missing
        return None
    installed, needs = metadata.version("torch"), _needs("torchvision")
    if installed.endswith("+cpu") and "+" not in version:
        return f"torchvision {version} is built for a torch with CUDA, and torch {installed} is installed"
    ours = re.match(r"(\d+)\.(\d+)", installed)
    asked = next((found for line in needs if (found := re.match(r"torch ?\(?([=>])=(\d+)\.(\d+)", line))), None)
    if ours is None or asked is None:
        return None
    have, least = (int(ours[1]), int(ours[2])), (int(asked[2]), int(asked[3]))
    if have == least or (asked[1] == ">" and have > least):
        return None
    return f"torchvision {version} needs torch {least[0]}.{least[1]}, and torch {installed} is installed"


def _remedy(package: str, key: str) -> str:
    """What to write where a package does not load: one that fits the installed torch, or something else instead."""
    instead = "a .safetensors or .pth file, or a run" if key == "init.from" else "a network of Paceline's"
    version = metadata.version("torch")
    fitting = _fitting(version)
    if version.endswith("+cpu"):  # pip's torchvision is built for the torch with CUDA
        return (
            f"give {instead}: pip has no torchvision for the CPU-only torch {version}; what fits is {fitting}, from "
            "where that torch came"
        )
    packages = fitting if package == "torchvision" else f"{package} {fitting}"
    return f"write pip install {_constraints(version)}{packages}, which fits torch {version}, or {instead}"


def _fitting(torch_version: str) -> str:
    """The torchvision that pip installs without another torch."""
    release = re.match(r"2\.(\d+)\.(\d+)", torch_version)
    if release is None:
        return "torchvision"
    if int(release[1]) >= 14:  # those after 0.29.1 are for any torch from 2.14 on, and each one before is for one
        return "'torchvision>=0.29.2'"
    return f"torchvision==0.{int(release[1]) + 15}.{release[2]}"


def _constraints(version: str) -> str:
    """In a clone of Paceline whose tested torch is the installed one, the option that keeps everything as tested."""
    file = Path(__file__).parents[3] / "constraints.txt"
    with suppress(OSError):
        if f"torch=={version.partition('+')[0]}" in file.read_text().split():
            return f"-c {shlex.quote(file.name if file.parent == Path.cwd() else str(file))} "
    return ""


def loads(package: str) -> bool:
    """Whether a package is installed and fits the installed torch, as far as files tell."""
    try:
        PACKAGES[package].check("", "")
    except PlanError:
        return False
    return True


def _import(module: str, key: str) -> Any:
    """A module of a package; whatever goes wrong in there, as with one made for another torch, is one line."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except Exception as fault:  # noqa: BLE001 - a library that does not fit may raise anything
        raise PlanError(
            f"{key}: {_named(package)} cannot be imported: {first_line(fault)}; {_remedy(package, key)}"
        ) from None


def _named(package: str) -> str:
    """A package with its version, where that is known."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package


def _timm(key: str, name: str, **options: Any) -> Maker:
    return partial(_import("timm", key).create_model, name, **options)


def _torchvision(key: str, name: str, **options: Any) -> Maker:
    return partial(_import("torchvision.models", key).get_model, name, **options)


PACKAGES = {
    "timm": Package(
        _installed("timm"),
        lambda key, name, facts: _timm(key, name, pretrained=False, num_classes=facts.classes, in_chans=facts.channels),
        lambda key, name: _timm(key, name, pretrained=True),
    ),
    "torchvision": Package(
        _installed("torchvision"),
        lambda key, name, facts: _torchvision(key, name, weights=None, num_classes=facts.classes),
        lambda key, name: _torchvision(key, name, weights="DEFAULT"),
    ),
}
"""Each by its name in `model: NAME:NETWORK`, the names of External."""


def check_packages(recipe: Recipe) -> None:
    """Refuse a recipe whose network or first weights come from a package that does not have them."""
    if isinstance(recipe.model, External):
        PACKAGES[recipe.model.name].check("model", recipe.model.network)
    package, name = split_source(recipe.init.from_ or "")
    if package is not None and not cached_weights(package, name).is_file():
        PACKAGES[package].check("init.from", name)


def network_maker(package: str, name: str, facts: DataFacts) -> Maker:
    """Makes a network of a package for images of these facts."""
    PACKAGES[package].check("model", name)
    with _faults_of(package, name):
        make = PACKAGES[package].create("model", name, facts)
    return _faults_of(package, name)(make)


def published_network(package: str, name: str) -> nn.Module:
    """A network of a package with its published weights."""
    published = PACKAGES[package].published
    assert published is not None, "split_source knows which packages publish weights"
    PACKAGES[package].check("init.from", name)
    with _faults_of(package, name):
        return published("init.from", name)()


def cached_weights(package: str, name: str) -> Path:
    """Where published weights are once they have been fetched; a copy of this file serves machines that are offline."""
    return cache_folder() / "weights" / f"{package}-{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}.pth"


def split_source(source: str) -> tuple[str | None, str]:
    """The package and the network of a source of weights such as timm:NAME; no package for any other source."""
    package, colon, name = source.partition(":")
    publishes = colon and package in PACKAGES and PACKAGES[package].published is not None
    return (package, name) if publishes else (None, source)


@contextmanager
def _faults_of(package: str, name: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as fault:  # noqa: BLE001 - whatever another package finds wrong is the user's to know
        raise PlanError(f"{package}:{name}: {package} cannot make it: {first_line(fault)}") from None


def first_line(fault: Exception) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return (str(fault).splitlines() or [type(fault).__name__])[0]
