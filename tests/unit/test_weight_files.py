"""A file of weights tells which network it is of, by the shapes that it lists; nothing in it is executed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from conftest import make_recipe
from paceline.errors import PlanError
from paceline.model.build import build_network
from paceline.model.sources import told
from paceline.model.weight_files import network_in


def shapes_of(name: str, classes: int) -> dict[str, tuple[int, ...]]:
    made = make_recipe(f"model={name}", f"data.classes={classes}", "data.side=32")
    assert made.data is not None
    return {key: tuple(tensor.shape) for key, tensor in build_network(made, made.data.facts).state_dict().items()}


def write_header(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """The list of tensors of a .safetensors file, without their numbers."""
    listed = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **listed}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


@pytest.mark.parametrize(("name", "classes"), [("resnet18", 1000), ("resnet20", 7), ("mobilenet-v2", 3)])
def test_the_shapes_of_a_file_tell_its_network(tmp_path: Path, name: str, classes: int) -> None:
    shapes = shapes_of(name, classes)
    assert network_in(write_header(tmp_path / "w.safetensors", shapes)) == name
    tensors = {f"module.{key}": torch.zeros(1).expand(shape) for key, shape in shapes.items()}
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "w.pth")
    assert network_in(tmp_path / "w.pth") == name
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert network_in(tmp_path / "old.pth") == name
    parameters = {key: torch.nn.Parameter(tensor, requires_grad=False) for key, tensor in tensors.items()}
    torch.save(parameters, tmp_path / "bare.pth")
    assert network_in(tmp_path / "bare.pth") == name


def test_a_network_that_is_not_known_has_no_name(tmp_path: Path) -> None:
    shapes = shapes_of("resnet8", 10) | {"more.weight": (3, 5)}
    assert network_in(write_header(tmp_path / "w.safetensors", shapes)) is None
    (tmp_path / "w.pth").write_bytes(b"PK\x03\x04")
    assert network_in(tmp_path / "w.pth") is None


class _Command:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


def test_nothing_in_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a.weight": torch.ones(2, 2), "b": _Command()}, "w.pth")
    torch.save({"a.weight": torch.ones(2, 2), "b": _Command()}, "old.pth", _use_new_zipfile_serialization=False)
    assert network_in(Path("w.pth")) is network_in(Path("old.pth")) is None
    assert not Path("executed").exists()


def test_weights_of_another_network_are_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    source = write_header(tmp_path / "w.safetensors", shapes_of("resnet20", 10))
    with pytest.raises(
        PlanError, match=r"holds weights of resnet20, and the recipe trains resnet8; write model=resnet20"
    ):
        told(make_recipe(f"init.from={source}"))
    assert told(make_recipe(f"init.from={source}", "model=resnet20")) == {}
