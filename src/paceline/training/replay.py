"""A step of a run again, watched layer by layer, to see where it stopped being finite."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline import checkpoint
from paceline.data.index.scan import open_index
from paceline.data.load.loader import open_loader
from paceline.data.load.order import micro_batch_positions, training_order
from paceline.errors import RunError, UserError
from paceline.model.norm import Statistics
from paceline.planning import Plan
from paceline.record import Run
from paceline.settings.data import Files
from paceline.training.loop import update
from paceline.training.restore import Tell
from paceline.training.state import State, begin, fresh, restore
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
    statistics: str | None
    """The first batch norm whose mean or variance over a norm group was not finite."""
    gradient: str | None
    """The last parameter, in the order of the data, whose gradient was not finite: the first the backward pass met."""
    images: list[dict[str, str | int]]
    """The images that made that layer's output, or the step's statistics or gradient, not finite: their numbers, and
    for data in files their names, as they stand in quarantine.jsonl."""


def repeat(plan: Plan, world: World, run: Run, data: Path | None, step: int, tell: Tell) -> Finding:
    """Go from the newest whole checkpoint before a step to that step again, and watch every layer in it."""
    assert world.replicas == plan.replicas == 1, "one process sees all images of the step"
    state = fresh(plan, world)
    from_checkpoint = _take_up_before(plan, run, state, step, tell)
    start, scale = state.step, state.scale
    with closing(open_loader(plan, data, world.replica, world.device).training(start)) as shares:
        while state.step < step - 1:
            update(plan, state, next(shares))
        watch = Watch(state.network.module)
        batches = next(shares)
        numbers = [
            training_order(plan).images(part).tolist() for part in micro_batch_positions(plan, step - 1, world.replica)
        ]
        loss, statistics = 0.0, None
        for number, batch in enumerate(batches):
            watch.micro_batch = number
            loss += float(state.network.forward_backward([batch], scale.now(step - 1))[0])
            statistics = statistics or _first_overflow(state.network.module, state.network.statistics)
        watch.close()
    gradients = [
        name
        for name, p in state.network.module.named_parameters()
        if p.grad is not None and not bool(p.grad.isfinite().all())
    ]
    layer, places = watch.first()
    images = [number for part in numbers for number in part] if gradients or statistics else []
    if layer:
        images = [numbers[batch][place] for batch, place in places]
    return Finding(
        step, start, from_checkpoint, loss / plan.global_batch, layer, statistics, gradients[-1] if gradients else None,
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


def _first_overflow(module: nn.Module, statistics: Statistics) -> str | None:
    """The first batch norm whose statistics of the first forward pass are not finite."""
    names, rows = {norm: name for name, norm in module.named_modules()}, statistics.pass_rows(0)
    bad = (norm for norm in statistics.norms if not all(bool(t.isfinite().all()) for t in norm.columns(rows)))
    return next((names[norm] for norm in bad), None)


class Watch:
    """Looks at the output of every layer in the order in which they are computed."""

    def __init__(self, module: nn.Module) -> None:
        self.micro_batch = 0
        self._calls: Counter[int] = Counter()
        self._found: dict[int, tuple[int, str, list[int]]] = {}
        """For each micro-batch, the first call of a layer that gave something not finite: its number, the layer's name
        and the places of those images."""
        self._hooks = [
            part.register_forward_hook(self._look(name))
            for name, part in module.named_modules()
            if not list(part.children())
        ]

    def first(self) -> tuple[str | None, list[tuple[int, int]]]:
        """The first layer of all micro-batches, and by micro-batch and place in it the images that it concerns."""
        if not self._found:
            return None, []
        call, layer, _ = min(self._found.values())
        same = {number: places for number, (*first, places) in self._found.items() if first == [call, layer]}
        return layer, [(number, place) for number, places in same.items() for place in places]

    def _look(self, name: str) -> Any:
        def hook(_part: nn.Module, _given: Any, made: Any) -> None:
            self._calls[self.micro_batch] += 1
            if self.micro_batch in self._found or not isinstance(made, Tensor) or bool(made.isfinite().all()):
                return
            bad = ~made.detach().flatten(1).isfinite().all(1)
            self._found[self.micro_batch] = self._calls[self.micro_batch], name, bad.nonzero().flatten().tolist()

        return hook

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
