"""Layouts in lockstep: every step starts from the first layout's state, so that rounding cannot grow over steps.

The first layout leads: it keeps the images, labels and masks of each step, what the step adds up (gradients, norm sums,
loss) and the state after it. Another layout follows: it compares each of these with its own, and takes over the first
one's. How much a step multiplies rounding by itself is measured: the first layout takes each step's passes a second
time, with one bit of noise in its weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import checkpoint, keyed
from paceline.data.load.batches import MicroBatch
from paceline.files import write_whole
from paceline.model.metrics import TRAIN_SUMS
from paceline.model.whole import checksum
from paceline.training.device_step import device_sums, device_update
from paceline.training.differences import NEGLIGIBLE, magnitude, relative_difference, state_scales
from paceline.training.restore import restore_newest
from paceline.training.session import Session
from paceline.training.state import State
from paceline.training.step import begin_step, end_step

ONE_BIT = 2.0**-52
"""The noise in float64, as a fraction of each weight."""
NOISE_DRAWS = 5
"""How often noise is drawn where its effect is a single number, which may be small by chance."""
NOISE_PERIOD = 8191
"""After so many numbers of a tensor the signs of its noise repeat."""
ONLY_ROUNDING = 1e-3
"""A tensor that the noise changes by more than this fraction is nothing but rounding, and is measured beside the
largest of its kind: the gradient of a bias before a norm is one."""
STEP_PARTS = ("inputs", "gradients", "norm_sums", "loss", "update")
"""What is compared: images with their labels and masks; what the passes add up; the state after equal gradients."""

Named = dict[str, Tensor]
"""Tensors of a step, as 'PART/NAME'."""


class Measure(NamedTuple):
    """What a tensor's difference is divided by."""

    scale: float
    """A size, so that the difference is a fraction."""
    amplification: float = 1.0
    """How many times larger than the noise the noise's effect is, at least 1."""

    @property
    def allowed(self) -> float:
        """How many times more than without amplification the tensor may differ.

        Layouts differ by a few times what the noise does, far less than the limit. So from an amplification of 500 on
        the limit stands still, and a difference of 1e-9 is found, until it would come near the noise itself.
        """
        return min(self.amplification, max(500.0, self.amplification / 45))


class Difference(NamedTuple):
    """The largest difference of a part of the step, after what its tensor is allowed has been divided out."""

    judged: float = 0.0
    relative: float = 0.0
    where: str = ""


Differences = dict[str, Difference]


def lead(session: Session, folder: Path, steps: int) -> None:
    """Take steps as the first layout, on one replica, and keep in the folder what others compare with."""
    assert session.world.processes == 1
    restore_newest(session)
    _keep_state(session.state, folder)
    with closing(session.loader.training(session.state.step)) as batches:
        while session.state.step < steps:
            _lead_step(session, next(batches), folder)


def follow(session: Session, leader: Path, steps: int) -> Differences:
    """Take steps from the newest checkpoint or the leader's beginning, each from the leader's state, and compare."""
    worst = dict.fromkeys(STEP_PARTS, Difference())
    if checkpoint.saved_steps(session.run.checkpoints):
        restore_newest(session)
        _compare_state(session, leader, worst)
    else:
        _take_over(session.state, leader)
    with closing(session.loader.training(session.state.step)) as batches:
        while session.state.step < steps:
            _follow_step(session, next(batches), leader, worst)
    return worst


def merge(processes: list[Differences]) -> Differences:
    """The worst of all processes."""
    return {part: max(one[part] for one in processes) for part in STEP_PARTS}


class Lead(NamedTuple):
    """What the leader leaves."""

    folder: Path
    losses: list[float]
    tensors: Named
    """The state at the end."""
    amplification: float
    """How many times a step multiplies one bit of noise, at the most."""
    amplified: str
    """Where that is."""


def read_lead(folder: Path, steps: int, global_batch: int) -> Lead:
    """Read what a leader has kept in a folder."""
    losses, found = [], []
    for step in range(steps):
        path = _step_file(folder, step)
        with safe_open(path, "pt") as kept:
            losses.append(float(kept.get_tensor("loss/sum")) / global_batch)
        measures = _measures(path)
        found += [(measure.amplification, _where(name, step)) for name, measure in measures.items()]
    return Lead(folder, losses, load_file(_state_file(folder, steps)), *max(found))


def first_loss_amplification(session: Session) -> float:
    """How many times the first loss multiplies one bit of noise in the weights, at least 1."""
    restore_newest(session)
    with closing(session.loader.training(session.state.step)) as batches:
        prepared, scale = begin_step(session, next(batches))
    loss, bit = _loss(session, prepared, scale), _one_bit(session)
    found = [1.0]
    for draw in range(NOISE_DRAWS):
        with _one_bit_of_noise(session, draw):
            found.append(relative_difference(loss, _loss(session, prepared, scale)) / bit)
    return max(amplification for amplification in found if math.isfinite(amplification))


def _loss(session: Session, batches: list[MicroBatch], scale: Tensor) -> Tensor:
    """The loss of a step that is not taken, in memory of its own."""
    loss = device_sums(session, batches, scale)[1][TRAIN_SUMS.index("loss")].clone()
    _forget_sums(session)
    return loss


def _forget_sums(session: Session) -> None:
    """Drop what the passes of a step have added up."""
    session.state.network.statistics.pop()
    for parameter in session.state.network.parameters:
        parameter.grad = None


def _lead_step(session: Session, batches: list[MicroBatch], folder: Path) -> None:
    path = _step_file(folder, session.state.step)
    prepared, scale = begin_step(session, batches)
    inputs = _step_inputs(session, prepared)
    with _one_bit_of_noise(session):
        noisy = _step_sums(session, *device_sums(session, prepared, scale))
        _forget_sums(session)
    norm_sums, sums = device_sums(session, prepared, scale)
    parts = _step_sums(session, norm_sums, sums)
    measures = {name: Measure(max(1.0, magnitude(tensor))) for name, tensor in inputs.items()}
    _keep(path, inputs | parts | {"sums": sums}, measures | _measure(parts, noisy, session.plan.norm_total))
    del inputs, parts, noisy
    end_step(session, device_update(session, norm_sums, sums, scale))
    _keep_state(session.state, folder)


def _follow_step(session: Session, batches: list[MicroBatch], leader: Path, worst: Differences) -> None:
    path, step = _step_file(leader, session.state.step), session.state.step
    measures = _measures(path)
    prepared, scale = begin_step(session, batches)
    with safe_open(path, "pt") as kept:
        _compare_inputs(session, _step_inputs(session, prepared), kept, measures, worst)
        norm_sums, sums = device_sums(session, prepared, scale)
        for parameter in session.state.network.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        parts = _step_sums(session, norm_sums, sums, copy=False)
        _compare_replicas(session, parts, "gradients/any parameter, between replicas", worst)
        for name, tensor in parts.items():
            theirs = kept.get_tensor(name)
            if session.world.replica == 0:
                _note(worst, name, step, relative_difference(theirs, tensor, measures[name].scale), measures[name])
            tensor.copy_(theirs)  # the update is compared on equal gradients and norm sums
        sums.copy_(kept.get_tensor("sums"))
    end_step(session, device_update(session, norm_sums, sums, scale))
    _compare_state(session, leader, worst)


def _step_inputs(session: Session, batches: list[MicroBatch]) -> Named:
    """What this replica's images are like in this step: pixels, labels, masks, and which images they are.

    Only the first stage of a pipeline has pixels and labels.
    """
    network, pieces = session.state.network, list[Named]()
    for batch in batches:
        assert batch.draws is not None
        assert batch.positions is not None
        dropout, depth = network.masks(batch.positions)
        piece = {"positions": batch.positions}
        if session.world.stage == 0:
            images, labels, weights = network.augment(batch.images, batch.labels, batch.draws)
            piece |= {"images": images, "labels": labels} | ({} if weights is None else {"label_weights": weights})
        piece |= {f"dropout.{index}": mask for index, mask in enumerate(dropout)}
        pieces.append(piece | {f"depth.{index}": mask for index, mask in enumerate(depth)})
    return {f"inputs/{name}": torch.cat([piece[name] for piece in pieces]) for name in (pieces[0] if pieces else ())}


def _step_sums(session: Session, norm_sums: Tensor, sums: Tensor, copy: bool = True) -> Named:
    """What the passes of a step have added up; the row of norm sums is used again, so it may be copied."""
    module, statistics = session.state.network.module, session.state.network.statistics
    parts = {
        f"gradients/{name}": torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    names = {norm: name for name, norm in module.named_modules()}
    row = norm_sums.clone() if copy else norm_sums
    for norm in statistics.norms:
        (means,), (variances,) = norm.columns(row[None])
        parts |= {f"norm_sums/{names[norm]}.mean": means, f"norm_sums/{names[norm]}.variance": variances}
    return parts | {"loss/sum": sums[TRAIN_SUMS.index("loss")]}


def _one_bit(session: Session) -> float:
    """The last bit of a weight, as a fraction of it."""
    return torch.finfo(session.state.network.parameters[0].dtype).eps


@contextmanager
def _one_bit_of_noise(session: Session, draw: int = 0) -> Iterator[None]:
    """Every weight times 1 plus or minus one bit; afterwards the weights are the same bits as before."""
    named = {name: p.detach() for name, p in session.state.network.module.named_parameters()}
    before = {name: weights.clone() for name, weights in named.items()}
    bit = _one_bit(session)
    for name, weights in named.items():
        words = keyed.words(keyed.key(session.plan.recipe.seed, "noise", name), torch.arange(NOISE_PERIOD))[0]
        factors = 1 + bit * (2.0 * (words >> draw & 1) - 1).to(weights)
        count = weights.numel()
        weights.mul_(factors.repeat(-(-count // NOISE_PERIOD))[:count].view(weights.shape))
    try:
        yield
    finally:
        for name, weights in named.items():
            weights.copy_(before[name])


def _measure(parts: Named, noisy: Named, groups: int) -> dict[str, Measure]:
    """Sizes of what a step has added up, and how many times more than the noise they change by it."""
    sizes, largest = {name: magnitude(tensor) for name, tensor in parts.items()}, dict[str, float]()
    for name in parts:
        if name.endswith(".mean") and name.startswith("norm_sums/"):  # as exact as the numbers that it is the mean of
            sizes[name] = max(sizes[name], math.sqrt(groups * sizes[name.removesuffix("mean") + "variance"]))
        largest[_kind(name)] = max(largest.get(_kind(name), 0.0), sizes[name])
    measures = {}
    for name, tensor in parts.items():
        scale = sizes[name]
        change = relative_difference(tensor, noisy[name], scale)
        if change > ONLY_ROUNDING or scale <= NEGLIGIBLE * largest[_kind(name)]:
            scale = largest[_kind(name)]
            change = relative_difference(tensor, noisy[name], scale)
        # What is not finite is never the same, and no amplification of it is needed.
        measures[name] = Measure(scale, max(1.0, change / ONE_BIT) if math.isfinite(change) else 1.0)
    return measures


def _kind(name: str) -> str:
    part, _, rest = name.partition("/")
    return f"{part}.{rest.rpartition('.')[2]}" if part == "norm_sums" else part


def _compare_inputs(
    session: Session, inputs: Named, kept: Any, measures: dict[str, Measure], worst: Differences
) -> None:
    """Compare this replica's images with the leader's; between them, the replicas must have every image once."""
    positions, step, world = kept.get_tensor("inputs/positions"), session.state.step, session.world
    counts = torch.zeros(world.stages, len(positions), dtype=torch.float64)
    if inputs:
        rows = torch.searchsorted(positions, inputs["inputs/positions"]).clamp_(max=len(positions) - 1)
        counts[world.stage].index_add_(0, rows, torch.ones(len(rows), dtype=torch.float64))
        for name, tensor in inputs.items():
            theirs = kept.get_tensor(name)[rows]
            alike = theirs.shape == tensor.shape
            found = relative_difference(theirs, tensor, measures[name].scale) if alike else math.inf
            _note(worst, name, step, found, measures[name])
    if not bool((world.all_reduce(counts) == 1).all()):
        _note(worst, "inputs/number of images", step, math.inf, Measure(1.0))


def _compare_replicas(session: Session, tensors: Named, name: str, worst: Differences) -> None:
    """See that all replicas have the same bits, so that the first can be compared with the leader for all of them."""
    if not session.world.all_equal(checksum(list(tensors.values()))):
        _note(worst, name, session.state.step, math.inf, Measure(1.0))


def _compare_state(session: Session, leader: Path, worst: Differences) -> None:
    """Compare the state with the leader's after as many steps, and take over the leader's."""
    state = session.state
    with state.gathered():
        path, tensors = _state_file(leader, state.step), _flat_tensors(state)
        _compare_replicas(session, tensors, "update/state, between replicas", worst)
        measures = _measures(path)
        if session.world.replica == 0:
            with safe_open(path, "pt") as kept:
                for name in tensors.keys() | _own(state, kept.keys()):
                    found, measure = math.inf, measures.get(name, Measure(1.0))
                    if name in tensors and name in measures:
                        found = relative_difference(kept.get_tensor(name), tensors[name], measure.scale)
                    _note(worst, f"update/{name}", state.step - 1, found, measure)
    _take_over(state, leader)


def _own(state: State, names: Iterable[str]) -> set[str]:
    """Those of a whole state's flat names that are not another stage's."""
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        group, _, rest = name.partition(".")
        groups.setdefault(group, {})[rest] = name
    return {name for members in groups.values() for name in state.network.own(members).values()}


def _take_over(state: State, leader: Path) -> None:
    """Let the tensors of a state be the leader's after as many steps."""
    with safe_open(_state_file(leader, state.step), "pt") as kept, torch.no_grad():
        for name, tensor in _flat_tensors(state).items():
            if name in kept.keys():  # noqa: SIM118 - no dictionary
                tensor.copy_(kept.get_tensor(name))


def _note(worst: Differences, name: str, step: int, relative: float, measure: Measure) -> None:
    """Remember a difference if it is the largest of its part."""
    part = name.partition("/")[0]
    worst[part] = max(worst[part], Difference(relative / measure.allowed, relative, _where(name, step)))


def _where(name: str, step: int) -> str:
    part, _, rest = name.partition("/")
    what = {"gradients": f"gradient of {rest}", "loss": "loss"}.get(part, rest)
    return f"{what}, step {step + 1}" if step >= 0 else f"{what}, before step 1"


def _keep_state(state: State, folder: Path) -> None:
    tensors = _flat_tensors(state)
    measures = {name: Measure(scale) for name, scale in state_scales(tensors).items()}
    _keep(_state_file(folder, state.step), tensors, measures)


def _flat_tensors(state: State) -> Named:
    groups = state.tensors().items()
    return {f"{group}.{name}": tensor.detach() for group, members in groups for name, tensor in members.items()}


def _keep(path: Path, tensors: Named, measures: dict[str, Measure]) -> None:
    write_whole(path.with_suffix(".json"), json.dumps(measures))
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, path)


def _measures(path: Path) -> dict[str, Measure]:
    return {name: Measure(*values) for name, values in json.loads(path.with_suffix(".json").read_text()).items()}


def _step_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.safetensors"


def _state_file(folder: Path, step: int) -> Path:
    return folder / f"state-{step}.safetensors"
