"""The report of runs: what its page says, that nothing in it is taken for markup, and how large it gets."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conftest import make_plan, make_session
from paceline.command import report
from paceline.errors import RunError, SpecError
from paceline.record import RECORD, REPORT, Row, Run, Sink
from paceline.reporting import page, sink
from paceline.reporting.curves import MOST_POINTS
from paceline.reporting.markup import element, joined
from paceline.reporting.results import RESULTS
from paceline.reporting.shown_run import read_run
from paceline.reporting.sink import ReportSink
from paceline.training.answers import read_classes
from paceline.training.loop import train
from runs_made import START, report_row, validation_of, write_answers, write_run

EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">&"\''
NAMES = ("apple", "pear", "plum")
CONFUSION = [[18, 2, 0], [1, 10, 0], [0, 9, 0]]
HARD = [("a.jpg", "plum", "pear", 0.01, 0.9, 4.6), ("b.jpg", "apple", "pear", 0.3, 0.6, 1.2)]


class Read(HTMLParser):
    """What a browser finds in a page: its tags with their attributes, its text, and its JSON."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style") and data.strip():
            self.words.append(data.strip())
        if self._inside == "script" and data.startswith("[{"):
            self.figures: list[dict[str, Any]] = json.loads(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def read(*folders: Path, data: Path | None = None) -> Read:
    """A page without the charts' script."""
    return Read(page.report_page([read_run(folder, data) for folder in folders], None))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "mine", "data.classes=3", top1=0.7)
    write_answers(folder, NAMES, CONFUSION, HARD)
    return folder


def test_a_page_says_what_came_out_of_a_run(run: Path) -> None:
    text = read(run).text
    for said in (
        "mine", "resnet8, 75,290 parameters, on generated", "96 training and 37 validation images of 3 classes",
        "70.00%", "after step 6", "123", "paceline train page.yaml seed=1", "came to its end", "here", "abc",
    ):  # fmt: skip
        assert said in text, said
    assert "--out" not in text  # the same words would only find this run again
    assert "top-5" not in text  # of three classes the right one is always among five


def test_curves_hold_what_the_rows_hold(tmp_path: Path) -> None:
    rows = [
        START,
        *(report_row(step, memory=step << 20, gradient_norm=None) for step in (1, 2, 3)),
        validation_of(3, 0.25),
    ]
    made = read(write_run(tmp_path / "run", rows=rows))
    titles = [word for word in made.words if word in ("Loss", "Memory in GiB", "Gradient norm", "Bad steps")]
    assert titles == ["Loss", "Memory in GiB"]  # what is never a number, or always zero, is not drawn
    training, validation = made.figures[0]["series"]
    assert (training["step"], training["y"], validation["y"]) == ([1, 2, 3], [2.0, 1.0, 0.666667], [1.5])


def test_of_steps_that_were_trained_again_the_last_rows_count(tmp_path: Path) -> None:
    rows = [START, report_row(1), report_row(2, loss=9.0), {**START, "step": 1}, report_row(2, loss=3.0)]
    made = read(write_run(tmp_path / "run", rows=rows))
    assert made.figures[0]["series"][0]["y"] == [2.0, 3.0]
    assert "killed, as nothing says how this start ended" in made.text
    assert "resumed on 1 x cpu, fp32" in made.text


def test_faults_and_bad_steps_are_in_the_timeline(tmp_path: Path) -> None:
    rows = [
        START,
        report_row(1, bad_steps=2),
        {"kind": "interrupted", "step": 1, "why": "time limit"},
        {**START, "step": 1, "arithmetic_changed": {"precision": ["fp32", "bf16"]}},
        {"kind": "note", "text": "a disk is slow", "warning": True},
        {"kind": "failed", "why": "out of memory"},
    ]
    text = read(write_run(tmp_path / "run", rows=rows)).text
    for said in (
        "2 bad steps",
        "interrupted by a time limit",
        "changed: precision",
        "a disk is slow",
        "failed: out of memory",
    ):
        assert said in text
    assert "killed" not in text


def test_a_long_curve_is_thinned_and_keeps_its_end(tmp_path: Path) -> None:
    rows = [START, *(report_row(step) for step in range(1, 10_002))]
    made = read(write_run(tmp_path / "run", rows=rows))
    steps = made.figures[0]["series"][0]["step"]
    assert (steps[0], steps[-1]) == (1, 10_001)
    assert MOST_POINTS / 2 < len(steps) <= MOST_POINTS + 1


def test_classes_and_confused_pairs_are_named_the_worst_first(run: Path) -> None:
    words = read(run).words
    pairs = words[words.index("of the class") + 1 :][:4]
    assert pairs == ["plum", "pear", "9", "100.00%"]
    classes = words[words.index("recall") :]
    assert classes.index("plum") < classes.index("apple") < classes.index("pear")
    assert "plum taken for pear: 9 of 9 (100.0%)" in [attributes.get("title") for _, attributes in read(run).tags]


def test_many_classes_have_no_matrix(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "data.classes=40")
    names = [f"class {number}" for number in range(40)]
    write_answers(
        folder, names, [[int(answer in (truth, (truth + 1) % 40)) for answer in range(40)] for truth in range(40)]
    )
    made = read(folder)
    assert "Confusion" not in made.words
    assert "Confused most" in made.words
    assert "All 40 classes, those first that are found least" in made.text


def test_nothing_that_users_wrote_is_taken_for_markup(tmp_path: Path) -> None:
    evil = tmp_path / EVIL.replace("/", "")
    folder = write_run(evil, f"about={json.dumps(EVIL)}", rows=[
        {**START, "command": ["train", EVIL], "machine": {"host": EVIL}, "commit": EVIL, "versions": {EVIL: EVIL}},
        report_row(1, **{EVIL: 1.0}), validation_of(1, 0.5), validation_of(6, 0.5),
        {"kind": "note", "text": EVIL, "warning": True}, {"kind": "failed", "why": EVIL},
    ])  # fmt: skip
    write_answers(folder, [EVIL, "b"], [[1, 2], [0, 1]], [(EVIL, EVIL, "b", 0.1, 0.9, 2.0)])
    (folder / page.SEEN).write_text(json.dumps({"samples": [{"class": EVIL, "shown": [EVIL, 'data:image/"x']}]}))
    other = write_run(tmp_path / "other", "seed=2")
    for made in (read(folder), read(folder, other)):
        assert not [tag for tag, attributes in made.tags if any(name.startswith("on") for name in attributes)]
        scripts = [attributes.get("src") for tag, attributes in made.tags if tag == "script"]
        assert scripts == [None, page.PLOTLY, None]
        assert EVIL in made.text
    text = page.report_page([read_run(folder)], None)
    assert "<script>alert" not in text
    assert 'onerror="alert' not in text


def test_names_that_are_no_text_are_shown_with_escapes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "data.classes=2")
    write_answers(folder, ["d\udcf6g", "cat"], [[1, 2], [0, 1]], [("\udcff.jpg", "d\udcf6g", "cat", 0.1, 0.9, 2.0)])
    report.run([folder], tmp_path / "one.html", None)
    made = Read((tmp_path / "one.html").read_text("utf-8"))
    assert "d\\udcf6g" in made.words
    assert "\\udcff.jpg" in made.words


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    report.run([write_run(tmp_path / name / "run") for name in ("a", "b")], tmp_path / "two.html", None)
    words = Read((tmp_path / "two.html").read_text("utf-8")).words
    assert {str(tmp_path / name / "run") for name in ("a", "b")} <= {*words}


def test_no_request_leaves_a_page(run: Path, tmp_path: Path) -> None:
    report.run([run], tmp_path / "one.html", None)
    made = Read((tmp_path / "one.html").read_text())
    addresses = [
        value or "" for _, attributes in made.tags for key, value in attributes.items() if key in ("src", "href")
    ]
    assert [address for address in addresses if not address.startswith("data:image/")] == []
    assert not [tag for tag, _ in made.tags if tag in ("link", "iframe", "base", "object")]
    policy = next(attributes["content"] for tag, attributes in made.tags if attributes.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    own = [page._own(name) for name in ("report.js", "report.css")]
    assert not [text for text in own if re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest", text)]


def test_in_the_run_folder_the_script_lies_beside_the_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        report.run([run], None, None)
        assert capsys.readouterr().out == f"{run / REPORT}\n"
    assert (run / page.PLOTLY).read_bytes() == page.plotly_script().read_bytes()
    assert (run / REPORT).stat().st_size < 100_000
    there = {path.name for path in run.iterdir()} - {RESULTS}
    assert there == {RECORD, "plan.yaml", "validation", REPORT, page.PLOTLY}


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "one", "seed=1", top1=0.5), write_run(tmp_path / "two", "seed=2", top1=0.7),
        write_run(tmp_path / "three", "seed=1", "optimizer.lr=0.5", top1=0.9),
    ]  # fmt: skip
    words = read(*runs).words
    differs = words[words.index("What differs") :]
    settings = differs[1 : differs.index("Curves")]
    assert settings == ["setting", "one", "two", "three", "seed", "1", "2", "1", "optimizer.lr", "0.1", "0.1", "0.5"]
    seeds = words[words.index("Over seeds") : words.index("What differs")]
    assert "one, two" in seeds
    assert "60.00 ± 14.14 %" in seeds  # the standard deviation of 50 % and 70 %
    assert not [word for word in seeds if "three" in word]


def test_runs_of_equal_settings_have_nothing_that_differs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    made = read(*runs)
    assert "The settings of these runs are the same." in made.text
    assert "Over seeds" not in made.text


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        '{"kind": "report", "step": 7}',
        '{"kind": "start", "step": 0, "placement": 3, "machine": [], "time": "x"}',
        '{"kind": "start", "step": 1, "command": [1, null]}',
        '{"kind": "validation", "step": 6, "top1": "high"}',
        json.dumps(validation_of(9, 0.5, loss=None, extra=[1])),
        '{"kind": "note", "warning": true}',
        '{"kind": "end", "step": 1}',
        '{"kind": "failed"}',
    ],
)
def test_a_damaged_record_still_has_a_report(run: Path, damage: str) -> None:
    with (run / RECORD).open("a") as file:
        file.write(damage)
    made = read(run)
    assert "mine" in made.words
    assert len(made.figures) >= 5


@pytest.mark.parametrize("name", ["classes.csv", "confusion.csv", "hardest.csv"])
@pytest.mark.parametrize("content", [b"", b"truth,a\nx", b'class,"\xff\n', b"path,truth\n1,2,3\n"])
def test_damaged_tables_cost_only_what_they_hold(run: Path, name: str, content: bytes) -> None:
    next(run.glob(f"validation/*/{name}")).write_bytes(content)
    assert "70.00%" in read(run).text


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    assert "Timeline" in read(write_run(tmp_path / "new", rows=[START])).words
    assert "No start is recorded." in read(write_run(tmp_path / "empty", rows=[])).words


def test_what_cannot_be_reported_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="this is no run folder"):
        report.run([tmp_path], None, None)
    with pytest.raises(SpecError, match=r"write --out FILE.html"):
        report.run([run, tmp_path], None, None)
    with pytest.raises(SpecError, match=r"write --out .*a\.html"):
        report.run([run], tmp_path / "a.pdf", None)
    with pytest.raises(SpecError, match="named twice"):
        report.run([run, run], tmp_path / "a.html", None)
    with pytest.raises(RunError, match="cannot be written"):
        report.run([run], tmp_path / "none" / "a.html", None)


def test_three_runs_of_ten_classes_stay_under_8_megabytes(tmp_path: Path) -> None:
    runs = [size_run(tmp_path / str(number), 10, 5000, f"seed={number}") for number in range(3)]
    report.run(runs, tmp_path / "three.html", None)
    assert (tmp_path / "three.html").stat().st_size < 8_000_000


def test_a_run_of_1000_classes_stays_under_20_megabytes(tmp_path: Path) -> None:
    report.run([size_run(tmp_path / "run", 1000, 20_000)], tmp_path / "many.html", None)
    assert (tmp_path / "many.html").stat().st_size < 20_000_000


def size_run(folder: Path, classes: int, reports: int, *words: str) -> Path:
    """A run with many reports, and with a mistake in every class."""
    rows = [
        START,
        *(report_row(step) for step in range(1, reports)),
        *(validation_of(step, 0.5) for step in range(6, 600, 6)),
    ]
    rows = [row for row in rows if row["kind"] != "validation" or row["step"] <= 6]
    write_run(folder, f"data.classes={classes}", *words, rows=rows)
    names = [f"n{number:08d} a kind of thing" for number in range(classes)]
    matrix = [[(truth * answer) % 3 for answer in range(classes)] for truth in range(classes)]
    images = [
        (f"val/{names[0]}/{n}.jpg", names[n % classes], names[(n + 1) % classes], 0.1, 0.8, 2.0) for n in range(64)
    ]
    write_answers(folder, names, matrix, images)
    return folder


def test_a_validation_has_left_its_tables_when_its_row_is_told(tmp_path: Path) -> None:
    class Reads(Sink):
        def row(self, row: Row) -> None:
            if row["kind"] == "validation":
                found.append(len(read_classes(tmp_path, row["step"])))

    found: list[int] = []
    session = make_session(make_plan(), tmp_path, "own")
    session.run.sinks = [Reads()]
    assert train(session)
    session.run.close()
    assert found == [10]


def test_text_is_escaped_and_markup_is_not() -> None:
    assert joined("<", element("b", "&"), None, "\x1b") == "&lt;<b>&amp;</b>\\x1b"
    assert element("td", "x", class_="a", title='"<', data_file=None, disabled=True) == (
        '<td class="a" title="&quot;&lt;" disabled>x</td>'
    )


def test_a_report_that_fails_never_stops_a_training(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no space for pictures")

    monkeypatch.setattr(sink, "write_report", fail)
    with Run(run, "own") as opened:
        opened.sinks = [ReportSink(make_plan(), opened, Console(quiet=True))]
        opened.write(**START)
        opened.write(**validation_of(7, 0.5))
        opened.write("end", step=7)
        opened.write("end", step=7)
        notes = [row["text"] for row in opened.rows() if row["kind"] == "note"]
    assert notes == ["report.html could not be written: RuntimeError: no space for pictures"]


def test_a_report_is_rewritten_at_validations_and_at_the_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(sink, "write_report", lambda runs, *_: written.append(len(runs[0].rows)))
    with Run(run, "own") as opened:
        before = len(opened.rows())
        opened.sinks = [one := ReportSink(make_plan(), opened, Console(quiet=True))]
        for row in (START, report_row(7), validation_of(7, 0.5), {"kind": "end", "step": 7}):
            opened.write(**row)
            if one._thread is not None:
                one._thread.join()
    assert written == [before + 1, before + 3, before + 4]


def test_a_report_takes_a_hundredth_of_the_time_and_its_end_is_never_left_out(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written, drawn = [1000.0], list[float](), list[float]()

    def take(seconds: float, done: list[float]) -> None:
        done.append(now[0])
        now[0] += seconds

    monkeypatch.setattr("paceline.reporting.sink.time.monotonic", lambda: now[0])
    monkeypatch.setattr(sink, "write_report", lambda *_: take(1, written))
    monkeypatch.setattr(sink, "write_results", lambda *_: take(2, drawn))
    with Run(run, "own") as opened:
        opened.sinks = [one := ReportSink(make_plan(), opened, Console(quiet=True))]
        for row in (START, *(validation_of(step, 0.5) for step in range(7, 12)), {"kind": "end", "step": 12}):
            opened.write(**row)
            if one._thread is not None:
                one._thread.join()
            now[0] += 60
    assert written == [1000, 1061, 1184, 1305, 1368]  # of validations 60 seconds apart
    assert drawn == [1062, 1306, 1369]
