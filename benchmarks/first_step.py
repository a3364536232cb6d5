"""Where the time goes from pressing return to the first step of a training, part by part, in a process of its own.

python benchmarks/first_step.py nvidia/resnet50
TRITON_CACHE_DIR=$(mktemp -d) python benchmarks/first_step.py nvidia/resnet50     # as if no kernel were compiled yet
python benchmarks/first_step.py shapes/resnet8 --device cpu
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

# Imports stand between the marks, because they are what takes the time.
# ruff: noqa: E402
import argparse
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory


class Timeline:
    """Prints each part with its seconds, and those since the beginning."""

    def __init__(self) -> None:
        self._last = BEGAN

    def mark(self, part: str) -> None:
        """A part has come to its end."""
        now = time.perf_counter()
        print(f"{now - self._last:8.2f} {now - BEGAN:8.2f}   {part}", flush=True)
        self._last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="nvidia/resnet50")
    parser.add_argument("words", nargs="*", help="KEY=VALUE, as for paceline train")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    print(" seconds    since   part")
    timeline = Timeline()
    from paceline.command.bench_job import train_job

    plan = train_job(options.recipe, options.words, None, None, 1, options.device).job.plan
    timeline.mark("plan")
    import torch

    timeline.mark("import torch")
    cuda = options.device == "cuda"
    if cuda:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        timeline.mark("CUDA context")
        import triton  # type: ignore[import-not-found]  # noqa: F401

        timeline.mark("import triton")
    from paceline.training.session import open_session
    from paceline.training.step import begin_step, take_step
    from paceline.training.stopwatch import wait_for

    timeline.mark("import the rest")
    with TemporaryDirectory() as folder, open_session(plan, Path(folder)) as session:
        timeline.mark("open the run")
        state = session.state
        wait_for(session.world.device)
        timeline.mark("network and its first weights")
        with closing(session.loader.training(0)) as steps:
            batches = next(steps)
            wait_for(session.world.device)
            timeline.mark("first images")
            if cuda:
                prepared, scale = begin_step(session, batches)
                state.network.compile_ahead(prepared[0], scale)
                wait_for(session.world.device)
                timeline.mark("kernels: the pass ahead, compiling, loading")
            for step in ("first", "second", "third", "fourth"):
                take_step(session, batches)
                wait_for(session.world.device)
                timeline.mark(f"{step} step")


if __name__ == "__main__":
    main()
