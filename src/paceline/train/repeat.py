"""A step of a run again, watched layer by layer, to see where it stopped being finite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import checkpoint
from paceline.data.loader import open_loader
from paceline.data.order import share, training_order
from paceline.errors import RunError
from paceline.plan import Plan
from paceline.record import Run
from paceline.train.loop import update
from paceline.train.state import fresh, restore
from paceline.train.wishes import Signals, Wishes
from paceline.world import World


@dataclass(frozen=True)
class Finding:
    """Where a step first went wrong."""

    step: int
    started_from: int
    loss: float
    layer: str | None
    """The first layer whose output was not finite; None where all were."""
    gradient: str | None
    """The last parameter, in the order of the data, whose gradient was not finite: the first the backward pass met."""
    images: list[int]
    """The numbers of the images that made that layer's output, or the step's gradient, not finite."""


def repeat(plan: Plan, world: World, run: Run, data: Path | None, step: int) -> Finding:
    """Go from the newest whole checkpoint before a step to that step again, and watch every layer in it."""
    state, start = fresh(plan, world), _take_up_before(run, step)
    restore(state, start[1], checkpoint.name_of(start[0]))
    shares = open_loader(plan, data, world.replica, world.device).training(state.step)
    wishes = Wishes(world, Signals(), None)
    while state.step < step - 1:
        update(plan, world, state, next(shares), wishes)
    watch = _Watch(state.network.module)
    batches = next(shares)
    positions = share(plan, step - 1, world.replica)
    numbers = [training_order(plan).images(part).tolist() for part in positions]
    loss = 0.0
    for number, batch in enumerate(batches):
        watch.micro_batch = number
        loss += float(state.network.learn([batch], state.scale.now(step - 1))[0])
    watch.close()
    shares.close()
    gradients = [
        name
        for name, p in state.network.module.named_parameters()
        if p.grad is not None and not bool(p.grad.isfinite().all())
    ]
    images = [number for part in numbers for number in part] if gradients else []
    if watch.layer:
        images = [numbers[watch.found_in][place] for place in watch.places]
    return Finding(step, start[0], loss / plan.global_batch, watch.layer, gradients[-1] if gradients else None, images)


def _take_up_before(run: Run, step: int) -> tuple[int, dict[str, bytes]]:
    saved = [number for number in checkpoint.saved_steps(run.checkpoints) if number < step]
    for number in reversed(saved):
        try:
            return number, checkpoint.read(run.checkpoints / checkpoint.name_of(number))
        except RunError:
            continue
    raise RunError(
        f"{run.folder}: there is no whole checkpoint from before step {step}; set on.keep_every to keep more"
    )


class _Watch:
    """Looks at the output of every layer in the order in which they are computed."""

    def __init__(self, module: nn.Module) -> None:
        self.layer: str | None = None
        self.micro_batch = self.found_in = 0
        self.places: list[int] = []
        self._hooks = [
            part.register_forward_hook(self._look(name))
            for name, part in module.named_modules()
            if not list(part.children())
        ]

    def _look(self, name: str) -> Any:
        def hook(_part: nn.Module, _given: Any, made: Any) -> None:
            if self.layer is None and isinstance(made, Tensor) and not bool(made.isfinite().all()):
                self.layer, self.found_in = name, self.micro_batch
                bad = ~made.detach().flatten(1).isfinite().all(1)
                self.places = torch.nonzero(bad).flatten().tolist()

        return hook

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
