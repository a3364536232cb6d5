"""What a file of weights holds by its list of tensors: their names and shapes, and of which network (no torch)."""

from __future__ import annotations

import json
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from paceline.errors import DataError
from paceline.files import open_file
from paceline.model.tables import MEMBERS

WEIGHT_FILES = (".pth", ".pt", ".safetensors")
STATE_KEYS = ("state_dict_ema", "state_dict", "model", "model_state_dict")
"""What training scripts call the tensors in a file that holds more."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""The last words of tensors that are no parameters."""
_MOST = 100 << 20
_OLDER_PICKLES = 4
"""torch's older form: a magic number, a version, the system, and the content."""
Shape = tuple[int, ...]


def no_tensors(source: str) -> DataError:
    """What is said of a file that is no list of tensors by name, or not a whole one."""
    return DataError(
        f"init.from: {source} does not hold plain tensors by name: it is damaged, or holds other objects, which are "
        "never loaded"
    )


def tensor_names(path: Path) -> Iterable[str]:
    """The names of the tensors in a file, among other texts of a .pth file; none where it is damaged."""
    try:
        with open_file(path) as file:
            if path.suffix == ".safetensors":
                return [name for name in _header(file) if name != "__metadata__"]
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as parts, _content(parts) as pickled:
                    return _texts(pickled, 1)
            file.seek(0)
            return _texts(file, _OLDER_PICKLES)
    except Exception:  # noqa: BLE001 - there is no end to what a damaged pickle can raise
        return []


def network_in(path: Path) -> str | None:
    """The network whose weights a file holds, by the number of their parameters; None where no network has as many."""
    shapes = [shape for name, shape in _tensor_shapes(path).items() if not name.endswith(_BUFFERS)]
    count, classes = sum(map(math.prod, shapes)), {shape[0] for shape in shapes if shape}
    for row in MEMBERS:
        others, odd = divmod(count - row.parameters, row.class_parameters)
        if not odd and row.classes + others in classes:
            return row.name
    return None


def _tensor_shapes(path: Path) -> dict[str, Shape]:
    """The shapes of the tensors in a file by name; none where it is damaged."""
    try:
        with open_file(path) as file:
            if path.suffix == ".safetensors":
                header = _header(file)
                return {name: tuple(facts["shape"]) for name, facts in header.items() if name != "__metadata__"}
            content = _shapes_in(file)
        for key in STATE_KEYS:
            content = content[key] if isinstance(content.get(key), dict) else content
        return {name: shape for name, shape in content.items() if isinstance(shape, tuple)}
    except Exception:  # noqa: BLE001 - as above
        return {}


def _shapes_in(file: IO[bytes]) -> Any:
    """What a .pth file holds, with shapes in place of tensors."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as parts, _content(parts) as pickled:
            return _ShapeReader(pickled).load()
    file.seek(0)
    return [_ShapeReader(file).load() for _ in range(_OLDER_PICKLES)][-1]


def _header(file: IO[bytes]) -> dict[str, Any]:
    """The list of tensors at the start of a .safetensors file; a ValueError if the file ends before they do."""
    length = int.from_bytes(file.read(8), "little")
    header: dict[str, Any] = json.loads(file.read(min(length, _MOST)))
    ends = [facts["data_offsets"][1] for name, facts in header.items() if name != "__metadata__"]
    if file.seek(0, 2) < 8 + length + max(ends, default=0):
        raise ValueError("the file is cut off")
    return header


def _content(parts: zipfile.ZipFile) -> IO[bytes]:
    """The pickle in a .pth file, which lists the tensors that lie beside it."""
    return parts.open(next(name for name in parts.namelist() if name.endswith("data.pkl")))


def _texts(file: IO[bytes], pickles: int) -> list[str]:
    """The texts in pickles, none of which is executed."""
    return [text for _ in range(pickles) for _, text, _ in pickletools.genops(file) if isinstance(text, str)]


class _Unknown:
    """Stands for every object that is not a tensor; what the file would do with it is not done."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


class _ShapeReader(pickle.Unpickler):
    """Reads the shapes of tensors in place of them; no class and no function that the file names is ever looked up."""

    def find_class(self, _module: str, name: str) -> Any:
        known = {"OrderedDict": OrderedDict, "_rebuild_tensor_v2": _shape, "_rebuild_parameter": _first}
        return known.get(name, _Unknown)

    def persistent_load(self, _: object) -> None:
        """The numbers of a tensor, which are not read."""


def _shape(_numbers: object, _offset: object, shape: Shape, *_: object) -> Shape:
    return shape


def _first(tensor: Shape, *_: object) -> Shape:
    return tensor
