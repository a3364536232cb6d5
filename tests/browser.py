"""Opens reports in a real browser, and holds that they work without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


CHROMIUM = os.environ.get("PACELINE_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
"""The browser that is asked, if there is one."""


@contextmanager
def opened_alone(browser: Browser, path: Path, dark: bool) -> Iterator[Page]:
    """A page in a browser, which says nothing on its console and asks for nothing from elsewhere."""
    page = browser.new_page(color_scheme="dark" if dark else "light")
    said, requests = list[str](), list[str]()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda fault: said.append(str(fault)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    yield page
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert said == []
    page.close()


def check_charts(opened: Page, dark: bool) -> None:
    """Curves are drawn, hovering shows values, and the colors are those of the reader."""
    charts = opened.locator(".chart")
    assert charts.count() >= 6
    for number in range(charts.count()):
        assert charts.nth(number).locator(".scatterlayer path").count() > 0
    charts.first.scroll_into_view_if_needed()
    box: Any = charts.first.bounding_box()
    opened.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.wait_for_selector(".hoverlayer .legendtext")
    assert "step" in (opened.locator(".hoverlayer").first.text_content() or "")
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") != dark
