"""What people should know of a job before it runs: what its images are, and what was hardly meant."""

from __future__ import annotations

import numpy as np

from paceline import schedule
from paceline.data.index import locate
from paceline.data.index.formats import counted, first_few
from paceline.data.index.scan import open_index
from paceline.data.index.table import Flag, Index
from paceline.data.inspect.describe import class_sizes
from paceline.errors import PlanError, SpecError
from paceline.job import Job
from paceline.model.packages import check_packages
from paceline.model.sources import contradictions
from paceline.planning import Plan
from paceline.reconcile import for_files
from paceline.settings.configurations import stands_for
from paceline.settings.data import Files, Made
from paceline.settings.model import EfficientNet, External, MobileNetV3
from paceline.sink import check_sinks
from paceline.visible import plural

_UNEQUAL = 3
"""So many times the images of the smallest class make the largest one worth a word."""
_FEW_VALIDATED = 50
_NAMED = 4
_SAMPLED_STEPS = 1_000


def index_of(job: Job) -> Index | None:
    """The index of a job's images, where they are in files that were looked at."""
    data = job.plan.data
    return open_index(data, job.data_folder) if isinstance(data, Files) and job.data_folder is not None else None


def describe_found(index: Index) -> str:
    """Classes, counts and sizes of the images in one line."""
    sizes = class_sizes(index, index.training)
    largest = np.argsort(-sizes, kind="stable")[:_NAMED].tolist()
    names = ", ".join(f"{index.classes[number]} {int(sizes[number]):,}" for number in largest)
    more = f", {len(sizes) - _NAMED:,} more" if len(sizes) > _NAMED else ""
    rows = np.concatenate([index.training.rows, index.validation.rows])
    rows = rows[(rows["flags"] & Flag.UNREADABLE) == 0]
    width, height = (int(np.median(rows[key])) for key in ("width", "height"))
    return (
        f"{len(index.training):,} images to train on and {len(index.validation):,} to validate on, of "
        f"{len(sizes):,} classes ({names}{more}), median {width} x {height} pixels"
    )


def notes_of(job: Job, index: Index | None) -> list[str]:
    """Notes on the numbers of a job's plan, its images, and where it would run."""
    recipe = job.plan.recipe
    notes = [
        *stands_for(job.name),
        *_missing_packages(job.plan),
        *contradictions(recipe),
        *_length_notes(job.plan),
        *_rate_notes(job.plan),
    ]
    if index is not None:
        notes += [*_validation_notes(job.plan), *_class_notes(job.plan, index), *index.notes]
    if isinstance(job.plan.data, Made) and (unused := for_files(recipe.augment)):
        made = job.plan.data.name
        notes.append(f"{made} images are made at their final size, so this has no effect: {', '.join(unused)}")
    variable = locate.set_variable()
    if variable is not None and job.data_folder is None and not locate.needs_files(job.plan.data):
        notes.append(f"{variable} is set and passed over, since {job.name} draws its own images")
    if job.plan.placement.fp16_accumulation:
        notes.append("on.fp16_accumulation is for matrix products only: cuDNN's convolutions sum in float32")
    notes += _state_notes(job)
    if job.plan.placement.device == "cuda" and not job.machine.accelerators:
        notes.append("on.device is cuda, and no CUDA device is visible on this machine")
    return notes


def precision_notes(job: Job) -> list[str]:
    """Whether bf16 would be faster on this CPU; EfficientNet and MobileNet-v3 were measured to be no faster."""
    recipe, placement, instructions = job.plan.recipe, job.plan.placement, job.machine.bf16
    unlikely = isinstance(recipe.model, EfficientNet | MobileNetV3 | External)
    if placement.device != "cpu" or job.asked.precision != "auto" or not instructions or unlikely:
        return []
    how = "is usually faster" if instructions == "avx512_bf16" else "may be faster"  # as measured, or by the flag alone
    return [f"this CPU multiplies in bfloat16 ({instructions}), so on.precision=bf16 {how}"]


def _state_notes(job: Job) -> list[str]:
    """What becomes of a wish for less of the optimizer's state on a device."""
    asked, placement, notes = job.asked, job.plan.placement, list[str]()
    if asked.shard != placement.shard:
        notes.append("on.shard has no effect with one replica, which keeps all of the optimizer's state")
    if asked.offload != placement.offload:
        notes.append(f"on.offload has no effect on {placement.device}; it spares the memory of a CUDA device")
    elif placement.offload != "none":
        notes.append("on.offload moves the optimizer's state in each step, so on.graphs is off")
    return notes


def _missing_packages(plan: Plan) -> list[str]:
    """What `train` would refuse here, though another machine may have it."""
    try:
        check_packages(plan.recipe)
        check_sinks(plan.placement)
    except (PlanError, SpecError) as fault:
        return [str(fault)]
    return []


def _length_notes(plan: Plan) -> list[str]:
    notes = []
    if plan.global_batch > plan.facts.images:
        notes.append(
            f"one step of {plan.global_batch:,} images is more than all {plan.facts.images:,} training images; "
            f"a smaller global_batch makes more steps"
        )
    asked, actual = plan.epochs, plan.epoch(plan.steps)
    if f"{actual:.3g}" != f"{asked:.3g}":  # as the end of the run prints it
        notes.append(f"epochs is {asked:g}, and whole steps make {actual:.3g} ({plural(plan.steps, 'step')})")
    return notes


def _rate_notes(plan: Plan) -> list[str]:
    """Whether the learning rate comes near its peak."""
    stride = max(1, plan.steps // _SAMPLED_STEPS)
    steps = {*range(0, plan.steps, stride), plan.steps - 1, min(plan.warm_steps, plan.steps - 1)}
    highest = max(schedule.lr(plan, step) for step in steps)
    if plan.steps == 1 or highest >= 0.9 * plan.peak_lr:
        return []
    warmup = plan.recipe.schedule.warmup
    longer = (
        f"warm-up ({warmup}) is not shorter than the run" if plan.warm_steps >= plan.steps else f"warm-up is {warmup}"
    )
    return [
        f"the learning rate never gets to its peak of {plan.peak_lr:.3g}, only to {highest:.3g}: {longer}; write "
        f"schedule.warmup=5%"
    ]


def _validation_notes(plan: Plan) -> list[str]:
    count, data = plan.facts.validation_images, plan.data
    if count >= _FEW_VALIDATED or plan.validations is None:
        return []
    asked = getattr(data, "validation", None)
    why = ""
    if asked is not None and count < 0.5 * asked * (count + plan.facts.images):
        why = f" for data.validation={asked:.0%}, since a class of one image is only trained on"
    only = f"there {'is' if count == 1 else 'are'} only {plural(count, 'validation image')}"
    return [f"{only}{why}: each is {1 / count:.1%} of top-1"]


def _class_notes(plan: Plan, index: Index) -> list[str]:
    """Classes that nothing can be learned of, and classes that are unequal."""
    rows, sizes = index.training.rows, class_sizes(index, index.training)
    readable = rows[(rows["flags"] & (Flag.UNREADABLE | Flag.OTHER_LABEL)) == 0]
    seen = np.bincount(readable["label"], minlength=len(sizes))
    empty = [index.classes[number] for number in np.flatnonzero(seen == 0).tolist()]
    notes = []
    if empty:
        notes.append(
            f"{counted(len(empty), 'class has', 'classes have')} no readable training image: {first_few(empty)}"
        )
    least, most = int(np.where(sizes > 0, sizes, sizes.max()).argmin()), int(sizes.argmax())
    if sizes[most] >= _UNEQUAL * sizes[least]:
        validated = class_sizes(index, index.validation)
        weighted = plan.recipe.loss.class_weights != "none"
        notes.append(
            f"classes are unequal: '{index.classes[most]}' has {int(sizes[most]):,} training images, "
            f"'{index.classes[least]}' {int(sizes[least]):,}; always answering the largest would be "
            f"{validated.max() / max(1, validated.sum()):.2%} top-1"
            f"{'' if weighted else '; loss.class_weights=balanced lets all classes count the same'}"
        )
    return notes
