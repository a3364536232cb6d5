"""Where a recipe runs: settings that never change what is learnt beyond rounding."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from paceline.architecture import Count
from paceline.duration import ClockInterval, Duration, Interval
from paceline.spec import Settings

LAYOUT = {"kind": "layout"}
ARITHMETIC = {"kind": "arithmetic"}
KEEPING = {"kind": "keeping"}


def _as_text(value: object) -> object:
    """YAML reads 16.32 as a number; it is a name."""
    return str(value) if isinstance(value, float) else value


def _count(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"expected a whole number above 0, or auto; found {value!r}")


def _switch(value: object) -> object:
    if value == "auto" or isinstance(value, bool):
        return value
    raise ValueError(f"expected true, false or auto; found {value!r}")


def _as_names(value: object) -> object:
    """One name alone means a list of it."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


AutoCount = Annotated[
    int | Literal["auto"],
    PlainValidator(_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
]
AutoSwitch = Annotated[
    bool | Literal["auto"], PlainValidator(_switch), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "auto"}]})
]


class Placement(Settings):
    """Where it runs. Layout keys give the same run to 1e-12 in float64; arithmetic keys change rounding only; keeping
    keys say what stays on disk."""

    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], Field(json_schema_extra=ARITHMETIC)] = "auto"
    """Kind of device; auto is cuda where there is one, else cpu."""
    replicas: Annotated[AutoCount, Field(json_schema_extra=LAYOUT)] = "auto"
    """Copies of the network that share each step's images; auto is every visible accelerator, or one."""
    micro_batch: Annotated[AutoCount, Field(json_schema_extra=LAYOUT)] = "auto"
    """Images in one forward pass of one replica; auto is the one that fits the memory and takes the least time."""
    precision: Annotated[
        Literal["auto", "64.64", "32.32", "16.32"], BeforeValidator(_as_text), Field(json_schema_extra=ARITHMETIC)
    ] = "auto"
    """Bits of arithmetic and of weights: 32.32, 16.32 (bfloat16 over float32 weights) or 64.64; auto is 16.32 on cuda,
    else 32.32."""
    compile: Annotated[bool, Field(json_schema_extra=ARITHMETIC)] = False
    """Let torch.compile fuse the network: slower to start."""
    deterministic: Annotated[bool, Field(json_schema_extra=ARITHMETIC)] = False
    """Only kernels that give the same bits each time, so that a resume on an accelerator is exact too."""
    recompute: Annotated[tuple[str, ...], BeforeValidator(_as_names), Field(json_schema_extra=LAYOUT)] = ()
    """Cut the network before these blocks (stage2 means each block of stage2, all means every block) and keep only what
    goes from piece to piece: the rest is computed again in the backward pass, for less memory and more time."""
    resident: Annotated[AutoSwitch, Field(json_schema_extra=LAYOUT)] = "auto"
    """Keep the whole data set on the device and crop and flip it there; auto does so where it is small."""
    loader_threads: Annotated[AutoCount, Field(json_schema_extra=LAYOUT)] = "auto"
    """Threads of each replica that prepare images."""
    cpu_threads: Annotated[AutoCount, Field(json_schema_extra=ARITHMETIC)] = "auto"
    """Threads of each replica that compute on the CPU; auto shares the cores between the replicas."""
    timeout: Annotated[float, Field(gt=0, json_schema_extra=LAYOUT)] = 600.0
    """Seconds after which a replica that does not answer is given up."""
    save: Annotated[ClockInterval, Field(json_schema_extra=KEEPING)] = Duration.parse("1 epoch")
    """How often a checkpoint is written: epochs, steps, images, % or seconds; the start and the end always are."""
    keep_last: Annotated[Count, Field(json_schema_extra=KEEPING)] = 3
    """How many of the newest checkpoints stay."""
    keep_best: Annotated[bool, Field(json_schema_extra=KEEPING)] = True
    """Keep the checkpoint with the best validation accuracy as well."""
    keep_every: Annotated[Interval | None, Field(json_schema_extra=KEEPING)] = None
    """Keep one checkpoint of each such stretch for good, such as 10 epochs."""


def keys(kind: str) -> list[str]:
    """The placement keys of one kind: layout, arithmetic or keeping."""
    return [name for name, info in Placement.model_fields.items() if info.json_schema_extra == {"kind": kind}]
