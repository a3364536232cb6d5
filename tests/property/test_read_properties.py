"""Any valid recipe or placement survives being written to YAML and read back."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.settings import model
from paceline.settings.build import Kind, build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, changes, dump, parse
from paceline.settings.recipe import Recipe

SETTINGS = settings(deadline=None, max_examples=120, derandomize=True)

COUNTS = st.integers(1, 10**7)
FEW = st.integers(1, 1000)
PARTS = st.floats(0, 1, exclude_max=True, allow_subnormal=False)
POSITIVE = st.floats(1e-9, 1e9)
FACTORS = st.floats(0.01, 100)
COLORS = st.lists(st.floats(-10, 10), min_size=3, max_size=3)
SPREADS = st.tuples(*[st.floats(0.01, 2.0)] * 3).map(list)
WORDS = st.text(st.characters(codec="utf-8", categories=["L", "P", "S", "Zs"]), max_size=30)
UNITS = st.sampled_from(["epochs", "steps", "images", "%"])
AMOUNTS = st.one_of(
    st.integers(1, 10**6).map(str),
    st.decimals("0.001", "1000", places=3).map(str),
    st.tuples(st.integers(1, 99), st.integers(1, 99)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
)
DURATIONS = st.tuples(AMOUNTS, UNITS).map(" ".join)
LENGTHS = st.tuples(AMOUNTS, st.sampled_from(["epochs", "steps", "images"])).map(" ".join)
IMAGES = st.tuples(AMOUNTS, st.sampled_from(["steps", "images"])).map(" ".join)
TIMES = st.tuples(AMOUNTS, st.sampled_from(["seconds", "minutes", "hours"])).map(" ".join)
RATES = st.one_of(
    st.floats(0, 1e6),
    st.integers(0, 100),
    st.integers(-30, 5).map(lambda power: f"2^{power} per image"),
    st.tuples(st.decimals("0.001", "10", places=3), COUNTS).map(lambda pair: f"{pair[0]} per {pair[1]} images"),
)


def kind(name: str | tuple[str, ...], needed: dict[str, Any] | None = None, **keys: Any) -> st.SearchStrategy[Any]:
    """Settings of one kind: its name, what it needs, and any of its other keys."""
    names = st.sampled_from([name] if isinstance(name, str) else list(name))
    return st.fixed_dictionaries({"name": names, **(needed or {})}, optional=keys)


def names(model: type[model.Model]) -> tuple[str, ...]:
    """The names of a family's networks."""
    found: tuple[str, ...] = typing.get_args(model.model_fields["name"].annotation)
    return found


STEMS: dict[str, Any] = {"version": st.sampled_from(["v1", "v1.5"]), "stem": st.sampled_from(["7x7", "3x3"])}
GROUPED: dict[str, Any] = {"cardinality": FEW, "group_width": FEW}
THREE = st.tuples(FEW, FEW, FEW).map(list)
BLOCKS = st.sampled_from(["stem", "stage1", "stage1/unit1", "head", "all"])
FAMILIES: dict[type[model.Model], st.SearchStrategy[Any]] = {
    model.AlexNet: kind(names(model.AlexNet), dropout=PARTS),
    model.Vgg: kind(names(model.Vgg), head=st.sampled_from(["dense", "mean"]), dropout=PARTS),
    model.GoogLeNet: kind(
        names(model.GoogLeNet), auxiliary=POSITIVE, dropout=PARTS, auxiliary_dropout=PARTS
    ),
    model.InceptionV3: kind(names(model.InceptionV3), auxiliary=st.just(0), dropout=PARTS),
    model.InceptionV4: kind(names(model.InceptionV4), dropout=PARTS),
    model.InceptionResNetV2: kind(
        names(model.InceptionResNetV2), units=THREE, residual_scale=st.tuples(*[POSITIVE] * 3).map(list)
    ),
    model.ResNet: kind(names(model.ResNet), first_projection=st.booleans(), **STEMS),
    model.CifarResNet: kind(
        names(model.CifarResNet), shortcut=st.sampled_from(["auto", "pad", "projection"])
    ),
    model.ResNeXt: kind(names(model.ResNeXt), **STEMS, **GROUPED),
    model.CifarResNeXt: kind(names(model.CifarResNeXt), wide=st.booleans(), **GROUPED),
    model.EfficientNet: kind(
        names(model.EfficientNet), width=st.one_of(st.none(), FACTORS), depth=FACTORS, divisor=FEW,
        top_width=FEW, expand_ratio=FEW, group_dim=FEW, squeeze_excite=PARTS, survival=st.floats(0.01, 1),
        dropout=st.one_of(st.none(), PARTS), activation=st.sampled_from(["silu", "relu"]),
    ),
    model.MobileNetV2: kind(names(model.MobileNetV2), width=FACTORS, dropout=PARTS),
    model.MobileNetV3: kind(names(model.MobileNetV3), width=FACTORS, dropout=PARTS),
    model.External: st.one_of(
        kind(names(model.External), {"network": WORDS}, auxiliary=POSITIVE),
        kind(("timm:convnext_tiny", "torchvision:resnet18"), auxiliary=POSITIVE),
        st.just("timm:hf-hub:someone/some.thing"),
    ),
}  # fmt: skip
MODELS = st.one_of(*FAMILIES.values(), st.sampled_from(["resnet20", "resnet50", "vgg11-bn"]))
DATA = st.one_of(
    st.none(),
    kind("shapes", mean=COLORS, std=SPREADS),
    kind(("cifar10", "cifar100"), mean=COLORS),
    kind(("generated", "synthetic"), images=COUNTS, validation_images=COUNTS, classes=FEW, side=FEW, std=SPREADS),
)
SCHEDULES = st.one_of(
    kind("constant", warmup=DURATIONS),
    kind("stepped", {"drops": st.lists(DURATIONS, max_size=4)}, factor=POSITIVE, warmup=DURATIONS),
    kind("cosine", warmup=DURATIONS, after_warmup=st.booleans()),
    kind("exponential", {"every": DURATIONS}, factor=POSITIVE),
    kind("polynomial", power=POSITIVE, end=st.floats(0, 1), first=st.sampled_from([0, 1]), extra_steps=COUNTS),
)
RECIPES = st.fixed_dictionaries(
    {
        "model": MODELS,
        "global_batch": COUNTS,
        "epochs": st.one_of(POSITIVE, st.integers(1, 1000), LENGTHS),
        "optimizer": st.one_of(
            kind("sgd", {"lr": RATES}, momentum=PARTS, nesterov=st.booleans()), kind("adamw", {"lr": RATES})
        ),
        "schedule": SCHEDULES,
    },
    optional={
        "about": WORDS,
        "data": DATA,
        "norm_batch": COUNTS,
        "drop_last": st.booleans(),
        "seed": st.integers(-(2**62), 2**62),
        "norm": st.one_of(
            kind("batch", momentum=st.one_of(st.none(), st.floats(0.001, 1)), epsilon=POSITIVE),
            kind("group", groups=COUNTS, proxy=st.booleans(), proxy_epsilon=POSITIVE, epsilon=POSITIVE),
            kind("none"),
        ),
        "init": st.fixed_dictionaries(
            {},
            optional={
                "conv": st.sampled_from(["published", "he-mixed", "normal-0.1"]),
                "dense": st.sampled_from(["published", "uniform-fan-out"]),
                "zero_gamma": st.sampled_from(["none", "residual", "identity"]),
                "from": st.one_of(st.none(), WORDS, st.sampled_from(["runs/a", "timm:resnet18", "1e5", "null"])),
            },
        ),
        "freeze": st.lists(BLOCKS, max_size=3),
        "lr_factors": st.dictionaries(BLOCKS, st.floats(0, 100), max_size=3),
        "weight_decay": st.fixed_dictionaries(
            {},
            optional={
                "rate": st.floats(0, 1),
                "skip_names": st.lists(WORDS, max_size=3),
                "skip_dimensions": st.lists(st.integers(0, 4), max_size=3),
            },
        ),
        "loss": st.fixed_dictionaries(
            {},
            optional={
                "label_smoothing": PARTS,
                "class_weights": st.one_of(
                    st.sampled_from(["none", "balanced"]),
                    st.dictionaries(WORDS, st.floats(1e-3, 1e9), min_size=1, max_size=3),
                ),
            },
        ),
        "augment": st.fixed_dictionaries({}, optional={"pad": st.integers(0, 9), "flip": st.booleans()}),
        "evaluate": st.fixed_dictionaries(
            {},
            optional={
                "every": st.one_of(DURATIONS, st.just("never")),
                "offset": DURATIONS,
                "limit": st.one_of(st.none(), IMAGES),
            },
        ),
        "report": st.one_of(DURATIONS, TIMES),
    },
)
OR_AUTO = st.one_of(st.just("auto"), COUNTS)
PLACEMENTS = st.fixed_dictionaries(
    {},
    optional={
        "device": st.sampled_from(["auto", "cpu", "cuda", "mps"]),
        "replicas": OR_AUTO,
        "micro_batch": OR_AUTO,
        "precision": st.sampled_from(["auto", "fp64", "fp32", "bf16"]),
        "compile": st.booleans(),
        "recompute": st.one_of(BLOCKS, st.lists(BLOCKS, max_size=3)),
        "shard": st.sampled_from(["none", "optimizer"]),
        "offload": st.sampled_from(["none", "optimizer"]),
        "data_on_device": st.sampled_from(["auto", True, False]),
        "loader_workers": OR_AUTO,
        "timeout": POSITIVE,
        "save": st.one_of(DURATIONS, TIMES),
        "save_offset": DURATIONS,
        "keep_last": COUNTS,
        "keep_every": st.one_of(st.none(), DURATIONS, TIMES),
    },
)


def test_every_family_is_tried() -> None:
    assert set(FAMILIES) == set(typing.get_args(model.Model))


def round_trip(settings_of_a_kind: Kind) -> Kind:
    """What is read back from the page that was written."""
    return build(type(settings_of_a_kind), parse(dump(settings_of_a_kind), "dump"))


@SETTINGS
@given(values=RECIPES)
def test_a_recipe_survives_being_written_and_read(values: dict[str, Any]) -> None:
    recipe = build(Recipe, Tree(values))
    again = round_trip(recipe)
    assert changes(recipe, again) == []
    assert dump(again) == dump(recipe)
    assert again.optimizer.lr.at(256) == recipe.optimizer.lr.at(256)
    assert again.model_copy(update={"optimizer": recipe.optimizer}) == recipe


@SETTINGS
@given(values=PLACEMENTS)
def test_a_placement_survives_being_written_and_read(values: dict[str, Any]) -> None:
    placement = build(Placement, Tree(values))
    assert round_trip(placement) == placement


@SETTINGS
@given(values=RECIPES)
def test_where_values_came_from_is_written_as_comments_only(values: dict[str, Any]) -> None:
    recipe = build(Recipe, Tree(values))
    traced = dump(recipe, Tree(values, {(): "page.yaml"}))
    assert parse(traced, "dump").values == parse(dump(recipe), "dump").values


@SETTINGS
@given(text=st.text(max_size=40))
def test_any_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SpecError) as caught:  # no short text is a whole recipe
        build(Recipe, parse(text, "page.yaml"))
    assert str(caught.value).startswith("page.yaml:")
    assert "\n" not in str(caught.value)
