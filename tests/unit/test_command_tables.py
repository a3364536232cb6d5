"""Numbers for people: one form for each kind, in every command; and for scripts as they are."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from paceline.command.tables import format_value, show_facts, show_rows
from paceline.visible import plural


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("top1", 0.37931, "37.93%"),
        ("top5", 1.0, "100.00%"),
        ("loss", 0.780259, "0.7803"),
        ("loss", math.nan, "nan"),
        ("images_per_second", 12345.6, "12,346"),
        ("images_per_second", 26.2376, "26"),
        ("images_per_second", 0.4321, "0.43"),
        ("seconds", 1234.567, "1,234.57"),
        ("epoch", 1 / 3, "0.33"),
        ("images", 50000, "50,000"),
        ("lr", 0.000123456, "0.000123456"),
        ("averaged", True, "true"),
        ("layer", None, "none"),
        ("layer", "head", "head"),
    ],
)
def test_a_value_has_one_form(name: str, value: Any, expected: str) -> None:
    assert format_value(name, value) == expected


def test_things_are_counted_in_words() -> None:
    assert [plural(number, "image") for number in (0, 1, 2, 1024)] == [
        "0 images",
        "1 image",
        "2 images",
        "1,024 images",
    ]


def test_keys_read_as_words_and_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show_facts({"started_from": "[bold]step 4", "layer": None}, as_json=False, title="[a] long title")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["[a]", "long", "title"], ["started", "from", "[bold]step", "4"], ["layer", "-"]]
    show_rows([{"smallest_side": 8, "top1": 0.5, "images_per_second": 10.0}], as_json=False)
    assert capsys.readouterr().out.splitlines()[0].split() == ["smallest", "side", "top-1", "images/s"]


def test_json_keeps_plain_numbers_and_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"top1": 0.123456789, "loss": math.nan}]
    show_rows(rows, as_json=True)
    assert json.loads(capsys.readouterr().out) == [{"top1": 0.123456789, "loss": None}]
    show_facts({"the loss": math.inf, "micro-batch": 4}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"the_loss": None, "micro_batch": 4}
