"""Weights from elsewhere: read from a run, a file or a package, matched to a network's tensors, every shape checked."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as tensors_from
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline import checkpoint
from paceline.errors import DataError, UserError
from paceline.files import new_file
from paceline.model.packages import cached_weights, published_network, split_source
from paceline.model.sources import locate_source
from paceline.model.tensor_names import in_network_order
from paceline.model.weight_files import STATE_KEYS, no_tensors
from paceline.visible import plural

Weights = dict[str, Tensor]

_OTHER_NETWORK = "; if the weights are of another network, name it: model=NAME"


@dataclass(frozen=True)
class LoadedWeights:
    """Which tensors of a network were loaded from elsewhere, and which were not."""

    source: str
    tensors: int
    """How many were loaded."""
    initial: list[str]
    """Tensors that keep their initial values."""

    def __str__(self) -> str:
        rest = f"; these keep their initial values: {', '.join(self.initial)}" if self.initial else ""
        return f"init.from {self.source}: loaded {self.tensors} tensors{rest}"


@torch.no_grad()
def load_weights(network: nn.Module, weights: Weights, source: str) -> LoadedWeights:
    """Load weights from elsewhere into an initialized network; a head with another number of classes keeps its own."""
    theirs = {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    ours = dict(network.state_dict())
    pairs = match(theirs, ours, source)
    loaded = {name: other for name, other in pairs.items() if other is not None}
    for name, other in loaded.items():
        ours[name].copy_(theirs[other].reshape(ours[name].shape))
    return LoadedWeights(source, len(loaded), [name for name in pairs if name not in loaded])


def read_weights(source: str) -> Weights:
    """The tensors of a run folder, a file, or a package's published weights, by the names they have there."""
    package, name = split_source(source)
    if package is not None:
        return _published(package, name)
    path = locate_source(source)
    return _of_run(path) if path.is_dir() else _of_file(path, source)


def _published(package: str, name: str) -> Weights:
    """Published weights, from the cache or from their package, and then into the cache."""
    kept = cached_weights(package, name)
    if kept.is_file():
        return _of_file(kept, str(kept))
    weights = dict(published_network(package, name).state_dict())
    with suppress(OSError):  # a cache that cannot be written to costs a download, no more
        kept.parent.mkdir(parents=True, exist_ok=True)
        with new_file(kept) as file:
            torch.save(weights, file)
    return weights


def _of_file(path: Path, source: str) -> Weights:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([Namespace]):  # where training scripts keep their arguments
            return _of_pickle(torch.load(path, map_location="cpu", weights_only=True))
    except Exception:  # noqa: BLE001 - there is no end to what a damaged pickle can raise
        raise no_tensors(source) from None


def _of_run(folder: Path) -> Weights:
    """The weights that a run is evaluated by, from its newest intact checkpoint: its EMA where it has one."""
    newest = checkpoint.newest_intact(folder / "checkpoints", damaged=lambda _: None)
    if newest is None:
        raise DataError(f"init.from: {folder} holds no intact checkpoint")
    return evaluated_weights(newest[1])


def evaluated_weights(files: checkpoint.CheckpointFiles) -> Weights:
    """The weights of a checkpoint that are evaluated: its EMA where it has one."""
    ema = files.get(checkpoint.EMA)
    return tensors_from(files[checkpoint.NETWORK]) | (tensors_from(ema) if ema else {})


def _of_pickle(content: Any) -> Weights:
    """The state dictionary in a .pth file, alone or under one of its usual names."""
    for key in STATE_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise ValueError("expected a state dictionary")
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}


def match(theirs: Weights, ours: Weights, source: str) -> dict[str, str | None]:
    """For each of our tensors the name of theirs; None for those of a head with another number of classes, and of
    auxiliary heads that they do not have.

    Paceline's own weights are matched by name. Others are matched in the order in which their network lists them, which
    is ours: the order of the file, or else the one that published names tell. Each pair must agree in shape and in the
    last word of the name, so that an order that was lost is noticed.
    """
    plain = [name for name in ours if not _auxiliary(name)]
    last = f"{plain[-1].rpartition('.')[0]}."
    heads = {name for name in ours if _auxiliary(name) or name.startswith(last)}  # these may differ in their classes
    if set(plain) == {name for name in theirs if not _auxiliary(name)}:
        return {name: _fit(name, name, theirs, ours, heads, source) for name in ours}
    for listed in (list(theirs), in_network_order(theirs) or []):
        for there in (listed, [name for name in listed if not _auxiliary(name)]):
            for here in _orders(ours):
                pairs = list(zip(here, there, strict=False))
                if len(here) == len(there) and all(_alike(o, t, ours[o], theirs[t], o in heads) for o, t in pairs):
                    fits = {o: _fit(o, t, theirs, ours, heads, source) for o, t in pairs}
                    return {name: fits.get(name) for name in ours}
    if len(ours.keys() & theirs.keys()) > len(ours) / 2:  # of Paceline, and of another network
        odd = next(name for name in [*ours, *theirs] if (name in ours) != (name in theirs))
        raise UserError(f"init.from: {source} does not fit this network; '{odd}' is in only one of the two")
    ordered = in_network_order(theirs)
    here, there = list(ours), ordered or list(theirs)
    lost = (
        "; a .safetensors file forgets the order of its tensors, and these names are neither torchvision's nor timm's; "
        "save them with torch.save, which keeps it"
        if source.endswith(".safetensors") and ordered is None
        else _OTHER_NETWORK
    )
    for o, t in zip(here, there, strict=False):
        if not _alike(o, t, ours[o], theirs[t], o in heads):
            raise UserError(
                f"init.from: {source} does not fit this network: '{t}' {tuple(theirs[t].shape)} stands where "
                f"'{o}' {tuple(ours[o].shape)} should{lost}"
            )
    raise UserError(
        f"init.from: {source} has {plural(len(there), 'tensor')}, and this network has {len(here)}{_OTHER_NETWORK}"
    )


def _orders(ours: Weights) -> Iterator[list[str]]:
    """Our tensors as another package may list them: as here, with the auxiliary heads just before the head, without."""
    auxiliary = [name for name in ours if _auxiliary(name)]
    head = [name for name in ours if name.startswith("head.")]
    body = [name for name in ours if name not in auxiliary and name not in head]
    yield list(ours)
    yield [*body, *auxiliary, *head]
    yield [*body, *head]


def _auxiliary(name: str) -> bool:
    """Whether a tensor belongs to an auxiliary head, here or in another package: aux1, AuxLogits."""
    return "aux" in name.lower()


def _alike(our_name: str, their_name: str, ours: Tensor, theirs: Tensor, head: bool) -> bool:
    if our_name.rpartition(".")[2] != their_name.rpartition(".")[2]:
        return False
    our_shape, their_shape = _shapes(ours, theirs)
    return our_shape == their_shape or (head and our_shape[1:] == their_shape[1:])


def _shapes(ours: Tensor, theirs: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of two tensors; a dense layer may be a convolution elsewhere, over all of the picture."""
    if {ours.dim(), theirs.dim()} == {2, 4}:
        ours, theirs = ours.flatten(1), theirs.flatten(1)
    return tuple(ours.shape), tuple(theirs.shape)


def _fit(name: str, other: str, theirs: Weights, ours: Weights, heads: set[str], source: str) -> str | None:
    """The name of theirs for one of ours, None where ours keeps its initial values; other shapes are refused."""
    if other not in theirs:
        return None
    our_shape, their_shape = _shapes(ours[name], theirs[other])
    if their_shape == our_shape:
        return other
    if name in heads and their_shape[1:] == our_shape[1:]:
        return None
    shapes = f"{tuple(theirs[other].shape)} instead of {tuple(ours[name].shape)}"
    raise UserError(f"init.from: {source} does not fit this network; '{name}' has the shape {shapes}")
