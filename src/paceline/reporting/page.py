"""Puts a report together: one page of HTML with its own style and script, and the script that draws its charts."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from paceline import __version__
from paceline.errors import RunError
from paceline.files import disk_faults, read_whole, write_whole
from paceline.reporting.comparison import comparison, swatch
from paceline.reporting.curves import Chart, charts_of, figures
from paceline.reporting.markup import Html, element, joined
from paceline.reporting.mistakes import mistakes
from paceline.reporting.shown_run import ShownRun, as_decimal, as_percent, number
from paceline.reporting.timeline import origin, timeline
from paceline.visible import long_time, plural

PLOTLY, SEEN = "plotly.min.js", "samples.json"


def write_report(runs: list[ShownRun], path: Path, script: Path | None = None) -> None:
    """Write the report of runs as one file, or with the charts' script as another one beside it."""
    plotly = plotly_script()
    with disk_faults(RunError, path, "cannot be written"):
        if script is None:
            write_whole(path, report_page(runs, plotly.read_text("utf-8")))
            return
        if not script.is_file() or script.stat().st_size != plotly.stat().st_size:
            _put(plotly, script)
        write_whole(path, report_page(runs, None))


def plotly_script() -> Path:
    """The script that draws charts, as the package plotly brings it; Python never imports the package."""
    spec = find_spec("plotly")
    script = Path(spec.origin or "").parent / "package_data" / PLOTLY if spec else None
    if script is None or not script.is_file():
        raise RunError("plotly, whose script draws the curves of a report, is not installed; write pip install plotly")
    return script


def _put(source: Path, target: Path) -> None:
    """Put a file beside a page; a link costs no space, and a copy does where there can be none."""
    temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex[:8]}.part")
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # it is still there where it was a link to the same file


def report_page(runs: list[ShownRun], plotly: str | None) -> Html:
    """The whole page; without the text of the charts' script it is read from beside the page."""
    several = len(runs) > 1
    title = f"{len(runs)} runs" if several else runs[0].name
    own = _own("report.js")
    charts = charts_of(runs)
    body = [
        element("header", _headline(runs)),
        _section("Comparison", comparison(runs)) if several else None,
        _section("Curves", _curves(charts, runs)) if charts else None,
        *(_about_one(run, several) for run in runs),
        element("footer", f"Paceline {__version__}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"),
        _data(json.dumps(figures(charts), allow_nan=False)) if charts else None,
    ]
    if charts:
        body.append(Html(f"<script>{plotly}</script>") if plotly else element("script", src=PLOTLY))
    body.append(Html(f"<script>{own}</script>"))
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(plotly is None)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} · Paceline"),
        Html(f"<style>{_own('report.css')}</style>"),
    ]
    content = element("html", element("head", *head), element("body", element("main", *body)), lang="en")
    return Html(f"<!doctype html>\n{content}\n")


def _policy(beside: bool) -> str:
    """What the browser lets the page do: nothing that leaves it."""
    scripts = "'unsafe-inline' 'self' file:" if beside else "'unsafe-inline'"
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"


def _own(name: str) -> str:
    return (files("paceline.reporting") / name).read_text("utf-8")


def _data(text: str) -> Html:
    """JSON inside a page: nothing in it can end the element that holds it."""
    inside = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return Html(f'<script type="application/json" id="figures">{inside}</script>')


def _section(title: str, *parts: str | None) -> Html:
    return element("section", element("h2", title), *parts)


def _headline(runs: list[ShownRun]) -> Html:
    """What was trained on what, and what came out."""
    if len(runs) > 1:
        what = dict.fromkeys(f"{run.network} on {run.data.name}" for run in runs)
        return joined(element("h1", f"{len(runs)} runs"), element("p", "; ".join(what)))
    (run,) = runs
    best, last = run.best, run.last
    epochs = number(run.reports[-1]["epoch"]) if run.reports else None
    tiles = []
    if best is not None and last is not None:
        tiles.append(_tile("best top-1", as_percent(best.get("top1")), f"after step {best['step']:,}"))
        loss = f"loss {as_decimal(last.get('loss'))}"
        tiles.append(_tile("last top-1", as_percent(last.get("top1")), loss))
        if run.data.facts.classes > 5:
            tiles.append(_tile("last top-5", as_percent(last.get("top5")), plural(int(last["images"]), "image")))
    if run.seconds is not None:
        said = f"{epochs:.4g} epochs" if epochs is not None else ""
        tiles.append(_tile("trained", long_time(run.seconds), said))
    if run.speed is not None:
        tiles.append(_tile("images/s", f"{run.speed:,.0f}", "median of the reports"))
    facts = run.data.facts
    parameters = number(run.starts[-1].get("parameters")) if run.starts else None
    network = f"{run.network}, {parameters:,.0f} parameters" if parameters is not None else run.network
    images = f"{facts.images:,} training and {facts.validation_images:,} validation images"
    about = f"{network}, on {run.data.name}: {images} of {facts.classes:,} classes"
    return joined(element("h1", run.name), element("p", about), element("div", *tiles, class_="tiles"))


def _tile(name: str, value: str, more: str) -> Html:
    return element("div", element("span", name), element("strong", value), element("small", more))


def _curves(charts: list[Chart], runs: list[ShownRun]) -> Html:
    several = len(runs) > 1
    legend = element("p", *(swatch(index, run.name) for index, run in enumerate(runs)), class_="legend")
    explained = element("p", "Validation is drawn strong, training thin, top-5 dotted.", class_="quiet")
    drawn = []
    for index, chart in enumerate(charts):
        names = [swatch(one.color, one.name, one.style) for one in chart.legend()] if not several else []
        title = element("figcaption", element("b", chart.title), *names)
        drawn.append(element("figure", title, element("div", class_="chart", data_figure=str(index))))
    return joined(legend if several else None, explained if several else None, element("div", *drawn, class_="charts"))


def _about_one(run: ShownRun, several: bool) -> Html:
    """What is told of each run alone."""
    answers = mistakes(run)
    sections = [
        _section("Mistakes", answers) if answers else None,
        _samples(run),
        _section("Timeline", timeline(run)),
        _section("Machine and command", origin(run)),
    ]
    if not several:
        return joined(*sections)
    return element("details", element("summary", run.name), *sections, class_="run")


def _samples(run: ShownRun) -> Html | None:
    """Training images as the network saw them, which the run has drawn when it started."""
    try:
        rows = json.loads(read_whole(run.folder / SEEN))["samples"]
        drawn = [_sample(str(row["class"]), [str(shown) for shown in row["shown"]]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    note = element(
        "p", "Training images after augmentation: each in the first epoch and in a later one.", class_="quiet"
    )
    return _section("What the network saw", note, element("div", *drawn, class_="pictures samples"))


def _sample(name: str, shown: list[str]) -> Html:
    images = [element("img", src=one, alt="") for one in shown if one.startswith("data:image/")]
    return element("figure", element("div", *images, class_="pair"), element("figcaption", name))
