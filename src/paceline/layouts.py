"""How a step can be cut into micro-batches and shared between replicas, and which way takes the least time."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.errors import PlanError
from paceline.facts import NetworkFacts
from paceline.machine import Machine
from paceline.planning import Plan
from paceline.settings.recipe import Recipe


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


def most_replicas_that_fit(
    global_batch: int, norm_batch: int | None, most: int, stages: int, size_for: Callable[[int], int]
) -> int:
    """The number of replicas, of those that there can be, that are done first with a step, and of equals the largest:
    norm groups that span replicas may leave some of them out."""

    def work(replicas: int) -> float:
        size = size_for(replicas)
        good = fits(global_batch, norm_batch, replicas, size)
        return _work(global_batch, replicas, size, stages) if good else math.inf

    # With a norm group over q replicas, no number is better than the largest that q divides.
    spans = divisors(norm_batch) if norm_batch else []
    return min(sorted({most, *(most - most % q for q in spans if q <= most)}, reverse=True), key=work)


def memory_of(device: str, processes: int, machine: Machine) -> int:
    """Bytes that each of so many processes may take: all of its accelerator, or its share of a quarter of main memory.

    A plan for another machine's accelerators, with none here to look at, assumes 16 GiB each.
    """
    return machine.accelerator_memory or 16 << 30 if device == "cuda" else machine.memory // 4 // processes


def images_that_fit(device: str, precision: str, memory: int, network: NetworkFacts) -> int:
    """A simple memory rule: activations and as much again to work with, beside weights, gradients and momentum."""
    width = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}[precision]
    free = (0.8 if device == "cuda" else 1.0) * memory - 4 * max(4, width) * network.parameters
    return max(1, int(free / (2 * width * max(1, network.activations))))


def best_micro_batch(recipe: Recipe, norm_batch: int | None, replicas: int, room: int, stages: int) -> int:
    """The size with the least work for the busiest replica, each forward pass counting as eight images more; in a
    pipeline the last stage waits for the first micro-batch, and the first stage for the last one's gradients."""
    fitting = fitting_sizes(recipe, norm_batch, replicas)
    small = [m for m in fitting if m <= room] or fitting[:1]
    return min(small, key=lambda m: (_work(recipe.global_batch, replicas, m, stages), -m))


def fitting_sizes(recipe: Recipe, norm_batch: int | None, replicas: int) -> list[int]:
    """The micro-batches that divide a step and cut no norm group, nor a block of images that are mixed if any can."""
    sizes = [m for m in divisors(recipe.global_batch) if fits(recipe.global_batch, norm_batch, replicas, m)]
    return [m for m in sizes if mixes(recipe, m)] or sizes


def _work(global_batch: int, replicas: int, micro_batch: int, stages: int) -> int:
    """How long a step takes the busiest replica."""
    return (math.ceil(global_batch / micro_batch / replicas) + stages - 1) * (micro_batch + 8)


def check_layout(plan: Plan) -> None:
    """Refuse micro-batches that cut a step or a norm group, and name the nearest that fit."""
    G, n, R, m = plan.global_batch, plan.norm_batch, plan.replicas, plan.micro_batch  # noqa: N806 - the design's letters
    if fits(G, n, R, m):
        return
    fitting = [d for d in divisors(G) if fits(G, n, R, d)]
    close = min(fitting, key=lambda d: (abs(d - m), -d))
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


def check_mixing(plan: Plan) -> None:
    """Refuse micro-batches that cut a block of images that are mixed with each other."""
    G, n, R, m, mix = plan.global_batch, plan.norm_batch, plan.replicas, plan.micro_batch, plan.recipe.mix  # noqa: N806
    if mix.switch_probability is not None and (mix.cutmix is None or not mix.mixup):
        raise PlanError("mix.switch_probability chooses between mixup and cutmix; write both, or leave it out")
    if mixes(plan.recipe, m):
        return
    fitting = [d for d in divisors(G) if fits(G, n, R, d) and mixes(plan.recipe, d)]
    blocks = [d for d in divisors(m) if d > 1]
    if fitting:
        remedy = f"the nearest that fits is on.micro_batch={min(fitting, key=lambda d: (abs(d - m), d))}"
    elif blocks:
        remedy = f"no micro-batch of this recipe fits; write mix.block={min(blocks, key=lambda d: abs(d - mix.block))}"
    else:
        remedy = "no micro-batch of this recipe fits"
    raise PlanError(f"mix.block {mix.block} does not divide on.micro_batch {m}, which parts neighbors; {remedy}")


def divisors(number: int) -> list[int]:
    """What divides a number, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
