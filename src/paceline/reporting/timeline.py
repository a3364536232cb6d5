"""What happened to a run: starts, resumes, faults, bad steps and the end; its machine and what repeats it."""

from __future__ import annotations

import shlex
import time

from paceline.record import NOT_FINITE, Row
from paceline.reporting.markup import Html, element, html_table, joined
from paceline.reporting.shown_run import ShownRun, number
from paceline.visible import plural

_MOST = 200
"""Lines of a timeline; of more, the first and the last are shown."""


def timeline(run: ShownRun) -> Html:
    """A table of what happened, with the time where the record has it."""
    lines = [[_clock(when), f"{step:,}" if step is not None else "", what] for when, step, what in _events(run.rows)]
    if len(lines) > _MOST:
        gap = ["", "", f"{len(lines) - _MOST:,} more"]
        lines = [*lines[: _MOST // 2], gap, *lines[-_MOST // 2 :]]
    cells = [
        [element("span", when, class_="quiet"), element("span", step, class_="step"), what]
        for when, step, what in lines
    ]
    return html_table(
        ["time (UTC)", "step", "what"], [list(line) for line in cells], numbers_from=99, class_="plain timeline"
    )


_Event = tuple[float | None, int | None, str]


def _events(rows: list[Row]) -> list[_Event]:
    events: list[_Event] = []
    started = ended = False
    trained = bad = 0
    for row in rows:
        kind, step = row["kind"], row.get("step")
        if kind == "start":
            if started and not ended:
                events.append((None, trained, "killed, as nothing says how this start ended"))
            events.append((number(row.get("time")), step, _start(row, started)))
            started, ended, trained = True, False, step or 0
        elif kind == "report":
            count = int(number(row.get("bad_steps")) or 0)
            if count > bad:
                what = f"{plural(count - bad, 'bad step')} since the last report: {NOT_FINITE}"
                events.append((None, step, what))
            bad, trained = count, step or trained
        elif (told := _told(row)) is not None:
            events.append((number(row.get("time")), step, told))
        ended = ended or kind in ("interrupted", "failed", "end")
    return events


def _told(row: Row) -> str | None:
    """What a row of one moment says, if a timeline shows it."""
    match row["kind"]:
        case "note" if row.get("warning"):
            return str(row.get("text"))
        case "continued":
            return f"continues {row.get('run')}"
        case "stop":
            return f"ended by {row.get('reason')}"
        case "interrupted":
            return f"interrupted by a {row.get('why', 'signal')}, saved"
        case "failed":
            return f"failed: {row.get('why')}"
        case "end":
            return "came to its end"
        case _:
            return None


def _start(row: Row, resumed: bool) -> str:
    placement = row.get("placement")
    where = ""
    if isinstance(placement, dict):
        where = f" on {placement.get('replicas')} x {placement.get('device')}, {placement.get('precision')}"
    changed = row.get("arithmetic_changed")
    arithmetic = f"; changed: {', '.join(map(str, changed))}" if isinstance(changed, dict) and changed else ""
    return f"{'resumed' if resumed else 'started'}{where}{arithmetic}"


def _clock(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < 1e11:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def origin(run: ShownRun) -> Html:
    """The machine, the versions, and the command that repeats the run."""
    if not run.starts:
        return element("p", "No start is recorded.")
    first, last = run.starts[0], run.starts[-1]
    facts = [*_machine(last), *_versions(last)]
    lines = [line for fact in facts for line in (element("dt", fact[0]), element("dd", fact[1]))]
    return joined(element("pre", _command(first)), element("dl", *lines))


def _machine(start: Row) -> list[tuple[str, str]]:
    machine = start.get("machine")
    if not isinstance(machine, dict):
        return []
    memory = number(machine.get("memory"))
    facts = [
        ("host", str(machine.get("host"))),
        ("processor", f"{machine.get('processor')}, {machine.get('cores')} cores"),
    ]
    facts += [("memory", f"{memory / 2**30:.1f} GiB")] if memory else []
    if machine.get("accelerators"):
        facts.append(("accelerators", f"{machine['accelerators']} x {machine.get('accelerator')}"))
    return [*facts, ("system", str(machine.get("system")))]


def _versions(start: Row) -> list[tuple[str, str]]:
    versions = start.get("versions")
    named = ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else ""
    facts = [("versions", named)] if named else []
    return [*facts, ("commit", str(start["commit"]))] if start.get("commit") else facts


def _command(start: Row) -> str:
    """The words of the first start without its run folder, in which the same words would only find this run."""
    words = start.get("command")
    kept: list[str] = []
    for word in words if isinstance(words, list) else []:
        if not kept and word == "paceline.train":  # it was started from Python
            kept.append("train")
        elif kept and kept[-1] == "--out":
            kept.pop()
        elif not str(word).startswith("--out="):
            kept.append(str(word))
    return f"paceline {shlex.join(kept)}"
