"""Settles what a job leaves to the machine before it trains: by a probe if there is one, and by one process for all."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import PlanError
from paceline.facts import Probe
from paceline.job import Job
from paceline.launch import without_launcher
from paceline.layouts import fitting_sizes, images_that_fit
from paceline.machine import Machine
from paceline.memory import best_that_fits
from paceline.planning import Plan
from paceline.probing import decided, is_open, read_probe, store_probe, stored_probe
from paceline.progress import notify
from paceline.ran_out import least_too_large, next_smaller
from paceline.reconcile import make_plan
from paceline.settings.placement import AUTO, Placement

_PATIENCE = 600.0
"""Seconds that a probe may take."""


def settled(job: Job, trained: Path | None) -> Job:
    """The job with nothing left to the machine, and no micro-batch for which the memory did not suffice before. Where a
    launcher has started several processes, the first decides for all, by the least memory that any has.

    Only what is `trained`, in this run folder, is worth a probe that was not taken yet.
    """
    memory = job.plan.placement.memory
    if job.launch is None or job.launch.count == 1:
        return _with(job, _decide(job, memory, trained)) if trained is not None else job
    from paceline.rendezvous import decided_by_first, die_with_launcher

    def decide(memories: list[int]) -> dict[str, Any]:
        return _decide(job, min(memories), trained)

    die_with_launcher()
    return _with(job, decided_by_first(job.launch, job.plan.placement.timeout, memory, decide, _PATIENCE))


def _decide(job: Job, memory: int, trained: Path | None) -> dict[str, Any]:
    """What is chosen for this job in so much memory, as JSON; on CUDA by a probe that is taken now, if there is none
    and it matters to what is trained."""
    plan, probe, ran_out = job.plan, None, None
    asked = job.asked.model_copy(update={"memory": memory})
    if is_open(job.asked) and not plan.evaluates:
        plan = make_plan(plan.recipe, asked, job.machine, plan.network, job.launch)
        probe = stored_probe(plan, job.machine)
        if probe is None and trained and plan.placement.device == "cuda" and _may_not_fit(plan):
            probe = probe_apart(plan, job.machine)
        if probe is not None:
            plan = decided(plan, asked, probe, job.machine, job.launch)
    # A smaller micro-batch that is computed again in other places may have run out of memory, too.
    while trained and (least := least_too_large(trained, plan, memory)) is not None and plan.micro_batch >= least:
        ran_out, plan = least, _below(plan, asked, probe, least)
    return {
        "micro_batch": plan.micro_batch,
        "recompute": list(plan.placement.recompute),
        "splits": list(plan.placement.splits),
        "shares": list(plan.shares),
        "most_evaluated": plan.most_evaluated,
        "chosen_by": plan.chosen_by,
        "ran_out": ran_out,
    }


def _below(plan: Plan, asked: Placement, probe: Probe | None, least: int) -> Plan:
    """The plan with a smaller micro-batch than the least that is known to be too large."""
    if probe is not None:
        return best_that_fits(plan, asked, probe, least)
    smaller = next_smaller(replace(plan, placement=plan.placement.model_copy(update={"micro_batch": least})))
    if smaller is None:
        raise PlanError(
            f"on.micro_batch={least} ran out of memory, and no smaller one fits norm_batch and on.replicas; write "
            "on.recompute=all, or more on.replicas"
        )
    return replace(plan, placement=plan.placement.model_copy(update={"micro_batch": smaller}))


def _with(job: Job, decision: dict[str, Any]) -> Job:
    """The job with what was decided in place of what it leaves open, or of what is too large."""
    asked, ran_out, changes = job.asked, decision["ran_out"], dict[str, Any]()
    if asked.micro_batch == "auto" or (ran_out is not None and job.plan.micro_batch >= ran_out):
        changes["micro_batch"] = decision["micro_batch"]
    if asked.recompute == AUTO:
        changes["recompute"] = tuple(decision["recompute"])
    if asked.stages > 1:
        changes["splits"] = asked.splits or tuple(decision["splits"])
    if not changes:
        return job
    settings, machine, plan = asked.model_copy(update=changes), job.machine, job.plan
    plan = make_plan(plan.recipe, settings, machine, plan.network, job.launch, plan.evaluates)
    by = f"less than {ran_out}, which ran out of memory" if ran_out is not None else decision["chosen_by"]
    shares, most = tuple(decision["shares"]), decision["most_evaluated"]
    return replace(job, plan=replace(plan, chosen_by=by, shares=shares, most_evaluated=most, ran_out=ran_out))


def _may_not_fit(plan: Plan) -> bool:
    """Whether a plan could have a micro-batch that takes more than a small part of the memory, by a simple rule."""
    placement = plan.placement
    room = images_that_fit(placement.device, placement.precision, placement.memory, plan.network)
    return max(fitting_sizes(plan.recipe, plan.norm_batch, plan.replicas), default=1) > room // 4


def probe_apart(plan: Plan, machine: Machine) -> Probe | None:
    """Take a probe in a process of its own, which leaves all of the device's memory behind, and keep it; None if that
    fails, so that an estimate must do."""
    notify(f"measuring what small steps take of {machine.accelerator or plan.placement.device}, once for this machine")
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        task, result = Path(scratch, "task"), Path(scratch, "probe.json")
        task.write_bytes(pickle.dumps((plan, machine)))
        command = [sys.executable, "-P", "-m", "paceline.training.probe", str(task), str(result)]
        try:
            process = subprocess.run(
                command, env=without_launcher(), stderr=subprocess.PIPE, text=True, timeout=_PATIENCE, check=False
            )
            said = process.stderr.strip().rpartition("\n")[2] or f"status {process.returncode}"
        except (OSError, subprocess.TimeoutExpired) as fault:
            said = str(fault)
        probe = read_probe(result)
    if probe is None:
        notify(f"this could not be measured ({said}), so an estimate must do")
    else:
        store_probe(plan, machine, probe)
    return probe
