"""From a fresh clone to a report in a browser, by what the README says and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from browser import CHROMIUM, check_charts, opened_alone
from conftest import environment
from documents import ROOT, commands_of


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed, and PACELINE_BROWSER names no browser")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone that could be cloned")
def test_the_first_command_of_the_readme_leads_from_a_clone_to_a_report() -> None:
    from playwright.sync_api import sync_playwright

    first = next(commands_of(ROOT / "README.md")).command
    assert first.startswith("make demo")
    with TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(clone)], check=True)
        env = {key: value for key, value in environment().items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(["bash", "-c", first], cwd=clone, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        accuracy, report = re.findall(r"^top-1 (\d+\.\d+)%|^Report: (.*)$", done.stdout, re.MULTILINE)
        assert float(accuracy[0]) > 99
        changed = subprocess.run(["git", "status", "--short"], cwd=clone, capture_output=True, text=True, check=True)
        assert changed.stdout == ""
        with sync_playwright() as player:
            browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            for dark in (False, True):
                with opened_alone(browser, clone / report[1], dark) as page:
                    check_charts(page, dark)
                    assert page.locator("h1").is_visible()
            browser.close()
