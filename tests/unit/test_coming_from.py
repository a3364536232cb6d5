"""The page for people who come from an older system is whole and true: every option has its row, every word exists."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from paceline.cli import app
from paceline.errors import SpecError, UserError
from paceline.job import make_job
from paceline.model import tables
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, override
from paceline.settings.recipe import Recipe
from paceline.settings.schema import fields, kinds
from paceline.settings.types import Settings

PAGE = (Path(__file__).parents[2] / "docs/coming-from.md").read_text()

OPTIONS = {
    "Graphcore TF1": """
        --model --lr-schedule --config --config-path --restore-path --init-path --help
        --dataset --data-dir --pipeline-num-parallel --generated-data --synthetic-data --no-dataset-cache
        --normalize-input --image-size --train-with-valid-preprocessing --hostside-norm --standard-imagenet
        --mixup-alpha --cutmix-lambda --cutmix-version --hostside-image-mixing --eight-bit-io --fused-preprocessing
        --dataset-percentage-to-use
        --batch-size --micro-batch-size --gradient-accumulation-count --base-learning-rate-exponent --abs-learning-rate
        --epochs --iterations --weight-decay --loss-scaling --label-smoothing --optimizer --momentum --rmsprop-decay
        --rmsprop-base-decay-exp --rmsprop-epsilon --lars-eeta --lars-epsilon --lars-weight-decay --lars-skip-list
        --ckpts-per-epoch --epochs-per-ckpt --ckpt-epochs-offset --ckpt-all-instances --no-validation --shards
        --replicas --max-cross-replica-buffer-size --max-reduce-many-buffer-size --pipeline --pipeline-splits
        --pipeline-schedule --offload-fp32-weight-copy --variable-filter --distributed --syncs-per-epoch
        --epochs-per-sync --stable-norm --weight-avg-N --weight-avg-exp --min-remote-tensor-size
        --learning-rate-decay --learning-rate-schedule --warmup-epochs --lr-decay-rate --lr-drops
        --poly-lr-decay-power --poly-lr-end-ratio --abs-end-learning-rate
        --precision --enable-half-partials --no-stochastic-rounding --batches-per-step --device-iterations --select-ipu
        --fp-exceptions --saturate-on-overflow --enable-recomputation --seed --identical-replica-seeding
        --dataset-benchmark --available-memory-proportion --disable-variable-offloading --enable-conv-dithering
        --gather-conv-output --internal-exchange-optimization-target --scheduling-algorithm --num-io-tiles
        --compile-only --on-demand --prefetch-depth --BN-span --latency
        --log-dir --logs-path --name-suffix --logs-per-epoch --log-freq --no-logs --log-all-instances --mlperf-logging
        --wandb --wandb-project
        --model-size --batch-norm --group-norm --groups --BN-decay --convolution-groups --group-dim --widenet
        --dropout-rate --block-survival-prob --no-se --depth-divisor --top-width --use-relu --expand-ratio
        --norm-epsilon --proxy-norm --proxy-epsilon --no-proxy-recompute --width-coefficient --depth-coefficient
        validation.py: --restore-path --repeat --inference --total-batch-size
        weight_avg.py: --restore-path --filename --mode -N --decay --discard-last
        restore.py: --restore-path
        upload_run.py: --base-folder --name --project
        run_and_time.sh: replicas seed host partition server netmask --upload
        --rts --gradient-mean-reduce-re --force-weight-to-fp16 --force-weight-to-fp32 --force-unstable-norm
        --stochastic-rounding --only-use-slic-vmac-16 --analyze-nans --profile --profile-compilation --gcl-method
        --gcl-max-broadcast-size --executable-cache-path --wandb-id
        --sharding-exclude-filter --sharding-include-filter --valid-batch-size --no-hostside-norm --select-ipus
        --enable-recompute
    """,
    "poprun and mpirun": """
        --num-instances --num-replicas --ipus-per-replica --numa-aware --host --mpi-*-args -x --mca --tag-output
        -v -vv --allow-run-as-root
        --only-output-from-instance --executable-cache-path --offline-mode --vipu-* --reset-partition --update-partition
        --num-ilds
    """,
    "Graphcore PyTorch": """
        --config --model --data --imagenet-data-path --batch-size --micro-batch-size --gradient-accumulation --replicas
        --device-iterations --pipeline-splits --precision --half-partial --enable-stochastic-rounding
        --enable-fp-exceptions --full-precision-norm --norm-type --norm-num-groups --norm-eps --batchnorm-momentum
        --enable-fast-groupnorm --disable-stable-batchnorm --normalization-location --eight-bit-io
        --input-image-padding --lr --weight-decay --momentum --rmsprop-decay --optimizer-eps --optimizer --epoch
        --warmup-epoch --lr-schedule --lr-decay --lr-epoch-decay --lr-scheduler-freq --loss-scaling
        --initial-loss-scaling --loss-velocity-scaling-ratio --auto-loss-scaling --label-smoothing --validation-mode
        --validation-frequency --disable-metrics --enable-recompute --recompute-checkpoints --recompute-mode
        --offload-optimizer --enable-optimizer-rts --available-memory-proportion --exchange-memory-target --num-io-tiles
        --logs-per-epoch --wandb --wandb-weight-histogram --checkpoint-path --checkpoint-input-dir
        --checkpoint-output-dir --checkpoint-save-freq --weight-avg-strategy --weight-avg-exp-decay --weight-avg-N
        --seed --dataloader-worker --dataloader-rebatch-size --webdataset-memory-cache-ratio
        --webdataset-percentage-to-use --profile --model-cache-path --compile-only --offline-target-ipu-version
        --efficientnet-expand-ratio --efficientnet-group-dim --iterations --use-bbox-info --mixup-alpha
        --cutmix-lambda-low --cutmix-lambda-high --cutmix-disable-prob --half-res-training --fine-tune-epoch
        --fine-tune-lr --fine-tune-micro-batch-size --fine-tune-gradient-accumulation --fine-tune-first-trainable-layer
        restore.py: --checkpoint-path
        validate.py: --checkpoint-path
        weight_avg.py: --checkpoint-path
        create_webdataset.py: --source --target --shuffle --samples-per-shard --format --seed --image-quality
        create_webdataset.py: --train-preprocess-steps --validation-preprocess-steps
        distributed_webdataset.py: --target --num-instances
        validate_dataset.py
        host_benchmark.py: --batch-size --data --disable-async-loading --normalization-location --dataloader-worker
        run_benchmark.py: --data --iterations --precision --random-weights
    """,
    "nvcnn": """
        -m --model --data_dir -b --batch_size --num_batches --num_epochs -g --num_gpus --log_dir --display_every
        --save_interval --summary_interval --loss_scale --larc_eta --larc_mode --eval --fp16 --nofp16 --learning_rate
        tensorboard: --logdir
    """,
    "mpiexec": """
        -np --allow-run-as-root --host -x
    """,
    "Habana": """
        -d --dtype -b --batch-size -e --epochs -a --data-dir -m --model-dir -o --use-horovod -s --steps -l --eval-steps
        -n --no-eval -v --display-steps -c --checkpoint-steps -r --recover -k --no-experimental-preloading
    """,
}  # fmt: skip
"""Every option of the older command lines; those of a script beside the main one stand after its name."""

RECIPES = {
    "Graphcore TF1": [
        "graphcore/resnet50-momentum-1920", "graphcore/efficientnet-b4", "graphcore/resnext101", "graphcore/resnet8",
        "graphcore/resnet50-lars-3200", "graphcore/resnet50-group-norm-1024",
    ],
    "Graphcore PyTorch": [
        "graphcore/resnet50-pytorch-16416", "graphcore/efficientnet-b4-g16-pytorch-2048", "graphcore/resnet50-bench",
    ],
    "nvcnn": ["nvcnn/resnet50", "nvcnn/resnext50", "nvcnn/inception-v3", "nvcnn/googlenet", "nvcnn/vgg11"],
    "Habana": ["habana/resnet50", "habana/resnet50-1024"],
    "The MLPerf write-up": ["graphcore/resnet50-lars-3200", "graphcore/efficientnet-b4"],
}  # fmt: skip
"""Shipped recipes of each system: what the page says must be accepted by one of them, as it is."""

ENVIRONMENT = {
    "DATA_DIR", "DATASETS_DIR", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR", "NCCL_ALGO", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "MASTER_ADDR",
}  # fmt: skip
"""Variables that Paceline, torch, NCCL or gloo read."""

NETWORKS = {row.name for row in tables.MEMBERS}

NEEDED = {"lr": 0.1, "drops": ["50%"], "every": "1 epoch", "network": "resnet50"}
"""What some kinds have no default for."""


@dataclass(frozen=True)
class Row:
    """A line of a table of the page."""

    system: str
    header: str
    older: str
    here: str
    differs: str


def rows() -> Iterator[Row]:
    """Every line of every table below its first two."""
    system, header = "", ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            system = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            header = ""
        elif not header:
            header = cells[0]
        elif not set(line) <= set("|-"):
            assert len(cells) == 3, f"a row has three cells: {line}"
            yield Row(system, header, *cells)


def coded(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


def options_of(system: str) -> list[str]:
    """The options of one system as the page should name them."""
    found = []
    for line in OPTIONS[system].strip().splitlines():
        script, colon, names = line.strip().rpartition(":")
        found += [f"{script} {name}" if colon else name for name in names.split()]
    return found


def parts(annotation: Any) -> Iterator[type[Settings]]:
    """The settings classes inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for argument in get_args(annotation):
        yield from parts(argument)


def is_key(address: str, model: type[Settings]) -> bool:
    """Whether an address leads to a setting, through some kind wherever there are several."""
    around = {model}
    for step in address.split("."):
        found = [fields(kind)[step] for kind in around if step in fields(kind)]
        if not found:
            return False
        around = {kind for info in found for kind in parts(info.annotation)}
    return True


def pages(words: list[str]) -> Iterator[dict[str, Any]]:
    """Recipes that differ in the kinds of those sections that the words speak of: one of them must take the words."""
    named = {re.split(r"[.=]", word)[0] for word in words} & {"model", "data", "norm", "optimizer", "schedule"}
    choices = {key: list(samples(key)) for key in sorted(named)}
    sgd = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    usual = {"model": "resnet50", "global_batch": 256, "epochs": 90, "optimizer": sgd, "schedule": "cosine"}
    for chosen in itertools.product(*choices.values()):
        yield usual | dict(zip(choices, chosen, strict=True))


def samples(key: str) -> Iterator[dict[str, Any]]:
    """One of each kind that a section may be."""
    for kind, name in {kind: name for name, kind in kinds(fields(Recipe)[key]).items()}.items():
        needed = {field for field, info in fields(kind).items() if info.is_required()}
        yield {"name": name} | {field: value for field, value in NEEDED.items() if field in needed}


def refusal(words: list[str]) -> str:
    """What Paceline says against KEY=VALUE words, or nothing."""
    placed = [word.removeprefix("on.") for word in words if word.startswith("on.")]
    fault = _refused(Placement, {}, placed) if placed else ""
    rest = [word for word in words if not word.startswith("on.")]
    return fault or (min((_refused(Recipe, page, rest) for page in pages(rest)), key=len) if rest else "")


def _refused(model: type[Settings], page: dict[str, Any], words: list[str]) -> str:
    tree = Tree(values=deepcopy(page), places={(): "page"})
    try:
        for word in words:
            override(tree, word, model)
        built = build(model, tree)
    except SpecError as fault:
        return str(fault)
    if isinstance(built, Recipe) and built.model.name not in (*NETWORKS, "timm", "torchvision"):
        return f"no table has {built.model.name}"
    return ""


@cache
def commands() -> dict[str, Any]:
    """Every command of Paceline by its words, those of a group too."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        if name:
            yield name, command
        for word, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {word}".strip())

    return dict(walk(typer.main.get_command(app), ""))


def flags_of(command: Any) -> set[str]:
    return {"--help", *(flag for parameter in command.params for flag in parameter.opts)}


@cache
def torchrun_flags() -> set[str]:
    run = pytest.importorskip("torch.distributed.run")
    return {flag for action in run.get_args_parser()._actions for flag in action.option_strings}


def fault_of(text: str) -> str:
    """What is wrong with something that the page shows as code, or nothing."""
    first, *rest = shlex.split(text)
    if first == "paceline":
        return fault_of_command(rest)
    if first in ("torchrun", "mpiexec"):
        after = rest[rest.index("paceline") :] if "paceline" in rest else []
        before = rest[: len(rest) - len(after)]
        flags = torchrun_flags() if first == "torchrun" else {"-np", "--host"}
        wrong = [word for word in before if word.startswith("-") and word not in flags]
        return f"{first} has no {wrong[0]}" if wrong else fault_of_command(after[1:]) if after else ""
    if first.startswith("-"):
        return "" if any(first in flags_of(command) for command in commands().values()) else "no command has this flag"
    if "=" in first:
        return refusal([first, *rest])
    if re.fullmatch(r"[A-Z][A-Z_]+", text):
        return "" if text in ENVIRONMENT else "nobody reads this variable"
    known = is_key(text.removeprefix("on."), Placement if text.startswith("on.") else Recipe) or text == "on."
    return "" if known else "there is no such key"


def fault_of_command(words: list[str]) -> str:
    """The same for the words after 'paceline'."""
    verb = " ".join(words[:2]) if " ".join(words[:2]) in commands() else words[0]
    if verb not in commands():
        return f"there is no command {verb}"
    rest = words[len(verb.split()) :]
    wrong = [word for word in rest if word.startswith("-") and word not in flags_of(commands()[verb])]
    if wrong:
        return f"{verb} has no {wrong[0]}"
    if verb == "models" and rest and rest[0] not in NETWORKS:
        return f"there is no network {rest[0]}"
    return refusal([word for word in rest if "=" in word])


@pytest.mark.parametrize("system", OPTIONS)
def test_every_option_of_an_older_command_line_has_one_row(system: str) -> None:
    named = [name for row in rows() if row.system == system and row.header == "option" for name in coded(row.older)]
    assert Counter(named) == Counter(options_of(system))


def test_every_row_says_what_to_write_or_why_nothing() -> None:
    silent = [row for row in rows() if not coded(row.here) and not re.match(r"(nothing|not yet): \S", row.here)]
    assert silent == []


def test_every_word_of_the_page_exists() -> None:
    prose = [word for line in PAGE.splitlines() if not line.startswith("|") for word in coded(line)]
    shown = [*prose, *(word for row in rows() for word in coded(f"{row.here} {row.differs}"))]
    shown += [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]
    assert {word: fault for word in shown if (fault := fault_of(word))} == {}


def test_what_is_not_there_yet_is_not_there() -> None:
    named = {word for row in rows() if row.here.startswith("not yet") for word in re.findall(r"\*([^*]+)\*", row.here)}
    there = {word for word in named if word in commands() or is_key(word.removeprefix("on."), Placement)}
    assert there == set(), "the page says 'not yet' of what exists now: give its words there"


def test_as_above_stands_below_a_row_of_its_kind() -> None:
    kinds = [(row.system, row.header, row.here.partition(":")[0], row.here.endswith("as above")) for row in rows()]
    assert [row for before, row in itertools.pairwise(kinds) if row[3] and before[:3] != row[:3]] == []


def typed() -> Iterator[Any]:
    """Every setting with a value that the page gives for a system, once, and the recipes that it may be typed on."""
    for system, recipes in RECIPES.items():
        rows_there = [row for row in rows() if row.system == system]
        words = [word for row in rows_there for word in coded(f"{row.here} {row.differs}")]
        for word in dict.fromkeys(word for word in words if re.match(r"(on\.)?[a-z][a-z_.]*=", word)):
            yield pytest.param(word, recipes, id=f"{system}: {word}")


@pytest.mark.parametrize(("word", "recipes"), list(typed()))
def test_what_the_page_says_can_be_typed_on_a_recipe_of_that_system(word: str, recipes: list[str]) -> None:
    faults = []
    for name in recipes:
        try:
            make_job(name, shlex.split(word), None, None, None, None, look=False)
        except UserError as fault:
            faults.append(str(fault))
        else:
            return
    pytest.fail("; ".join(dict.fromkeys(faults)))


@pytest.mark.parametrize(
    "wrong",
    [
        "optimizer.trusted", "on.micro", "optimizer.trust_coefficient=-1", "on.precision=8", "model=resnet51",
        "paceline tran",
        "paceline average RUN --first 5", "torchrun --processes 8", "--input", "schedule.drops=0.5", "norm.group",
        "paceline models resnet51", "DATA_PATH", "data.evaluation.short=wide",
    ],
)  # fmt: skip
def test_a_word_that_does_not_exist_would_be_found(wrong: str) -> None:
    assert fault_of(wrong)
