"""The model card of an export: a README.md that says what the network is, how to use it and how far to trust it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.data.index.fingerprint import training_digest
from paceline.exporting.comparison import BATCH, Comparison
from paceline.exporting.request import FILES, ExportRequest
from paceline.record import latest, rows_of
from paceline.training.answers import read_classes
from paceline.training.opened import OpenedRun

_LISTED = 100
"""Classes that the card lists; with more, preprocess.json alone has their names."""
_USE = {
    "onnx": """import json
import numpy as np
import onnxruntime
from preprocess import preprocess

session = onnxruntime.InferenceSession("model.onnx")
classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
scores = session.run(["scores"], {"images": np.stack([preprocess("photo.jpg")])})[0]
print(classes[scores[0].argmax()])""",
    "pt2": """import json
import numpy as np
import torch
from preprocess import preprocess

files = {"classes.json": ""}
network = torch.export.load("model.pt2", extra_files=files).module()
scores = network(torch.from_numpy(np.stack([preprocess("photo.jpg")])))
print(json.loads(files["classes.json"])[scores[0].argmax()])""",
    "safetensors": """from safetensors.torch import load_file

tensors = load_file("model.safetensors")    # with Paceline's names; or train from it: init.from=model.safetensors""",
    "torchvision": """import torch
import torchvision

network = torchvision.models.get_model("{twin}", weights=None, num_classes={classes})
network.load_state_dict(torch.load("model.pth"))
network.eval()    # takes preprocess(...) normalized as preprocess.json says, channels first""",
}


def model_card(request: ExportRequest, opened: OpenedRun, result: Comparison, described: dict[str, Any]) -> str:
    """The text of README.md, in the form that Hugging Face reads."""
    name = str(opened.plan.recipe.model.name)
    parts = [
        "---\nlicense: unknown\npipeline_tag: image-classification\ntags:\n- image-classification\n- paceline\n---",
        f"# {name}, {len(opened.classes)} classes",
        _about(request, opened),
        f"## Use\n\n```python\n{_usage(request, opened, described)}\n```",
        _input(opened),
        _results(request.run, opened, result),
        _comparison(request, result),
        _data(request),
        "## Limits\n\nThe network answers one of its classes whatever it is shown. It was evaluated on these images "
        "and on no others: on images of another kind, measure first. No license is stated: write one before you pass "
        "the network on, and see that it agrees with that of the training images.",
        f"## Made by\n\n```\n{_command(request, opened)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _about(request: ExportRequest, opened: OpenedRun) -> str:
    half = " in float16" if request.half else ""
    listed = ", ".join(opened.classes) if len(opened.classes) <= _LISTED else "see `preprocess.json`"
    return f"The weights of step {opened.step:,}, in `{FILES[request.to]}`{half}. Classes: {listed}."


def _usage(request: ExportRequest, opened: OpenedRun, described: dict[str, Any]) -> str:
    text = _USE[request.to]
    twin, classes = str(described.get("twin", "")), str(len(opened.classes))
    return text.replace("{twin}", twin).replace("{classes}", classes)


def _input(opened: OpenedRun) -> str:
    side = opened.side
    return (
        f"## Input and output\n\nImages are 8-bit RGB, `[images, {side}, {side}, 3]`, any number. Normalization "
        f"is inside the graphs of ONNX and torch.export. The output is `[images, {len(opened.classes)}]` scores. "
        "`preprocess.py` (Pillow and NumPy) reads an image file, resizes and crops it as the evaluation did, pixel for "
        "pixel, by the numbers in `preprocess.json`."
    )


def _results(run: Path, opened: OpenedRun, result: Comparison) -> str:
    """The accuracy of the run's validation after this step, else of the images that the file was compared on."""
    found = [row for row in latest(rows_of(run), "validation") if row["step"] == opened.step]
    text = "## Accuracy\n\n"
    if found:
        row = found[-1]
        text += (
            f"Validation of the run after this step: top-1 {row['top1']:.2%}, top-5 {row['top5']:.2%}, loss "
            f"{row['loss'] or float('nan'):.4f}, {row['images']:,} images.\n\n"
        )
    table = read_classes(run, opened.step)
    if 0 < len(table) <= _LISTED:
        shares = [[row[key] and f"{float(row[key]):.3f}" for key in ("precision", "recall", "f1")] for row in table]
        lines = [[row["class"], row["images"], row["right"], *rest] for row, rest in zip(table, shares, strict=True)]
        text += _table(["class", "images", "right", "precision", "recall", "F1"], lines)
    elif 0 < len(result.classes) <= _LISTED:
        text += f"This file, on the {result.images:,} images it was compared on, which need not be all:\n\n"
        text += _table(["class", "images", "right"], [[name, *counts] for name, counts in result.classes.items()])
    return text.rstrip()


def _table(headings: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    rows = [headings, ["---"] * len(headings), *([_cell(each) for each in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|")


def _comparison(request: ExportRequest, result: Comparison) -> str:
    return (
        f"## Compared with the run\n\nOn {result.images:,} {request.sample.about}, run by {result.by}: "
        f"{result.equal:,} of {result.images:,} answers are equal; the largest difference of a score is "
        f"{result.difference:.2g}, where the largest score is {result.largest:.3g}; {result.milliseconds:.2f} ms an "
        f"image in batches of {BATCH} on the CPU of the machine that exported it."
    )


def _data(request: ExportRequest) -> str:
    """What the run was trained on, as far as its folder tells."""
    data = request.plan.data
    facts = f"{data.facts.images:,} training images"
    digest = training_digest(request.run)
    return f"## Data\n\n{facts}{f', digest `{digest}`' if digest else ''}."


def _command(request: ExportRequest, opened: OpenedRun) -> str:
    words = ["paceline", "export", str(request.run), "--to", request.to, "--checkpoint", str(opened.step)]
    return shlex.join([*words, *(["--half"] if request.half else [])])
