"""What a run's newest validation got wrong: classes, confused pairs, and the images that it was most wrong about."""

from __future__ import annotations

from heapq import nlargest
from typing import NamedTuple

from paceline.reporting.markup import Html, element, html_table, joined
from paceline.reporting.pictures import ValidationPictures
from paceline.reporting.shown_run import NONE, ShownRun, as_percent
from paceline.settings.data import Files
from paceline.training.answers import CONFUSION, HARD, IMAGE_COLUMNS, WRONG, read_classes, read_lines, read_table

MATRIX_CLASSES = 24
"""Classes whose confusion can be read as a matrix."""
_PAIRS = 12
_PICTURES = 48
_OPEN_CLASSES = 30
"""Longer tables of classes are folded."""
_TABLE = tuple[list[str], list[list[int]]]


class _Pair(NamedTuple):
    """How often images of one class were taken for another."""

    truth: str
    answer: str
    images: int
    of: int


class _Mistake(NamedTuple):
    """An image that was answered wrongly."""

    name: str
    truth: str
    answer: str
    truth_probability: float
    answer_probability: float
    loss: float


def mistakes(run: ShownRun) -> Html | None:
    """Everything that is known of the answers of the newest validation that left tables."""
    step = next((row["step"] for row in reversed(run.validations) if read_classes(run.folder, row["step"])), None)
    if step is None:
        return None
    classes = read_classes(run.folder, step)
    names, counts = _confusion(run, step)
    pairs = _pairs(names, counts)
    beside: list[Html] = []
    if names and len(names) <= MATRIX_CLASSES:
        beside.append(element("div", element("h3", "Confusion"), _matrix(names, counts)))
    if pairs:
        lines = [
            [pair.truth, pair.answer, f"{pair.images:,}", as_percent(pair.images / max(1, pair.of))] for pair in pairs
        ]
        header = ["true class", "taken for", "images", "of the class"]
        most = html_table(header, lines, numbers_from=2, class_="plain")
        beside.append(element("div", element("h3", "Confused most"), most))
    said = element("p", f"Of the validation after step {step:,}.", class_="quiet")
    return joined(said, element("div", *beside, class_="beside"), _classes(classes), _images(run, step))


def _confusion(run: ShownRun, step: int) -> _TABLE:
    """The classes and how often each was taken for each; empty where a line is damaged."""
    lines = read_lines(run.folder, step, CONFUSION)
    if not lines:
        return [], []
    names = lines[0][1:]
    try:
        counts = [[int(cell) for cell in line[1:]] for line in lines[1:]]
    except ValueError:
        return [], []
    whole = len(counts) == len(names) and all(len(row) == len(names) for row in counts)
    return (names, counts) if whole else ([], [])


def _pairs(names: list[str], counts: list[list[int]]) -> list[_Pair]:
    wrong = (
        (images, -truth, -answer)  # of equals the first
        for truth, row in enumerate(counts)
        for answer, images in enumerate(row)
        if images and answer != truth
    )
    most = [(-truth, -answer, images) for images, truth, answer in nlargest(_PAIRS, wrong)]
    return [_Pair(names[truth], names[answer], images, sum(counts[truth])) for truth, answer, images in most]


def _matrix(names: list[str], counts: list[list[int]]) -> Html:
    """True classes below each other, answers beside each other; the darker, the larger the share of the class."""
    head = [element("th"), *(element("th", element("span", name), class_="turned") for name in names)]
    lines = []
    for truth, row in enumerate(counts):
        cells = [element("th", names[truth])]
        for answer, images in enumerate(row):
            share = images / max(1, sum(row))
            kind = "right" if answer == truth else "wrong"
            said = f"{names[truth]} taken for {names[answer]}: {images:,} of {sum(row):,} ({share:.1%})"
            style = f"--share:{100 * share:.0f}%"
            shown = f"{images:,}" if images else "·"
            cells.append(
                element("td", shown, class_=f"{kind}{' strong' if share > 0.55 else ''}", style=style, title=said)
            )
        lines.append(element("tr", *cells))
    note = element("p", "Rows are the true classes, columns the answers.", class_="quiet")
    return joined(note, element("div", element("table", element("tr", *head), *lines, class_="matrix"), class_="wide"))


def _classes(classes: list[dict[str, str]]) -> Html:
    """The table of classes, those first that are found least."""

    def share(text: str) -> str:
        try:
            return f"{float(text):.1%}"
        except ValueError:
            return NONE

    def recall(row: dict[str, str]) -> float:
        try:
            return float(row["recall"])
        except ValueError:
            return 2.0

    lines = [
        [row["class"], row["images"], row["right"], *(share(row[key]) for key in ("recall", "precision", "f1"))]
        for row in sorted(classes, key=recall)
    ]
    header = ["class", "images", "right", "recall", "precision", "F1"]
    shown = html_table(header, lines, class_="plain sortable")
    title = element("h3", "Classes")
    if len(lines) <= _OPEN_CLASSES:
        return joined(title, shown)
    summary = element("summary", f"All {len(lines):,} classes, those first that are found least")
    return joined(title, element("details", summary, shown))


def _images(run: ShownRun, step: int) -> Html | None:
    """The images with the largest losses and those whose wrong answers were the most confident."""
    rows = read_table(run.folder, step, WRONG, IMAGE_COLUMNS) or read_table(run.folder, step, HARD, IMAGE_COLUMNS)
    wrong = [one for one in map(_mistake, rows) if one is not None and one.answer != one.truth]
    if not wrong:
        return None
    by_loss = sorted(wrong, key=lambda one: -one.loss)
    by_confidence = sorted(wrong, key=lambda one: -one.answer_probability)
    chosen = dict.fromkeys([*by_loss[: _PICTURES // 2], *by_confidence[: _PICTURES // 2]])
    shown = sorted(chosen, key=lambda one: -one.loss)
    pictures = ValidationPictures(run)
    files = isinstance(run.data, Files)
    note = "Wrong answers, the largest loss first."
    if files:
        note += " Tick what is labeled wrongly, correct the class (leave it empty to leave the image out), and download"
        note += " a file for data.relabel."
    orders = element(
        "div",
        element("button", "largest loss", type="button", data_order="loss", class_="chosen"),
        element("button", "most confident", type="button", data_order="confidence"),
        class_="orders",
    )
    figures = [_figure(one, pictures) for one in shown]
    download = element("button", "relabel.csv", type="button", class_="download", disabled=True) if files else None
    bar = element("div", orders, download, class_="bar")
    grid = element("div", *figures, class_="pictures")
    classes = sorted({one["class"] for one in read_classes(run.folder, step)}) if files else []
    choices = element("datalist", *(element("option", value=name) for name in classes))
    return joined(
        element("h3", "Worst mistakes"),
        element("p", note, class_="quiet"),
        element("div", bar, grid, choices if files else None, class_="mistakes"),
    )


def _mistake(row: dict[str, str]) -> _Mistake | None:
    try:
        numbers = [float(row[key]) for key in ("truth_probability", "answer_probability", "loss")]
    except ValueError:
        return None
    return _Mistake(row["path"], row["truth"], row["answer"], *numbers)


def _figure(one: _Mistake, pictures: ValidationPictures) -> Html:
    """An image, what it is, what it was taken for, and a tick that says that its label is wrong."""
    address, key = pictures.of(one.name), pictures.key(one.name)
    image = element("img", src=address, alt="") if address else element("div", "no picture", class_="missing")
    answer = joined(element("b", one.answer), f" {one.answer_probability:.0%}")
    truth = joined("is ", one.truth, f" {one.truth_probability:.1%}")
    parts = [image, element("figcaption", answer, element("br"), truth, element("small", one.name, title=one.name))]
    if key is not None:
        tick = element("input", type="checkbox", data_file=key)
        corrected = element("input", type="text", value=one.answer, aria_label="class", disabled=True)
        parts.append(element("label", tick, element("span", "wrong label"), corrected))
    return element("figure", *parts, data_loss=f"{one.loss:.6g}", data_confidence=f"{one.answer_probability:.6g}")
