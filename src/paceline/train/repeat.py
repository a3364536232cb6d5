"""A step of a run again, watched layer by layer, to see where it stopped being finite."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import checkpoint
from paceline.data.loader import open_loader
from paceline.data.order import share, training_order
from paceline.data.scan import open_index
from paceline.dataset import Files
from paceline.errors import RunError, UserError
from paceline.plan import Plan
from paceline.record import Run
from paceline.train.loop import update
from paceline.train.state import State, begin, fresh, restore
from paceline.train.taken import Tell
from paceline.train.wishes import Signals, Wishes
from paceline.world import World


@dataclass(frozen=True)
class Finding:
    """Where a step first went wrong."""

    step: int
    started_from: int
    from_checkpoint: bool
    """Whether that is a checkpoint; otherwise it is the initial weights, made again."""
    loss: float
    layer: str | None
    """The first layer whose output was not finite; None where all were."""
    gradient: str | None
    """The last parameter, in the order of the data, whose gradient was not finite: the first the backward pass met."""
    images: list[dict[str, str | int]]
    """The images that made that layer's output, or the step's gradient, not finite: their numbers, and for data in
    files their names, as they stand in quarantine.jsonl."""


def repeat(plan: Plan, world: World, run: Run, data: Path | None, step: int, tell: Tell) -> Finding:
    """Go from the newest whole checkpoint before a step to that step again, and watch every layer in it."""
    assert world.replicas == plan.replicas == 1, "one process sees all images of the step"
    state = fresh(plan, world)
    from_checkpoint = _take_up_before(plan, run, state, step, tell)
    start, scale = state.step, state.scale
    wishes = Wishes(world, Signals(), None)
    with closing(open_loader(plan, data, world.replica, world.device).training(start)) as shares:
        while state.step < step - 1:
            update(plan, world, state, next(shares), wishes)
        watch = _Watch(state.network.module)
        batches = next(shares)
        numbers = [training_order(plan).images(part).tolist() for part in share(plan, step - 1, world.replica)]
        loss = 0.0
        for number, batch in enumerate(batches):
            watch.micro_batch = number
            loss += float(state.network.learn([batch], scale.now(step - 1))[0])
        watch.close()
    gradients = [
        name
        for name, p in state.network.module.named_parameters()
        if p.grad is not None and not bool(p.grad.isfinite().all())
    ]
    images = [number for part in numbers for number in part] if gradients else []
    if watch.layer:
        images = [numbers[batch][place] for batch, place in watch.places]
    return Finding(
        step, start, from_checkpoint, loss / plan.global_batch, watch.layer, gradients[-1] if gradients else None,
        _named(plan, data, images),
    )  # fmt: skip


def _take_up_before(plan: Plan, run: Run, state: State, step: int, tell: Tell) -> bool:
    """Let the state be that of the newest whole checkpoint before a step, or the initial one; whether it is the
    former."""
    saved = [number for number in checkpoint.saved_steps(run.checkpoints) if number < step]
    for number in reversed(saved):
        try:
            files = checkpoint.read(run.checkpoints / checkpoint.name_of(number))
        except RunError as fault:
            tell(f"passed over: {fault}")
        else:
            restore(state, files, checkpoint.name_of(number))
            return True
    try:
        adopted = begin(state, plan)
    except UserError as fault:
        raise RunError(
            f"{run.folder}: there is no whole checkpoint from before step {step}, and the weights that the run began "
            f"with cannot be had again: {fault}"
        ) from None
    tell(f"there is no whole checkpoint from before step {step}: going from the initial weights, from step 1 on")
    if adopted:
        tell(f"{adopted}, as it is now")
    return False


def _named(plan: Plan, folder: Path | None, images: list[int]) -> list[dict[str, str | int]]:
    """Training images by number, and where a person finds those that are in files."""
    if not isinstance(plan.data, Files):
        return [{"image": number} for number in images]
    assert folder is not None
    table = open_index(plan.data, folder).training
    found: list[dict[str, str | int]] = []
    for number in images:
        row = table.rows[number]
        path = table.shards[int(row["shard"])]
        found.append({"image": number, "name": table.name(number), "path": path, "offset": int(row["offset"])})
    return found


class _Watch:
    """Looks at the output of every layer in the order in which they are computed."""

    def __init__(self, module: nn.Module) -> None:
        self.layer: str | None = None
        self.micro_batch = 0
        self.places: list[tuple[int, int]] = []
        """The micro-batch and the place in it of every image whose output of that layer was not finite."""
        self._hooks = [
            part.register_forward_hook(self._look(name))
            for name, part in module.named_modules()
            if not list(part.children())
        ]

    def _look(self, name: str) -> Any:
        def hook(_part: nn.Module, _given: Any, made: Any) -> None:
            # Later micro-batches are asked about the layer that was found, so that none of its images is missed.
            if self.layer in (None, name) and isinstance(made, Tensor) and not bool(made.isfinite().all()):
                self.layer = name
                bad = ~made.detach().flatten(1).isfinite().all(1)
                places = [(self.micro_batch, place) for place in torch.nonzero(bad).flatten().tolist()]
                self.places += [place for place in places if place not in self.places]

        return hook

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
