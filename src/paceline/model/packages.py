"""The packages that networks and published weights may come from; torch is loaded only when one makes a network."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import PlanError
from paceline.facts import DataFacts
from paceline.settings.model import External
from paceline.settings.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn


Maker = Callable[[], "nn.Module"]
"""Makes a network. Its package has been imported: what that draws by torch comes before the recipe's seed is set."""


class Package(NamedTuple):
    """Where networks come from that are not Paceline's; each function takes a network's name there."""

    check: Callable[[str, str], None]
    """Refuse, without loading torch, what cannot be there; the first argument is the key that names it."""
    create: Callable[[str, DataFacts], Maker]
    """Of the network for images of these facts, its weights drawn by torch."""
    published: Callable[[str], Maker] | None
    """Of the network with its published weights, as these need it; None where there are none."""


def _installed(package: str) -> Callable[[str, str], None]:
    """The check of a package that must be installed."""

    def check(key: str, _network: str) -> None:
        if find_spec(package) is None:
            instead = "the weights of a file or a run" if key == "init.from" else "a network of Paceline's"
            raise PlanError(f"{key}: {package} is not installed; write pip install {package}, or {instead}")

    return check


def _timm(name: str, **options: Any) -> Maker:
    return partial(importlib.import_module("timm").create_model, name, **options)


def _torchvision(name: str, **options: Any) -> Maker:
    return partial(importlib.import_module("torchvision.models").get_model, name, **options)


PACKAGES = {
    "timm": Package(
        _installed("timm"),
        lambda name, facts: _timm(name, pretrained=False, num_classes=facts.classes, in_chans=facts.channels),
        lambda name: _timm(name, pretrained=True),
    ),
    "torchvision": Package(
        _installed("torchvision"),
        lambda name, facts: _torchvision(name, weights=None, num_classes=facts.classes),
        lambda name: _torchvision(name, weights="DEFAULT"),
    ),
}
"""Each by its name in `model: NAME:NETWORK`, the names of External."""


def check_packages(recipe: Recipe) -> None:
    """Refuse a recipe whose network or first weights come from a package that does not have them."""
    if isinstance(recipe.model, External):
        PACKAGES[recipe.model.name].check("model", recipe.model.network)
    package, name = split_source(recipe.init.from_ or "")
    if package is not None:
        PACKAGES[package].check("init.from", name)


def network_maker(package: str, name: str, facts: DataFacts) -> Maker:
    """Makes a network of a package for images of these facts."""
    PACKAGES[package].check("model", name)
    with _faults_of(package, name):
        make = PACKAGES[package].create(name, facts)
    return _faults_of(package, name)(make)


def published_network(package: str, name: str) -> nn.Module:
    """A network of a package with its published weights."""
    published = PACKAGES[package].published
    assert published is not None, "split_source knows which packages publish weights"
    PACKAGES[package].check("init.from", name)
    with _faults_of(package, name):
        return published(name)()


def split_source(source: str) -> tuple[str | None, str]:
    """The package and the network of a source of weights such as timm:NAME; no package for any other source."""
    package, colon, name = source.partition(":")
    publishes = colon and package in PACKAGES and PACKAGES[package].published is not None
    return (package, name) if publishes else (None, source)


@contextmanager
def _faults_of(package: str, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as fault:  # noqa: BLE001 - whatever another package finds wrong is the user's to know
        raise PlanError(f"{package}:{name}: {package} cannot make it: {first_line(fault)}") from None


def first_line(fault: Exception) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return (str(fault).splitlines() or [type(fault).__name__])[0]
