"""What a run carries from step to step, and how it becomes a checkpoint and back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from
from safetensors.torch import save as tensors_to
from torch import Tensor

from paceline.checkpoint import AVERAGE, NETWORK
from paceline.errors import Broken, RunError
from paceline.model.init import initialize, published
from paceline.model.norm import norm_parameters
from paceline.model.pretrained import Adoption, adopt
from paceline.model.whole import TALLY, Whole, exact
from paceline.optim.averages import Ema
from paceline.optim.build import Optimizer, build_optimizer
from paceline.planning import Plan
from paceline.record import json_text
from paceline.settings.model import External
from paceline.training.loss_scale import LossScale
from paceline.world import World

KEPT = ("step", "reported", "tally", "last", "skipped", "loss_scale", "good_steps")
"""What state.json holds."""


@dataclass
class State:
    """All that a checkpoint holds. The place in the data and all random numbers follow from `step`."""

    network: Whole
    optimizer: Optimizer
    tally: Tensor
    """Loss and hits, summed over the images since the last report."""
    last: Tensor
    """Loss and hits of the last step."""
    bad: Tensor
    """For each step of the run, whether it was skipped because something in it was not finite."""
    scale: LossScale
    """What the loss is multiplied by before the backward pass."""
    average: Ema | None = None
    """The moving average of weights and running statistics, where the recipe asks for one."""
    reported: int = 0
    """The step of the last report."""
    step: int = 0

    def count(self, bad: Tensor) -> None:
        """Take note of a step that is done, on the device."""
        self.bad[self.step - 1].copy_(bad)

    def bad_steps(self) -> list[int]:
        """The steps so far that were skipped, by number; this waits for the device."""
        return [place + 1 for place in self.bad[: self.step].nonzero().flatten().tolist()]


def fresh(plan: Plan, world: World) -> State:
    """The state before the first step, weights not yet set: `begin` or `restore` sets them."""
    network = Whole(plan, world)
    optimizer = build_optimizer(network.module.named_parameters(), plan, norm_parameters(network.module))
    sums = torch.zeros(2, len(TALLY), dtype=exact(world.device), device=world.device)
    decay = plan.recipe.ema.decay
    average = None if decay is None else Ema(plan, network.module, decay)
    bad = torch.zeros(plan.steps, dtype=torch.uint8, device=world.device)
    scale = LossScale(plan, world.device)
    return State(network, optimizer, sums[0], sums[1], bad, scale, average)


def begin(state: State, plan: Plan) -> Adoption | None:
    """Initial weights, the same on every replica and placement; what became of weights from elsewhere."""
    recipe, module = plan.recipe, state.network.module
    if not isinstance(recipe.model, External):  # a network of another package starts as it says
        initialize(module, published(recipe.init, recipe.model), recipe.seed)
    return adopt(module, recipe.init.from_, plan.facts) if recipe.init.from_ else None


def compare_replicas(world: World, state: State) -> None:
    """End the run if the replicas' weights are no longer the same bits: what they learn apart would be nobody's run."""
    if world.replicas > 1 and not world.all_equal(state.network.fingerprint()):
        raise Broken(f"the replicas' weights differ after step {state.step}; what was saved before is whole")


def to_files(state: State) -> dict[str, bytes]:
    """The content of a checkpoint: tensors as safetensors, everything else as JSON."""
    rest = {
        "step": state.step,
        "reported": state.reported,
        "tally": state.tally.tolist(),
        "last": state.last.tolist(),
        "skipped": state.bad_steps(),
        "loss_scale": float(state.scale.value) if state.scale.dynamic else None,
        "good_steps": int(state.scale.good_steps),
    }
    files = {
        NETWORK: tensors_to(_on_host(state.network.module.state_dict())),
        "optimizer.safetensors": tensors_to(_on_host(state.optimizer.tensors())),
        "state.json": json_text(rest).encode(),
    }
    if state.average is not None and state.average.started(state.step):
        files[AVERAGE] = tensors_to(_on_host(state.average.tensors()))
    return files


def restore(state: State, files: dict[str, bytes], where: str) -> State:
    """Take up a checkpoint's content; names, shapes and types must be those of this network."""
    try:
        rest: dict[str, Any] = {key: json.loads(files["state.json"])[key] for key in KEPT}
        network = tensors_from(files[NETWORK])
        optimizer = tensors_from(files["optimizer.safetensors"])
    except (KeyError, ValueError, SafetensorError) as fault:
        raise RunError(f"{where}: not a checkpoint that this version reads: {fault}") from None
    _copy(network, state.network.module.state_dict(), where)
    _copy(optimizer, state.optimizer.tensors(), where)
    _restore_average(state, files, rest["step"], where)
    for sums in ("tally", "last"):
        numbers = [math.nan if value is None else value for value in rest[sums]]  # JSON has no NaN
        getattr(state, sums).copy_(torch.tensor(numbers, dtype=state.tally.dtype))
    for number in rest["skipped"]:
        state.bad[number - 1] = 1
    if state.scale.dynamic and rest["loss_scale"] is not None:  # one that was fixed says nothing of a dynamic one
        state.scale.value.fill_(rest["loss_scale"])
        state.scale.good_steps.fill_(rest["good_steps"])
    state.reported, state.step = rest["reported"], rest["step"]
    return state


def set_network(state: State, tensors: dict[str, Tensor], where: str) -> None:
    """Give the network other weights and running statistics; names and shapes must be those of this network."""
    _copy(tensors, state.network.module.state_dict(), where)


def _restore_average(state: State, files: dict[str, bytes], step: int, where: str) -> None:
    if state.average is None or not state.average.started(step):
        return
    if AVERAGE not in files:
        raise RunError(
            f"{where}: '{AVERAGE}' is missing, and the recipe keeps an average (average.decay): this checkpoint is of "
            "another recipe; to start from its weights, train a new run with init.from"
        )
    try:
        average = tensors_from(files[AVERAGE])
    except SafetensorError as fault:
        raise RunError(f"{where}: not a checkpoint that this version reads: {fault}") from None
    _copy(average, state.average.tensors(), where)


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in plain memory order, which is what safetensors stores."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def _copy(saved: dict[str, Tensor], into: dict[str, Tensor], where: str) -> None:
    if saved.keys() != into.keys():
        odd = min(saved.keys() ^ into.keys())
        raise RunError(f"{where}: does not fit this network; '{odd}' is in only one of the two")
    for name, tensor in into.items():
        if saved[name].shape != tensor.shape:
            shapes = f"{tuple(saved[name].shape)} instead of {tuple(tensor.shape)}"
            raise RunError(f"{where}: does not fit this network; '{name}' has the shape {shapes}")
        tensor.copy_(saved[name])
