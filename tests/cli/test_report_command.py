"""A run leaves a report, with pictures of its mistakes and of what it saw; in a browser, it works without a network."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser import CHROMIUM, check_charts, opened_alone
from conftest import run_in
from image_files import PAGE, WRITERS, clean_pictures
from paceline.data.index.label_file import read_relabels
from paceline.data.index.scan import open_index
from paceline.record import REPORT
from paceline.reporting.page import PLOTLY, SEEN
from paceline.reporting.pictures import ValidationPictures
from paceline.reporting.shown_run import read_run
from paceline.settings.build import build
from paceline.settings.data import Files
from paceline.settings.read import Tree
from pictures_made import write_folder
from runs_made import write_answers, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Page


class Elements(HTMLParser):
    """The attributes of every element of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append(dict(attrs))

    def all(self, name: str) -> list[str]:
        """The values of an attribute, in order."""
        return [value for one in self.attributes if (value := one.get(name)) is not None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and a run on them."""
    folder = tmp_path_factory.mktemp("report")
    write_folder(clean_pictures(60), folder / "data", 1 / 4)
    (folder / "page.yaml").write_text(PAGE)
    done = run_in(folder, "train", "page.yaml", "--data", "data", "--out", "run", "report=1 epochs", "epochs=2")
    assert done.returncode == 0, done.stderr
    assert f"Report: run/{REPORT}\n" in done.stdout
    return folder


def test_a_run_leaves_a_report_of_its_end(trained: Path) -> None:
    text = (trained / "run" / REPORT).read_text()
    assert "came to its end" in text
    assert "Worst mistakes" in text
    assert (trained / "run" / PLOTLY).is_file()
    samples = json.loads((trained / "run" / SEEN).read_text())["samples"]
    assert [len(sample["shown"]) for sample in samples] == [2] * 12
    shown = [address for address in Elements(text).all("src") if address.startswith("data:image/")]
    assert len(shown) >= 24 + 5
    assert "no picture" not in text


def test_the_command_writes_the_same_page_from_the_folder_alone(trained: Path, tmp_path: Path) -> None:
    program = "import sys; from paceline.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    done = run_in(trained, "report", "run", "--out", str(tmp_path / "one.html"), program=program)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'one.html'}\n", "")
    beside, alone = (Elements(path.read_text()) for path in (trained / "run" / REPORT, tmp_path / "one.html"))
    assert alone.all("src") == [address for address in beside.all("src") if address != PLOTLY]


def test_without_the_images_a_report_has_no_pictures_of_mistakes(trained: Path, tmp_path: Path) -> None:
    done = run_in(trained, "report", "run", "--out", str(tmp_path / "one.html"), "--data", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no picture" in (tmp_path / "one.html").read_text()


def test_a_run_that_names_no_report_leaves_none(trained: Path) -> None:
    words = ("page.yaml", "--data", "data", "--out", "quiet", "on.sinks=[console]")
    done = run_in(trained, "train", *words)
    assert done.returncode == 0, done.stderr
    assert "Report:" not in done.stdout
    assert not (trained / "quiet" / REPORT).exists()


@pytest.mark.parametrize("kind", ["folder", "tfrecord", "webdataset"])
def test_ticks_name_images_as_data_relabel_does(tmp_path: Path, kind: str) -> None:
    data = WRITERS[kind](clean_pictures(40), tmp_path / "data", 1 / 4)
    settings = build(Files, Tree({"name": "images"}, {}))
    index = open_index(settings, data)
    table = index.validation
    run = write_run(
        tmp_path / "run", text=PAGE.replace("data: {", "data: {images: 30, validation_images: 10, "), data=data
    )
    pictures = ValidationPictures(read_run(run))
    names = [table.name(number) for number in range(len(table))]
    assert all((pictures.of(name) or "").startswith("data:image/") for name in names)
    keys = [pictures.key(name) for name in names]
    (tmp_path / "relabel.csv").write_text("\n".join(["file,class", *(f"{key},{index.classes[0]}" for key in keys), ""]))
    relabel = build(Files, Tree({"name": "images", "relabel": str(tmp_path / "relabel.csv")}, {}))
    relabeled = open_index(relabel, data)
    assert set(relabeled.validation.rows["label"].tolist()) == {0}
    assert relabeled.training.rows["label"].tolist() == index.training.rows["label"].tolist()


@pytest.mark.parametrize("name", ["gone.jpg", "../../etc/passwd", "a folder", "x at byte 12", "", "\udcff.jpg"])
def test_an_image_that_cannot_be_shown_has_no_picture(tmp_path: Path, name: str) -> None:
    data = write_folder(clean_pictures(40), tmp_path / "data", 1 / 4)
    (data / "a folder").mkdir()
    run = write_run(
        tmp_path / "run", text=PAGE.replace("data: {", "data: {images: 30, validation_images: 10, "), data=data
    )
    pictures = ValidationPictures(read_run(run))
    assert pictures.of(name) is None
    if "\udcff" in name:
        assert pictures.key(name) is None  # a file of labels is UTF-8


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed, and PACELINE_BROWSER names no browser")
@pytest.mark.parametrize("dark", [False, True])
def test_a_report_works_in_a_browser_without_a_network(trained: Path, tmp_path: Path, dark: bool) -> None:
    from playwright.sync_api import sync_playwright

    odd = write_run(tmp_path / "o<b>dd", text=PAGE.replace("data: {", "data: {images: 30, validation_images: 10, "))
    images = [('a, "b".jpg', "x", "y;z", 0.1, 0.9, 2.0), ("c.jpg", "x", "y;z", 0.05, 0.5, 3.0)]
    write_answers(odd, ["x", "y;z"], [[1, 2], [0, 1]], images)
    done = run_in(trained, "report", "run", str(odd), "--out", str(tmp_path / "two.html"))
    assert done.returncode == 0, done.stderr
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for path in (trained / "run" / REPORT, tmp_path / "two.html"):
            with opened_alone(browser, path, dark) as page:
                check_charts(page, dark)
                check_paper(page)
                if path.parent == tmp_path:
                    check_relabels(page, tmp_path)
        browser.close()


def check_paper(opened: Page) -> None:
    """On paper two charts stand beside each other and nothing is closed; afterwards charts are as wide as before."""

    def width() -> float:
        return float(opened.evaluate("document.querySelector('.chart .main-svg').getBoundingClientRect().width"))

    before, closed = width(), "details:not([open])"
    marked = opened.locator(closed).count()
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert width() == 335 < before
    assert opened.locator(closed).count() == 0
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    assert abs(width() - before) < 2
    assert opened.locator(closed).count() == marked


def check_relabels(opened: Page, folder: Path) -> None:
    """Ticks download a file that data.relabel reads."""
    opened.locator("details.run summary").nth(1).click()
    block = opened.locator("details.run").nth(1)
    block.locator("[data-order=confidence]").click()
    assert block.locator("figure small").all_text_contents() == ['a, "b".jpg', "c.jpg"]
    for tick in block.locator("[data-file]").all():
        tick.check()
    block.locator("label input[type=text]").nth(1).fill("")
    with opened.expect_download() as download:
        block.locator(".download").click()
    assert download.value.suggested_filename == "relabel.csv"
    download.value.save_as(folder / "relabel.csv")
    data = build(Files, Tree({"name": "images", "relabel": str(folder / "relabel.csv")}, {}))
    assert read_relabels(data, folder) == {'a, "b".jpg': "y;z", "c.jpg": ""}
