"""Recipe and placement reconciled: what is decided, what is refused, and what a refusal suggests."""

from __future__ import annotations

import math
from typing import Any

import pytest

from conftest import SMALL, make_plan, make_recipe
from paceline import layouts
from paceline import reconcile as planning
from paceline.errors import PlanError, UserError
from paceline.facts import NetworkFacts
from paceline.launch import Launch
from paceline.machine import Machine
from paceline.planning import Plan
from paceline.settings import placement
from paceline.settings.placement import Placement

GIB = 1 << 30
PLACES: list[dict[str, Any]] = [{"device": "cuda", "precision": "fp32"}, {"device": "cuda"}, {"device": "cpu"}]
SMALL_NETWORK = NetworkFacts(parameters=100_000, activations=200_000)
LAPTOP = Machine(cores=8, memory=16 * GIB)
SERVER = Machine(cores=64, memory=512 * GIB, accelerators=8, accelerator="X", accelerator_memory=80 * GIB)


def decide(
    *words: str,
    machine: Machine = LAPTOP,
    network: NetworkFacts = SMALL_NETWORK,
    launch: Launch | None = None,
    **on: object,
) -> Plan:
    """The plan of a small recipe on a placement and a machine."""
    recipe = make_recipe(*words)
    assert recipe.data is not None
    return planning.make_plan(recipe, Placement.model_validate(on), machine, network, launch)


def test_every_placement_key_is_of_exactly_one_kind() -> None:
    kinds = [placement.keys(kind) for kind in ("layout", "arithmetic", "keeping")]
    assert sorted(key for keys in kinds for key in keys) == sorted(Placement.model_fields)


def test_what_the_design_calls_layout_and_arithmetic_is_marked_so() -> None:
    assert {"replicas", "micro_batch", "loader_workers", "data_on_device"} <= set(placement.keys("layout"))
    assert {"device", "precision", "compile", "deterministic"} <= set(placement.keys("arithmetic"))
    keeping = {"about", "save", "save_offset", "keep_last", "keep_best", "keep_every", "sinks", "time_limit"}
    assert keeping | {"histograms", "samples"} == set(placement.keys("keeping"))


def test_no_auto_is_left_in_a_plan() -> None:
    decided = decide().placement.model_dump()
    assert "auto" not in decided.values()
    assert decided.keys() == Placement.model_fields.keys()


@pytest.mark.parametrize(
    ("machine", "asked", "device", "replicas", "precision"),
    [
        (LAPTOP, {}, "cpu", 1, "fp32"),
        (SERVER, {}, "cuda", 8, "bf16"),
        (SERVER, {"device": "cpu"}, "cpu", 1, "fp32"),
        (SERVER, {"replicas": 2}, "cuda", 2, "bf16"),
        (SERVER, {"precision": "fp32"}, "cuda", 8, "fp32"),
        (LAPTOP, {"device": "mps"}, "mps", 1, "fp32"),
        (LAPTOP, {"precision": "fp64", "replicas": 4}, "cpu", 4, "fp64"),
        (LAPTOP, {"device": "cuda"}, "cuda", 1, "bf16"),
    ],
)
def test_device_replicas_and_precision_follow_the_machine_unless_asked(
    machine: Machine, asked: dict[str, Any], device: str, replicas: int, precision: str
) -> None:
    placed = decide("norm_batch=2", machine=machine, **asked).placement
    assert (placed.device, placed.replicas, placed.precision) == (device, replicas, precision)


@pytest.mark.parametrize(
    ("machine", "asked", "cpu_threads", "loader_workers"),
    [
        (LAPTOP, {}, 8, 8),
        (LAPTOP, {"replicas": 4}, 2, 2),
        (LAPTOP, {"replicas": 16}, 1, 1),
        (SERVER, {}, 8, 8),
        (SERVER, {"replicas": 2}, 32, 16),
        (SERVER, {"device": "cpu"}, 64, 16),
        (LAPTOP, {"cpu_threads": 3, "loader_workers": 5}, 3, 5),
    ],
)
def test_cores_are_shared_between_replicas(
    machine: Machine, asked: dict[str, Any], cpu_threads: int, loader_workers: int
) -> None:
    placed = decide("norm_batch=1", machine=machine, **asked).placement
    assert (placed.cpu_threads, placed.loader_workers) == (cpu_threads, loader_workers)


@pytest.mark.parametrize(
    ("words", "on_device"),
    [
        ((), True),
        (("data.side=224", "data.images=1000"), True),
        (("data.side=224", "data.images=1000000"), False),
        (("data.side=224", "data.images=7000", "augment.pad=0"), True),
        (("data.side=224", "data.images=7000", "augment.pad=4"), False),  # the border counts as well
    ],
)
def test_small_data_stays_on_the_device(words: tuple[str, ...], on_device: bool) -> None:
    assert decide(*words).placement.data_on_device is on_device
    assert decide(*words, data_on_device=not on_device).placement.data_on_device is not on_device


def launch(count: int, local_count: int) -> Launch:
    return Launch(0, count, 0, local_count, "host", 1, store_is_there=False)


def test_a_launcher_s_processes_are_the_replicas() -> None:
    assert decide(launch=launch(4, 4)).replicas == 4
    assert decide(launch=launch(4, 4), replicas=4).replicas == 4
    with pytest.raises(PlanError, match=r"^the launcher started 4 processes, and on.replicas is 2; make them equal$"):
        decide(launch=launch(4, 4), replicas=2)


def test_gradients_travel_as_they_are_unless_bf16_is_asked_for() -> None:
    assert decide().placement.communication == "fp32"
    assert decide(precision="fp64").placement.communication == "fp64"
    assert decide(precision="fp64", communication="bf16").placement.communication == "bf16"
    message = r"^on.communication=fp32 does not go with on.precision=fp64, .* write on.communication=fp64 or bf16"
    with pytest.raises(PlanError, match=message):
        decide(precision="fp64", communication="fp32")


@pytest.mark.parametrize(
    ("machine", "asked", "memory"),
    [
        (LAPTOP, {}, 4 * GIB),
        (LAPTOP, {"replicas": 2}, 2 * GIB),
        (LAPTOP, {"memory": "3 GiB"}, 3 * GIB),
        (SERVER, {}, 80 * GIB),
        (SERVER, {"memory": "20 GiB"}, 20 * GIB),
        (LAPTOP, {"device": "cuda"}, 16 * GIB),
        (LAPTOP, {"device": "cuda", "memory": "100 GiB"}, 100 * GIB),  # of another machine
    ],
)
def test_a_process_may_take_its_device_s_memory_unless_less_is_asked_for(
    machine: Machine, asked: dict[str, Any], memory: int
) -> None:
    assert decide("norm_batch=1", machine=machine, **asked).placement.memory == memory


@pytest.mark.parametrize(("machine", "device"), [(LAPTOP, "cpu"), (SERVER, "cuda")])
def test_more_memory_than_there_is_is_refused(machine: Machine, device: str) -> None:
    with pytest.raises(PlanError, match=r"^on.memory is 107,374,182,400 bytes, and there are .*; write at most that"):
        decide(machine=machine, device=device, memory="100 GiB")


@pytest.mark.parametrize(("memory", "recompute"), [("1 GiB", ()), ("10 MiB", ("all",))])
def test_without_a_probe_all_or_nothing_is_recomputed(memory: str, recompute: tuple[str, ...]) -> None:
    plan = decide(
        "norm_batch=16",
        device="cpu",
        memory=memory,
        recompute="auto",
        network=NetworkFacts(1000, 200_000, blocks=("a", "b")),
    )
    assert plan.placement.recompute == recompute
    assert plan.micro_batch == 16


def test_the_processes_of_one_host_share_its_cores() -> None:
    placed = decide(launch=launch(4, 2)).placement
    assert (placed.cpu_threads, placed.loader_workers) == (4, 4)
    bound = Machine(cores=3, memory=16 * GIB, bound=True)  # the launcher has cut the host's cores up already
    assert decide(launch=launch(4, 2), machine=bound).placement.cpu_threads == 3


def test_more_replicas_than_accelerators_are_refused_unless_a_launcher_has_more_hosts() -> None:
    with pytest.raises(PlanError, match=r"^on.replicas=16, and only 8 accelerators are visible$"):
        decide("norm_batch=1", machine=SERVER, replicas=16)
    assert decide("norm_batch=1", machine=SERVER, launch=launch(16, 8)).replicas == 16
    assert decide("norm_batch=1", machine=SERVER, replicas=16, device="cpu").replicas == 16


@pytest.mark.parametrize(
    ("words", "replicas", "micro_batch"),
    [
        (("global_batch=64", "norm_batch=4"), 1, 64),
        (("global_batch=64", "norm_batch=4"), 2, 32),
        (("global_batch=64", "norm_batch=4"), 16, 4),
        (("global_batch=64", "norm_batch=64"), 1, 64),
        (("global_batch=64", "norm_batch=64"), 4, 16),  # one norm group across all four
        (("global_batch=64", "norm=none"), 8, 8),
        (("global_batch=12", "norm_batch=4"), 3, 4),
    ],
)
def test_auto_gives_every_replica_as_large_a_micro_batch_as_there_is(
    words: tuple[str, ...], replicas: int, micro_batch: int
) -> None:
    plan = decide(*words, replicas=replicas)
    assert plan.micro_batch == micro_batch
    assert plan.rounds == 1


@pytest.mark.parametrize("memory", [GIB // 8, GIB, 16 * GIB])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_micro_batch_uses_at_most_its_share_of_the_memory(memory: int, precision: str, replicas: int) -> None:
    words = ("global_batch=4096", "norm_batch=2")
    network = NetworkFacts(parameters=100_000, activations=200_000)
    machine = Machine(cores=2, memory=memory)
    m = decide(*words, machine=machine, network=network, precision=precision, replicas=replicas).micro_batch
    width = 8 if precision == "fp64" else 4

    def needed(size: int) -> int:
        return 2 * width * network.activations * size + 4 * width * network.parameters

    room = memory / 4 / replicas
    assert needed(m) <= room
    assert m == 4096 // replicas or needed(2 * m) > room


def test_an_accelerator_s_memory_counts_where_it_computes() -> None:
    tiny = Machine(cores=64, memory=512 * GIB, accelerators=1, accelerator="X", accelerator_memory=GIB)
    network = NetworkFacts(parameters=25_000_000, activations=22_000_000)
    words = ("global_batch=256", "norm_batch=1")
    sizes = [decide(*words, machine=tiny, network=network, **asked).micro_batch for asked in PLACES]
    assert sizes == [2, 4, 256]


def test_a_network_too_large_for_the_memory_still_gets_a_micro_batch() -> None:
    machine = Machine(cores=2, memory=1 << 20)
    assert decide("global_batch=16", "norm_batch=4", machine=machine).micro_batch == 4


@pytest.mark.parametrize(
    ("words", "asked", "message"),
    [
        (
            (),
            {"micro_batch": 5},
            "on.micro_batch 5 does not divide global_batch 16; the nearest that fits is on.micro_batch=4",
        ),
        (
            ("global_batch=24", "norm_batch=6"),
            {"micro_batch": 4},
            "norm_batch 6 and on.micro_batch 4 do not divide each other, so a norm group would be cut; "
            "the nearest that fits is on.micro_batch=6",
        ),
        (
            ("norm_batch=16",),
            {"micro_batch": 4, "replicas": 2},
            "norm_batch 16 spans 4 replicas of on.micro_batch 4, which do not divide on.replicas 2; "
            "write on.replicas=4 or on.micro_batch=8",
        ),
        (("norm_batch=5",), {}, "norm_batch 5 does not divide global_batch 16; the nearest that does is 4"),
        (("norm_batch=6",), {}, "norm_batch 6 does not divide global_batch 16; the nearest that does is 4"),
        (("norm_batch=32",), {}, "norm_batch 32 does not divide global_batch 16; the nearest that does is 16"),
        (
            ("drop_last=true", "data.images=10"),
            {},
            "drop_last: true leaves nothing of 10 images at global_batch 16; "
            "write drop_last: false, or a global_batch of at most 10",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    words: tuple[str, ...], asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        decide(*words, **asked)
    assert str(caught.value) == message


def test_images_too_small_for_a_network_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^resnet8 needs images of at least 16 pixels a side, and these have 8$"):
        decide(network=NetworkFacts(1, 1, smallest_side=16))


def test_a_norm_over_a_single_number_is_refused() -> None:
    """The last stage of resnet8 sees 1 x 1 pixels here, and one number has no variance."""
    with pytest.raises(UserError):
        make_plan("data.side=4", "norm_batch=1")


@pytest.mark.parametrize(("classes", "smoothing", "most"), [(2, 0.6, 0.5), (3, 0.7, 2 / 3), (1, 0.1, 0)])
def test_smoothing_over_the_others_beyond_an_even_spread_is_refused(
    classes: int, smoothing: float, most: float
) -> None:
    words = (f"data.classes={classes}", "loss.smooth_over=others")
    with pytest.raises(PlanError, match=r"^loss.label_smoothing over the others may be at most"):
        decide(*words, f"loss.label_smoothing={smoothing}")
    assert decide(*words, f"loss.label_smoothing={most - 0.01 if most else 0}").steps == 6


@pytest.mark.parametrize("norm", ["group", "none"])
def test_norm_batch_does_not_matter_where_the_norm_sees_one_image(norm: str) -> None:
    plan = decide("norm_batch=5", f"norm={norm}", micro_batch=2)
    assert (plan.norm_batch, plan.norm_groups, plan.norm_replicas, plan.norm_total) == (None, 1, 1, 0)


@pytest.mark.parametrize(
    ("norm_batch", "micro_batch", "replicas", "groups", "across", "total"),
    [
        ("4", 16, 1, 4, 1, 4),
        ("4", 8, 2, 2, 1, 4),
        ("4", 4, 3, 1, 1, 4),
        ("16", 4, 4, 1, 4, 1),
        ("8", 2, 4, 1, 4, 2),
        ("null", 16, 1, 1, 1, 1),
    ],
)
def test_norm_groups_lie_in_micro_batches_or_across_replicas(
    norm_batch: str, micro_batch: int, replicas: int, groups: int, across: int, total: int
) -> None:
    plan = decide(f"norm_batch={norm_batch}", micro_batch=micro_batch, replicas=replicas)
    assert (plan.norm_groups, plan.norm_replicas, plan.norm_total) == (groups, across, total)


@pytest.mark.parametrize(
    ("micro_batch", "replicas", "micro_batches", "rounds"), [(16, 1, 1, 1), (4, 1, 4, 4), (4, 3, 4, 2), (4, 8, 4, 1)]
)
def test_a_step_is_cut_into_micro_batches_and_rounds(
    micro_batch: int, replicas: int, micro_batches: int, rounds: int
) -> None:
    plan = decide(micro_batch=micro_batch, replicas=replicas)
    assert (plan.micro_batches, plan.rounds) == (micro_batches, rounds)


@pytest.mark.parametrize(
    ("images", "batch", "epochs", "drop_last", "steps", "epoch_images"),
    [
        (50_000, 128, "160", "false", 62_500, 50_000),
        (50_000, 128, "160", "true", 62_400, 49_920),
        (100, 16, "1", "false", 6, 100),
        (100, 16, "0.01", "false", 1, 100),
        (10, 16, "1", "false", 1, 10),
        (10, 16, "8", "false", 5, 10),
        (1000, 100, "0.1", "false", 1, 1000),
        (1000, 10, "0.29", "false", 29, 1000),  # 0.29 x 1000 is 290 exactly, though not in floating point
        (1_281_167, 256, str(5 * 256 / 1_281_167), "false", 5, 1_281_167),  # a little less, for the same reason
        (1_281_167, 256, "0.00099908911172", "false", 4, 1_281_167),
    ],
)
def test_total_steps_count_whole_steps_and_at_least_one(
    images: int, batch: int, epochs: str, drop_last: str, steps: int, epoch_images: int
) -> None:
    plan = decide(
        f"data.images={images}",
        f"global_batch={batch}",
        "norm=none",
        f"epochs={epochs}",
        f"drop_last={str(drop_last).lower()}",
    )
    assert (plan.steps, plan.epoch_images) == (steps, epoch_images)
    assert plan.epoch(steps) == steps * batch / epoch_images


def test_an_evaluation_batch_is_bounded_by_the_validation_images() -> None:
    assert decide(micro_batch=4).evaluation_batch == 16
    assert decide(micro_batch=16).evaluation_batch == 37
    assert decide("global_batch=1024", "norm_batch=4", "data.validation_images=5000").evaluation_batch == 1024


def test_the_same_recipe_has_the_same_numbers_on_every_placement() -> None:
    plans = [
        decide(micro_batch=m, replicas=r) for m, r in ((16, 1), (4, 1), (4, 3), (2, 2)) if layouts.fits(16, 4, r, m)
    ]
    assert len(plans) == 4
    assert len({(p.steps, p.warm_steps, p.peak_lr, p.norm_total, p.epoch_images) for p in plans}) == 1


def test_the_small_recipe_of_the_tests_runs_on_the_cpu() -> None:
    plan = make_plan(text=SMALL)
    assert plan.placement.device == "cpu"
    assert plan.steps == math.floor(96 / 16)
