"""Where a recipe runs: settings that never change what is learned beyond rounding."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from paceline.settings.duration import ClockInterval, ClockTime, Duration, IntervalOrNever, Length, refuse_clock
from paceline.settings.types import Count, Names, Settings

LAYOUT = {"kind": "layout"}
ARITHMETIC = {"kind": "arithmetic"}
KEEPING = {"kind": "keeping"}


_MOST = 10**9


def _count(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST):
        return value
    most = f" and at most {_MOST:,}" if isinstance(value, int) and value > _MOST else ""
    raise ValueError(f"expected a whole number above 0{most}, or auto; found {value!r}")


def _switch(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    raise ValueError(f"expected true, false or auto; found {value!r}")


def _loss_scale(value: object) -> object:
    if value in ("auto", "dynamic"):
        return value
    if isinstance(value, dict) and value:
        return {str(refuse_clock(when)): _power_of_two(scale) for when, scale in value.items()}
    return _power_of_two(value)


def _power_of_two(value: object) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 2.0**-24 <= value <= 2.0**24
    if not good or math.frexp(value)[0] != 0.5:  # type: ignore[arg-type]
        raise ValueError(f"expected auto, dynamic or a power of two from 2^-24 to 2^24, such as 128; found {value!r}")
    return float(value)  # type: ignore[arg-type]


AutoCount = Annotated[
    int | Literal["auto"],
    PlainValidator(_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
]
AutoSwitch = Annotated[
    bool | Literal["auto"], PlainValidator(_switch), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "auto"}]})
]


LossScaleSetting = Annotated[
    float | dict[str, float] | Literal["auto", "dynamic"],
    PlainValidator(_loss_scale),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "dynamic"]}, {"type": "number"}, {"type": "object"}]}),
]


_MOST_BYTES = 1 << 50
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _bytes(value: object) -> object:
    """A number of bytes, or an amount with its unit."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_BYTES:
        return value
    match = (
        re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMG]i?B)\s*", value)
        if isinstance(value, str) and len(value) < 100
        else None
    )
    if match is None:
        raise ValueError(f"expected an amount of memory such as 500 MB or 8 GiB, found {value!r}")
    if (size := int(Fraction(match[1]) * _UNITS[match[2]])) > _MOST_BYTES:
        raise ValueError(f"expected an amount of memory that a machine can have, found {value!r}")
    return size


def _memory(value: object) -> object:
    """An amount of memory that something can be done with, or auto."""
    size = value if value == "auto" else _bytes(value)
    if not size:
        raise ValueError(f"expected an amount of memory such as 20 GiB, or auto; found {value!r}")
    return size


_SIZES = [{"type": "integer", "minimum": 0}, {"type": "string"}]
Size = Annotated[int, PlainValidator(_bytes), WithJsonSchema({"anyOf": _SIZES})]
AutoSize = Annotated[int | Literal["auto"], PlainValidator(_memory), WithJsonSchema({"anyOf": _SIZES})]


def _no_names(value: object) -> object:
    """The word none means a list of no names."""
    return () if value == "none" else value


Cuts = Annotated[Names, BeforeValidator(_no_names)]


SinkName = Literal["console", "csv", "log", "report", "mlperf", "tensorboard", "wandb", "mlflow"]


class Placement(Settings):
    """Where it runs. Layout keys give the same run to 1e-12 in float64; arithmetic keys change rounding only; keeping
    keys say what stays on disk."""

    about: Annotated[str, Field(json_schema_extra=KEEPING)] = ""
    """One line on where the placement comes from."""
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], Field(json_schema_extra=ARITHMETIC)] = "auto"
    """Kind of device; auto is cuda where there is one, else cpu."""
    replicas: Annotated[AutoCount, Field(json_schema_extra=LAYOUT)] = "auto"
    """Copies of the network that share each step's images; auto is every visible accelerator, or one, and under a
    launcher every process: fewer where norm groups that span replicas leave some out."""
    micro_batch: Annotated[AutoCount, Field(json_schema_extra=LAYOUT)] = "auto"
    """Images in one forward pass of one replica; auto is the one that fits the memory and takes the least time."""
    stages: Annotated[Count, Field(json_schema_extra=LAYOUT)] = 1
    """Processes, each with a device of its own, that share the blocks of each replica's network as a pipeline."""
    splits: Annotated[Names, Field(json_schema_extra=LAYOUT)] = ()
    """The blocks that begin the second stage and those after it (stage2 means the first block of stage2); without any,
    the stages get about the same time, where a probe has measured it, or else number of multiply-adds."""
    virtual_stages: Annotated[Count, Field(json_schema_extra=LAYOUT)] = 1
    """Parts of the network that each stage of a pipeline has, dealt out in turn: of 2 stages with 2 parts each, the
    first has parts 1 and 3. More parts are less waiting, and more traffic between stages; `splits` then names where
    the second part and those after it begin."""
    pipeline: Annotated[Literal["grouped", "interleaved", "sequential"], Field(json_schema_extra=LAYOUT)] = "grouped"
    """Order of a step's passes in a pipeline: grouped (all forward, then all backward, as GPipe), interleaved (one
    forward, one backward, which keeps fewer activations; also called 1F1B) or sequential (one micro-batch after the
    other)."""
    precision: Annotated[
        Literal["auto", "fp64", "fp32", "tf32", "bf16", "fp16"], Field(json_schema_extra=ARITHMETIC)
    ] = "auto"
    """Arithmetic of the network: float64, float32, tf32 (float32 rounded to TF32 in products), bfloat16 or float16;
    auto is bf16 on cuda, else fp32."""
    weights: Annotated[Literal["auto", "fp64", "fp32", "bf16", "fp16"], Field(json_schema_extra=ARITHMETIC)] = "auto"
    """Type of the weights of convolutions and dense layers: auto is fp64 under precision fp64, else fp32; bf16 and fp16
    weights go with the same precision only."""
    stochastic_rounding: Annotated[bool, Field(json_schema_extra=ARITHMETIC)] = True
    """Round 16-bit weights up or down at random, so that small steps are not lost; keyed, so the same everywhere."""
    fp16_accumulation: Annotated[bool, Field(json_schema_extra=ARITHMETIC)] = False
    """Let matrix products of float16 numbers on cuda be summed in float16, which is faster on some devices and less
    exact; cuDNN's convolutions are no such products."""
    loss_scale: Annotated[LossScaleSetting, Field(json_schema_extra=ARITHMETIC)] = "auto"
    """What the loss is multiplied by before the backward pass and gradients divided by after it: a power of two, or
    dynamic (halved by a bad step, doubled after 2,000 good ones), or steps such as {0 epochs: 64, 30 epochs: 512}; auto
    is dynamic with float16, else 1. A published scale S of a mean over a micro-batch m is S / m here."""
    communication: Annotated[Literal["auto", "fp64", "fp32", "bf16"], Field(json_schema_extra=ARITHMETIC)] = "auto"
    """Type in which gradients travel between replicas: bf16 is half the bytes, and each sum is rounded to 8 bits; auto
    is fp64 under precision fp64, else fp32."""
    bucket: Annotated[Size, Field(json_schema_extra=ARITHMETIC)] = 25 << 20
    """Gradients that leave together, in bytes or as 25 MiB (the default): more at a time is fewer messages, less leaves
    earlier; 0 sends the gradient of each weight by itself."""
    compile: Annotated[bool, Field(json_schema_extra=ARITHMETIC)] = False
    """Let torch.compile fuse the network: slower to start."""
    kernels: Annotated[Literal["auto", "fused", "plain"], Field(json_schema_extra=ARITHMETIC)] = "auto"
    """How blocks are computed: fused (norms with what stands around them, by Paceline's own kernels) or plain (torch's
    own); auto is fused on cuda unless precision is fp64 or the network is compiled."""
    graphs: Annotated[AutoSwitch, Field(json_schema_extra=LAYOUT)] = "auto"
    """Record a step, and a pass of evaluation, once as CUDA graphs and replay it, which spares the host the launches;
    auto does so on cuda with one replica, unless the network is compiled or state is offloaded."""
    deterministic: Annotated[bool, Field(json_schema_extra=ARITHMETIC)] = False
    """Only kernels that give the same bits each time, so that a resume on an accelerator is exact too."""
    memory: Annotated[AutoSize, Field(json_schema_extra=LAYOUT)] = "auto"
    """The most of its device's memory that a process may take, such as 20 GiB: micro_batch and recompute are chosen by
    it, and torch keeps to it on cuda; auto is all of it, and on a CPU a quarter of main memory for all processes."""
    recompute: Annotated[Cuts, Field(json_schema_extra=LAYOUT)] = ()
    """Cut the network before these blocks (stage2 means each block of stage2, all means every block) and keep only what
    goes from piece to piece: the rest is computed again in the backward pass, for less memory and more time; auto
    computes again as little as fits the memory."""
    shard: Annotated[Literal["none", "optimizer"], Field(json_schema_extra=LAYOUT)] = "none"
    """What replicas keep in shares, for less memory: optimizer means that each keeps the optimizer's state of some
    parameters, updates these, and sends them to the others (ZeRO-1)."""
    offload: Annotated[Literal["none", "optimizer"], Field(json_schema_extra=LAYOUT)] = "none"
    """What stays in the host's memory, for less of a CUDA device's and more time: optimizer means the optimizer's
    state, which comes to the device in pieces while its weights are updated."""
    data_on_device: Annotated[AutoSwitch, Field(json_schema_extra=LAYOUT)] = "auto"
    """Keep the whole data set on the device and crop and flip it there; auto does so where it is small."""
    decoder: Annotated[Literal["auto", "fast", "pillow", "gpu"], Field(json_schema_extra=ARITHMETIC)] = "auto"
    """What decodes images in files: fast (libjpeg-turbo, and Pillow for what that refuses), pillow, or gpu (nvJPEG
    through torchvision, cropped and resized on the device); auto is fast."""
    cache: Annotated[Size, Field(json_schema_extra=LAYOUT)] = 0
    """Memory of each host in which encoded images stay once they are read, such as 8 GiB; 0 keeps none. All replicas of
    the host share it, so that a file comes over the network once for each host."""
    decoded_validation: Annotated[bool, Field(json_schema_extra=LAYOUT)] = False
    """Keep validation images decoded on disk, beside the data's index, so that each is decoded once for all runs."""
    loader_workers: Annotated[AutoCount, Field(json_schema_extra=LAYOUT)] = "auto"
    """Workers of each replica that prepare images: threads, or processes where more than 4 decode files."""
    cpu_threads: Annotated[AutoCount, Field(json_schema_extra=ARITHMETIC)] = "auto"
    """Threads of each replica that compute on the CPU; auto shares the cores between the replicas."""
    bind: Annotated[AutoSwitch, Field(json_schema_extra=LAYOUT)] = "auto"
    """Bind each of several replicas of a host to cores of its own: those near its accelerator, else an equal share;
    what a launcher has bound stays so. auto does so on Linux where a host has several NUMA nodes."""
    timeout: Annotated[float, Field(gt=0, le=1e9, json_schema_extra=LAYOUT)] = 600.0
    """Seconds after which a replica that does not answer is given up."""
    save: Annotated[ClockInterval, Field(json_schema_extra=KEEPING)] = Duration.parse("1 epoch")
    """How often a checkpoint is written: epochs, steps, images, % or seconds; the start and the end always are."""
    save_offset: Annotated[Length, Field(json_schema_extra=KEEPING)] = Duration.parse("0 epochs")
    """How long before that rhythm starts: every 4 epochs with offset 3 epochs saves after epochs 3, 7, 11, ..."""
    keep_last: Annotated[Count, Field(json_schema_extra=KEEPING)] = 3
    """How many of the newest checkpoints stay."""
    keep_best: Annotated[bool, Field(json_schema_extra=KEEPING)] = True
    """Keep the checkpoint with the best validation (`stop.metric`) as well."""
    keep_every: Annotated[ClockInterval | None, Field(json_schema_extra=KEEPING)] = None
    """Keep one checkpoint of each such stretch for good, such as 10 epochs, or 2 hours since the run began."""
    time_limit: Annotated[ClockTime | None, Field(json_schema_extra=KEEPING)] = None
    """How long one start may train, such as 4 hours: then it saves and ends with status 75, and resume continues."""
    histograms: Annotated[IntervalOrNever, Field(json_schema_extra=KEEPING)] = "never"
    """How often, and after the last step, histograms of each weight and its gradient are written, for trackers: epochs,
    steps, images or %; or never."""
    samples: Annotated[IntervalOrNever, Field(json_schema_extra=KEEPING)] = "never"
    """How often a picture of the first images of a step is written, as the network sees them, for trackers: epochs,
    steps, images or %; or never."""
    sinks: Annotated[tuple[SinkName, ...], Field(json_schema_extra=KEEPING)] = (
        "console",
        "csv",
        "log",
        "report",
    )
    """Where the rows of the record also go while a run trains: console (the terminal), csv (tables), log (log.txt),
    report (report.html), mlperf (mlperf.log), and the trackers tensorboard, wandb and mlflow, each of which is an
    extra: pip install 'paceline[wandb]'."""


class ResolvedPlacement(Placement):
    """A placement with every `auto` decided for one machine."""

    device: Literal["cpu", "cuda", "mps"]
    replicas: Count
    micro_batch: Count
    memory: int
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
    weights: Literal["fp64", "fp32", "bf16", "fp16"]
    communication: Literal["fp64", "fp32", "bf16"]
    loss_scale: float | dict[str, float] | Literal["dynamic"]
    kernels: Literal["fused", "plain"]
    graphs: bool
    data_on_device: bool
    decoder: Literal["fast", "pillow", "gpu"]
    loader_workers: Count
    cpu_threads: Count
    bind: bool


AUTO = ("auto",)
"""What recompute is where the machine decides."""

MOST_THREADS = 4
"""More threads than this wait for each other in Python more than they decode: beyond it they are processes."""


_OWN = {"cpu_threads", "loader_workers", "timeout", "cache", "bind", "memory"}


def shared_keys() -> set[str]:
    """The placement keys on which all processes of a run must agree."""
    return {*keys("layout"), *keys("arithmetic")} - _OWN


def keys(kind: str) -> list[str]:
    """The placement keys of one kind: layout, arithmetic or keeping."""
    return [name for name, info in Placement.model_fields.items() if info.json_schema_extra == {"kind": kind}]
