"""paceline launch: prints the file with which a scheduler starts a recipe on several hosts; submits nothing."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.data.index.locate import is_known, needs_files
from paceline.errors import DataError, RunError, SpecError
from paceline.job import Job, ask, check_apart, make_job, read_placement, read_recipe
from paceline.launch import Launch
from paceline.schedulers import PORT, SCHEDULERS, HostedRun, name_of_run
from paceline.settings.configurations import placement_of
from paceline.visible import one_line, plural

_IN_CONTAINERS = ("kubernetes", "skypilot", "docker")


def run(
    scheduler: str, recipe: str | None, words: list[str], hosts: int, devices: int, data: Path | None,
    out: Path | None, page: str | None, device: str | None, image: str | None, volume: str | None,
    accelerator: str | None,
) -> None:  # fmt: skip
    """Print the file of one scheduler."""
    if out is None:
        raise RunError(
            "write --out FOLDER, on a file system that all hosts share: every process opens the run there, and the "
            "same command continues it"
        )
    check_apart(out, data)
    asked = ask(recipe, words, data)
    known = is_known(read_recipe(asked.name, asked.words)[0].data)
    here = asked.data if asked.data is not None and (asked.data.is_dir() or not known) else None
    placed, _ = read_placement(placement_of(asked.name) if page is None else page, asked.words, None, device)
    device = "cuda" if placed.device == "auto" else device  # the host that prints this may have none
    launch = Launch(0, hosts * devices, 0, devices, "", PORT, store_is_there=False)
    job = make_job(
        asked.name, asked.words, here, page, None, device, look=False, choices=asked.choices, launch=launch
    )  # fmt: skip
    if needs_files(job.plan.data) and asked.data is None:
        raise DataError("write --data FOLDER: where the images are on every host")
    data, out = (None if each is None else Path(os.path.abspath(each)) for each in (asked.data, out))  # noqa: PTH100
    assert out is not None
    accelerated = job.plan.placement.device == "cuda"
    _check_given(scheduler, accelerated, image, volume, accelerator)
    limit = job.plan.placement.time_limit
    hosted = HostedRun(
        name=name_of_run(out),
        summary=_summary(job, hosts, devices),
        hosts=hosts,
        devices=devices,
        accelerated=accelerated,
        words=tuple(_arguments(asked.name, asked.words, page, device, data, out)),
        out=out,
        mounts=_mounts(data, out, volume),
        seconds=limit.seconds if limit else None,
        image=image or "",
        volume=volume or "",
        accelerator=accelerator or "",
    )
    print(SCHEDULERS[scheduler](hosted), end="")


def _arguments(
    name: str, words: list[str], page: str | None, device: str | None, data: Path | None, out: Path
) -> list[str]:
    """The words after `paceline` that every host is to run."""
    return [
        "train",
        _found_anywhere(name),
        *words,
        *(["--on", _found_anywhere(page)] if page else []),
        *(["--device", device] if device else []),
        *(["--data", str(data)] if data else []),
        "--out",
        str(out),
    ]


def _mounts(data: Path | None, out: Path, volume: str | None) -> tuple[str, ...]:
    """Where folders are mounted: the images and the folder of the runs, or one volume at the folder that holds both."""
    folders = sorted({str(each) for each in (data, out.parent) if each is not None})
    if volume is None:
        return tuple(folders)
    shared = os.path.commonpath(folders)
    if shared == os.path.sep:
        raise SpecError(
            f"--volume {volume} holds the images and the runs, and {' and '.join(folders)} are in no folder together"
        )
    return (shared,)


def _found_anywhere(name: str) -> str:
    """A shipped name as it is, and a file by its whole path."""
    return os.path.abspath(name) if os.path.isfile(name) else name  # noqa: PTH100, PTH113


def _check_given(
    scheduler: str, accelerated: bool, image: str | None, volume: str | None, accelerator: str | None
) -> None:
    """Refuse a file that lacks what its scheduler needs, and words that it has no place for."""
    contained, sky = scheduler in _IN_CONTAINERS, scheduler == "skypilot"
    if contained and not image:
        raise SpecError(f"{scheduler} runs containers: write --image NAME, of an image that Paceline is installed in")
    if sky and not volume:
        raise SpecError("skypilot hosts share no folders: write --volume NAME, of a volume with the data and the runs")
    if sky and accelerated and not accelerator:
        raise SpecError("skypilot looks for hosts by their accelerator: write --accelerator NAME, such as H100")
    for option, given, takes in (
        ("--image", image, contained),
        ("--volume", volume, scheduler in ("kubernetes", "skypilot")),
        ("--accelerator", accelerator, sky and accelerated),
    ):
        if given and not takes:
            raise SpecError(f"{option} has no place in what {scheduler} reads here; leave it out")


def _summary(job: Job, hosts: int, devices: int) -> str:
    plan = job.plan
    return one_line(
        f"{job.name} on {plural(hosts, 'host')} of {plural(devices, 'replica')}: {plural(plan.steps, 'step')} of "
        f"{plan.global_batch:,} images, {plan.epochs:g} epochs"
    )
