"""The configuration names of older systems lead to a recipe and a placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Paceline
from paceline.command.notes import notes_of
from paceline.errors import SpecError
from paceline.job import make_job
from paceline.settings import shipped
from paceline.settings.configurations import configurations, named, stands_for

LIST = (Path(__file__).parents[1] / "golden/older_names.txt").read_text()
NAMES = {name: tuple(map(int, numbers)) for name, *numbers in map(str.split, LIST.splitlines()) if name != "#"}
INFERENCE = {
    "resnet50-mk2": ("resnet50", 90), "resnet50-mk1": ("resnet50", 8), "efficientnet-b0-mk2": ("efficientnet-b0", 49),
    "efficientnet-b0-mk1": ("efficientnet-b0", 11), "efficientnet-b4-mk2": ("efficientnet-b4", 12),
    "efficientnet-b0-g16-gn-mk2": ("efficientnet-b0", 106), "efficientnet-b4-g16-gn-mk2": ("efficientnet-b4", 26),
    "mobilenet-v3-small-mk2": ("mobilenet-v3-small", 224), "mobilenet-v3-large-mk2": ("mobilenet-v3-large", 64),
}  # fmt: skip
"""Graphcore PyTorch's configurations of inference: network and batch."""


@pytest.mark.parametrize("name", NAMES)
def test_an_older_name_plans_what_it_trained(name: str) -> None:
    job = make_job(name, [], None, None, None, None, look=False)
    plan = job.plan
    assert (plan.replicas, plan.micro_batch, plan.rounds, plan.recipe.epochs) == NAMES[name]
    assert notes_of(job, None)[0].startswith(f"{name} is {named(name)[0].recipe} --on ")
    assert named(name.replace("_", "-")) == named(name.replace("-", "_")) == named(name)


@pytest.mark.parametrize("name", INFERENCE)
def test_an_older_configuration_of_inference_has_its_network_and_batch(name: str) -> None:
    network, batch = INFERENCE[name]
    plan = make_job(name, [], None, None, None, None, look=False).plan
    assert (plan.recipe.model.name, plan.replicas, plan.placement.precision) == (network, 1, "fp16")
    assert stands_for(name) == [
        f"{name} is {named(name)[0]}; it is for inference at a batch of {batch}: paceline bench infer {name}"
    ]


def test_every_pair_of_the_table_is_shipped() -> None:
    for each in configurations():
        assert each.recipe in shipped.names("recipes")
        assert each.placement in shipped.names("placements")


def test_every_older_name_of_the_table_is_on_the_list() -> None:
    on_list = {*NAMES, *INFERENCE, "resnet50", "mobilenet-v3-small", "mobilenet-v3-large"}  # the last are networks too
    assert {each.name for each in configurations() if each.name} == on_list


def test_the_name_of_a_network_is_no_older_name() -> None:
    assert named("resnet50") == []
    with pytest.raises(SpecError, match="no recipe is named 'resnet50'; there is images/resnet50-finetune"):
        shipped.page("recipes", "resnet50")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("mk2_resnet50_mlperf_pod32_bs20", "; near it are mk2_resnet50_mlperf_pod"),
        ("gn_16ipus", "; near it are mk2_resnet50_gn_16ipus, of older systems"),
        ("mk3_vit_b16", "paceline recipes --all lists all"),
    ],
)
def test_a_name_that_is_none_gives_honest_help(word: str, said: str) -> None:
    with pytest.raises(SpecError) as fault:
        shipped.page("recipes", word)
    assert said in str(fault.value)
    assert "did you mean" not in str(fault.value)


def test_an_older_name_trains_and_another_placement_replaces_its_own(paceline: Paceline, tmp_path: Path) -> None:
    small = ["data=generated", "data.images=64", "data.validation_images=8", "epochs=1"]
    small += ["on.device=cpu", "on.precision=fp32", "on.weights=fp32", "on.loss_scale=1"]
    done = paceline("train", "mk2_resnet8_test", *small, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "mk2_resnet8_test is graphcore/resnet8 --on graphcore/mk2-resnet8-test" in done.stdout
    printed = paceline("plan", "mk2_resnet8_test", "--on", "float64", "--json").stdout
    assert json.loads(printed)["precision"] == "fp64"
    printed = paceline("plan", "shapes/resnet8", "--on", "mk2_resnet8_test", "--json").stdout
    assert json.loads(printed)["micro_batch"] == 32


def test_placements_are_listed_with_their_older_names_hosts_devices_and_recipes(paceline: Paceline) -> None:
    rows = {row["name"]: row for row in json.loads(paceline("placements", "--json").stdout)}
    assert set(rows) == set(shipped.names("placements"))
    row = rows["graphcore/mk2-resnet50-bn-64ipus"]
    assert (row["older_name"][0], row["hosts"], row["devices"]) == ("mk2_resnet50_bn_64ipus", 4, 64)
    assert row["recipes"] == ["graphcore/resnet50-momentum-16384"]
    listed = paceline("placements", "nvcnn").stdout
    assert "nvcnn/8gpu" in listed
    assert "graphcore" not in listed
    assert paceline("placements", "float64").stdout == shipped.page("placements", "float64")[0]


def test_recipes_show_the_placements_that_belong_to_them(paceline: Paceline) -> None:
    rows = {row["name"]: row for row in json.loads(paceline("recipes", "--all", "--json").stdout)}
    assert rows["habana/resnet50-2048"]["placements"] == ["habana/8cards-bf16"]
    page = paceline("recipes", "mk2_resnext101_16ipus").stdout
    assert page.endswith("# published with --on graphcore/mk2-resnext101-16ipus\n")
