"""Loaders: the same pixels from the host and from the device's copy, on every layout and from every step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from conftest import make_plan
from paceline import keyed
from paceline.data.load import in_memory
from paceline.data.load.arrays import Source, Split, open_source
from paceline.data.load.batches import MicroBatch
from paceline.data.load.in_memory import HostLoader, OnDeviceLoader, SyntheticLoader
from paceline.data.load.loader import Loader
from paceline.data.load.order import micro_batch_positions, training_order
from paceline.planning import Plan

CPU = torch.device("cpu")
SIDE, TRAINING, VALIDATION = 8, 96, 37


def pictures(name: str, count: int) -> Split:
    """Keyed pixels and labels, as many as are counted."""
    size = count * SIDE * SIDE * 3
    pixels = keyed.integers(keyed.words(keyed.key(1, name), np.arange(size, dtype=np.int64))[0], 256)
    labels = keyed.integers(keyed.words(keyed.key(2, name), np.arange(count, dtype=np.int64))[0], 10)
    return Split(pixels.astype(np.uint8).reshape(count, SIDE, SIDE, 3), labels, count)


SOURCE = Source(pictures("training", TRAINING), pictures("validation", VALIDATION))


def naive(plan: Plan, position: int) -> tuple[NDArray[np.uint8], int]:
    """One training image, padded, sliced and mirrored by itself."""
    number = int(training_order(plan).images(np.array([position]))[0])
    picture, settings = SOURCE.training.images[number], plan.recipe.augment
    pad = settings.pad
    wide = np.zeros((SIDE + 2 * pad, SIDE + 2 * pad, 3), np.uint8)
    for row, column in itertools.product(range(SIDE + 2 * pad), repeat=2):
        inside = [row - pad, column - pad]
        if settings.fill == "mirror":
            inside = [(SIDE - 1) - abs((SIDE - 1) - abs(x)) for x in inside]
        if all(0 <= x < SIDE for x in inside):
            wide[row, column] = picture[inside[0], inside[1]]
    words = keyed.words(keyed.key(plan.recipe.seed, "crop and flip"), np.array([position]))
    down, right = (int(word[0]) * (2 * pad + 1) >> 32 for word in words[:2])
    cut = wide[down : down + SIDE, right : right + SIDE]
    if settings.flip and int(words[2][0]) >= 2**31:
        cut = cut[:, ::-1]
    if settings.alternate_flip:
        begins = int(keyed.words(keyed.key(plan.recipe.seed, "alternate flip"), np.array([number]))[0][0]) >= 2**31
        if begins == (position // plan.epoch_images % 2 == 0):
            cut = cut[:, ::-1]
    return cut, int(SOURCE.training.labels[number])


def pixels_of(batch: MicroBatch) -> NDArray[np.uint8]:
    assert batch.images.dtype == torch.uint8
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    return batch.images.permute(0, 2, 3, 1).numpy()


def firsts(batches: list[MicroBatch]) -> list[int]:
    return [int(batch.positions[0]) for batch in batches if batch.positions is not None]


def take(source: Loader, start: int, count: int) -> list[list[MicroBatch]]:
    steps = source.training(start)
    taken = list(itertools.islice(steps, count))
    assert isinstance(steps, Iterator)
    steps.close()
    return taken


@pytest.mark.parametrize("kind", [OnDeviceLoader, HostLoader])
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("augment.pad=3", "augment.flip=false"),
        ("augment.pad=0",),
        ("augment.fill=mirror", "augment.pad=2"),
        ("augment.flip=false", "augment.alternate_flip=true"),
        ("augment.flip=false", "augment.alternate_flip=true", "drop_last=true", "data.images=90"),
    ],
)
def test_training_images_are_what_slicing_each_by_itself_gives(kind: type[HostLoader], words: tuple[str, ...]) -> None:
    plan = make_plan(*words, "seed=5", "on.micro_batch=8")
    for step, batches in enumerate(take(kind(plan, SOURCE, 0, CPU), 4, 5), 4):
        positions = np.concatenate(micro_batch_positions(plan, step, 0))
        expected = [naive(plan, int(position)) for position in positions]
        assert np.array_equal(np.concatenate([pixels_of(b) for b in batches]), np.stack([e[0] for e in expected]))
        assert torch.cat([b.labels for b in batches]).tolist() == [e[1] for e in expected]
        assert [b.count for b in batches] == [8, 8]
        assert firsts(batches) == [16 * step, 16 * step + 8]


@pytest.mark.parametrize("start", [0, 1, 7])
@pytest.mark.parametrize(
    "words",
    [
        ("on.loader_workers=1", "on.micro_batch=16"),
        ("on.loader_workers=3", "on.micro_batch=4"),
        ("on.loader_workers=2", "on.micro_batch=4", "on.replicas=3"),
        ("on.micro_batch=8", "on.replicas=3"),
        ("on.micro_batch=2", "on.replicas=2", "drop_last=true", "data.images=90"),
    ],
)
def test_host_and_resident_loaders_give_the_same_images_on_every_layout(words: tuple[str, ...], start: int) -> None:
    plan = make_plan(*words)
    whole = make_plan("on.micro_batch=16", *(word for word in words if not word.startswith("on.")))
    steps = 12
    expected = take(HostLoader(whole, SOURCE, 0, CPU), 0, start + steps)[start:]
    for kind in (OnDeviceLoader, HostLoader):
        replicas = [take(kind(plan, SOURCE, r, CPU), start, steps) for r in range(plan.replicas)]
        for step in range(steps):
            k = range(plan.micro_batches)
            batches = [replicas[i % plan.replicas][step][i // plan.replicas] for i in k]
            assert sum(len(replica[step]) for replica in replicas) == len(batches)
            assert torch.equal(torch.cat([b.images for b in batches]), expected[step][0].images)
            assert torch.equal(torch.cat([b.labels for b in batches]), expected[step][0].labels)
            first = 16 * (start + step)
            assert firsts(batches) == [first + plan.micro_batch * i for i in k]


def test_a_resident_loader_that_gathers_a_few_steps_at_a_time_gives_the_same_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan("on.micro_batch=4")
    expected = take(OnDeviceLoader(plan, SOURCE, 0, CPU), 2, 9)
    for gathered in (1, 16, 50):
        monkeypatch.setattr(in_memory, "CROPPED_AT_ONCE", gathered)
        for one, other in zip(take(OnDeviceLoader(plan, SOURCE, 0, CPU), 2, 9), expected, strict=True):
            assert all(torch.equal(a.images, b.images) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", [OnDeviceLoader, HostLoader])
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_validation_images_come_once_and_unchanged(kind: type[HostLoader], replicas: int) -> None:
    plan = make_plan("on.micro_batch=2", "norm_batch=2", f"on.replicas={replicas}", "augment.pad=3")
    found: dict[bytes, int] = {}
    total = 0
    for replica in range(replicas):
        for batch in kind(plan, SOURCE, replica, CPU).validation():
            assert len(batch.images) == len(batch.labels) == plan.evaluation_batch
            for picture, label in zip(pixels_of(batch)[: batch.count], batch.labels.tolist(), strict=False):
                found[picture.tobytes()] = label
            total += batch.count
    split = SOURCE.validation
    assert total == VALIDATION
    assert found == {p.tobytes(): int(n) for p, n in zip(split.images, split.labels, strict=True)}


@pytest.mark.parametrize("kind", [OnDeviceLoader, HostLoader])
def test_each_image_is_mirrored_in_every_other_epoch(kind: type[HostLoader]) -> None:
    plan = make_plan("augment={alternate_flip: true}", "on.micro_batch=16", "epochs=4")
    order, kept = training_order(plan), SOURCE.training.images
    seen: dict[int, list[bool]] = {number: [] for number in range(TRAINING)}
    for step, (batch,) in enumerate(take(kind(plan, SOURCE, 0, CPU), 0, 4 * TRAINING // 16)):
        numbers = order.images(micro_batch_positions(plan, step, 0)[0])
        for number, picture in zip(numbers.tolist(), pixels_of(batch), strict=True):
            mirrored = bool(np.array_equal(picture, kept[number][:, ::-1]))
            assert mirrored or np.array_equal(picture, kept[number])
            seen[number].append(mirrored)
    assert {tuple(times) for times in seen.values()} == {(True, False) * 2, (False, True) * 2}
    assert 0.3 < np.mean([times[0] for times in seen.values()]) < 0.7


@pytest.mark.parametrize("replicas", [1, 3])
def test_synthetic_images_are_slices_of_one_pool_whatever_the_layout(replicas: int) -> None:
    plan = make_plan("data.name=synthetic", "on.micro_batch=4", f"on.replicas={replicas}")
    source = open_source(plan, None)
    counted = 0
    for replica in range(replicas):
        synthetic = SyntheticLoader(plan, source, replica, CPU)
        for step, batches in enumerate(take(synthetic, 0, 9)):
            parts = micro_batch_positions(plan, step, replica)
            assert len(batches) == len(parts)
            for batch, part in zip(batches, parts, strict=True):
                assert np.array_equal(batch.images.permute(0, 2, 3, 1).numpy(), source.training.take(part))
                assert np.array_equal(batch.labels.numpy(), source.training.labels_of(part))
                assert batch.positions is not None
                assert np.array_equal(batch.positions.numpy(), part)
        counted += sum(batch.count for batch in synthetic.validation())
    assert counted == VALIDATION


@pytest.mark.parametrize("kind", [OnDeviceLoader, HostLoader])
def test_a_fault_while_images_are_prepared_comes_through_the_loader(
    kind: type[HostLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    steps = kind(plan, SOURCE, 0, CPU).training(0)
    monkeypatch.setattr(in_memory, "draw_flips", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(steps)


@pytest.mark.parametrize("kind", [OnDeviceLoader, HostLoader])
def test_closing_a_loader_s_steps_stops_its_threads(kind: type[HostLoader]) -> None:
    before = threading.enumerate()
    plan = make_plan("on.loader_workers=3", "on.micro_batch=4")
    take(kind(plan, SOURCE, 0, CPU), 0, 3)
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(30)
            assert not thread.is_alive()
