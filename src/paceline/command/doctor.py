"""paceline doctor: what a report of a fault should say of this machine, and whether its parts work and how fast."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.command.tables import show_facts
from paceline.data.index.file import cache_folder
from paceline.errors import UserError
from paceline.job import DEFAULT_RECIPE, plan_job, read_recipe
from paceline.machine import Machine, processor_name, source_commit, this_machine
from paceline.model.packages import first_line
from paceline.progress import progress_bar
from paceline.settings.placement import Placement
from paceline.settings.read import Tree

BESIDE = ("torchvision", "timm", "triton")
"""Packages that are used where they are there, and that no extra installs."""
VARIABLES = re.compile(
    r"DATA_DIR|DATASETS_DIR|PYTHONPATH|(PACELINE|CUDA|NCCL|GLOO|OMP|MKL|TORCH|TORCHINDUCTOR|TRITON|PYTORCH)_\w+"
    r"|MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|WORLD_SIZE|SLURM_NTASKS|WANDB_MODE|MLFLOW_TRACKING_URI"
)
"""What of the environment changes what Paceline does; nothing of it is secret."""
WRITTEN = 64 << 20
"""Bytes that are written and read to see how fast a folder is."""
EXCHANGED = 25 << 20
"""Bytes of gradients that two replicas add up: a bucket."""

Fact = Callable[[Machine], str]


def run(as_json: bool) -> int:
    """Print every fact and check; the exit status is 1 if a check failed."""
    machine, found, failed = this_machine(), dict[str, Any](), []
    with progress_bar() as progress:
        for number, (name, fact) in enumerate(CHECKS.items()):
            progress("looking at this machine", number, len(CHECKS))
            try:
                found[name] = fact(machine)
            except OSError as fault:
                found[name] = f"FAILED: {fault.filename}: {fault.strerror}" if fault.strerror else f"FAILED: {fault}"
                failed.append(name)
            except (UserError, RuntimeError, ImportError) as fault:
                found[name] = f"FAILED: {first_line(fault)}"
                failed.append(name)
    show_facts(found, as_json)
    return 1 if failed else 0


def _paceline(_: Machine) -> str:
    commit = source_commit()
    return f"{__version__}{f', commit {commit}' if commit else ''}, in {Path(__file__).parents[1]}"


def _system(_: Machine) -> str:
    return f"Python {platform.python_version()}, {platform.platform()}"


def _cores(machine: Machine) -> str:
    bound = f" of {os.cpu_count()}" if machine.bound else ""
    load = f"; load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{machine.cores}{bound}, {processor_name()}; {machine.memory / 2**30:.1f} GiB of memory{load}"


def _packages(_: Machine) -> str:
    return _versions([*_required(extra=False), *BESIDE])


def _extras(_: Machine) -> str:
    return _versions(_required(extra=True))


def _required(extra: bool) -> list[str]:
    """The packages that this one needs, or those of its extras, but for the extras of developers."""
    lines = [line for line in metadata.requires("paceline") or [] if ("extra ==" in line) == extra]
    lines = [line for line in lines if not re.search(r"extra == .(dev|all)\b", line)]
    return list(dict.fromkeys(re.split(r"[^\w-]", line, maxsplit=1)[0].lower() for line in lines))


def _versions(names: list[str]) -> str:
    versions, missing = [], []
    for name in names:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    parts = [", ".join(versions), f"not installed: {', '.join(missing)}" if missing else ""]
    return "; ".join(part for part in parts if part)


def _variables(_: Machine) -> str:
    return ", ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if VARIABLES.fullmatch(name)) or "none"


def _accelerators(machine: Machine) -> str:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        named = [f"{each.name} ({each.total_memory / 2**30:.0f} GiB, {each.major}.{each.minor})" for each in devices]
        return f"{', '.join(named)}; CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    if torch.backends.mps.is_available():
        return "an Apple GPU"
    if machine.accelerators:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs alone"
        raise RuntimeError(f"torch cannot use the {machine.accelerator} that is here; it is {built}")
    return "none"


def _random_numbers(_: Machine) -> str:
    """Whether the keyed generator gives the same bits here as on every other device."""
    import numpy as np
    import torch

    from paceline import keyed

    key, count = 0x0123456789ABCDEF, 1 << 16
    expected = keyed.uniforms(*keyed.words(key, np.arange(count, dtype=np.int64))[:2])
    names = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for name in names:
        drawn = keyed.uniforms(*keyed.words(key, torch.arange(count, device=name))[:2])
        if not torch.equal(drawn.cpu(), torch.from_numpy(expected)):
            raise RuntimeError(f"other numbers on {name} than in NumPy: runs here are not those of other machines")
    return f"the same bits in NumPy and in torch on {' and '.join(names)}"


def _speed_of(folder: Path) -> str:
    """How fast a folder takes a file and gives it back."""
    folder.mkdir(parents=True, exist_ok=True)
    content = os.urandom(1 << 20) * (WRITTEN >> 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        writing = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):  # else it comes from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        same = Path(file.name).read_bytes() == content
        reading = time.perf_counter() - start
    if not same:
        raise RuntimeError(f"{folder} gives back other bytes than were written")
    free = shutil.disk_usage(folder).free / 2**30
    speeds = [
        f"{verb} {WRITTEN / seconds / 1e6:,.0f} MB/s" for verb, seconds in (("writes", writing), ("reads", reading))
    ]
    return f"{folder.resolve()}: {', '.join(speeds)}, {free:,.1f} GiB free"


def _this_folder(_: Machine) -> str:
    return _speed_of(Path())


def _cache(_: Machine) -> str:
    return _speed_of(cache_folder())


def _exchange(machine: Machine) -> str:
    """How fast two replicas on this machine add up a bucket of gradients."""
    kinds = ["cpu", *(["cuda"] if machine.accelerators > 1 else [])]
    return ", ".join(_exchange_on(kind) for kind in kinds)


def _exchange_on(device: str) -> str:
    from paceline.training.trials import Trial

    placement = Placement.model_validate({"device": device, "replicas": 2, "timeout": 60})
    plan = plan_job("doctor", read_recipe(DEFAULT_RECIPE, [])[0], placement, None, Tree(), Tree()).plan
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        seconds = Trial(Path(folder), None, 0).exchange_seconds(plan, EXCHANGED)
    return f"{EXCHANGED >> 20} MiB in {1000 * seconds:.1f} ms on {device}"


CHECKS: dict[str, Fact] = {
    "paceline": _paceline,
    "system": _system,
    "cores": _cores,
    "packages": _packages,
    "extras": _extras,
    "variables": _variables,
    "accelerators": _accelerators,
    "random numbers": _random_numbers,
    "this folder": _this_folder,
    "cache": _cache,
    "exchange of two replicas": _exchange,
}
"""What is looked at, in the order in which it is printed."""
