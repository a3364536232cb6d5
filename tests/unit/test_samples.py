"""Pictures of the images of a step: what the network sees of them, under the names of their classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from conftest import make_plan, make_session
from image_files import clean_pictures, file_plan
from paceline.data.inspect.samples import draw_samples
from paceline.numpy_types import UInt8s
from paceline.record import Row, rows_of
from paceline.training.loop import train
from pictures_made import write_folder

AUGMENTED = ("augment.cutout=4", "augment.color.brightness=0.4", "mix.mixup=0.2", "mix.block=4", "epochs=0.4")


def shown(folder: Path, *words: str) -> list[Row]:
    """The rows of a short run that name pictures."""
    session = make_session(make_plan(*words, "evaluate.every=never"), folder, "own")
    train(session)
    session.run.close()
    return [row for row in rows_of(folder) if row["kind"] == "samples"]


def tiles(path: Path, side: int, scale: int) -> list[UInt8s]:
    """The images in a picture."""
    with Image.open(path) as image:
        page, wide = np.asarray(image), side * scale
    places = [(26 + row * (wide + 26), 12 + column * (wide + 12)) for row in range(4) for column in range(4)]
    return [page[top : top + wide : scale, left : left + wide : scale] for top, left in places]


def test_a_picture_shows_the_pixels_that_the_network_sees_before_they_are_mixed(tmp_path: Path) -> None:
    plan = make_plan(*AUGMENTED)
    first, *_ = rows = shown(tmp_path, *AUGMENTED, "on.samples=1 steps")
    assert [row["step"] for row in rows] == list(range(1, plan.steps + 1))
    assert first["file"] == "samples/step-000000001.png"
    seen = list(draw_samples(plan, None, 16))
    for tile, one in zip(tiles(tmp_path / first["file"], 8, 12), seen, strict=True):
        assert np.array_equal(tile, one.shown[0])
    assert first["classes"] == [str(one.label) for one in seen]


def test_pictures_come_back_by_their_rhythm_and_change_no_loss(tmp_path: Path) -> None:
    losses = []
    for every in ("2 steps", "never"):
        rows = shown(tmp_path / every, f"on.samples={every}")
        assert [row["step"] for row in rows] == ([2, 4, 6] if every != "never" else [])
        losses.append([row["loss"] for row in rows_of(tmp_path / every) if row["kind"] == "report"])
    assert losses[0] == losses[1]


def test_a_small_micro_batch_shows_fewer_of_the_same_images(tmp_path: Path) -> None:
    words = ("epochs=0.2", "on.samples=1 steps")
    whole, part = (shown(tmp_path / size, *words, f"on.micro_batch={size}")[0] for size in ("16", "4"))
    assert part["classes"] == whole["classes"][:4]
    pictures = (tiles(tmp_path / size / row["file"], 8, 12)[:4] for size, row in (("16", whole), ("4", part)))
    for one, other in zip(*pictures, strict=True):
        assert np.array_equal(one, other)


def test_photographs_are_shown_as_a_jpeg_of_their_own_size(tmp_path: Path) -> None:
    data = write_folder(clean_pictures(40, classes=2), tmp_path / "data")
    plan = file_plan(
        data, "data.side=80", "data.evaluation.short=80", "data.classes=2", "epochs=0.5", "on.samples=1 steps"
    )
    session = make_session(plan, tmp_path / "run", "own")
    session.data_folder = data
    train(session)
    session.run.close()
    (row,) = (row for row in rows_of(tmp_path / "run") if row["kind"] == "samples")
    assert row["file"] == "samples/step-000000001.jpg"
    with Image.open(tmp_path / "run" / row["file"]) as image:
        assert image.size == (4 * (80 + 12) + 12, 4 * (80 + 14 + 12) + 12)
        seen = np.asarray(image)[26:106, 12:92].astype(np.int16)
    (first, *_) = draw_samples(plan, data, 1)
    assert np.abs(seen - first.shown[0]).mean() < 8  # a JPEG is close
