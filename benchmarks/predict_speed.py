"""`paceline predict` against `paceline validate` on the same images, turn by turn in one process.

A turn is one pass over the validation images of a run, from files to answers, without opening the run. The clock is the
CPU time of the whole process unless --wall is written, so that neighbors on the machine matter little; on a GPU only
--wall says anything. Pixels that a validation keeps on disk are not used.

    python benchmarks/predict_speed.py RUN --turns 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from paceline.data.index.given import find_images
from paceline.data.index.scan import open_index
from paceline.job import Job, stored_job
from paceline.prediction import predict_images
from paceline.settings.data import Files
from paceline.training.evaluate import evaluate
from paceline.training.opened import open_run
from paceline.training.restore import restore_newest
from paceline.training.session import open_session

WORDS = ["on.replicas=auto", "on.micro_batch=auto", "on.decoded_validation=false"]


def validation_paths(job: Job) -> list[str]:
    """The validation images of a run, in the order of the index."""
    if not isinstance(job.plan.data, Files) or job.data_folder is None:
        raise SystemExit("the run was not trained on images in files")
    validation = open_index(job.plan.data, job.data_folder).validation
    return [str(job.data_folder / validation.name(index)) for index in range(len(validation))]


def validate_turn(run: Path, wall: bool) -> float:
    """Seconds of one validation."""
    job = stored_job(run, WORDS, None)
    with open_session(job.plan, run, "read", data_folder=job.data_folder, launch=job.launch) as session:
        restore_newest(session)
        begin = clock(wall)
        evaluate(session)
        return clock(wall) - begin


def predict_turn(run: Path, paths: list[str], wall: bool) -> float:
    """Seconds of predicting as many images."""
    images = find_images(paths, iter(()))
    opened = open_run(run, None, WORDS, len(images.table))
    begin = clock(wall)
    predictions = list(predict_images(opened, images.table, {}))
    seconds = clock(wall) - begin
    assert len(predictions) == len(paths)
    return seconds


def clock(wall: bool) -> float:
    return time.perf_counter() if wall else time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run that was trained on images in files")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--wall", action="store_true", help="measure the time that passes, on a machine of its own")
    options = parser.parse_args()
    paths = validation_paths(stored_job(options.run, WORDS, None))
    validating, predicting = list[float](), list[float]()
    for turn in range(options.turns + 1):
        seconds = validate_turn(options.run, options.wall), predict_turn(options.run, paths, options.wall)
        if turn:  # the first warms up
            validating.append(seconds[0])
            predicting.append(seconds[1])
    speeds = [len(paths) / statistics.median(each) for each in (validating, predicting)]
    row = {"images": len(paths), "clock": "wall" if options.wall else "cpu", "turns": options.turns}
    row |= {"validate": speeds[0], "predict": speeds[1], "ratio": speeds[1] / speeds[0]}
    print(json.dumps(row | {"validate_seconds": validating, "predict_seconds": predicting}))


if __name__ == "__main__":
    main()
