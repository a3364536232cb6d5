"""Compares runs: what came out, what differs in their settings, and how far seeds alone move the result."""

from __future__ import annotations

from statistics import mean, stdev

from paceline.record import Row
from paceline.reporting.markup import Html, element, html_table, joined
from paceline.reporting.shown_run import NONE, ShownRun, as_decimal, as_percent, number
from paceline.settings.read import flow, values_by_address
from paceline.visible import long_time, plural

_TOLD_ELSEWHERE = ("about", "published", "source", "on.about", "on.sinks")


def comparison(runs: list[ShownRun]) -> Html:
    """The part of a report that holds several runs against each other."""
    return joined(_results(runs), _seeds(runs), _differences(runs))


def _results(runs: list[ShownRun]) -> Html:
    header = ["run", "best top-1", "last top-1", "last loss", "epochs", "trained", "images/s"]
    lines = []
    for index, run in enumerate(runs):
        best, last = run.best or {}, run.last or {}
        epochs = run.reports[-1]["epoch"] if run.reports else None
        lines.append(
            [
                swatch(index, run.name),
                as_percent(best.get("top1")),
                as_percent(last.get("top1")),
                as_decimal(last.get("loss")),
                as_decimal(epochs, ".4g"),
                long_time(run.seconds) if run.seconds is not None else NONE,
                as_decimal(run.speed, ",.0f"),
            ]
        )
    return html_table(header, lines, class_="plain")


def swatch(color: int, name: str, style: str = "training") -> Html:
    """A name with the color of its curves before it."""
    return element("span", element("i", class_=f"swatch color{color % 8} {style}"), name, class_="named")


def settings_of(run: ShownRun) -> dict[str, str]:
    """Every setting of a run by its address; the placement is that of its last start."""
    values = values_by_address(run.stored.recipe) | values_by_address(run.stored.placement, "on.")
    shown = {address: flow(value) for address, value in values.items()}
    placement = run.starts[-1].get("placement") if run.starts else None
    if isinstance(placement, dict):
        shown |= {f"on.{key}": flow(value) for key, value in placement.items() if not isinstance(value, dict)}
    return {address: text for address, text in shown.items() if not address.startswith(_TOLD_ELSEWHERE)}


def _differences(runs: list[ShownRun]) -> Html:
    """A table of the settings that are not the same in all runs."""
    settings = [settings_of(run) for run in runs]
    addresses = list(dict.fromkeys(address for one in settings for address in one))
    values = {address: [one.get(address, NONE) for one in settings] for address in addresses}
    values["data folder"] = [str(run.data_folder or NONE) for run in runs]
    lines = [[address, *shown] for address, shown in values.items() if len(set(shown)) > 1]
    title = element("h3", "What differs")
    if not lines:
        return joined(title, element("p", "The settings of these runs are the same."))
    return joined(title, html_table(["setting", *(run.name for run in runs)], lines, numbers_from=99, class_="plain"))


def _seeds(runs: list[ShownRun]) -> Html | None:
    """Mean and spread of runs of one recipe, whatever their placements, that differ in the seed alone."""
    groups: dict[tuple[tuple[str, str], ...], list[ShownRun]] = {}
    for run in runs:
        recipe = {key: text for key, text in settings_of(run).items() if not key.startswith("on.") and key != "seed"}
        groups.setdefault((*recipe.items(), ("folder", str(run.data_folder))), []).append(run)
    lines = []
    for group in groups.values():
        finished = [run for run in group if run.last]
        if len({run.stored.recipe.seed for run in finished}) < 2:
            continue
        names = ", ".join(run.name for run in finished)
        last: list[Row] = [run.last or {} for run in finished]
        lines.append(
            [
                names,
                plural(len({run.stored.recipe.seed for run in finished}), "seed"),
                _mean_and_spread([number((run.best or {}).get("top1")) for run in finished], percent=True),
                _mean_and_spread([number(row.get("top1")) for row in last], percent=True),
                _mean_and_spread([number(row.get("loss")) for row in last]),
            ]
        )
    if not lines:
        return None
    note = "Mean and standard deviation of runs that differ in the seed alone."
    header = ["runs", "seeds", "best top-1", "last top-1", "last loss"]
    return joined(element("h3", "Over seeds"), element("p", note), html_table(header, lines, class_="plain"))


def _mean_and_spread(values: list[float | None], percent: bool = False) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return NONE
    middle, spread = mean(known), stdev(known)
    return f"{100 * middle:.2f} ± {100 * spread:.2f} %" if percent else f"{middle:.4f} ± {spread:.4f}"
