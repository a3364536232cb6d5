"""Reconciles a recipe with a placement, or refuses and names what would fit."""

from __future__ import annotations

import importlib.util
import sys

from paceline.errors import PlanError
from paceline.facts import DataFacts, NetworkFacts
from paceline.launch import Launch
from paceline.layouts import (
    best_micro_batch,
    check_layout,
    check_mixing,
    divisors,
    images_that_fit,
    memory_of,
    most_replicas_that_fit,
)
from paceline.lengths import check_lengths
from paceline.machine import Machine
from paceline.planning import Plan, norm_batch_of
from paceline.settings.augment import Augment, Crop
from paceline.settings.data import Center, Data, Files, Made
from paceline.settings.model import External, Residual
from paceline.settings.placement import AUTO, Placement, ResolvedPlacement
from paceline.settings.recipe import GroupNorm, Recipe
from paceline.stages import check_stages


def make_plan(
    recipe: Recipe,
    placement: Placement,
    machine: Machine,
    network: NetworkFacts,
    launch: Launch | None = None,
    evaluates: bool = False,
) -> Plan:
    """Reconcile the two; the recipe names its data, and `launch` says how many processes a launcher has started.

    A plan that only `evaluates` takes any micro-batch: nothing is normalized or mixed over it.
    """
    data = recipe.data
    assert data is not None
    _check_files(recipe, data, placement.data_on_device)
    _check_recipe(recipe, data, network)
    resolved = _resolve(recipe, placement, data, machine, network, launch, evaluates)
    by = "an estimate" if placement.micro_batch == "auto" else "the placement"
    plan = Plan(recipe, resolved, network, evaluates, by)
    check_lengths(plan)
    _check_blocks(plan)
    check_stages(plan)
    if not evaluates:
        check_layout(plan)
        check_mixing(plan)
    if recipe.on_bad_step == "stop" and plan.placement.loss_scale == "dynamic":
        raise PlanError(
            "a dynamic loss scale finds its size by bad steps; write on_bad_step=skip, or a fixed on.loss_scale"
        )
    return plan


def _check_recipe(recipe: Recipe, data: Data, network: NetworkFacts) -> None:
    facts = data.facts
    if recipe.schedule.start and not recipe.schedule.warmup.amount:
        raise PlanError(
            "schedule.start is the learning rate that warm-up climbs from, and there is no warm-up; write "
            'schedule.warmup="5 epochs", or leave schedule.start out'
        )
    if facts.side < network.smallest_side:
        less = "; without its auxiliary head (model.auxiliary=0) smaller ones do" if network.auxiliary else ""
        raise PlanError(
            f"{recipe.model.name} needs images of at least {network.smallest_side} pixels a side, "
            f"and these have {facts.side}{less}"
        )
    for key, values in (("mean", data.mean), ("std", data.std)):
        if len(values) != facts.channels:
            raise PlanError(
                f"data.{key} has {len(values)} values, and the images have {facts.channels} channels; write as many"
            )
    if recipe.drop_last and facts.images < recipe.global_batch:
        raise PlanError(
            f"drop_last: true leaves nothing of {facts.images} images at global_batch {recipe.global_batch}; "
            f"write drop_last: false, or a global_batch of at most {facts.images}"
        )
    K = facts.classes  # noqa: N806 - the field's letter
    if recipe.loss.smooth_over == "others" and recipe.loss.label_smoothing > (K - 1) / K:
        raise PlanError(f"loss.label_smoothing over the others may be at most {(K - 1) / K:.3g} with {K} classes")
    if isinstance(recipe.norm, GroupNorm) and recipe.norm.proxy and isinstance(recipe.model, Residual | External):
        raise PlanError(
            "norm.proxy needs activations that follow their norms directly, as in VGG, GoogLeNet, Inception, "
            f"EfficientNet and MobileNet networks; {recipe.model.name} is none of them: write norm.proxy=false"
        )
    _check_pictures(recipe, facts, network)
    n = norm_batch_of(recipe, network)
    if n is not None and n * network.last_side**2 < 2:
        raise PlanError("norm_batch 1 leaves the last norms one number for each channel; write a larger norm_batch")
    if n is not None and recipe.global_batch % n:
        close = min(divisors(recipe.global_batch), key=lambda d: (abs(d - n), d))
        raise PlanError(
            f"norm_batch {n} does not divide global_batch {recipe.global_batch}; the nearest that does is {close}"
        )


def for_files(augment: Augment) -> list[str]:
    """The settings of an augmentation that are about images in files, where they are written."""
    written = {"crop": augment.crop != Crop(), "python": augment.python is not None}
    return [f"augment.{key}" for key, is_written in written.items() if is_written]


def _check_files(recipe: Recipe, data: Data, data_on_device: bool | str) -> None:
    """Settings that are for data in files, or for pictures of one size only."""
    augment = recipe.augment
    if isinstance(data, Made):
        return  # as what is done to files would leave them
    if not isinstance(data, Files):
        for key in for_files(augment):
            raise PlanError(f"{key} is for data in files, and {data.name} has pictures of one size; leave it out")
        return
    if augment.pad:
        raise PlanError("augment.pad is for pictures of one size, and these come in files; write augment.crop instead")
    if data_on_device is True:
        raise PlanError("on.data_on_device=true is for pictures of one size, and these come in files; leave it out")
    side = data.evaluation_side or data.side
    if isinstance(data.evaluation, Center) and data.evaluation.shorter(side) < side:
        raise PlanError(
            f"data.evaluation.short {data.evaluation.short} is less than the {side} pixels that are cut out of it; "
            f"write data.evaluation.short={side} or more"
        )


def _check_pictures(recipe: Recipe, facts: DataFacts, network: NetworkFacts) -> None:
    augment = recipe.augment
    for key, written in (("augment.policy", augment.policy is not None), ("augment.color", augment.color.active)):
        if written and facts.channels != 3:
            raise PlanError(f"{key} is for images of three channels, and these have {facts.channels}; leave it out")
    if augment.side and isinstance(recipe.model, External):
        raise PlanError("augment.side is for networks of Paceline's; leave it out, or choose one of them")
    for when, side in augment.side.items():
        if not network.smallest_side <= side <= facts.side:
            raise PlanError(
                f"augment.side from {when} on is {side}; {recipe.model.name} and these images allow "
                f"{network.smallest_side} to {facts.side}"
            )
    least = min([facts.side, *augment.side.values()])
    if augment.pad > facts.side - (augment.fill == "mirror"):
        raise PlanError(
            f"augment.pad {augment.pad} is more than images of {facts.side} pixels a side have to show; write "
            f"augment.pad={facts.side // 8}, or at most {facts.side - 1}"
        )
    if augment.cutout > least:
        raise PlanError(f"augment.cutout {augment.cutout} is larger than images of {least} pixels a side; write less")
    # One norm group of one image, made smaller still, may end in one number for each channel.
    if norm_batch_of(recipe, network) == 1 and network.last_side * least // facts.side < 2 and least < facts.side:
        raise PlanError(f"norm_batch 1 leaves images of {least} pixels a side too little; write a larger norm_batch")


def _check_blocks(plan: Plan) -> None:
    """Names of blocks that do not exist are refused, and so is a network of which nothing trains."""
    plan.network.chosen("on.recompute", plan.placement.recompute)
    plan.network.chosen("lr_factors", plan.recipe.lr_factors)
    if plan.network.blocks and len(plan.frozen) == len(plan.network.blocks):
        raise PlanError("freeze names every block, so that nothing trains; leave out the head, at least")


def _resolve(
    recipe: Recipe,
    asked: Placement,
    data: Data,
    machine: Machine,
    network: NetworkFacts,
    launch: Launch | None,
    evaluates: bool,
) -> ResolvedPlacement:
    """Decide every `auto` of a placement for this machine."""
    device = asked.device if asked.device != "auto" else "cuda" if machine.accelerators else "cpu"
    precision = asked.precision if asked.precision != "auto" else "bf16" if device == "cuda" else "fp32"
    replicas = _replicas(asked, device, machine, launch)
    processes = replicas * asked.stages
    _check_device(recipe, asked, device, precision)
    n, stages = norm_batch_of(recipe, network), asked.stages

    def room_for(replicas: int) -> int:
        """How many images fit the memory of each of so many replicas, as far as a simple rule can say."""
        return images_that_fit(device, precision, _memory(asked, device, replicas * stages, machine), network)

    def size_for(replicas: int) -> int:
        """The micro-batch of so many replicas."""
        if isinstance(asked.micro_batch, int):
            return asked.micro_batch
        return best_micro_batch(recipe, n, replicas, room_for(replicas), stages)

    if asked.replicas == "auto" and not evaluates:
        replicas = most_replicas_that_fit(recipe.global_batch, n, replicas, stages, size_for)
    micro_batch, processes = size_for(replicas), replicas * stages
    local_processes = launch.local_count if launch else processes
    cores = machine.cores if launch and machine.bound else max(1, machine.cores // local_processes)
    decided = {
        "device": device,
        "precision": precision,
        "weights": _weights(asked.weights, precision, device),
        "communication": _communication(asked.communication, precision),
        "kernels": _kernels(asked, device, precision),
        "graphs": _graphs(asked, device, processes),
        "replicas": replicas,
        "shard": asked.shard if replicas > 1 else "none",
        "offload": asked.offload if device == "cuda" else "none",
        "micro_batch": micro_batch,
        "memory": _memory(asked, device, processes, machine),
        "recompute": _recompute(asked, micro_batch <= room_for(replicas)),
        "data_on_device": _is_small(recipe, data) if asked.data_on_device == "auto" else asked.data_on_device,
        "decoder": "fast" if asked.decoder == "auto" else asked.decoder,
        "loss_scale": _loss_scale(asked.loss_scale, precision),
        "loader_workers": _threads("loader_workers", asked.loader_workers, min(16, cores), machine),
        "bind": _bind(asked.bind, local_processes, machine),
        "cpu_threads": _threads("cpu_threads", asked.cpu_threads, cores, machine),
    }
    return ResolvedPlacement.model_construct(asked.model_fields_set, **{**dict(asked), **decided})


def _check_device(recipe: Recipe, asked: Placement, device: str, precision: str) -> None:
    """Refuse what this device does not do."""
    if asked.decoder == "gpu" and (device != "cuda" or recipe.augment.python is not None):
        why = "own functions work on the host" if recipe.augment.python else f"on.device is {device}"
        raise PlanError(f"on.decoder=gpu decodes on a CUDA device, and {why}; write on.decoder=fast")
    if asked.fp16_accumulation and (device, precision) != ("cuda", "fp16"):
        raise PlanError(
            f"on.fp16_accumulation sums products of float16 numbers on a CUDA device, and this is {precision} on "
            f"{device}; write on.precision=fp16 on.device=cuda, or leave it out"
        )


def _memory(asked: Placement, device: str, processes: int, machine: Machine) -> int:
    """What a process may take of its device's memory."""
    if not isinstance(asked.memory, int):
        return memory_of(device, processes, machine)
    there = machine.accelerator_memory if device == "cuda" else machine.memory
    if 0 < there < asked.memory:
        raise PlanError(
            f"on.memory is {asked.memory:,} bytes, and there are {there:,}; write at most that, or leave it out"
        )
    return asked.memory


def _recompute(asked: Placement, fits: bool) -> tuple[str, ...]:
    """What is computed again where nothing was measured: all or nothing, if that is left to the machine."""
    if asked.recompute != AUTO:
        return asked.recompute
    return () if fits else ("all",)


def _threads(key: str, asked: int | str, default: int, machine: Machine) -> int:
    threads = asked if isinstance(asked, int) else default
    most = _most_on_cores(machine)
    if threads > most:
        raise PlanError(
            f"on.{key}={threads}, and this machine has {machine.cores} cores; write at most on.{key}={most}"
        )
    return threads


def _most_on_cores(machine: Machine) -> int:
    """More threads or processes than these are a slip of the pen."""
    return max(256, 16 * machine.cores)


def _bind(asked: bool | str, local_replicas: int, machine: Machine) -> bool:
    linux = sys.platform == "linux"
    if asked is True and not linux:
        raise PlanError("on.bind=true binds processes to cores, which needs Linux; leave it out")
    several = local_replicas > 1 and not machine.bound  # who has bound this process knows the others
    return linux and several and (asked is True or (asked == "auto" and machine.numa_nodes > 1))


def _replicas(asked: Placement, device: str, machine: Machine, launch: Launch | None) -> int:
    accelerators, stages = machine.accelerators if device == "cuda" else 1, asked.stages
    there = launch.count if launch else accelerators
    replicas = asked.replicas if isinstance(asked.replicas, int) else max(1, there // stages)
    processes = replicas * stages
    said = f"on.replicas={replicas}" + (f" of on.stages={stages}" if stages > 1 else "")
    if launch is not None and processes != launch.count:
        equal = "make them equal" if stages == 1 else f"start {processes}, or write other numbers"
        raise PlanError(
            f"the launcher started {launch.count} processes, and on.replicas is {replicas}"
            f"{f' of {stages} stages each' if stages > 1 else ''}; {equal}"
        )
    most = _most_on_cores(machine) if device != "cuda" else 65_536  # accelerators may be elsewhere
    if launch is None and processes > most:
        raise PlanError(
            f"{said}, and this machine has {machine.cores} cores; write at most on.replicas={max(1, most // stages)}, "
            "or let a launcher such as torchrun start them on several machines"
        )
    if device == "cuda" and launch is None and 0 < machine.accelerators < processes:
        raise PlanError(f"{said}, and only {machine.accelerators} accelerators are visible")
    return replicas


_WEIGHTS = {
    "fp64": ("fp64",),
    "fp32": ("fp32",),
    "tf32": ("fp32",),
    "bf16": ("fp32", "bf16"),
    "fp16": ("fp32", "fp16"),
}
"""The types that weights can have under each precision, the default first."""


def _weights(asked: str, precision: str, device: str) -> str:
    if (precision == "tf32" and device != "cuda") or (precision == "fp64" and device == "mps"):
        raise PlanError(f"on.precision={precision} does not exist on {device}; write on.precision=fp32")
    if asked not in ("auto", *_WEIGHTS[precision]):
        raise PlanError(
            f"on.weights={asked} does not go with on.precision={precision}, which takes "
            f"{' or '.join(_WEIGHTS[precision])}; write on.precision={asked}, or leave on.weights out"
        )
    return _WEIGHTS[precision][0] if asked == "auto" else asked


def _communication(asked: str, precision: str) -> str:
    default = "fp64" if precision == "fp64" else "fp32"
    if asked not in ("auto", default, "bf16"):
        raise PlanError(
            f"on.communication={asked} does not go with on.precision={precision}, whose gradients are {default}; "
            f"write on.communication={default} or bf16, or leave it out"
        )
    return default if asked == "auto" else asked


def _kernels(asked: Placement, device: str, precision: str) -> str:
    if asked.kernels == "fused" and asked.compile:
        raise PlanError("on.kernels=fused and on.compile=true both fuse the network; leave one of them out")
    if asked.kernels != "auto":
        return asked.kernels
    there = importlib.util.find_spec("triton") is not None
    return "fused" if device == "cuda" and precision != "fp64" and there and not asked.compile else "plain"


def _graphs(asked: Placement, device: str, processes: int) -> bool:
    possible = device == "cuda" and processes == 1 and not asked.compile and asked.offload == "none"
    if asked.graphs is True and not possible:
        why = (
            "on.compile is true"
            if asked.compile
            else f"{processes} {'replicas' if asked.stages == 1 else 'processes'} exchange gradients in it"
        )
        why = "on.offload moves the optimizer's state in it" if asked.offload != "none" else why
        why = f"on.device is {device}" if device != "cuda" else why
        raise PlanError(f"on.graphs=true records a step of one replica on a CUDA device, and {why}; leave it out")
    return possible and asked.graphs is not False


def _is_small(recipe: Recipe, data: Data) -> bool:
    """Whether all images, with the border that crops reach into, take at most 1 GiB of a device."""
    facts, side = data.facts, data.facts.side + 2 * recipe.augment.pad
    images = facts.images + facts.validation_images
    return not isinstance(data, Files) and images * side * side * facts.channels <= 1 << 30


def _loss_scale(asked: float | dict[str, float] | str, precision: str) -> float | dict[str, float] | str:
    if asked != "auto":
        return asked
    return "dynamic" if precision == "fp16" else 1.0
