"""Where probes are kept, what they try, and plans whose open questions they answer; without torch."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from paceline import __version__
from paceline.agreement import code_digest
from paceline.data.index.file import cache_folder
from paceline.facts import NetworkFacts, Probe
from paceline.files import read_whole, write_whole
from paceline.launch import Launch
from paceline.layouts import fitting_sizes, images_that_fit
from paceline.machine import Machine, processor_name
from paceline.memory import best_that_fits, measured_shares
from paceline.planning import Plan
from paceline.reconcile import make_plan
from paceline.settings.augment import Augment, Crop
from paceline.settings.data import Files, Made, likeness
from paceline.settings.duration import Duration
from paceline.settings.placement import AUTO, Placement
from paceline.settings.recipe import Recipe
from paceline.settings.stop import Stop

IN_A_STEP = 4
"""Micro-batches of a step that is probed."""
_SIZES = 3
MOST_ON_CUDA, MOST_ON_CPU = 256, 32
"""No more images than these are probed at a time."""
_ACTIVATIONS = 1e8
"""On a CPU a micro-batch has about so many activations at the most, so that a probe takes seconds."""
_STEPS = 10_000
_PROBED = TypeAdapter(Probe)
_WORK = (
    "device", "precision", "weights", "stochastic_rounding", "fp16_accumulation", "compile", "kernels", "graphs",
    "deterministic", "offload", "cpu_threads",
)  # fmt: skip
"""The placement keys that memory and time of a micro-batch depend on."""


def planned(
    recipe: Recipe, asked: Placement, machine: Machine, network: NetworkFacts, launch: Launch | None, evaluates: bool
) -> Plan:
    """The plan of a recipe; what it leaves to the machine is decided by a probe, where one was taken. Several processes
    decide together, later."""
    plan = make_plan(recipe, asked, machine, network, launch, evaluates)
    if evaluates or not is_open(asked) or (launch is not None and launch.count > 1):
        return plan
    probe = stored_probe(plan, machine)
    return plan if probe is None else decided(plan, asked, probe, machine, launch)


def is_open(asked: Placement) -> bool:
    """Whether a placement leaves something to the machine that a probe can decide."""
    return asked.micro_batch == "auto" or asked.recompute == AUTO or asked.stages > 1


def decided(plan: Plan, asked: Placement, probe: Probe, machine: Machine, launch: Launch | None) -> Plan:
    """The plan in which a probe has decided what is left to the machine."""
    best = best_that_fits(plan, asked, probe)
    changes = {key: getattr(best.placement, key) for key in ("micro_batch", "recompute", "splits")}
    plan = make_plan(plan.recipe, asked.model_copy(update=changes), machine, plan.network, launch)
    shares = measured_shares(plan, probe) if plan.stages > 1 else ()
    by = f"a probe of {probe.device}" if asked.micro_batch == "auto" else plan.chosen_by
    return replace(plan, chosen_by=by, shares=shares, most_evaluated=best.most_evaluated)


def stored_probe(plan: Plan, machine: Machine) -> Probe | None:
    """What was probed on this machine of the plan's network, as this placement computes it; None if nothing was."""
    return read_probe(_file(plan, machine))


def read_probe(path: Path) -> Probe | None:
    """The probe in a file; None where there is no intact one."""
    with suppress(OSError, ValidationError):
        return _PROBED.validate_json(read_whole(path))
    return None


def write_probe(path: Path, probe: Probe) -> None:
    """Write a probe to a file."""
    write_whole(path, _PROBED.dump_json(probe, indent=1))


def store_probe(plan: Plan, machine: Machine, probe: Probe) -> Path | None:
    """Keep a probe for later plans; gives its file, or None where the cache cannot be written."""
    path = _file(plan, machine)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_probe(path, probe)
        return path
    return None


def _file(plan: Plan, machine: Machine) -> Path:
    digest = hashlib.sha256(json.dumps(_facts(plan, machine), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "probes" / f"{plan.recipe.model.name}-{plan.placement.device}-{digest[:16]}.json"


def _facts(plan: Plan, machine: Machine) -> dict[str, Any]:
    """What a probe depends on: machine, network, images, kernels and versions."""
    recipe, facts = plan.recipe, plan.facts
    on_cuda = plan.placement.device == "cuda"
    device = [machine.accelerator, machine.accelerator_memory] if on_cuda else [processor_name(), machine.cores]
    network = {
        key: json.loads(getattr(recipe, key).model_dump_json(exclude={"lr", "adamw_lr"}))
        for key in ("model", "norm", "optimizer", "clip", "ema", "augment", "mix", "loss")
    }
    placement = json.loads(plan.placement.model_dump_json(include=set(_WORK)))
    return {
        "machine": [machine.host, *device],
        "images": [facts.side, facts.evaluation_side, facts.channels, facts.classes],
        "norm groups": _unit(plan),
        "frozen": plan.frozen,
        "versions": [__version__, code_digest(), metadata.version("torch")],
        **network,
        **placement,
    }


def probe_sizes(plan: Plan) -> list[int]:
    """The micro-batches that a probe of this plan tries, smallest first."""
    unit = _unit(plan)
    largest = max(fitting_sizes(plan.recipe, plan.norm_batch, plan.replicas), default=1)
    count = max(_SIZES, min(_most(plan), largest) // unit)
    return [unit * number for number in sorted({max(1, count // 4), max(2, count // 2), count})]


def _most(plan: Plan) -> int:
    """How many images are probed at a time at the most."""
    if plan.placement.device != "cuda":
        return min(MOST_ON_CPU, int(_ACTIVATIONS / max(1, plan.network.activations)))
    room = images_that_fit("cuda", plan.placement.precision, plan.placement.memory, plan.network)
    return min(MOST_ON_CUDA, room // 4)


def _unit(plan: Plan) -> int:
    """What the sizes of a probe are multiples of: blocks of images that are mixed, and small norm groups."""
    mix, norm = plan.recipe.mix, plan.norm_batch
    unit = mix.block if mix.active else 1
    if norm is not None and plan.network.last_side < 2:
        unit = math.lcm(unit, 2)  # a norm of one number for each channel has no variance
    whole = unit if norm is None else math.lcm(unit, norm)
    return whole if plan.placement.device == "cuda" and _SIZES * whole <= _most(plan) else unit


def probe_plan(plan: Plan, machine: Machine, size: int, **placed: Any) -> Plan:
    """The plan by which a micro-batch of this size is probed, on synthetic images of the plan's sides."""
    recipe = at_largest_side(plan.recipe)
    data = Made(**{**likeness(plan.data), "name": "synthetic", "images": 1_000_000, "validation_images": 4 * size})
    norm = plan.norm_batch if plan.norm_batch is not None and size % plan.norm_batch == 0 else size
    changes = {
        "data": data,
        "global_batch": IN_A_STEP * size,
        "norm_batch": norm,
        "epochs": Duration(Fraction(_STEPS), "steps"),
        "augment": made_augment(recipe),
        "init": recipe.init.model_copy(update={"from_": None}),
        "average": recipe.average.model_copy(update={"last": None}),
        "evaluate": recipe.evaluate.model_copy(update={"limit": None}),
        "stop": Stop(),
        "drop_last": False,
    }
    layout = {"replicas": 1, "stages": 1, "splits": (), "micro_batch": size, "recompute": (), "shard": "none"}
    placement = plan.placement.model_copy(update={**layout, "bind": False, "sinks": (), "time_limit": None, **placed})
    return make_plan(recipe.model_copy(update=changes), placement, machine, plan.network)


def at_largest_side(recipe: Recipe) -> Recipe:
    """The recipe with its largest image side from the first step on."""
    assert recipe.data is not None
    sides, whole = recipe.augment.side, recipe.data.facts.side
    if not sides:
        return recipe
    begins = any(not Duration.parse(when).amount for when in sides)  # before the first, images have their own side
    largest = max(sides.values()) if begins else whole
    side = {} if largest == whole else {"0%": largest}
    return recipe.model_copy(update={"augment": recipe.augment.model_copy(update={"side": side})})


def made_augment(recipe: Recipe) -> Augment:
    """The augmentation of a recipe's images without what made-up images have no need of."""
    if not isinstance(recipe.data, Files):
        return recipe.augment
    return recipe.augment.model_copy(update={"crop": Crop(), "python": None})
