"""The documents are true: key tables are current, links lead somewhere, commands name recipes that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from paceline.settings import shipped

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_recipes_that_exist(page: Path) -> None:
    for word in re.findall(r"paceline (?:train|plan|verify|recipes) ([a-z0-9]+/[a-z0-9-]+)", page.read_text()):
        assert word in shipped.names("recipes"), f"{page.name} speaks of {word}"


@pytest.mark.parametrize("page", ["recipes", "placements"])
def test_key_tables_are_what_the_code_says(page: str) -> None:
    found = importlib.util.spec_from_file_location("keys", ROOT / "docs/keys.py")
    assert found is not None
    assert found.loader is not None
    keys = importlib.util.module_from_spec(found)
    found.loader.exec_module(keys)
    text = (ROOT / f"docs/{page}.md").read_text()
    rows = keys.recipe_rows() if page == "recipes" else keys.placement_rows()
    assert keys.renewed(text, rows) == text, "run: python docs/keys.py"


@pytest.mark.parametrize("page", ["recipes", "placements"])
def test_key_tables_speak_of_settings_and_not_of_python(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    assert not re.search(r"Undefined|typing\.|Annotated|<class|from_", text)
