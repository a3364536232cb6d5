"""Finds the data set in a folder and checks its files, before anything heavy is loaded."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from paceline.data.index.scan import holds_images, open_index, refuse_unread, suggestion
from paceline.data.index.splits import EvaluationFiles
from paceline.data.index.table import Flag, Index
from paceline.errors import DataError
from paceline.files import disk_faults
from paceline.progress import Progress, silent
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
    variable = set_variable()
    return flag if flag is not None or variable is None else Path(os.environ[variable])


def set_variable() -> str | None:
    """The environment variable that says where the data are, if one does."""
    return next((name for name in ("DATA_DIR", "DATASETS_DIR") if os.environ.get(name)), None)


def dataset_folder(folder: Path, name: str = "") -> Path:
    """The folder of a data set, where DATASETS_DIR names either that or its parent; `name` decides between several."""
    parent = os.environ.get("DATASETS_DIR")
    if set_variable() != "DATASETS_DIR" or folder != Path(parent or "") or not _may_be_parent(folder):
        return folder
    inside = [child for child in sorted(folder.iterdir()) if _is_dataset(child)]
    if len(inside) > 1:
        inside = [child for child in inside if name and name in child.name.lower()]
    return inside[0] if len(inside) == 1 else folder


def _may_be_parent(folder: Path) -> bool:
    """Whether a folder can be read and is no data set itself."""
    return os.path.isdir(folder) and os.access(folder, os.R_OK) and not _is_dataset(folder)  # noqa: PTH112


def _is_dataset(folder: Path) -> bool:
    with suppress(DataError):  # one that cannot be read is not meant
        return os.path.isdir(folder) and (holds_images(folder) or _cifar_in(folder) is not None)  # noqa: PTH112
    return False


def locate(wanted: Data | None, folder: Path | None, progress: Progress = silent) -> tuple[Data, Path | None]:
    """Find the data set and the folder that holds it; its files tell which it is when the recipe leaves it open.

    Images in files are counted, which may take a while the first time.
    """
    match wanted:
        case Shapes() | Made():
            return wanted, None
        case Cifar():
            return wanted, _cifar_folder(wanted.name, _existing(folder, wanted.name))
        case Files():
            return _count_images(wanted, dataset_folder(_existing(folder, wanted.name), wanted.name), progress)
        case None:
            name = recognize(folder)
            known = Files if name == "images" else Cifar
            return locate(known.model_validate({"name": name}), folder, progress)


def _existing(folder: Path | None, what: str) -> Path:
    if folder is None:
        question = "where are the images" if what == "images" else f"where is {what}"
        raise DataError(f"{question}? write --data FOLDER, or set the DATA_DIR environment variable")
    with disk_faults(DataError, folder, "cannot be read"):
        there = folder.is_dir()
    if not there:
        raise DataError(f"{folder}: there is no such folder; write the one that holds {what}, as in --data FOLDER")
    return folder


def is_known(data: Data | None) -> bool:
    """Whether a plan can be made for a data set before its files are looked at."""
    return data is not None and (not isinstance(data, Files) or data.name == "imagenet")


def needs_files(data: Data) -> bool:
    """Whether a data set lies in a folder."""
    return not isinstance(data, Shapes | Made)


def _count_images(data: Files, folder: Path, progress: Progress) -> tuple[Files, Path]:
    """Fill in the numbers of images and classes that the files hold."""
    index = open_index(data, folder, progress)
    present = _trained_classes(index) if data.class_names else index.classes
    if len(present) == 1:
        (name,) = present
        raise DataError(
            f"{folder}: all images are of one class, '{name}', so nothing can be learned; "
            f"{_inner_folder(folder / name) or 'add another class'}"
        )
    if bool((index.training.rows["flags"] & int(Flag.UNREADABLE) > 0).all()):
        raise DataError(
            f"{folder}: none of the training images can be read; `paceline data check {folder}` names what is wrong "
            "with each"
        )
    counts = {
        "images": len(index.training),
        "validation_images": len(index.validation),
        "classes": len(index.classes),
    }
    for key, count in counts.items():
        expected = getattr(data, key)
        if expected is not None and expected != count:
            raise DataError(
                f"{folder}: data.{key} is {expected:,}, but {count:,} are there; leave data.{key} out, or correct it"
            )
    return data.model_copy(update=counts), folder


def _trained_classes(index: Index) -> tuple[str, ...]:
    """The classes that have training images."""
    labels = np.unique(index.training.rows["label"]).tolist()
    return tuple(index.classes[label] for label in labels if 0 <= label < len(index.classes))


def evaluation_files(data: Files, names: tuple[str, ...], folder: Path, progress: Progress = silent) -> EvaluationFiles:
    """Other images of the classes that a run was trained for, to be evaluated like its own validation images."""
    images = EvaluationFiles.model_construct(
        **{**dict(data), "class_names": names, "validation": None, "fraction": 1.0}
    )
    table = open_index(images, folder, progress).validation
    if bool((table.rows["flags"] & int(Flag.OTHER_LABEL) > 0).all()):
        raise DataError(f"{folder}: no image here is of a class that the run knows")
    return images.model_copy(update={"validation_images": len(table)})


def _inner_folder(class_folder: Path) -> str | None:
    """What to write instead where the folder of the only class holds several folders."""
    with suppress(OSError):
        if sum(child.is_dir() for child in class_folder.iterdir()) > 1:
            return f"did you mean --data {class_folder}?"
    return None


def recognize(folder: Path | None) -> str:
    """The data set that a folder holds, by name; images right there come before CIFAR's files below or above it."""
    folder = _existing(folder, "the data")
    here, *around = _cifar_folders(folder)
    name = _cifar_in(here)
    if name is None and holds_images(folder):
        return "images"
    name = name or next(filter(None, map(_cifar_in, around)), None)
    if name is not None:
        return name
    refuse_unread(folder)
    raise DataError(
        f"{folder}: no data set is recognized here; expected CIFAR's binary files (data_batch_1.bin, or train.bin and "
        f"test.bin), images in class folders (train/, val/), TFRecords, WebDataset tars or a Paceline pack; or write "
        f"data=shapes for the built-in one{suggestion(folder)}"
    )


def _cifar_folders(folder: Path) -> list[Path]:
    """Where CIFAR's files may lie: in this folder, one below it, or the one above it."""
    with disk_faults(DataError, folder, "cannot be read"):
        below = sorted(child for child in folder.iterdir() if os.path.isdir(child))  # noqa: PTH112 - as in _has_file
    return [folder, *below, folder.resolve().parent]


def _cifar_in(folder: Path) -> str | None:
    return next((name for name, (training, _) in CIFAR_FILES.items() if _has_file(folder, training[0])), None)


def _has_file(folder: Path, file: str) -> bool:
    return os.path.isfile(folder / file)  # noqa: PTH113 - Path would raise where the folder may not be looked into


def _folder_with(folder: Path, file: str) -> Path | None:
    return next((folder for folder in _cifar_folders(folder) if _has_file(folder, file)), None)


def _cifar_folder(name: str, folder: Path) -> Path:
    """The folder with all files of a CIFAR data set, each of its published size."""
    training, validation = CIFAR_FILES[name]
    cifar = _folder_with(folder, training[0])
    if cifar is None:
        for pickled, title in _PICKLES.items():
            if (other := _folder_with(folder, pickled)) is not None:
                raise DataError(
                    f"{other}: this is the Python version of {title}; get the binary version ('{training[0]}', ...)"
                )
        raise DataError(
            f"{folder}: '{training[0]}' is neither here, nor one folder below or above; --data should hold {name}"
        )
    for file in [*training, *validation]:
        path = cifar / file
        expected = next(size for start, size in CIFAR_SIZES.items() if file.startswith(start))
        if not _has_file(cifar, file):
            raise DataError(f"{path}: this file of {name} is missing; copy it again")
        if path.stat().st_size != expected:
            raise DataError(
                f"{path}: the file has {path.stat().st_size:,} bytes instead of {expected:,}; "
                f"it is cut off, or not {name}: copy it again"
            )
    return cifar
