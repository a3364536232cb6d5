"""Images decoded on an accelerator: the host's pictures within a few levels, the same labels, the same order."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from image_files import Numbers, Pixels, clean_pictures, file_plan, loading, spoilt
from paceline import keyed
from paceline.data.load import decode
from paceline.data.load.files_nvjpeg import NvjpegLoader
from paceline.data.load.order import training_order
from paceline.data.load.quarantine import quarantined
from paceline.data.load.resample import resample
from paceline.errors import PlanError
from paceline.planning import Plan
from pictures_made import make_pictures, split, write_folder

pytest.importorskip("torchvision")
pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

CUDA = torch.device("cuda")
STEPS = 4
WORDS = ("on.device=cuda", "on.micro_batch=16", "global_batch=32", "on.loader_workers=3", "data.side=48",
         "data.evaluation.short=52")  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """What a loader gives: pictures, labels, and where batches begin."""

    pictures: Pixels
    labels: Numbers
    firsts: list[int]


def shown(plan: Plan, folder: Path, run: Path | None = None, start: int = 0, steps: int = STEPS) -> Shown:
    with loading(plan, folder, 0, run, CUDA) as loader, closing(loader.training(start)) as shares:
        assert isinstance(loader, NvjpegLoader) == (plan.placement.decoder == "gpu")
        batches = list(chain.from_iterable(islice(shares, steps)))
    return Shown(
        torch.cat([batch.images.permute(0, 2, 3, 1) for batch in batches]).cpu().numpy(),
        torch.cat([batch.labels for batch in batches]).cpu().numpy(),
        [int(batch.positions[0]) for batch in batches if batch.positions is not None],
    )


def judged(plan: Plan, folder: Path) -> tuple[Pixels, Numbers]:
    with loading(plan, folder, device=CUDA) as loader:
        batches = list(loader.validation())
    pictures = torch.cat([batch.images[: batch.count].permute(0, 2, 3, 1) for batch in batches])
    return pictures.cpu().numpy(), torch.cat([batch.labels[: batch.count] for batch in batches]).cpu().numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with every oddity that can be decoded."""
    return write_folder(clean_pictures(200), tmp_path_factory.mktemp("files"), 1 / 7)


def far(one: Pixels, other: Pixels) -> NDArray[np.float64]:
    """The mean difference of each picture."""
    found: NDArray[np.float64] = np.abs(one.astype(np.float64) - other).reshape(len(one), -1).mean(1)
    return found


@pytest.mark.parametrize("words", [(), ("data.resize=bicubic",), ("data.orientation=honor",)], ids=str)
def test_the_accelerator_shows_what_the_host_shows(folder: Path, words: tuple[str, ...]) -> None:
    host, device = (shown(file_plan(folder, *WORDS, *words, f"on.decoder={name}"), folder) for name in ("fast", "gpu"))
    assert device.firsts == host.firsts
    assert np.array_equal(device.labels, host.labels)
    difference = far(host.pictures, device.pictures)
    assert difference.mean() < 3
    assert np.median(difference) < 3
    # Chroma that is stored smaller is made larger in another way, which no picture as a whole may suffer from.
    assert difference.max() < 25


SIZES = [(64, 48), (33, 90), (20, 20), (400, 300), (7, 40), (1, 83), (83, 1), (1, 1), (1200, 17)]


@pytest.mark.parametrize("side", [16, 48, 224])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("filter", ["bilinear", "bicubic"])
def test_boxes_are_resized_on_the_accelerator_as_on_the_host(
    filter: Literal["bilinear", "bicubic"], inside: bool, side: int
) -> None:
    words = [keyed.words(keyed.key(number, "noise"), np.arange(3 * h * w))[0] for number, (h, w) in enumerate(SIZES)]
    given = [
        torch.tensor((some >> 24).astype(np.uint8)).reshape(3, *size) for some, size in zip(words, SIZES, strict=True)
    ]
    boxes = np.array([[h // 5, w // 4, max(1, h * 3 // 5), max(1, w // 2)] for h, w in SIZES])
    if not inside:
        boxes = boxes * 0.9 + 0.05
    mirrored = np.arange(len(SIZES)) % 2 == 0
    expected = resample(given, boxes, mirrored, side, filter, inside).to(torch.int64)
    found = resample([some.cuda() for some in given], boxes, mirrored, side, filter, inside).to(torch.int64).cpu()
    assert (found - expected).abs().max() <= 1
    assert (found != expected).double().mean() < 0.01


def test_validation_pictures_are_the_hosts_too(folder: Path) -> None:
    host, device = (judged(file_plan(folder, *WORDS, f"on.decoder={name}"), folder) for name in ("fast", "gpu"))
    assert np.array_equal(host[1], device[1])
    assert far(host[0], device[0]).mean() < 3


def test_layout_and_resume_point_change_nothing(folder: Path) -> None:
    whole = shown(file_plan(folder, *WORDS, "on.decoder=gpu"), folder)
    other = file_plan(folder, *WORDS, "on.decoder=gpu", "on.micro_batch=8", "on.loader_workers=1")
    part = shown(other, folder, start=2, steps=2)
    assert np.array_equal(part.labels, whole.labels[64:])
    assert np.abs(part.pictures.astype(int) - whole.pictures[64:]).max() <= 1


def test_odd_pictures_are_decoded_by_the_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PNG, GIF, CMYK and a file with an early end; the rest never come to the host's decoders."""
    plan = file_plan(folder, *WORDS, "on.decoder=gpu")
    pictures = clean_pictures(200)
    training = sorted(split(pictures, 1 / 7)[0], key=lambda picture: picture.key)
    odd = {
        number for number, picture in enumerate(training) if picture.odd in {"cmyk", "png", "gif", "alpha", "palette"}
    }
    assert len(odd) == 5
    seen: list[bytes] = []
    original = decode._read

    def watched(encoded: bytes, *given: object) -> object:
        seen.append(bytes(encoded))
        return original(encoded, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(decode, "_read", watched)
    steps = 1 + len(training) // plan.global_batch
    found = shown(plan, folder, steps=steps)
    by_host = {number for number, picture in enumerate(training) if picture.bytes in seen}
    assert odd <= by_host
    assert len(by_host) < len(training) // 2
    numbers = training_order(plan).images(np.arange(steps * plan.global_batch))
    assert found.labels.tolist() == [training[number].label for number in numbers.tolist()]


def test_bad_images_are_replaced_and_listed_as_on_the_host(tmp_path: Path) -> None:
    pictures = clean_pictures(120)
    training = sorted(split(pictures, 1 / 7)[0], key=lambda picture: picture.key)
    ways = {training[3].key: "empty", training[4].key: "truncated", training[9].key: "bomb", training[-1].key: "text"}
    made = [spoilt(picture, ways[picture.key]) if picture.key in ways else picture for picture in pictures]
    folder = write_folder(made, tmp_path / "data", 1 / 7)
    rows, labels = [], []
    for name in ("fast", "gpu"):
        run = tmp_path / name
        run.mkdir()
        labels.append(shown(file_plan(folder, *WORDS, f"on.decoder={name}"), folder, run).labels)
        rows.append(sorted((row["image"], row["reason"]) for row in quarantined(run)))
    assert rows[0] == rows[1]
    assert len(rows[0]) == 4
    assert np.array_equal(labels[0], labels[1])


def test_images_come_at_the_side_that_the_schedule_says(folder: Path) -> None:
    plan = file_plan(folder, *WORDS, "on.decoder=gpu", "augment.side={0%: 32, 50%: 40}", "epochs=2")
    with loading(plan, folder, device=CUDA) as loader, closing(loader.training(0)) as shares:
        sides = [share[0].images.shape[2] for share in islice(shares, plan.steps)]
    half = plan.steps // 2
    assert sides == [32] * half + [40] * (plan.steps - half)


def test_a_whole_set_with_every_pitfall_gives_the_same_labels(tmp_path: Path) -> None:
    folder = write_folder(make_pictures(150, 10), tmp_path, 1 / 7)
    host, device = (
        shown(file_plan(folder, *WORDS, f"on.decoder={name}", "data.max_bad=0.2"), folder, steps=6)
        for name in ("pillow", "gpu")
    )
    # What nvJPEG makes do with, as Pillow does not, may be shown in its own place.
    assert (host.labels == device.labels).mean() > 0.97


def test_a_function_of_ones_own_is_refused(folder: Path) -> None:
    with pytest.raises(PlanError, match=r"write on\.decoder=fast"):
        file_plan(folder, *WORDS, "on.decoder=gpu", "augment.python=math:floor")
