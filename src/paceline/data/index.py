"""Finds the data set in a folder and checks its files, before anything heavy is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import DataError
from paceline.recipe import Cifar, Data, Made, Shapes

CIFAR_FILES = {
    "cifar10": ([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]),
    "cifar100": (["train.bin"], ["test.bin"]),
}
"""Training and validation files of the published binary versions."""

CIFAR_SIZES = {"data_batch": 30_730_000, "test_batch": 30_730_000, "train": 153_700_000, "test": 30_740_000}
_PICKLES = {"data_batch_1": "CIFAR-10", "train": "CIFAR-100"}


def given_folder(flag: Path | None) -> Path | None:
    """The folder of --data, else of the DATA_DIR or DATASETS_DIR environment variable."""
    if flag is not None:
        return flag
    named = os.environ.get("DATA_DIR") or os.environ.get("DATASETS_DIR")
    return Path(named) if named else None


def locate(wanted: Data | None, folder: Path | None) -> tuple[Data, Path | None]:
    """The data set and the folder that holds it; recognised by its files when the recipe leaves it open."""
    match wanted:
        case Shapes() | Made():
            return wanted, None
        case Cifar():
            return wanted, _cifar_folder(wanted.name, _existing(folder, wanted.name))
        case None:
            return _recognise(_existing(folder, "the data"))


def _existing(folder: Path | None, what: str) -> Path:
    if folder is None:
        raise DataError(f"where is {what}? write --data FOLDER, or set the DATA_DIR environment variable")
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; write --data FOLDER with where {what} is")
    return folder


def _recognise(folder: Path) -> tuple[Data, Path]:
    for name in CIFAR_FILES:
        found = _holding(folder, CIFAR_FILES[name][0][0])
        if found is not None:
            data = Cifar.model_validate({"name": name})
            return data, _cifar_folder(name, folder)
    raise DataError(
        f"{folder}: no data set is recognised here; expected CIFAR's binary files (data_batch_1.bin, or train.bin and "
        f"test.bin), or write data=shapes for the built-in one"
    )


def _holding(folder: Path, file: str) -> Path | None:
    """The folder that has the file: this one, one below it, or the one above it."""
    below = sorted(child for child in folder.iterdir() if child.is_dir())
    above = folder.resolve().parent
    return next((place for place in [folder, *below, above] if (place / file).is_file()), None)


def _cifar_folder(name: str, folder: Path) -> Path:
    """The folder with all files of a CIFAR data set, each of its published size."""
    training, validation = CIFAR_FILES[name]
    found = _holding(folder, training[0])
    if found is None:
        for pickled, title in _PICKLES.items():
            if (place := _holding(folder, pickled)) is not None:
                raise DataError(
                    f"{place}: this is the Python version of {title}; get the binary version ('{training[0]}', ...)"
                )
        raise DataError(
            f"{folder}: '{training[0]}' is neither here, nor one folder below or above; --data should hold {name}"
        )
    for file in [*training, *validation]:
        path = found / file
        expected = next(size for start, size in CIFAR_SIZES.items() if file.startswith(start))
        if not path.is_file():
            raise DataError(f"{path}: this file of {name} is missing; copy it again")
        if path.stat().st_size != expected:
            raise DataError(
                f"{path}: the file has {path.stat().st_size:,} bytes instead of {expected:,}; "
                f"it is cut or not {name}: copy it again"
            )
    return found
