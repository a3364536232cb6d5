"""Starts the replicas of this host under torch's elastic launcher; beside `world`, a user of torch.distributed."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import INTERRUPTED, Broken, StoppedEarly
from paceline.launch import MESSAGES_FOLDER
from paceline.starting import EARLY_STOPS, STOPS, answered_signals, training_begins

_PASSED_ON = (*STOPS, signal.SIGQUIT)
"""Signals that Paceline's own launcher hands on to the replicas."""


def start_replicas(count: int, module_args: Sequence[str]) -> int:
    """Run `python -m MODULE_ARGS` in `count` processes under torch's elastic launcher, and return the exit status."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: PLC0415 - slow to import
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle=",".join(number.name for number in answered_signals(_PASSED_ON)),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    try:
        with _launching(folder):
            elastic_launch(config, sys.executable)("-P", "-m", *module_args)  # -P: not from the user's folder
        return INTERRUPTED if (folder / "interrupted").exists() else 0
    except SignalException as fault:
        if (folder / "interrupted").exists():
            return INTERRUPTED
        _end_forgotten(folder)
        early = fault.sigval in EARLY_STOPS and not (folder / "training").exists()
        kind = StoppedEarly if early else Broken
        raise kind("stopped by a signal before the replicas could save; what was saved before is whole") from None
    except ChildFailedError as fault:
        rank, failure = fault.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise Broken(
                f"replica {rank} was killed by {name}; the others were stopped, and what was saved is whole"
            ) from None
        messages = [path.read_text() for path in (folder / str(rank), folder / "0") if path.is_file()]
        raise _ReplicaFailed(messages[0] if messages else f"replica {rank} failed", failure.exitcode) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _launching(folder: Path) -> Iterator[None]:
    """Set this process up to launch replicas, and leave it as it was."""
    environment, level = dict(os.environ), logging.root.manager.disable
    previous = {number: signal.getsignal(number) for number in _PASSED_ON}  # the launcher takes these over
    logging.disable(logging.ERROR)  # the launcher's notes on signals and dead workers; ours are one line each
    os.environ[MESSAGES_FOLDER] = str(folder)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "60")  # time to finish the step and save
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
    finally:
        if (folder / "training").exists():
            training_begins()
        logging.disable(level)
        os.environ.clear()
        os.environ.update(environment)
        if threading.current_thread() is threading.main_thread():
            for number, action in previous.items():
                signal.signal(number, action or signal.SIG_DFL)


def _end_forgotten(folder: Path) -> None:
    """End replicas of this launch that torch had started and not yet noted when a signal came (Linux)."""
    told = f"{MESSAGES_FOLDER}={folder}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or gone
            if told in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


class _ReplicaFailed(Broken):
    """What a replica said before it ended, with its exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
