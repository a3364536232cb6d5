"""`paceline models` as a user types it: the list, one network's settings, its blocks, and what is refused."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from conftest import Paceline
from paceline.command import models
from paceline.command.models import settings_of
from paceline.errors import PlanError
from paceline.model import tables
from paceline.settings.recipe import Recipe
from paceline.settings.schema import fields, kinds

FAKE = """
from torch import nn

def create_model(name, pretrained=False, num_classes=1000, in_chans=3):
    if name != "tiny":
        raise RuntimeError(f"Unknown model ({name})")
    body = [nn.Conv2d(in_chans, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
"""
"""A package that stands in for timm, and has one network."""


def words_of(text: str) -> list[list[str]]:
    """The lines of a table as words."""
    return [line.split() for line in text.splitlines()]


def refusal(paceline: Paceline, *words: str) -> str:
    """The one line that a refused command prints."""
    done = paceline("models", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("error: ").removesuffix("\n")


def test_models_lists_every_network_as_table_and_json(paceline: Paceline) -> None:
    rows = json.loads(paceline("models", "--json").stdout)
    assert [row["name"] for row in rows] == [member.name for member in tables.MEMBERS]
    assert rows[0] == {
        "name": "alexnet", "parameters": 61_100_840, "classes": 1000, "side": 224, "smallest_side": 63,
    }  # fmt: skip
    table = words_of(paceline("models").stdout)
    assert table[0] == ["name", "parameters", "classes", "side", "smallest", "side"]
    assert table[1] == ["alexnet", "61,100,840", "1,000", "224", "63"]
    assert [line[0] for line in table[1:]] == [row["name"] for row in rows]


def test_a_network_is_printed_with_its_facts_and_settings(paceline: Paceline) -> None:
    one = json.loads(paceline("models", "inception-resnet-v2", "--json").stdout)
    settings = {row.pop("key"): row for row in one.pop("settings")}
    assert one == {
        "name": "inception-resnet-v2", "parameters": 55_843_464, "activations": 46_049_835, "classes": 1000,
        "side": 299, "stride": 37, "smallest_side": 75,
    }  # fmt: skip
    assert settings["units"]["default"] == [10, 20, 10]
    assert settings["dropout"]["meaning"].startswith("Fraction of the features dropped")
    shown = paceline("models", "vgg16").stdout
    assert "138,357,544" in shown
    assert "model.KEY=VALUE" in shown
    (head,) = [line for line in words_of(shown) if line[:1] == ["head"]]
    assert head[1:4] == ["dense", "dense,", "mean"]


def test_a_network_of_another_package_is_printed_without_the_package(paceline: Paceline) -> None:
    one = json.loads(paceline("models", "timm:resnet18", "--json").stdout)
    assert one["name"] == "timm:resnet18"
    assert [(row["key"], row["default"]) for row in one["settings"]] == [("network", "needed"), ("auxiliary", 0.3)]
    assert "needed" in paceline("models", "torchvision:resnet18").stdout


def test_every_setting_of_every_network_is_shown_in_plain_words() -> None:
    model = fields(Recipe)["model"]
    for name, kind in kinds(model).items():
        for row in settings_of(kind):
            assert row["meaning"], name
            assert row["choices"], name
            assert not set("<>[]=") & set(row["choices"]), row["choices"]
            json.dumps(row)


def test_the_choices_of_a_setting_are_listed() -> None:
    found = {
        (name, row["key"]): row["choices"]
        for name, kind in kinds(fields(Recipe)["model"]).items()
        for row in settings_of(kind)
    }
    assert found["resnet50", "stem"] == "7x7, 3x3"
    assert found["resnet50", "first_projection"] == "bool"
    assert found["efficientnet-b0", "width"] == "float"
    assert found["efficientnet-b0", "divisor"] == "int"
    assert found["inception-resnet-v2", "units"] == "int, int, int"
    assert found["timm", "network"] == "str"


Blocks = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def blocks_of(capsys: pytest.CaptureFixture[str]) -> Blocks:
    """What `models NAME WORDS --blocks --side SIDE --json` prints, without a process of its own."""

    def run(name: str, *words: str, side: int | None = None) -> list[dict[str, Any]]:
        models.run(name, list(words), blocks=True, side=side, as_json=True)
        rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return rows

    return run


def test_blocks_are_printed_with_what_they_cost_and_their_sum(
    paceline: Paceline, capsys: pytest.CaptureFixture[str]
) -> None:
    done = paceline("models", "resnet8", "--blocks", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == ["stem", "stage1/unit1", "stage2/unit1", "stage3/unit1", "head", "all"]
    assert rows[0] == {
        "name": "stem", "parameters": 464, "activation_bytes": 4 * 32 * 32 * 35, "multiply_adds": 32 * 32 * 3 * 16 * 9,
    }  # fmt: skip
    for key in ("parameters", "activation_bytes", "multiply_adds"):
        assert rows[-1][key] == sum(row[key] for row in rows[:-1])
    member = tables.member("resnet8")
    assert (rows[-1]["parameters"], rows[-1]["activation_bytes"]) == (member.parameters, 4 * member.activations)
    models.run("resnet8", [], blocks=True, side=None, as_json=False)
    table = words_of(capsys.readouterr().out)
    assert table[0] == ["name", "parameters", "activation", "bytes", "multiply", "adds"]
    assert table[1] == ["stem", "464", "143,360", "442,368"]
    assert table[-1][:2] == ["all", "75,290"]


def test_a_side_and_settings_change_what_blocks_cost(blocks_of: Blocks) -> None:
    native, small = blocks_of("resnet18"), blocks_of("resnet18", side=112)
    assert small[-1]["parameters"] == native[-1]["parameters"] == 11_689_512
    assert 4 * small[0]["multiply_adds"] == native[0]["multiply_adds"]
    fine = blocks_of("resnet18", "model.stem=3x3", side=112)
    assert fine[0]["multiply_adds"] == 112 * 112 * 3 * 64 * 9
    fewer = blocks_of("inception-v3", "model.auxiliary=0", side=75)
    assert "aux" not in [row["name"] for row in fewer]
    assert fewer[-1]["parameters"] == 23_834_568


def test_another_package_s_network_is_one_block(blocks_of: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("timm")
    fake.__spec__ = ModuleSpec("timm", None)
    exec(FAKE, fake.__dict__)
    monkeypatch.setitem(sys.modules, "timm", fake)
    network, total = blocks_of("timm:tiny", side=8)
    parameters = 3 * 4 * 9 + 2 * 4 + 5 * 1000
    assert (network["name"], network["parameters"], network["multiply_adds"]) == (
        "network", parameters, 4 * 4 * 3 * 4 * 9 + 4 * 1000,
    )  # fmt: skip
    assert total == {**network, "name": "all"}
    with pytest.raises(PlanError, match=r"^timm:large: timm cannot make it: Unknown model \(large\)$"):
        blocks_of("timm:large")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnt50",), "'model=resnt50': model: no model is named 'resnt50'; did you mean 'resnet50'?"),
        (("timm",), "'model=timm': model: timm needs 'network'"),
        (("resnet50", "model.stem=5x5"), "'model.stem=5x5': model.stem: expected 7x7 or 3x3, found '5x5'"),
        (("resnet50", "model.stm=3x3"), "'model.stm=3x3': model: resnet50 has no 'stm'; did you mean 'stem'?"),
        (("alexnet", "--blocks", "--side", "62"), "alexnet needs images of at least 63 pixels a side, not 62"),
        (("vgg11", "--blocks", "--side", "31"), "vgg11 needs images of at least 32 pixels a side, not 31"),
        (("inception-v3", "--blocks", "--side", "75"), "inception-v3 needs images of at least 299 pixels a side"),
        (
            ("efficientnet-b0", "model.group_dim=7", "--blocks"),
            "model.group_dim: 96 channels cannot be split into 13 groups of about 7; write model.divisor=7",
        ),
        (("--blocks",), "--blocks prints those of one network; write its name"),
        (("resnet50", "--side", "64"), "--side is the image side for --blocks; write both"),
        (("--side", "64"), "--side is the image side for --blocks; write both"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_one_line(paceline: Paceline, words: tuple[str, ...], message: str) -> None:
    found = refusal(paceline, *words)
    assert found.startswith(message), found


def test_a_package_that_is_not_installed_is_said_to_be(paceline: Paceline) -> None:
    program = "import sys; sys.modules['timm'] = None; from paceline.cli import main; main()"  # even if it is
    done = paceline("models", "timm:resnet18", "--blocks", program=program)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model: timm is not installed; ")
    assert " a network of Paceline's" in done.stderr


def test_images_too_small_are_refused_before_torch_is_loaded(paceline: Paceline) -> None:
    program = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
    done = paceline("models", "alexnet", "--blocks", "--side", "62", program=program)
    assert done.stderr == "error: alexnet needs images of at least 63 pixels a side, not 62\n"


def test_a_side_below_one_is_refused(paceline: Paceline) -> None:
    assert paceline("models", "resnet50", "--blocks", "--side", "0").returncode == 2


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        (("efficientnet-b4", "model.group_dim=16", "model.expand_ratio=4"), 19_328_168),
        (("resnet18", "model.first_projection=true"), 11_693_736),
        (("resnet18",), 11_689_512),
    ],
)
def test_parameters_of_a_changed_network_are_its_own(
    paceline: Paceline, words: tuple[str, ...], parameters: int
) -> None:
    assert json.loads(paceline("models", *words, "--json").stdout)["parameters"] == parameters
