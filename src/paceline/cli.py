"""The one command line: finds the verb, reads its words, and turns faults into one line and an exit status."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]

from paceline import __version__, completing
from paceline.errors import UserError
from paceline.starting import interruptible
from paceline.verbs import Verbs
from paceline.visible import visible_output

# isort: off
from paceline.options import (
    Accelerator, Against, All, AllowDifference, BenchData, Checkpoint, CompareOn, CsvFile, DataFolder, DataWords,
    Details, Device, DeviceLink, Devices, DevicesPerHost, Evaluated, ExportFolder, ExportTo, Follow, GivenWords, Half,
    HeatmapFolder, HostCount, HostLink, Hosts, Image, Json, MeasuredSpeed, NewRun, On, Once, OnWords, Out, Probed, Profile,
    RecipeOrFolder, RecipeWord, Replicas, ReportFile, ResultFile, RunFolder, RunFolders, Scheduler, Seconds,
    SettingWords, Shell, SourceFolder, Target, TestFolder, Threshold, TimeLimit, Top, Until, Volume, path_of, time_words,
)  # fmt: skip
# isort: on


app = typer.Typer(
    name="paceline",
    cls=Verbs,
    help="Train, validate and benchmark convolutional image classifiers. The same recipe is the same run on every placement.",
    epilog="Start with: paceline train",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
    completion: Annotated[Shell | None, typer.Option("--completion", help="Print what makes a shell complete words.", is_eager=True)] = None,
) -> None:  # fmt: skip
    if version:
        print(f"paceline {__version__}")
    if completion:
        print(completing.SCRIPTS[completion.value].strip())
    if version or completion:
        raise typer.Exit


@app.command(epilog="Example: paceline train photos, or: paceline train cifar10/resnet20 --data ~/cifar10 epochs=50")
def train(
    recipe: RecipeOrFolder = None, settings: SettingWords = None, data: DataFolder = None, out: Out = None, on: On = None,
    replicas: Replicas = None, device: Device = None, time_limit: TimeLimit = None,
) -> None:  # fmt: skip
    """Train a recipe, or on a folder of images; else, a demo."""
    with interruptible():
        from paceline.command import train as verb

        words = [*(settings or []), *time_words(time_limit)]
        raise typer.Exit(verb.run(recipe, words, data, out, on, replicas, device))


@app.command(epilog="Example: paceline resume runs/mine on.micro_batch=32")
def resume(
    run: RunFolder, settings: OnWords = None, data: DataFolder = None, replicas: Replicas = None, device: Device = None,
    time_limit: TimeLimit = None, until: Until = None, out: NewRun = None,
) -> None:  # fmt: skip
    """Continue a run from its newest intact checkpoint."""
    with interruptible():
        from paceline.command import resume as verb

        words = [*(settings or []), *time_words(time_limit)]
        raise typer.Exit(verb.run(run, words, data, replicas, device, until, out))


@app.command(epilog="Example: paceline watch runs/first runs/second")
def watch(runs: RunFolders, once: Once = False) -> None:
    """Show runs while they train, by their records alone."""
    from paceline.command import watch as verb

    raise typer.Exit(verb.run(runs, once))


@app.command(epilog="Example: paceline validate runs/mine --all")
def validate(
    run: RunFolder, settings: OnWords = None, checkpoint: Evaluated = None, every: All = False, test: TestFolder = None,
    follow: Follow = False, details: Details = False, data: DataFolder = None, json: Json = False,
) -> None:  # fmt: skip
    """Validate a run's newest checkpoint, each image exactly once."""
    from paceline.command import validate as verb
    from paceline.training.selection import Selection

    evaluates = verb.follow if follow else verb.run
    raise typer.Exit(evaluates(run, settings or [], Selection(checkpoint, every, test), data, json, details))


@app.command(epilog="Example: paceline predict runs/mine photos/ --top 3")
def predict(
    run: RunFolder, images: GivenWords, checkpoint: Checkpoint = None, top: Top = 5, threshold: Threshold = None,
    heatmap: HeatmapFolder = None, csv: CsvFile = None, device: Device = None, json: Json = False,
) -> None:  # fmt: skip
    """Say what is in images, by the network of a run."""
    from paceline.command import predict as verb

    raise typer.Exit(verb.run(run, images, checkpoint, top, threshold, heatmap, csv, device, json))


@app.command(epilog="Example: paceline report runs/a runs/b --out both.html")
def report(runs: RunFolders, out: ReportFile = None, data: DataFolder = None) -> None:
    """Write a page with the curves and mistakes of runs."""
    from paceline.command import report as verb

    verb.run(runs, out, data)


@app.command(epilog="Example: paceline export runs/mine --to onnx")
def export(
    run: RunFolder, to: ExportTo, out: ExportFolder = None, checkpoint: Checkpoint = None, half: Half = False,
    images: CompareOn = None, data: DataFolder = None, allow_difference: AllowDifference = False, json: Json = False,
) -> None:  # fmt: skip
    """Write a run's network as a file for other programs."""
    from paceline.command import export as verb

    raise typer.Exit(verb.run(run, to, out, checkpoint, half, images or [], data, allow_difference, json))


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
    recipe: RecipeOrFolder = None, settings: SettingWords = None, data: DataFolder = None, on: On = None, replicas: Replicas = None,
    device: Device = None, json: Json = False,
    yaml: Annotated[bool, typer.Option("--yaml", help="Print every setting and where its value came from.")] = False,
    rehearse: Annotated[int | None, typer.Option("--rehearse", metavar="RANK", min=0, help="Take one step as this one of on.replicas=N: what it sends, its memory.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes and placements, for editors.")] = False,
    hosts: HostCount = None, devices_per_host: DevicesPerHost = None, link: HostLink = None, inside: DeviceLink = None,
    measured: MeasuredSpeed = None, probe: Probed = False,
) -> None:  # fmt: skip
    """Print every number of a run without running it."""
    many = (hosts, devices_per_host, link, inside, measured)
    if any(given is not None for given in many):
        from paceline.command import plan_hosts

        plan_hosts.run(
            recipe, settings or [], data, on, replicas, device, plan_hosts.Hosts(*many), json, yaml or schema or probe
        )
        return
    from paceline.command import plan as verb

    verb.run(recipe, settings or [], data, on, replicas, device, json, yaml, schema, rehearse, probe)


@app.command(
    epilog="Example: paceline launch slurm nvidia/resnet50 --hosts 2 --devices 8 --data /data/imagenet --out /shared/runs/mine"
)
def launch(
    scheduler: Annotated[Scheduler, typer.Argument(metavar="SCHEDULER", help="slurm, kubernetes, skypilot, docker, or torchrun for a script.")],
    recipe: RecipeOrFolder = None, settings: SettingWords = None, hosts: Hosts = 1, devices: Devices = 1,
    data: DataFolder = None, out: Out = None, on: On = None, device: Device = None, time_limit: TimeLimit = None,
    image: Image = None, volume: Volume = None, accelerator: Accelerator = None,
) -> None:  # fmt: skip
    """Print the file with which a scheduler starts a run on hosts."""
    from paceline.command import launch as verb

    words = [*(settings or []), *time_words(time_limit)]
    verb.run(scheduler.value, recipe, words, hosts, devices, data, out, on, device, image, volume, accelerator)


@app.command(epilog="Example: paceline verify shapes/resnet8")
def verify(
    recipe: RecipeWord = None, settings: SettingWords = None, data: DataFolder = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Optimizer steps of each run.")] = 10,
    full: Annotated[bool, typer.Option("--full", help="Do not shrink a large recipe.")] = False,
    whole_runs: Annotated[bool, typer.Option("--whole-runs/--no-whole-runs", help="Show whole runs too, which have no limit.")] = True,
    json: Json = False,
) -> None:  # fmt: skip
    """Prove here that a recipe is the same run on every layout."""
    from paceline.command import verify as verb

    raise typer.Exit(verb.run(recipe, settings or [], data, steps, full, json, whole_runs=whole_runs))


@app.command(epilog="Example: paceline doctor > report.txt")
def doctor(json: Json = False) -> None:
    """Check this machine, and print what a report of a fault needs."""
    from paceline.command import doctor as verb

    raise typer.Exit(verb.run(json))


@app.command(epilog="Example: paceline recipes cifar10/resnet20 > mine.yaml")
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", autocompletion=completing.recipe_name, help="Print this recipe's page, or list those of a system.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="List the recipes that others published, too.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """List the recipes that come with Paceline, or print one."""
    from paceline.command import recipes as verb

    verb.run(name, everything, json)


@app.command(epilog="Example: paceline placements graphcore")
def placements(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", autocompletion=completing.placement_name, help="Print this placement's page, or list those of a system.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """List the placements that come with Paceline, or print one."""
    from paceline.command import placements as verb

    verb.run(name, json)


@app.command(epilog="Example: paceline models resnet50 --blocks")
def models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", autocompletion=completing.network, help="Print this network's settings and defaults.")] = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", autocompletion=completing.setting, help="Settings to change, such as model.stem=3x3.")] = None,
    blocks: Annotated[bool, typer.Option("--blocks", help="Print its blocks: parameters, activation bytes, multiply-adds per image.")] = False,
    side: Annotated[int | None, typer.Option(metavar="PIXELS", help="Image side for --blocks.", min=1, max=65_535)] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """List the networks, or print one's settings, or its blocks."""
    from paceline.command import models as verb

    verb.run(name, words or [], blocks, side, json)


data_app = typer.Typer(
    cls=Verbs, help="Show, check, pack and convert data sets.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(data_app, name="data")


@data_app.command("pack", epilog="Example: paceline data pack ~/imagenet ~/imagenet-pack --max-side 500 --quality 90")
def data_pack(
    source: SourceFolder,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", parser=path_of, help="A new folder for the pack, or one to go on with.")] = None,
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
    out: Annotated[Path, typer.Argument(metavar="OUT", parser=path_of, help="A new folder.")],
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
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...", autocompletion=completing.recipe_or_data_setting,
            help="A recipe and settings to change; without a recipe, settings of the data.",
        ),
    ] = None,
    sheet: Annotated[Path | None, typer.Option("--sheet", metavar="FILE.png", parser=path_of, help="Write a contact sheet of what augmentation gives.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Print the images, classes, sizes and bytes of a data set."""
    from paceline.command import data_show as verb

    verb.run(source, words or [], sheet, json)


bench_app = typer.Typer(
    cls=Verbs, help="Measure what a recipe gets of this machine.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench_app, name="bench")


@bench_app.command("data", epilog="Example: paceline bench data nvidia/resnet50 --data ~/imagenet")
def bench_data(
    recipe: RecipeWord = None, settings: SettingWords = None, data: DataFolder = None, on: On = None, device: Device = None,
    images: Annotated[int, typer.Option("--images", metavar="N", min=1, max=10**6, help="Training images that are measured on.")] = 256,
    seconds: Seconds = 1.0,
    json: Json = False,
) -> None:  # fmt: skip
    """Measure reading, decoding, resizing and sending images."""
    from paceline.command import bench_data as verb

    verb.run(recipe, settings or [], data, on, device, images, seconds, json)


@bench_app.command(
    "train", epilog="Example: paceline bench train nvidia/resnet50 global_batch=512 norm_batch=512 on.precision=bf16"
)
def bench_train(
    recipe: RecipeWord = None, settings: SettingWords = None,
    data: BenchData = None, on: On = None, replicas: Replicas = None, device: Device = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", min=1, max=1000, help="Steps of a block; about half a second of them if left out.")] = None,
    seconds: Seconds = 60.0,
    profile: Profile = None, out: ResultFile = None, against: Against = None, json: Json = False,
) -> None:  # fmt: skip
    """Measure a recipe's training steps: images a second and memory."""
    from paceline.command import bench_train as verb

    verb.run(recipe, settings or [], data, on, replicas, device, steps, seconds, profile, out, against, json)


@bench_app.command("infer", epilog="Example: paceline bench infer nvidia/resnet50 --batch 1,8,32,128 on.compile=true")
def bench_infer(
    what: Annotated[str | None, typer.Argument(metavar="[RECIPE|RUN]", autocompletion=completing.recipe_or_run, help="A recipe, for random weights, or a run folder.")] = None,
    settings: SettingWords = None,
    data: BenchData = None, on: On = None, replicas: Replicas = None, device: Device = None,
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", metavar="STEP|best", autocompletion=completing.one_of("best"), help="The run's checkpoint; the newest if left out.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", metavar="N,...", help="Batch sizes; 1,8,32,128 if left out.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, max=10**6, help="How often the latency of each size is measured.")] = 100,
    seconds: Seconds = 20.0, profile: Profile = None, out: ResultFile = None, against: Against = None, json: Json = False,
) -> None:  # fmt: skip
    """Measure a network in evaluation: latency and images a second."""
    from paceline.command import bench_infer as verb

    verb.run(
        what, settings or [], data, on, replicas, device, checkpoint, batch, repeats, seconds, profile, out, against, json
    )  # fmt: skip


def main() -> None:
    """Run the command line."""
    if "_PACELINE_COMPLETE" in os.environ:
        completion_init()
    with visible_output():
        try:
            app(prog_name="paceline")
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(1)
        except (UserError, OSError):
            from paceline.worker import faults_in_one_line

            with faults_in_one_line():
                raise
