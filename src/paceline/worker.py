"""Runs a verb on a job: in this process, or in one process for each local replica, started from the run folder."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from paceline.errors import Broken, PlanError, UserError
from paceline.job import Job, stored_job
from paceline.launch import MESSAGES_FOLDER, launched
from paceline.machine import check_torch_build
from paceline.ran_out import remembered
from paceline.record import json_text
from paceline.settings.read import flow
from paceline.settling import settled
from paceline.sink.console import console, show_evaluated
from paceline.visible import one_line, visible_output

_LONGEST = 2800
"""Characters of a message."""

Verb = Callable[..., Any]


def run_verb(verb: str, job: Job, folder: Path, **arguments: Any) -> Any:
    """Run a verb on a job and give what it gives; with several replicas, each is a process that opens the run folder.

    `arguments` are the verb's own, as JSON has them.
    """
    check_torch_build(job.plan.placement.device)
    if job.launch is not None or job.plan.processes == 1:  # else each replica does so
        job = settled(job, folder if verb == "train" else None)
    if job.launch is not None and job.launch.rank >= job.plan.processes:
        from paceline.data.index.fingerprint import data_digest
        from paceline.world import stand_by

        # There is nothing that a command could show here.
        sys.exit(stand_by(job.plan, job.launch, data_digest(job.plan.data, job.data_folder)))
    if job.launch is not None or job.plan.processes == 1:
        return _verbs()[verb](job, folder, **arguments)
    from paceline.elastic import start_replicas

    placement = json.loads(job.asked.model_dump_json())
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        result = Path(scratch, "result.json")
        request = {
            "words": [word for word in job.words if not word.startswith("on.")]
            + [f"on.{key}={flow(value)}" for key, value in placement.items()],
            "data": None if job.test or job.data_folder is None else str(job.data_folder),
            "test": str(job.test) if job.test else None,
            "arguments": arguments,
            "result": str(result),
        }
        command = ["paceline.worker", str(folder), verb, json.dumps(request)]
        while True:
            too_large = remembered(folder)
            try:
                status = start_replicas(job.plan.processes, command)
            except Broken:
                if verb != "train" or remembered(folder) == too_large:
                    raise
            else:
                return json.loads(result.read_text()) if result.is_file() else status


def main() -> None:
    """One local replica: python -m paceline.worker FOLDER VERB REQUEST."""
    folder, verb, text = sys.argv[1:]
    request = json.loads(text)
    with visible_output(), faults_in_one_line():
        data, test = (Path(path) if path else None for path in (request["data"], request["test"]))
        job = stored_job(Path(folder), request["words"], data, test, evaluates=verb in ("validate", "follow"))
        job = settled(job, Path(folder) if verb == "train" else None)
        result = _verbs()[verb](job, Path(folder), **request["arguments"])
        if job.launch is not None and job.launch.rank == 0:
            Path(request["result"]).write_text(json_text(result))


@contextmanager
def faults_in_one_line() -> Iterator[None]:
    """End the process with one line where a person, and not Paceline, can mend what went wrong inside."""
    try:
        yield
    except UserError as fault:
        exit_with(fault)
    except BrokenPipeError:
        raise
    except OSError as fault:
        if fault.filename is None:
            raise
        exit_with(Broken(f"{os.fsdecode(fault.filename)}: {fault.strerror}"))


def exit_with(fault: UserError) -> NoReturn:
    """End the process with one line about a fault; a local replica leaves it for its parent to print."""
    message, launch = str(fault), None
    with suppress(PlanError):  # what a launcher said may be the very fault
        launch = launched()
    if len(message) > _LONGEST:  # it repeats a very long word; what to write instead comes at the end
        message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 4 :]}"
    if launch is not None and MESSAGES_FOLDER in os.environ:
        Path(os.environ[MESSAGES_FOLDER], str(launch.rank)).write_text(one_line(message))
    else:
        who = f" (replica {launch.rank})" if launch is not None and launch.rank else ""
        print(one_line(f"error{who}: {message}"), file=sys.stderr)  # noqa: T201
    sys.exit(fault.status)


def _verbs() -> dict[str, Verb]:
    """The verbs that run on replicas; torch is loaded here, once a plan stands."""
    from paceline.reporting.sink import ReportSink
    from paceline.training.averaging import Method, average_run
    from paceline.training.follow import follow_run
    from paceline.training.infer_speed import bench_infer
    from paceline.training.run import train_run
    from paceline.training.selection import Selection
    from paceline.training.train_speed import bench_train
    from paceline.training.validation import validate_run

    def train(job: Job, folder: Path, command: list[str]) -> int:
        report = partial(ReportSink, data_folder=job.data_folder)
        return train_run(job, folder, console(works_on=True), command, {"report": report})

    def validate(job: Job, folder: Path, checkpoint: str | None, every: bool, details: bool) -> list[Any]:
        return list(
            validate_run(job, folder, Selection(checkpoint, every, job.test, job.plan.evaluated_images), details)
        )

    def follow(job: Job, folder: Path, as_json: bool) -> list[str]:
        selection = Selection(test=job.test, images=job.plan.evaluated_images)
        return follow_run(job, folder, selection, partial(show_evaluated, as_json))

    def average(job: Job, folder: Path, last: int | None, decay: float | None, recalibrate: int | None) -> list[Any]:
        return list(average_run(job, folder, last, Method(decay, recalibrate)))

    return {
        "train": train,
        "validate": validate,
        "follow": follow,
        "average": average,
        "bench_train": bench_train,
        "bench_infer": bench_infer,
    }


if __name__ == "__main__":
    main()
