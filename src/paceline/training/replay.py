"""Takes a step of a run again and watches every layer, to see where it stopped being finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline import checkpoint
from paceline.data.index.scan import open_index
from paceline.data.load.order import micro_batch_positions, training_order
from paceline.errors import RunError, UserError
from paceline.model.norm import Statistics
from paceline.planning import Plan
from paceline.progress import Progress, silent
from paceline.settings.data import Files
from paceline.training.restore import load_files
from paceline.training.session import Session
from paceline.training.state import initialize_state
from paceline.training.step import take_step


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


def replay(session: Session, step: int, notify: Callable[[str], None], progress: Progress = silent) -> Finding:
    """Go from the newest intact checkpoint before a step to that step again, and watch every layer in it."""
    plan, state = session.plan, session.state
    assert session.world.replicas == plan.replicas == 1, "one process sees all images of the step"
    from_checkpoint = _restore_before(session, step, notify)
    start = state.step
    with closing(session.loader.training(start)) as steps:
        while state.step < step - 1:
            take_step(session, next(steps))
            progress("training again", state.step - start, step - 1 - start)
        watch = Watch(state.network.module)
        batches = next(steps)
        positions = micro_batch_positions(plan, step - 1, replica=0)
        images = [training_order(plan).images(each).tolist() for each in positions]
        loss, statistics = 0.0, None
        for index, batch in enumerate(batches):
            watch.micro_batch = index
            scale = state.loss_scale.now(step - 1)
            loss += float(state.network.forward_backward([state.network.prepare(batch)], scale)[0])
            statistics = statistics or _first_not_finite(state.network.module, state.network.statistics)
        watch.close()
    gradients = [
        name
        for name, parameter in state.network.module.named_parameters()
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
    ]
    layer, where = watch.first()
    concerned = [image for each in images for image in each] if gradients or statistics else []
    if layer:
        concerned = [images[batch][index] for batch, index in where]
    return Finding(
        step, start, from_checkpoint, loss / plan.global_batch, layer, statistics, gradients[-1] if gradients else None,
        _named(plan, session.data_folder, concerned),
    )  # fmt: skip


def _restore_before(session: Session, step: int, notify: Callable[[str], None]) -> bool:
    """Restore the newest intact checkpoint before a step, or the initial weights; whether it was the former."""
    run, state = session.run, session.state
    newest = checkpoint.newest_intact(run.checkpoints, lambda fault: notify(f"passed over: {fault}"), before=step)
    if newest is not None:
        load_files(state, newest[1], checkpoint.name_of(newest[0]))
        return True
    try:
        adoption = initialize_state(state, session.plan)
    except UserError as fault:
        raise RunError(
            f"{run.folder}: there is no intact checkpoint from before step {step}, and the weights that the run began "
            f"with cannot be had again: {fault}"
        ) from None
    notify(f"there is no intact checkpoint from before step {step}: starting from the initial weights, at step 1")
    if adoption:
        notify(f"{adoption}, as it is now")
    return False


def _named(plan: Plan, folder: Path | None, images: list[int]) -> list[dict[str, str | int]]:
    """Training images by number, and where a person finds those that are in files."""
    if not isinstance(plan.data, Files):
        return [{"image": number} for number in images]
    assert folder is not None
    table = open_index(plan.data, folder).training
    return [{"image": number, **table.place(number)} for number in images]


def _first_not_finite(module: nn.Module, statistics: Statistics) -> str | None:
    """The first batch norm whose statistics of the first forward pass are not finite."""
    names, rows = {norm: name for name, norm in module.named_modules()}, statistics.pass_rows(0)
    bad = (norm for norm in statistics.norms if not all(bool(t.isfinite().all()) for t in norm.columns(rows)))
    return next((names[norm] for norm in bad), None)


class Watch:
    """Looks at the output of every layer in the order in which they are computed."""

    def __init__(self, module: nn.Module) -> None:
        self.micro_batch = 0
        self._calls: Counter[int] = Counter()
        self._first_calls: dict[int, tuple[int, str, list[int]]] = {}
        """For each micro-batch, the first call of a layer that gave something not finite: its number, the layer's name
        and the places of those images."""
        self._hooks = [
            part.register_forward_hook(self._look(name))
            for name, part in module.named_modules()
            if not list(part.children())
        ]

    def first(self) -> tuple[str | None, list[tuple[int, int]]]:
        """The first layer of all micro-batches, and by micro-batch and place in it the images that it concerns."""
        if not self._first_calls:
            return None, []
        call, layer, _ = min(self._first_calls.values())
        same = {number: places for number, (*first, places) in self._first_calls.items() if first == [call, layer]}
        return layer, [(number, place) for number, places in same.items() for place in places]

    def _look(self, name: str) -> Any:
        def hook(_part: nn.Module, _inputs: Any, output: Any) -> None:
            self._calls[self.micro_batch] += 1
            if self.micro_batch in self._first_calls or not isinstance(output, Tensor) or bool(output.isfinite().all()):
                return
            bad = ~output.detach().flatten(1).isfinite().all(1)
            self._first_calls[self.micro_batch] = self._calls[self.micro_batch], name, bad.nonzero().flatten().tolist()

        return hook

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
