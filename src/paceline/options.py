"""The arguments and options that several commands take, each with its one sentence of help."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline import completing
from paceline.errors import SpecError


class Target(StrEnum):
    """The formats that images are converted to."""

    webdataset = "webdataset"
    folder = "folder"


class Shell(StrEnum):
    """The shells that complete words."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


class Scheduler(StrEnum):
    """What starts a run on several hosts."""

    slurm = "slurm"
    kubernetes = "kubernetes"
    skypilot = "skypilot"
    docker = "docker"
    torchrun = "torchrun"


def path_of(word: str) -> Path:
    """A path, which is never empty."""
    if not word.strip():
        raise SpecError(f"'{word}' names no file or folder; write its path, or . for the folder that you are in")
    return Path(word)


def time_words(limit: str | None) -> list[str]:
    """The word that --time-limit is short for."""
    return [] if limit is None else [f"on.time_limit={limit}"]


RecipeWord = Annotated[
    str | None,
    typer.Argument(
        autocompletion=completing.recipe,
        metavar="[RECIPE]",
        help="A shipped name (see `paceline recipes`) or a YAML file; shapes/resnet8 if left out.",
    ),
]
RecipeOrFolder = Annotated[
    str | None,
    typer.Argument(
        autocompletion=completing.recipe_or_folder,
        metavar="[RECIPE|FOLDER]",
        help="A shipped name (see `paceline recipes`), a YAML file, or a folder of images, which is given a recipe; "
        "if left out, --data or DATA_DIR is that folder, and without them it is shapes/resnet8.",
    ),
]
SettingWords = Annotated[
    list[str] | None,
    typer.Argument(
        autocompletion=completing.setting,
        metavar="[KEY=VALUE]...",
        help="Settings to change, such as epochs=20 optimizer.lr=0.2; placement keys start with on.",
    ),
]
OnWords = Annotated[
    list[str] | None,
    typer.Argument(
        autocompletion=completing.on_setting,
        metavar="[on.KEY=VALUE]...",
        help="Placement settings to change, such as on.micro_batch=64.",
    ),
]
RunFolder = Annotated[
    Path, typer.Argument(autocompletion=completing.run, metavar="RUN", parser=path_of, help="A run folder.")
]
RunFolders = Annotated[
    list[Path],
    typer.Argument(
        autocompletion=completing.run,
        metavar="RUN...",
        parser=path_of,
        help="Run folders, of runs that train or have trained.",
    ),
]
Once = Annotated[
    bool, typer.Option("--once", help="Print where the runs stand, and end, as in a pipe; without it, follow them.")
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="FOLDER", parser=path_of, help="Where the images are; else DATA_DIR or DATASETS_DIR."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="RUN", parser=path_of, help="The run folder; one that holds the same recipe goes on."
    ),
]
Until = Annotated[
    str | None,
    typer.Option("--until", metavar="LENGTH", help="Go on as a new run of this length, such as '120 epochs'."),
]
NewRun = Annotated[
    Path | None, typer.Option("--out", metavar="NEW", parser=path_of, help="The folder of that new run.")
]
On = Annotated[
    str | None,
    typer.Option(
        "--on", autocompletion=completing.placement, metavar="PLACEMENT", help="A shipped placement or a YAML file."
    ),
]
Replicas = Annotated[int | None, typer.Option("--replicas", metavar="N", help="Short for on.replicas=N.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        autocompletion=completing.one_of("cpu", "cuda", "mps"),
        metavar="KIND",
        help="Short for on.device=KIND: cpu, cuda or mps.",
    ),
]
Evaluated = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        autocompletion=completing.one_of("best"),
        metavar="STEP|best",
        help="Evaluate this step's checkpoint, or the best one.",
    ),
]
All = Annotated[bool, typer.Option("--all", help="Evaluate every checkpoint that was not evaluated yet.")]
Follow = Annotated[
    bool, typer.Option("--follow", help="Evaluate every checkpoint as it comes, until the run has ended.")
]
TestFolder = Annotated[
    Path | None,
    typer.Option(
        "--test",
        metavar="FOLDER",
        parser=path_of,
        help="Evaluate other images of the same classes, as a test set.",
    ),
]
Details = Annotated[bool, typer.Option("--details", help="Write tables of classes, confused pairs and wrong answers.")]
TimeLimit = Annotated[
    str | None,
    typer.Option(
        "--time-limit",
        metavar="TIME",
        help="Short for on.time_limit: save and end after, say, '4 hours', with status 75.",
    ),
]
Hosts = Annotated[int, typer.Option("--hosts", metavar="N", min=1, max=65_536, help="How many hosts.")]
Devices = Annotated[
    int, typer.Option("--devices", metavar="M", min=1, max=1024, help="Devices, and so replicas, of each host.")
]
Image = Annotated[
    str | None, typer.Option("--image", metavar="NAME", help="A container image that Paceline is installed in.")
]
Volume = Annotated[
    str | None,
    typer.Option("--volume", metavar="NAME", help="A claim or volume to mount in place of folders of the hosts."),
]
Accelerator = Annotated[
    str | None, typer.Option("--accelerator", metavar="NAME", help="What SkyPilot calls the device, such as H100.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        autocompletion=completing.one_of("best"),
        metavar="STEP|best",
        help="The run's checkpoint; the best that is kept if left out.",
    ),
]
GivenWords = Annotated[
    list[str],
    typer.Argument(
        metavar="IMAGES... [on.KEY=VALUE]...",
        help="Files, folders, patterns, a CSV file of paths, or - for paths on standard input.",
    ),
]
Top = Annotated[int, typer.Option("--top", metavar="K", min=1, help="How many classes to give of each image.")]
Threshold = Annotated[
    float | None,
    typer.Option("--threshold", metavar="P", help="Answer 'none' where the best class is less probable than this."),
]
HeatmapFolder = Annotated[
    Path | None,
    typer.Option(
        "--heatmap", metavar="FOLDER", parser=path_of, help="Write pictures of what speaks for the answer (Grad-CAM)."
    ),
]
CsvFile = Annotated[
    Path | None,
    typer.Option("--csv", metavar="FILE", parser=path_of, help="Write a table of all in place of printing one."),
]
ExportTo = Annotated[
    str,
    typer.Option(
        "--to",
        autocompletion=completing.one_of("onnx", "pt2", "safetensors", "torchvision"),
        metavar="onnx|pt2|safetensors|torchvision",
        help="onnx, pt2 (torch.export), safetensors, or torchvision (its names of the tensors).",
    ),
]
ExportFolder = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", parser=path_of, help="Where to write; RUN/exported/KIND if left out."),
]
Half = Annotated[bool, typer.Option("--half", help="Write weights, and compute, in float16.")]
CompareOn = Annotated[
    list[str] | None,
    typer.Option("--images", metavar="IMAGES", help="Compare on these images; on validation images if left out."),
]
AllowDifference = Annotated[
    bool, typer.Option("--allow-difference", help="Export even if fewer than 99% of the answers are equal.")
]
SourceFolder = Annotated[
    Path, typer.Argument(metavar="SOURCE", parser=path_of, help="The folder of a data set, in any format.")
]
DataWords = Annotated[
    list[str] | None,
    typer.Argument(
        autocompletion=completing.data_setting,
        metavar="[KEY=VALUE]...",
        help="Settings of the data, such as labels=classes.csv first_label=0.",
    ),
]
Seconds = Annotated[
    float,
    typer.Option("--seconds", metavar="S", min=0.001, max=3600, help="How long each measurement takes at most."),
]
BenchData = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="FOLDER", parser=path_of, help="Measure on the images here; on synthetic ones if left out."
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        parser=path_of,
        help="One file that needs nothing else; if left out, of one run, report.html in its folder.",
    ),
]
ResultFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", parser=path_of, help="Keep the result in a file, as JSON.")
]
Against = Annotated[
    Path | None,
    typer.Option(
        "--against", metavar="FILE", parser=path_of, help="Print ratios to an earlier result of the same work."
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FOLDER",
        parser=path_of,
        help="Profile a few steps or batches into a folder: trace, kernels, memory.",
    ),
]
Probed = Annotated[
    bool, typer.Option("--probe", help="Measure a few small steps here, and predict what the run takes.")
]
HostCount = Annotated[
    int | None,
    typer.Option("--hosts", metavar="N", min=1, help="Predict the steps on N hosts; with the options that follow."),
]
DevicesPerHost = Annotated[
    int | None, typer.Option("--devices-per-host", metavar="N", min=1, help="Devices of each of --hosts.")
]
HostLink = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="SPEED[,LATENCY]",
        help="What one of --hosts sends to others, such as 400Gb or 50GB,5us, as measured for an all-reduce.",
    ),
]
DeviceLink = Annotated[
    str | None,
    typer.Option(
        "--inside",
        metavar="SPEED[,LATENCY]",
        help="What one device sends to others in its host; as --link if left out.",
    ),
]
MeasuredSpeed = Annotated[
    str | None,
    typer.Option(
        "--measured",
        metavar="FILE|N",
        help="What one device does: a result of `paceline bench train --out FILE`, or its images/s.",
    ),
]
