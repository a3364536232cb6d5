"""Reconciles a recipe with a placement, or refuses and names what would fit."""

from __future__ import annotations

import math

from paceline.errors import PlanError
from paceline.launch import Launch
from paceline.machine import Machine
from paceline.planning import NetworkFacts, Plan, norm_batch_of
from paceline.settings.augment import Crop
from paceline.settings.data import Center, Data, Facts, Files
from paceline.settings.model import Outside, Residual
from paceline.settings.placement import Placement
from paceline.settings.recipe import GroupNorm, Recipe


def make_plan(
    recipe: Recipe,
    placement: Placement,
    data: Data,
    machine: Machine,
    network: NetworkFacts,
    launch: Launch | None = None,
) -> Plan:
    """Reconcile the two; `launch` says how many processes a launcher has started already."""
    facts = data.facts
    _check_files(recipe, data, placement.resident)
    _check_recipe(recipe, data, network)
    placement = _decide(recipe, placement, facts, machine, network, launch)
    plan = Plan(recipe, placement, data, facts, network)
    _check_blocks(plan)
    _check_layout(plan)
    _check_mixing(plan)
    if recipe.on_bad_step == "stop" and plan.placement.loss_scale == "dynamic":
        raise PlanError(
            "a dynamic loss scale finds its size by bad steps; write on_bad_step=skip, or a fixed on.loss_scale"
        )
    _check_average(plan)
    return plan


def mixes(recipe: Recipe, micro_batch: int) -> bool:
    """Whether micro-batches hold whole blocks of images that are mixed with each other."""
    return not recipe.mix.active or micro_batch % recipe.mix.block == 0


def fits(global_batch: int, norm_batch: int | None, replicas: int, micro_batch: int) -> bool:
    """Whether micro-batches divide the step and norm groups fall inside them or across whole neighbors."""
    if global_batch % micro_batch:
        return False
    if norm_batch is None or micro_batch % norm_batch == 0:
        return True
    return norm_batch % micro_batch == 0 and replicas % (norm_batch // micro_batch) == 0


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
    for key, given in (("mean", data.mean), ("std", data.std)):
        if len(given) != facts.channels:
            raise PlanError(
                f"data.{key} has {len(given)} values, and the images have {facts.channels} channels; write as many"
            )
    if recipe.tail == "drop" and facts.images < recipe.global_batch:
        raise PlanError(
            f"tail: drop leaves nothing of {facts.images} images at global_batch {recipe.global_batch}; "
            f"write tail: flow, or a global_batch of at most {facts.images}"
        )
    K = facts.classes  # noqa: N806 - the field's letter
    if recipe.loss.smooth_over == "others" and recipe.loss.label_smoothing > (K - 1) / K:
        raise PlanError(f"loss.label_smoothing over the others may be at most {(K - 1) / K:.3g} with {K} classes")
    if isinstance(recipe.norm, GroupNorm) and recipe.norm.proxy and isinstance(recipe.model, Residual | Outside):
        raise PlanError(
            "norm.proxy needs activations that follow their norms directly, as in VGG, GoogLeNet, Inception, "
            f"EfficientNet and MobileNet networks; {recipe.model.name} is none of them: write norm.proxy=false"
        )
    _check_pictures(recipe, facts, network)
    n = norm_batch_of(recipe, network)
    if n is not None and n * network.last_side**2 < 2:
        raise PlanError("norm_batch 1 leaves the last norms one number for each channel; write a larger norm_batch")
    if n is not None and recipe.global_batch % n:
        close = min(_divisors(recipe.global_batch), key=lambda d: (abs(d - n), d))
        raise PlanError(
            f"norm_batch {n} does not divide global_batch {recipe.global_batch}; the nearest that does is {close}"
        )


def _check_files(recipe: Recipe, data: Data, resident: bool | str) -> None:
    """Settings that are for data in files, or for pictures of one size only."""
    augment = recipe.augment
    if not isinstance(data, Files):
        for key, given in (("augment.crop", augment.crop != Crop()), ("augment.python", augment.python is not None)):
            if given:
                raise PlanError(f"{key} is for data in files, and {data.name} has pictures of one size; leave it out")
        return
    if augment.pad:
        raise PlanError("augment.pad is for pictures of one size, and these come in files; write augment.crop instead")
    if resident is True:
        raise PlanError("on.resident=true is for pictures of one size, and these come in files; leave it out")
    side = data.evaluation_side or data.side
    if isinstance(data.evaluation, Center) and data.evaluation.shorter(side) < side:
        raise PlanError(
            f"data.evaluation.short {data.evaluation.short} is less than the {side} pixels that are cut out of it; "
            f"write data.evaluation.short={side} or more"
        )


def _check_pictures(recipe: Recipe, facts: Facts, network: NetworkFacts) -> None:
    augment = recipe.augment
    for key, given in (("augment.policy", augment.policy is not None), ("augment.color", augment.color.active)):
        if given and facts.channels != 3:
            raise PlanError(f"{key} is for images of three channels, and these have {facts.channels}; leave it out")
    if augment.side and isinstance(recipe.model, Outside):
        raise PlanError("augment.side is for networks of Paceline's; leave it out, or choose one of them")
    for when, side in augment.side.items():
        if not network.smallest_side <= side <= facts.side:
            raise PlanError(
                f"augment.side from {when} on is {side}; {recipe.model.name} and these images allow "
                f"{network.smallest_side} to {facts.side}"
            )
    least = min([facts.side, *augment.side.values()])
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


def _decide(
    recipe: Recipe, asked: Placement, facts: Facts, machine: Machine, network: NetworkFacts, launch: Launch | None
) -> Placement:
    """Every 'auto' of a placement, decided for this machine."""
    device = asked.device if asked.device != "auto" else "cuda" if machine.accelerators else "cpu"
    precision = asked.precision if asked.precision != "auto" else "16.32" if device == "cuda" else "32.32"
    norm_batch = norm_batch_of(recipe, network)
    most = machine.accelerators if device == "cuda" else 1
    replicas = asked.replicas if asked.replicas != "auto" else launch.count if launch else max(1, most)
    if launch is not None and replicas != launch.count:
        raise PlanError(
            f"the launcher started {launch.count} processes, and on.replicas is {replicas}; make them equal"
        )
    if (precision == "tf32.32" and device != "cuda") or (precision == "64.64" and device == "mps"):
        raise PlanError(f"on.precision={precision} does not exist on {device}; write on.precision=32.32")
    if device == "cuda" and launch is None and 0 < machine.accelerators < replicas:
        raise PlanError(f"on.replicas={replicas}, and only {machine.accelerators} accelerators are visible")
    if asked.decoder == "gpu" and (device != "cuda" or recipe.augment.python is not None):
        why = "own functions work on the host" if recipe.augment.python else f"on.device is {device}"
        raise PlanError(f"on.decoder=gpu decodes on a CUDA device, and {why}; write on.decoder=fast")
    micro_batch = asked.micro_batch
    if micro_batch == "auto":
        room = _images_that_fit(device, precision, replicas, machine, network)
        micro_batch = _best_micro_batch(recipe, norm_batch, replicas, room)
    side = facts.side + 2 * recipe.augment.pad
    bytes_of_data = (facts.images + facts.validation_images) * side * side * facts.channels
    small = bytes_of_data <= 1 << 30 and not isinstance(recipe.data, Files)
    resident = asked.resident if asked.resident != "auto" else small
    neighbors = launch.local_count if launch else replicas
    share_of_cores = machine.cores if launch and machine.bound else max(1, machine.cores // neighbors)
    return asked.model_copy(
        update={
            "device": device,
            "precision": precision,
            "replicas": replicas,
            "micro_batch": micro_batch,
            "resident": resident,
            "decoder": "fast" if asked.decoder == "auto" else asked.decoder,
            "loss_scale": _loss_scale(asked.loss_scale, precision),
            "loader_threads": min(16, share_of_cores) if asked.loader_threads == "auto" else asked.loader_threads,
            "cpu_threads": share_of_cores if asked.cpu_threads == "auto" else asked.cpu_threads,
        }
    )


def _loss_scale(asked: float | dict[str, float] | str, precision: str) -> float | dict[str, float] | str:
    if asked != "auto":
        return asked
    return "dynamic" if precision.startswith("fp16") else 1.0


def _images_that_fit(device: str, precision: str, replicas: int, machine: Machine, network: NetworkFacts) -> int:
    """A simple memory rule: activations and as much again to work with, beside weights, gradients and momentum."""
    width = {"64": 8, "32": 4, "tf32": 4}.get(precision.partition(".")[0], 2)
    # A plan for another machine's accelerators, with none here to look at, assumes 16 GiB each.
    accelerator = machine.accelerator_memory or 16 << 30
    memory = 0.8 * accelerator if device == "cuda" else 0.25 * machine.memory / replicas
    free = memory - 4 * max(4, width) * network.parameters
    return max(1, int(free / (2 * width * max(1, network.activations))))


def _best_micro_batch(recipe: Recipe, norm_batch: int | None, replicas: int, room: int) -> int:
    """The size with the least work for the busiest replica, each forward pass counting as eight images more."""
    global_batch = recipe.global_batch
    able = [m for m in _divisors(global_batch) if fits(global_batch, norm_batch, replicas, m)]
    able = [m for m in able if mixes(recipe, m)] or able
    small = [m for m in able if m <= room] or able[:1]
    return min(small, key=lambda m: (math.ceil(global_batch / m / replicas) * (m + 8), -m))


def _check_layout(plan: Plan) -> None:
    G, n, R, m = plan.global_batch, plan.norm_batch, plan.replicas, plan.micro_batch  # noqa: N806 - the design's letters
    if fits(G, n, R, m):
        return
    able = [d for d in _divisors(G) if fits(G, n, R, d)]
    close = min(able, key=lambda d: (abs(d - m), -d))
    if G % m:
        raise PlanError(
            f"on.micro_batch {m} does not divide global_batch {G}; the nearest that fits is on.micro_batch={close}"
        )
    assert n is not None
    if n % m:
        raise PlanError(
            f"norm_batch {n} and on.micro_batch {m} do not divide each other, so a norm group would be cut; "
            f"the nearest that fits is on.micro_batch={close}"
        )
    raise PlanError(
        f"norm_batch {n} spans {n // m} replicas of on.micro_batch {m}, which do not divide on.replicas {R}; "
        f"write on.replicas={n // m} or on.micro_batch={close}"
    )


def _check_mixing(plan: Plan) -> None:
    G, n, R, m, mix = plan.global_batch, plan.norm_batch, plan.replicas, plan.micro_batch, plan.recipe.mix  # noqa: N806
    if mix.switch is not None and (mix.cutmix is None or not mix.mixup):
        raise PlanError("mix.switch chooses between mixup and cutmix; write both, or leave it out")
    if mixes(plan.recipe, m):
        return
    able = [d for d in _divisors(G) if fits(G, n, R, d) and mixes(plan.recipe, d)]
    blocks = [d for d in _divisors(m) if d > 1]
    if able:
        remedy = f"the nearest that fits is on.micro_batch={min(able, key=lambda d: (abs(d - m), d))}"
    elif blocks:
        remedy = f"no micro-batch of this recipe fits; write mix.block={min(blocks, key=lambda d: abs(d - mix.block))}"
    else:
        remedy = "no micro-batch of this recipe fits"
    raise PlanError(f"mix.block {mix.block} does not divide on.micro_batch {m}, which parts neighbors; {remedy}")


def _check_average(plan: Plan) -> None:
    last, found = plan.recipe.average.last, len(plan.averaged_steps)
    if last is not None and found < last:
        raise PlanError(
            f"average.last={last}, and of this run's steps {found} are {plan.recipe.average.apart} apart; "
            f"write average.last={found} or a shorter average.apart"
        )


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
