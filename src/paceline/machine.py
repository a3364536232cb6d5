"""What this machine has, found without torch: cores, memory and accelerators."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from paceline.errors import PlanError

NO_CUDA = "torch cannot use a CUDA device here; write on.device=cpu, or install a CUDA build of torch"


@dataclass(frozen=True)
class Machine:
    """The parts of a machine that a plan depends on."""

    cores: int
    memory: int
    """Bytes of main memory this process may use."""
    accelerators: int = 0
    accelerator: str = ""
    """Name of the first accelerator."""
    accelerator_memory: int = 0
    """Bytes of memory of the smallest accelerator."""
    host: str = ""
    bound: bool = False
    """Whether this process may use only some of the host's cores."""
    bf16: str = ""
    """The processor's instructions that multiply bfloat16 numbers, if it has any."""
    numa_nodes: int = 1
    """Parts of the host that have cores and memory of their own."""


def this_machine() -> Machine:
    """Look at the machine this process runs on."""
    rows = _nvidia()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [word.strip() for word in visible.split(",") if word.strip()]
        rows = [
            row
            for word in names
            for row in rows
            if word == row[0] or row[3].startswith(word) or (word.startswith("MIG-") and row is rows[0])
        ]
    total, cores = os.cpu_count() or 1, usable_cores()
    return Machine(
        cores=cores,
        bound=cores < total,
        memory=_memory(),
        accelerators=len(rows),
        accelerator=rows[0][1] if rows else "",
        accelerator_memory=min((int(float(row[2])) << 20 for row in rows if row[2].isdigit()), default=0),
        host=platform.node(),
        bf16=bf16_instructions(_processor_facts()),
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
    )


def usable_cores() -> int:
    """How many of the host's cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, _quota())


def check_torch_build(device: str) -> None:
    """Refuse a CUDA device where the installed torch is built for the CPU alone, which its version tells."""
    if device == "cuda" and metadata.version("torch").endswith("+cpu"):
        raise PlanError(NO_CUDA)


def _nvidia() -> list[list[str]]:
    """Index, name, MiB and id of each NVIDIA device, by the driver's own tool."""
    return [row for row in _query_nvidia("index,name,memory.total,uuid") if len(row) == 4]


@dataclass(frozen=True)
class AcceleratorLoad:
    """How busy an accelerator is, with whatever anybody does on it."""

    index: int
    busy: int | None
    """Percent of the last moments in which it worked; None where the driver does not say."""
    used: int
    """Bytes of its memory that are taken."""
    memory: int


def accelerator_loads() -> list[AcceleratorLoad]:
    """How busy each NVIDIA device is, by the driver's own tool; none where there is no such tool."""
    rows = _query_nvidia("index,utilization.gpu,memory.used,memory.total")
    return [
        AcceleratorLoad(int(row[0]), int(row[1]) if row[1].isdigit() else None, int(row[2]) << 20, int(row[3]) << 20)
        for row in rows
        if len(row) == 4 and all(row[number].isdigit() for number in (0, 2, 3))
    ]


def _query_nvidia(fields: str) -> list[list[str]]:
    """What the driver's tool says of each device."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if process.returncode != 0:
        return []
    return [[word.strip() for word in line.split(",")] for line in process.stdout.splitlines()]


def _quota() -> int:
    """Whole cores that the container this process is in may use."""
    words = _limit("cpu.max").split()
    return max(1, int(words[0]) // int(words[1])) if len(words) == 2 and words[0].isdigit() else sys.maxsize


def _memory() -> int:
    """Main memory, or the limit of the container this process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _limit("memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def bf16_instructions(facts: str) -> str:
    """What Linux calls the best instructions for bfloat16 products that a processor has, by what it says of it."""
    words = {word for line in facts.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return next((name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in words), "")


def _processor_facts() -> str:
    """What Linux says of the processors; nothing elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _limit(name: str) -> str:
    """What the control group of this process says of one resource."""
    try:
        return Path("/sys/fs/cgroup", name).read_text()
    except OSError:
        return ""


def processor_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def source_commit() -> str | None:
    """The commit of the source this runs from, marked when files differ from it; None outside a checkout."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    ask = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        if subprocess.run(
            [*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=False
        ).returncode:
            return None  # installed inside somebody else's repository
        description = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return description.stdout.strip() or None
