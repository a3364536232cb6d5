"""What the orders of a pipeline's passes cost: memory that each stage's process takes for its passes, and waiting.

ResNet-20 in two stages on this machine's CPU, sixteen micro-batches in a step. A process's memory is what it has taken
at its peak beyond what it had taken before the first step.

    python benchmarks/pipeline_orders.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

from paceline.device import peak_memory
from paceline.job import plan_job
from paceline.planning import Plan
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, parse
from paceline.settings.recipe import Recipe
from paceline.stages import percents
from paceline.training.restore import restore_newest
from paceline.training.session import Session
from paceline.training.step import take_step
from paceline.training.train_speed import idle_shares
from paceline.training.trials import Trial

PAGE = """
model: resnet20
data: {name: generated, images: 512, validation_images: 8, classes: 10, side: 32}
global_batch: 512
norm_batch: 32
epochs: 100
optimizer: {name: sgd, lr: 0.1}
schedule: constant
"""
STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("| order | parts | peak of stage 1, MiB | of stage 2 | waiting, predicted | measured |")
    print("|---|---|---|---|---|---|")
    for order in ("grouped", "interleaved", "sequential"):
        for virtual in (1, 2):
            first, second = measured(order, virtual)
            idle = first["idle"]
            print(
                f"| {order} | {2 * virtual} | {first['bytes'] >> 20} | {second['bytes'] >> 20} "
                f"| {idle['predicted']:.1%} | {idle['measured']:.1%} ({percents(idle['of_each'])}) |",
                flush=True,
            )


def measured(order: str, virtual: int) -> list[dict]:  # type: ignore[type-arg]
    """What each stage has found."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        processes = Trial(folder, None, STEPS)._start(plan_of(order, virtual), partial(task, folder))
        for process in processes:
            process.join()
            assert process.exitcode == 0
        return [json.loads((folder / f"{stage}.json").read_text()) for stage in range(2)]


def plan_of(order: str, virtual: int) -> Plan:
    tree, words = parse(PAGE, "pipeline_orders"), {"device": "cpu", "stages": 2, "micro_batch": 32, "cpu_threads": 1}
    placed = Tree({**words, "pipeline": order, "virtual_stages": virtual}, {(): "here"})
    return plan_job("pipeline_orders", build(Recipe, tree), build(Placement, placed), None, tree, placed).plan


def task(folder: Path, session: Session) -> None:
    """Take a few steps, and write down what they take."""
    restore_newest(session)
    with closing(session.loader.training(0)) as batches:
        before = peak_memory("cpu")
        for _ in range(STEPS):
            take_step(session, next(batches))
        peak = peak_memory("cpu") - before
        idle = idle_shares(session, lambda: take_step(session, next(batches)))
    (folder / f"{session.world.stage}.json").write_text(json.dumps({"bytes": peak, "idle": idle}))


if __name__ == "__main__":
    main()
