"""The training loop. Read this file first: every other file explains a word used here."""

from __future__ import annotations

from contextlib import closing

from paceline.training.bad_steps import stop_on_bad_steps
from paceline.training.details import details_folder, write_details
from paceline.training.evaluate import evaluate, validation_is_owed
from paceline.training.reports import Clock, stop_row
from paceline.training.save import finish_saving, save, saved_if_aborted, tell_saved, tolerating_full_disk
from paceline.training.session import Session
from paceline.training.showing import show
from paceline.training.state import compare_replicas
from paceline.training.step import take_step


def train(session: Session) -> bool:
    """Train from where the state stands to the end of the run; False if asked to stop before that."""
    plan, run, state, requests = session.plan, session.run, session.state, session.requests
    reports, validations, saves = plan.reports, plan.validations, plan.saves
    clock = Clock(plan, run.rows(), state.step)

    if state.step == 0:
        save(session)
        finish_saving(session)  # a run that has trained always has a checkpoint, so one without any was robbed of them
    elif validation_is_owed(session):
        validate(session, clock)
        save(session)
    with closing(session.loader.training(state.step)) as steps:
        while not (session.is_done() or requests.stop):
            with saved_if_aborted(session):
                with clock.waiting(), requests.waiting():
                    batches = next(steps)
                take_step(session, batches)
            run.progress("training", state.step, plan.steps)
            tell_saved(session)

            if session.is_done() or requests.report or (reports and reports.due(state.step)):
                # Apart from validating and saving, reading the sums is the only wait for the device.
                compare_replicas(session.world, state)
                row = run.write("report", **clock.report(state, session.gradient_norm.value))
                stop_on_bad_steps(session, row)
            show(session, clock, batches)
            if validations and (session.is_done() or validations.due(state.step)):
                validate(session, clock)
            planned = (saves and saves.due(state.step)) or state.step in plan.averaged_steps
            if session.is_done() or planned or requests.save or requests.stop:
                with clock.pause():
                    save(session)
    finish_saving(session)
    return session.is_done()


def validate(session: Session, clock: Clock) -> None:
    """Evaluate the state as it is, write down what came out, and let it decide whether the run ends here."""
    run, stopping, stop, step = session.run, session.state.stopping, session.plan.recipe.stop, session.state.step
    run.write("validation-start", step=step, epoch=session.plan.epoch(step))
    with clock.pause(), saved_if_aborted(session):
        evaluation = evaluate(session)
    found = clock.validation(step, evaluation.row)
    with clock.pause(), tolerating_full_disk(run):
        write_details(session, details_folder(run, "validation", step), evaluation)
    row = run.write("validation", **found)  # a sink may show the tables, too
    stopping.judge(stop, step, session.world.broadcast_object(row[stop.metric]))
    if stopping.reason:
        run.write("stop", **stop_row(session.state, session.plan))
