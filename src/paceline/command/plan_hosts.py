"""paceline plan --hosts: predicts a recipe's steps on many hosts from what one device was measured to do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.command.bench_result import differences, open_result, same_work
from paceline.command.tables import show_facts, show_line, show_rows
from paceline.errors import PlanError, SpecError
from paceline.job import Job, ask, make_job, read_placement
from paceline.launch import Launch
from paceline.layouts import best_micro_batch
from paceline.model import tables
from paceline.model.norm_tables import NORMS
from paceline.planning import Plan, norm_batch_of
from paceline.reconcile import make_plan
from paceline.record import json_text
from paceline.scaling import Cluster, Link, StepTime, Traffic, step_time, traffic
from paceline.settings.configurations import placement_of
from paceline.settings.placement import Placement
from paceline.visible import long_time, one_line, plural

_MOST_DEVICES = 512
"""The curve goes this far at least."""
_LARGEST = 1_000_000
_WORK = ("model.", "norm.", "data.", "freeze", "on.")
"""What a measured step must have in common with the one predicted; its batch and its schedule may be others."""
_BITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}


class Hosts(NamedTuple):
    """The flags of `plan` about many hosts, as they were typed."""

    hosts: int | None
    devices: int | None
    link: str | None
    inside: str | None
    measured: str | None


@dataclass(frozen=True)
class Measured:
    """What one device was measured to do."""

    images_per_second: float
    micro_batch: int | None
    """Images in one of its forward passes, where that is known."""
    words: list[str]
    """The settings of the placement that it was measured with."""
    told: str
    same: dict[str, Any]
    steady: bool = True


@dataclass(frozen=True)
class Prediction:
    """The plan for a number of devices, and the time of its steps."""

    devices: int
    plan: Plan
    time: StepTime

    @property
    def images_per_second(self) -> float:
        return self.plan.global_batch / self.time.total


@dataclass(frozen=True)
class Predictor:
    """Predicts a job on any number of devices."""

    job: Job
    asked: Placement
    cluster: Cluster
    sent: Traffic
    images_per_second: float
    micro_batch: int
    """The one that was measured; no larger one is predicted unless it was asked for."""

    def on(self, devices: int) -> Prediction:
        """The plan and the time of a step on so many devices; refused where the plan is."""
        recipe, network = self.job.plan.recipe, self.job.plan.network
        micro_batch = self.asked.micro_batch
        if micro_batch == "auto":
            micro_batch = best_micro_batch(recipe, norm_batch_of(recipe, network), devices, self.micro_batch, 1)
        placement = self.asked.model_copy(update={"replicas": "auto", "micro_batch": micro_batch})
        launch = Launch(0, devices, 0, min(devices, self.cluster.devices), "", 0, store_is_there=False)
        plan = make_plan(recipe, placement, self.job.machine, network, launch)
        return Prediction(devices, plan, step_time(plan, 1 / self.images_per_second, self.sent, self.cluster))


def run(
    recipe: str | None, words: list[str], data: Path | None, page: str | None, replicas: int | None, device: str | None,
    asked: Hosts, as_json: bool, other_form: bool,
) -> None:  # fmt: skip
    """Print what a step takes on these hosts, and how that changes with their number."""
    if other_form:
        raise SpecError(
            "--yaml, --schema and --probe are of the plan itself; for a prediction write --json, or nothing"
        )
    cluster, count = _cluster(asked, replicas)
    measured = _measured(asked.measured)
    what = ask(recipe, words, data)
    words = [*measured.words, *what.words]
    # What fits one device is asked of the plan: its layout is written for many.
    base = [*words, "on.replicas=1", "on.micro_batch=auto", "on.graphs=auto"]
    job = make_job(what.name, base, what.data, page, None, device, look=False, choices=what.choices)
    placement, _ = read_placement(placement_of(what.name) if page is None else page, words, None, device)
    if job.plan.placement.stages > 1:
        raise PlanError("a prediction knows no pipelines; leave on.stages and on.splits out")
    _check_same(measured, job.plan, asked.measured)
    micro_batch = measured.micro_batch
    if micro_batch is None:
        micro_batch = job.plan.micro_batch if placement.micro_batch == "auto" else placement.micro_batch
    told = f"{measured.told}, in micro-batches of {micro_batch:,}"
    sent = _traffic(job.plan)
    predictor = Predictor(job, placement, cluster, sent, measured.images_per_second, micro_batch)
    chosen = predictor.on(count)
    rows = list(_curve(predictor, count))
    facts, notes = _facts(predictor, chosen, told), _notes(predictor, asked, rows, measured.steady)
    if as_json:
        print(json_text({**facts, "bytes": vars(sent), "curve": rows, "notes": notes}, indent=1))
        return
    hosts = f"{plural(-(-count // cluster.devices), 'host')} of {plural(cluster.devices, 'device')}"
    show_facts(_in_words(chosen, facts, sent), as_json, title=f"{what.name} on {hosts}, predicted")
    print()
    show_rows([_line(row) for row in rows], as_json)
    for number, note in enumerate(notes):
        show_line(("" if number else "\n") + one_line(f"note: {note}"))


def _cluster(asked: Hosts, replicas: int | None) -> tuple[Cluster, int]:
    """The hosts that are asked for, and how many devices they have."""
    if asked.hosts is None or asked.devices is None or asked.link is None or asked.measured is None:
        raise SpecError(
            "a prediction needs --hosts N, --devices-per-host N, --link SPEED between hosts, such as 400Gb, and "
            "--measured, a result of paceline bench train on one device or its images/s"
        )
    count = asked.hosts * asked.devices
    if count > _LARGEST:
        raise SpecError(f"--hosts {asked.hosts} of {asked.devices} devices are {count:,}; write at most {_LARGEST:,}")
    if replicas is not None:
        raise SpecError(f"--replicas {replicas}: there is one on each device of --hosts; leave it out")
    between = read_link("--link", asked.link)
    inside = between if asked.inside is None else read_link("--inside", asked.inside)
    return Cluster(asked.devices, inside, between), count


def read_link(option: str, word: str) -> Link:
    """A link by its speed, and its latency if there is one: 400Gb, 50GB/s, 400Gb,5us."""
    number = r"(\d+\.?\d*|\.\d+)"
    match = re.fullmatch(rf"\s*{number}\s*([KMGT]?)(b|B)(?:/s|ps)?(?:\s*,\s*{number}\s*(ns|us|ms))?\s*", word)
    if match is None or len(word) > 100 or not float(match[1]):
        raise SpecError(
            f"{option} {word}: expected a speed, in bits (b) or bytes (B) per second, and a latency if it is known, "
            "such as 400Gb or 50GB,5us"
        )
    latency = float(match[4]) * _SECONDS[match[5]] if match[4] else 0.0
    return Link(float(match[1]) * _BITS[match[2]] / (8 if match[3] == "b" else 1), latency)


def _measured(word: str | None) -> Measured:
    """What --measured says: images per second, or a file of `bench train`."""
    assert word is not None
    if re.fullmatch(r"\d{1,12}(\.\d+)?", word):
        if not float(word):
            raise SpecError(f"--measured {word}: expected the images/s of one device, which are more than none")
        return Measured(float(word), None, [], f"{float(word):,.6g} images/s, as given", {})
    result = open_result(Path(word), "--measured")
    replicas = result.get("replicas")
    if result["bench"] != "train" or replicas != 1:
        raise SpecError(
            f"--measured {word}: it is of paceline bench {result['bench']} with on.replicas={replicas}; measure one "
            "device with: paceline bench train RECIPE --replicas 1 --out FILE"
        )
    try:
        rate, micro_batch = float(result["images_per_second"]), int(result["micro_batch"])
        device, precision = str(result["device"]), str(result["precision"])
        machine = result["machine"]["accelerator" if device == "cuda" else "processor"] or device
        assert 0 < rate < math.inf
        assert micro_batch > 0
    except (LookupError, TypeError, ValueError, AssertionError):
        raise SpecError(f"{word}: this result is not whole; measure again") from None
    words = [f"on.device={device}", f"on.precision={precision}"]
    told = f"{rate:,.6g} images/s on one {machine}, {precision}"
    return Measured(rate, micro_batch, words, told, result["same"], result.get("steady") is not False)


def _check_same(measured: Measured, plan: Plan, word: str | None) -> None:
    """Refuse the speed of another network, of other images, or in another precision."""
    if not measured.same:
        return
    before, now = (
        {key: value for key, value in each.items() if key.startswith(_WORK)}
        for each in (measured.same, same_work(plan))
    )
    if differing := differences(before, now):
        raise SpecError(f"--measured {word}: it measured other work: {'; '.join(differing[:3])}")


def _traffic(plan: Plan) -> Traffic:
    """What a replica sends; only a network that the tables do not know is built to count it."""
    recipe = plan.recipe
    parameters = tables.parameters(recipe.model, plan.facts, getattr(recipe.norm, "proxy", False))
    if parameters is None or plan.frozen:
        from paceline.model.cost import exchanged

        return traffic(plan, *exchanged(recipe, plan.facts, plan.frozen))
    return traffic(plan, parameters, *NORMS[recipe.model.name])


def _curve(predictor: Predictor, count: int) -> Iterator[dict[str, Any]]:
    """From one device to many: in one host first, then host after host."""
    each = predictor.cluster.devices
    inside = [2**power for power in range(20) if 2**power <= each]
    hosts = [each * 2**power for power in range(20) if each * 2**power <= max(count, _MOST_DEVICES)]
    alone = predictor.images_per_second
    for devices in sorted({*inside, *hosts, count}):
        row: dict[str, Any] = {"devices": devices}
        try:
            prediction = predictor.on(devices)
        except PlanError as fault:
            nothing = ("micro_batch", "rounds", "ms_per_step", "images_per_second", "efficiency", "hidden")
            yield {**row, **dict.fromkeys(nothing), "limits": [str(fault)]}
            continue
        time, plan, rate = prediction.time, prediction.plan, prediction.images_per_second
        hidden = time.hidden / time.exchange if time.exchange else None
        yield row | {
            "micro_batch": plan.micro_batch, "rounds": plan.rounds, "ms_per_step": 1e3 * time.total,
            "images_per_second": rate, "efficiency": rate / (devices * alone), "hidden": hidden,
            "limits": _bounds(prediction, predictor.micro_batch),
        }  # fmt: skip


def _bounds(prediction: Prediction, measured: int) -> list[str]:
    """What the batch and the norm keep this number of devices from."""
    bounds, plan = list[str](), prediction.plan
    idle, last = prediction.devices - min(plan.replicas, plan.micro_batches), plan.micro_batches % plan.replicas
    if idle > 0:
        bounds.append(f"{idle:,} without work")
    elif last:
        bounds.append(f"last round on {last:,} only")
    if plan.micro_batch < measured:
        bounds.append("smaller micro-batch")
    if plan.norm_replicas > 1:
        bounds.append(f"norm over {plan.norm_replicas:,}")
    return bounds


def _facts(predictor: Predictor, chosen: Prediction, told: str) -> dict[str, Any]:
    plan, time = chosen.plan, chosen.time
    return {
        "measured": told,
        "hosts": -(-chosen.devices // predictor.cluster.devices),
        "devices": chosen.devices,
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "rounds": plan.rounds,
        "norm_batch": plan.norm_batch,
        "images_per_second": chosen.images_per_second,
        "efficiency": chosen.images_per_second / (chosen.devices * predictor.images_per_second),
        "ms_per_step": 1e3 * time.total,
        "ms_of_work": 1e3 * time.work,
        "ms_of_exchange": 1e3 * time.exchange,
        "ms_of_exchange_exposed": 1e3 * time.exposed,
        "ms_of_norm_exchange": 1e3 * time.norms,
        "steps": plan.steps,
        "seconds": plan.steps * time.total,
    }


def _in_words(chosen: Prediction, facts: dict[str, Any], sent: Traffic) -> dict[str, Any]:
    plan, time = chosen.plan, chosen.time
    hidden = 1e3 * time.hidden
    parts = f"{facts['ms_of_work']:,.2f} of work, {facts['ms_of_exchange_exposed']:,.2f} of exchange"
    norms = f", {facts['ms_of_norm_exchange']:,.2f} of norms" if time.norms else ""
    epochs = f"{plan.epochs:g} {'epoch' if plan.epochs == 1 else 'epochs'}"
    busy, rate = min(plan.replicas, plan.micro_batches), f"{facts['images_per_second']:,.0f}"
    each, sent_in = _each(plan.rounds, plan.micro_batch), f"{facts['ms_of_exchange']:,.2f} ms"
    return {
        "measured": facts["measured"],
        "step": f"{plan.global_batch:,} images: {each} on each of {plural(busy, 'device')}",
        "images per second": f"{rate}, {facts['efficiency']:.1%} of {chosen.devices:,} x one",
        "time of a step": f"{facts['ms_per_step']:,.2f} ms: {parts}{norms}",
        "exchange": f"{sent.gradients / 1e6:,.1f} MB of gradients in {sent_in}, {hidden:,.2f} of it "
        "behind the backward pass",
        "time in all": f"{long_time(facts['seconds'])} for {epochs}, without validation and checkpoints",
    }


def _each(rounds: int, micro_batch: int) -> str:
    return f"{rounds} x {micro_batch:,}" if rounds > 1 else f"{micro_batch:,}"


def _line(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the curve for people."""
    line = {
        "devices": row["devices"],
        **dict.fromkeys(("each", "ms per step", "images/s", "efficiency", "hidden"), "-"),
    }
    if row["efficiency"] is not None:
        line |= {
            "each": _each(row["rounds"], row["micro_batch"]),
            "ms per step": round(row["ms_per_step"], 2),
            "images/s": round(row["images_per_second"]),
            "efficiency": f"{row['efficiency']:.1%}",
        }
    if row["hidden"] is not None:
        line["hidden"] = f"{row['hidden']:.0%}"
    return line | {"limits": "; ".join(row["limits"])}


def _notes(predictor: Predictor, asked: Hosts, rows: list[dict[str, Any]], steady: bool) -> list[str]:
    """Where limits bind, and what was taken for granted."""
    recipe, notes = predictor.job.plan.recipe, []
    if any(row["micro_batch"] and row["micro_batch"] < predictor.micro_batch for row in rows):
        held, measured = recipe.global_batch // predictor.micro_batch, predictor.micro_batch
        notes.append(
            f"global_batch {recipe.global_batch:,} is {held:,} times the {measured:,} images of the measured "
            "micro-batch: on more devices it is smaller, and taken to be as fast for each image, which is too good; "
            "measure with a smaller on.micro_batch"
        )
    if not steady:
        notes.append("the measured speed was not steady; measure again on a machine that does nothing else")
    cluster = predictor.cluster
    if asked.inside is None and cluster.devices > 1:
        notes.append("devices of a host are taken to be linked as hosts are; write --inside SPEED if they are not")
    if not cluster.between.latency:
        notes.append("latency is taken as none; write it behind the speed, as in --link 400Gb,5us")
    notes.append("nothing is known of the input, of slow hosts or of a busy network: see docs/scaling.md")
    return notes
