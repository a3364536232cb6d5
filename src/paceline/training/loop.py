"""The training loop. Read this file first: every other file explains a word used here."""

from __future__ import annotations

from contextlib import closing

import torch

from paceline import schedule
from paceline.data.load.batches import Loader, MicroBatch
from paceline.planning import Plan
from paceline.record import Run
from paceline.sink import Sink
from paceline.training.evaluate import judge, owes_judgment
from paceline.training.reports import Clock
from paceline.training.requests import Requests
from paceline.training.save import heed_bad_steps, save, saved_if_cut_off
from paceline.training.state import State, compare_replicas
from paceline.world import World


def train(plan: Plan, world: World, run: Run, state: State, loader: Loader, sink: Sink, requests: Requests) -> bool:
    """Train from where `state` stands to the end of the plan; False when asked to stop before."""
    reports = plan.rhythm(plan.recipe.report)
    judgments = plan.rhythm(plan.recipe.evaluate.every, plan.recipe.evaluate.offset)
    saves = None if plan.placement.save.unit == "seconds" else plan.rhythm(plan.placement.save)
    clock = Clock(plan, run.rows(), state.step)

    def validate() -> None:
        with clock.pause(), saved_if_cut_off(plan, run, state):
            row = judge(plan, world, state, loader, sink, requests)
        sink.validation(run.write("validation", **clock.validation(state.step, row)))

    if state.step == 0:
        save(plan, run, state)
    elif owes_judgment(plan, world, run, state.step):
        validate()
    with closing(loader.training(state.step)) as shares:
        while state.step < plan.steps and not requests.stop:
            with saved_if_cut_off(plan, run, state):
                with clock.waiting():
                    share = next(shares)
                update(plan, world, state, share)
                requests.exchange(state.step)
            sink.step(state.step)

            last = state.step == plan.steps
            if last or reports.due(state.step):
                # Apart from validating and saving, reading the sums is the only wait for the device.
                compare_replicas(world, state)
                row = run.write("report", **clock.report(state))
                sink.report(row)
                heed_bad_steps(plan, run, state, row)
            if last or judgments.due(state.step):
                validate()
            planned = (saves and saves.due(state.step)) or state.step in plan.averaged_steps
            if last or planned or requests.save or requests.stop:
                with clock.pause():
                    save(plan, run, state)
    return state.step == plan.steps


def update(plan: Plan, world: World, state: State, share: list[MicroBatch]) -> None:
    """One optimizer step over this replica's share of the global batch."""
    network, scale = state.network, state.scale.now(state.step)
    tally = network.learn(share, scale)  # forward and backward, leaving summed gradients
    sums, tally = network.all_reduce(world, tally)
    bad = network.bad(sums)  # decided on the device: a step that is not finite changes nothing
    lr = state.tally.new_full((), schedule.lr(plan, state.step))  # tensors, so that a CUDA graph can hold the step
    divisor = scale.to(lr.dtype) * plan.global_batch
    state.optimizer.step(lr, divisor, bad, torch.full((), state.step, device=world.device))
    state.scale.update(bad)
    network.statistics.settle(sums, plan.norm_total, bad)
    state.last.copy_(tally)
    state.tally += state.last
    state.step += 1
    state.count(bad)
    if state.average:
        state.average.update(state.step, bad)
