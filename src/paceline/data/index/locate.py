"""Finds the data set in a folder and checks its files, before anything heavy is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from paceline.data.index.scan import Tell, meant, open_index, recognized
from paceline.data.index.splits import ALL
from paceline.data.index.table import Flag, Index
from paceline.errors import DataError
from paceline.settings.data import Cifar, Data, Files, Made, Shapes

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


def locate(wanted: Data | None, folder: Path | None, tell: Tell | None = None) -> tuple[Data, Path | None]:
    """The data set and the folder that holds it; recognized by its files when the recipe leaves it open.

    Images in files are counted, which may take a while the first time; `tell` hears how far that is.
    """
    match wanted:
        case Shapes() | Made():
            return wanted, None
        case Cifar():
            return wanted, _cifar_folder(wanted.name, _existing(folder, wanted.name))
        case Files():
            return _counted(wanted, _existing(folder, wanted.name), tell)
        case None:
            return _recognize(_existing(folder, "the data"), tell)


def _existing(folder: Path | None, what: str) -> Path:
    if folder is None:
        raise DataError(f"where is {what}? write --data FOLDER, or set the DATA_DIR environment variable")
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; write --data FOLDER with where {what} is")
    return folder


def is_known(data: Data | None) -> bool:
    """Whether a data set can be planned with before its files are looked at."""
    return data is not None and (not isinstance(data, Files) or data.name == "imagenet")


def _counted(data: Files, folder: Path, tell: Tell | None) -> tuple[Files, Path]:
    """The same with the numbers of images and classes that its files hold."""
    found = open_index(data, folder, tell)
    present = _present(found) if data.class_names else found.classes
    if len(present) == 1:
        (name,) = present
        raise DataError(
            f"{folder}: all images are of one class, '{name}', so nothing can be learned; "
            f"{_other_folder(folder / name) or 'add another class'}"
        )
    counts = {
        "images": len(found.training),
        "validation_images": len(found.validation),
        "classes": len(found.classes),
    }
    for key, count in counts.items():
        said = getattr(data, key)
        if said is not None and said != count:
            raise DataError(
                f"{folder}: data.{key} is {said:,}, and {count:,} are there; leave data.{key} out, or mend it"
            )
    return data.model_copy(update=counts), folder


def _present(found: Index) -> tuple[str, ...]:
    """The classes that training images are of."""
    labels = np.unique(found.training.rows["label"]).tolist()
    return tuple(found.classes[label] for label in labels if 0 <= label < len(found.classes))


def to_judge(data: Files, names: tuple[str, ...], folder: Path, tell: Tell | None = None) -> Files:
    """Other images of the classes that a run was trained for, to be judged as its own validation images are."""
    found = data.model_copy(update={"class_names": names, "validation": ALL, "use": 1.0})
    judged = open_index(found, folder, tell).validation
    if bool((judged.rows["flags"] & int(Flag.OTHER_LABEL) > 0).all()):
        raise DataError(f"{folder}: no image here is of a class that the run knows")
    return found.model_copy(update={"validation_images": len(judged)})


def _other_folder(one: Path) -> str | None:
    """What to write where the folder of the only class holds the folders of several."""
    several = one.is_dir() and sum(child.is_dir() for child in one.iterdir()) > 1
    return f"did you mean --data {one}?" if several else None


def _recognize(folder: Path, tell: Tell | None) -> tuple[Data, Path]:
    """What lies in the folder itself comes before CIFAR's files below or above it."""
    here, *around = _places(folder)
    name = _cifar_in(here)
    if name is None and recognized(folder):
        return _counted(Files(name="images"), folder, tell)
    name = name or next(filter(None, map(_cifar_in, around)), None)
    if name is not None:
        return Cifar.model_validate({"name": name}), _cifar_folder(name, folder)
    raise DataError(
        f"{folder}: no data set is recognized here; expected CIFAR's binary files (data_batch_1.bin, or train.bin and "
        f"test.bin), images in class folders (train/, val/), TFRecords, WebDataset tars or a Paceline pack; or write "
        f"data=shapes for the built-in one{meant(folder)}"
    )


def _places(folder: Path) -> list[Path]:
    """Where CIFAR's files may lie: in this folder, one below it, or the one above it."""
    below = sorted(child for child in folder.iterdir() if child.is_dir())
    return [folder, *below, folder.resolve().parent]


def _cifar_in(place: Path) -> str | None:
    return next((name for name, (training, _) in CIFAR_FILES.items() if _has_file(place, training[0])), None)


def _has_file(place: Path, file: str) -> bool:
    return os.path.isfile(place / file)  # noqa: PTH113 - Path would raise where the folder may not be looked into


def _holding(folder: Path, file: str) -> Path | None:
    return next((place for place in _places(folder) if _has_file(place, file)), None)


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
