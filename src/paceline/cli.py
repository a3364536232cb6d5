"""The one command line: finds the verb, reads its words, and turns faults into one line and an exit status."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline import __version__
from paceline.errors import SpecError, UserError
from paceline.visible import visible_output


class Target(StrEnum):
    """The formats that images are converted to."""

    webdataset = "webdataset"
    folder = "folder"


class Verbs(TyperGroup):
    """The verbs; an option that is really a setting is answered with the word to write."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _short_faults():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _short_faults():
            try:
                return super().invoke(ctx)
            except Exception as fault:
                if type(fault).__name__ == "NoSuchOption":  # click's, which some versions of typer bring as their own
                    _refuse_option(fault)
                raise


@contextmanager
def _short_faults() -> Iterator[None]:
    """Cut what click says of a very long word, which it repeats whole."""
    try:
        yield
    except Exception as fault:
        if isinstance(message := getattr(fault, "message", None), str):
            from paceline.settings.read import cut

            fault.message = cut(message, 400)  # type: ignore[attr-defined]
        raise


def _refuse_option(fault: Any) -> None:
    """Say what to write in place of an unknown option, where that is known."""
    from paceline.job import all_addresses
    from paceline.settings.read import cut
    from paceline.settings.suggest import elsewhere

    words = " ".join(str(parameter.metavar) for parameter in fault.ctx.command.params)
    known = [key for key in all_addresses() if "[KEY=VALUE]" in words or (key.startswith("on.") and "on.KEY" in words)]
    argument = re.search(rf"\0{re.escape(fault.option_name)}[=\0]([^-\0][^\0]*)", "\0".join(sys.argv))
    value = cut(argument[1]) if argument else "..."
    option = fault.option_name.lstrip("-").replace("-", "_")
    instead = " or ".join(f"{key}={value}" for key in elsewhere(option, known))
    if option == "resume":
        instead = f"paceline resume {value}"
    if instead:
        raise SpecError(f"there is no option {fault.option_name}; write {instead}") from None


app = typer.Typer(
    name="paceline",
    cls=Verbs,
    help="Train, validate and benchmark convolutional image classifiers. The same recipe is the same run on every placement.",
    epilog="Start with: paceline train",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _path(word: str) -> Path:
    if not word.strip():
        raise SpecError(f"'{word}' names no file or folder; write its path, or . for the folder that you are in")
    return Path(word)


RecipeWord = Annotated[
    str | None,
    typer.Argument(
        metavar="[RECIPE]", help="A shipped name (see `paceline recipes`) or a YAML file; shapes/resnet8 if left out."
    ),
]
SettingWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings to change, such as epochs=20 optimizer.lr=0.2; placement keys start with on.",
    ),
]
OnWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="[on.KEY=VALUE]...", help="Placement settings to change, such as on.micro_batch=64."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", parser=_path, help="A run folder.")]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data", metavar="FOLDER", parser=_path, help="Where the images are; else DATA_DIR or DATASETS_DIR."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="RUN", parser=_path, help="The run folder; one that holds the same recipe goes on."),
]
On = Annotated[str | None, typer.Option("--on", metavar="PLACEMENT", help="A shipped placement or a YAML file.")]
Replicas = Annotated[int | None, typer.Option("--replicas", metavar="N", help="Short for on.replicas=N.")]
Device = Annotated[
    str | None, typer.Option("--device", metavar="KIND", help="Short for on.device=KIND: cpu, cuda or mps.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False) -> None:
    if version:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.command(epilog="Example: paceline train cifar10/resnet20 --data ~/cifar10 epochs=50 optimizer.lr=0.2")
def train(
    recipe: RecipeWord = None, settings: SettingWords = None, data: DataFolder = None, out: Out = None, on: On = None,
    replicas: Replicas = None, device: Device = None,
) -> None:  # fmt: skip
    """Train a recipe; without one, a small network on built-in images."""
    from paceline.command import train as verb

    raise typer.Exit(verb.run(recipe, settings or [], data, out, on, replicas, device))


@app.command(epilog="Example: paceline resume runs/mine on.micro_batch=32")
def resume(
    run: RunFolder, settings: OnWords = None, data: DataFolder = None, replicas: Replicas = None, device: Device = None
) -> None:
    """Continue a run from its newest intact checkpoint."""
    from paceline.command import resume as verb

    raise typer.Exit(verb.run(run, settings or [], data, replicas, device))


@app.command(epilog="Example: paceline validate runs/mine --all")
def validate(
    run: RunFolder,
    settings: OnWords = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="STEP|best", help="Evaluate this step's checkpoint, or the best one."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Evaluate every checkpoint that was not evaluated yet.")] = False,
    test: Annotated[
        Path | None,
        typer.Option(
            "--test",
            metavar="FOLDER",
            parser=_path,
            help="Evaluate other images of the same classes, such as a test set.",
        ),
    ] = None,
    data: DataFolder = None,
    json: Json = False,
) -> None:
    """Validate a run's newest checkpoint, each image exactly once."""
    from paceline.command import validate as verb
    from paceline.training.selection import Selection

    raise typer.Exit(verb.run(run, settings or [], Selection(checkpoint, every, test), data, json))


@app.command(epilog="Example: paceline average runs/mine --last 5")
def average(
    run: RunFolder, settings: OnWords = None,
    last: Annotated[int | None, typer.Option("--last", metavar="N", help="The mean of the last N checkpoints; all that are kept if left out.")] = None,
    decay: Annotated[float | None, typer.Option("--decay", metavar="D", help="All that are kept in the order of time: V = D * V + (1 - D) * the next.")] = None,
    recalibrate: Annotated[int | None, typer.Option("--recalibrate", metavar="IMAGES", help="Take running statistics from so many training images.")] = None,
    data: DataFolder = None, json: Json = False,
) -> None:  # fmt: skip
    """Average a run's checkpoints into one network and validate it."""
    from paceline.command import average as verb

    raise typer.Exit(verb.run(run, settings or [], last, decay, recalibrate, data, json))


@app.command(epilog="Example: paceline replay runs/mine --step 1200")
def replay(
    run: RunFolder, step: Annotated[int, typer.Option("--step", metavar="S", help="The step to look into.")],
    settings: OnWords = None, data: DataFolder = None, json: Json = False,
) -> None:  # fmt: skip
    """Replay one step and name the first layer that is not finite."""
    from paceline.command import replay as verb

    raise typer.Exit(verb.run(run, settings or [], step, data, json))


@app.command(epilog="Example: paceline plan cifar10/resnet20 on.replicas=2 on.micro_batch=64")
def plan(
    recipe: RecipeWord = None, settings: SettingWords = None, data: DataFolder = None, on: On = None, replicas: Replicas = None,
    device: Device = None, json: Json = False,
    yaml: Annotated[bool, typer.Option("--yaml", help="Print every setting and where its value came from.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes and placements, for editors.")] = False,
) -> None:  # fmt: skip
    """Print every number of a run without running it."""
    from paceline.command import plan as verb

    verb.run(recipe, settings or [], data, on, replicas, device, json, yaml, schema)


@app.command(epilog="Example: paceline verify shapes/resnet8")
def verify(
    recipe: RecipeWord = None,
    settings: SettingWords = None,
    data: DataFolder = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Optimizer steps of each run.")] = 10,
    full: Annotated[bool, typer.Option("--full", help="Do not shrink a large recipe.")] = False,
    whole_runs: Annotated[
        bool, typer.Option("--whole-runs/--no-whole-runs", help="Show whole runs too, which have no limit.")
    ] = True,
    json: Json = False,
) -> None:
    """Prove here that a recipe is the same run on every layout."""
    from paceline.command import verify as verb

    raise typer.Exit(verb.run(recipe, settings or [], data, steps, full, json, whole_runs=whole_runs))


@app.command(epilog="Example: paceline recipes cifar10/resnet20 > mine.yaml")
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this recipe's page, or list those of a system.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List the recipes that others published, too.")] = False,
    json: Json = False,
) -> None:
    """List the recipes that come with Paceline, or print one."""
    from paceline.command import recipes as verb

    verb.run(name, everything, json)


@app.command(epilog="Example: paceline models resnet50 --blocks")
def models(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this network's settings and defaults.")
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as model.stem=3x3.")
    ] = None,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Print its blocks: parameters, activation bytes, multiply-adds per image.")
    ] = False,
    side: Annotated[
        int | None, typer.Option(metavar="PIXELS", help="Image side for --blocks.", min=1, max=65_535)
    ] = None,
    json: Json = False,
) -> None:
    """List the networks, or print one's settings, or its blocks."""
    from paceline.command import models as verb

    verb.run(name, words or [], blocks, side, json)


data_app = typer.Typer(
    help="Show, check, pack and convert data sets.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")

SourceFolder = Annotated[
    Path, typer.Argument(metavar="SOURCE", parser=_path, help="The folder of a data set, in any format.")
]
DataWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the data, such as labels=classes.csv first_label=0."),
]


@data_app.command("pack", epilog="Example: paceline data pack ~/imagenet ~/imagenet-pack --max-side 500 --quality 90")
def data_pack(
    source: SourceFolder,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", parser=_path, help="A new folder for the pack, or one to go on with.")] = None,
    settings: DataWords = None,
    max_side: Annotated[int | None, typer.Option("--max-side", metavar="PIXELS", min=8, max=65_535, help="Make larger images smaller, and all JPEG at --quality (90).")] = None,
    quality: Annotated[int | None, typer.Option("--quality", metavar="Q", min=1, max=100, help="JPEG quality, 4:2:0; left out, nothing is lost.")] = None,
    processes: Annotated[int | None, typer.Option("--processes", metavar="N", min=1, max=1024, help="Worker processes; one for each core if left out.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Only read the pack SOURCE and compare every checksum.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Write a data set as a pack, which is faster to decode."""
    from paceline.command import data_pack as verb

    verb.run(source, out, settings or [], max_side, quality, processes, verify, json)


@data_app.command("convert", epilog="Example: paceline data convert ~/imagenet-pack ~/tars --to webdataset --shuffle 1")
def data_convert(
    source: SourceFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", parser=_path, help="A new folder.")],
    to: Annotated[Target, typer.Option("--to", help="The format to write.")],
    settings: DataWords = None,
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=1, help="Samples in each tar.")] = 1024,
    shuffle: Annotated[int | None, typer.Option("--shuffle", metavar="SEED", help="Shuffle the samples of the tars by this seed.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Write a data set as WebDataset tars or as class folders."""
    from paceline.command import data_convert as verb

    verb.run(source, out, settings or [], to.value, samples, shuffle, json)


@data_app.command("check", epilog="Example: paceline data check ~/imagenet")
def data_check(
    source: SourceFolder,
    settings: DataWords = None,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", min=1, max=1024, help="Threads that decode; one for each core if left out.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Decode every image once; exit status 1 if one is damaged."""
    from paceline.command import data_check as verb

    raise typer.Exit(verb.run(source, settings or [], threads, json))


@data_app.command("show", epilog="Example: paceline data show ~/imagenet timm/resnet50-a3 --sheet sheet.png")
def data_show(
    source: SourceFolder,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe and settings to change; without a recipe, settings of the data."),
    ] = None,
    sheet: Annotated[Path | None, typer.Option("--sheet", metavar="FILE.png", parser=_path, help="Write a contact sheet of what augmentation gives.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Print the images, classes, sizes and bytes of a data set."""
    from paceline.command import data_show as verb

    verb.run(source, words or [], sheet, json)


bench_app = typer.Typer(help="Measure what a recipe gets of this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")


@bench_app.command("data", epilog="Example: paceline bench data nvidia/resnet50 --data ~/imagenet")
def bench_data(
    recipe: RecipeWord = None, settings: SettingWords = None, data: DataFolder = None, on: On = None, device: Device = None,
    images: Annotated[int, typer.Option("--images", metavar="N", min=1, max=10**6, help="Training images that are measured on.")] = 256,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", min=0.001, max=3600, help="How long each measurement takes at most.")] = 1.0,
    json: Json = False,
) -> None:  # fmt: skip
    """Measure reading, decoding, resizing and sending images."""
    from paceline.command import bench_data as verb

    verb.run(recipe, settings or [], data, on, device, images, seconds, json)


def main() -> None:
    """Run the command line."""
    with visible_output():
        try:
            app()
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(1)
        except (UserError, OSError):
            from paceline.worker import faults_in_one_line

            with faults_in_one_line():
                raise
