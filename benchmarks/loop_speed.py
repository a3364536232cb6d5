"""Paceline's training loop against a bare hand-written PyTorch loop: same network, batch, precision and augmentation.

Both run in one process, turn by turn: the real `train` loop runs until its next report, then the bare loop does as many
steps. The bare loop has torch.nn.BatchNorm2d, data on the device, the same crop and flip, and no metrics at all.

    python benchmarks/loop_speed.py --model resnet20 --batch 128
    python benchmarks/loop_speed.py --device cuda --precision bf16 --model resnet18
    python benchmarks/loop_speed.py --model resnet50 --batch 16 --steps 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.load.arrays import open_source
from paceline.job import plan_job
from paceline.planning import Plan
from paceline.record import Row
from paceline.settings.build import build
from paceline.settings.placement import Placement
from paceline.settings.read import Tree, parse
from paceline.settings.recipe import Recipe
from paceline.training.loop import train
from paceline.training.restore import restore_newest
from paceline.training.session import open_session


class BareUnit(nn.Module):
    """A basic residual unit as anyone would write it."""

    def __init__(self, inputs: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride, self.extra = stride, outputs - inputs
        self.side: nn.Module | None = None
        if project and (stride != 1 or inputs != outputs):
            self.side = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        if self.side is not None:
            x = self.side(x)
        elif self.extra:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        y += x
        return F.relu(y, inplace=True)


class BareBottleneck(nn.Module):
    """A bottleneck as anyone would write it, its stride in the 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.side: nn.Module | None = None
        if inputs != outputs:
            self.side = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y))
        y += x if self.side is None else self.side(x)
        return F.relu(y, inplace=True)


def bare_resnet50() -> nn.Module:
    """resnet50 for 1,000 classes, with torch's own batch norm."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, (width, depth) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True)):
        for unit in range(depth):
            layers.append(BareBottleneck(inputs, width, 2 if stage and unit == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def bare_network(model: str) -> nn.Module:
    """resnet50, or resnet20 (shortcut A) or resnet18 with a 3x3 stem (projections), with torch's own batch norm."""
    if model == "resnet50":
        return bare_resnet50()
    widths, depth, project = ((16, 32, 64), 3, False) if model == "resnet20" else ((64, 128, 256, 512), 2, True)
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(inplace=True),
    ]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for unit in range(depth):
            layers.append(BareUnit(inputs, width, 2 if stage and unit == 0 else 1, project))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Bare:
    """The hand-written loop."""

    def __init__(self, plan: Plan, model: str, device: torch.device) -> None:
        pictures = open_source(plan, None).training
        self.images = (
            F.pad(torch.tensor(pictures.images).permute(0, 3, 1, 2), (4, 4, 4, 4))
            .permute(0, 2, 3, 1)
            .contiguous()
            .to(device)
        )
        self.labels = torch.tensor(pictures.labels).to(device)
        self.mean, self.std = (
            torch.tensor(c, device=device).view(3, 1, 1) * 255 for c in (plan.data.mean, plan.data.std)
        )
        self.network = bare_network(model).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.forward = torch.compile(self.network) if plan.placement.compile else self.network
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        self.device, self.batch = device, plan.global_batch
        self.half = plan.placement.precision == "bf16"
        self.last = plan.facts.side - 1
        self.steps = torch.arange(plan.facts.side, device=device)
        self.order, self.place = torch.randperm(len(self.labels), device=device), 0

    def step(self) -> None:
        """One step: pick, crop, flip, forward, backward, update."""
        if self.place + self.batch > len(self.order):
            self.order, self.place = torch.randperm(len(self.labels), device=self.device), 0
        chosen = self.order[self.place : self.place + self.batch]
        self.place += self.batch
        down, right = torch.randint(0, 9, (2, self.batch, 1), device=self.device)
        mirror = torch.randint(0, 2, (self.batch, 1), device=self.device)
        rows, columns = down + self.steps, right + self.steps + mirror * (self.last - 2 * self.steps)
        images = self.images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        x = (images.float() - self.mean) / self.std
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            scores = self.forward(x)
        F.cross_entropy(scores.float(), self.labels[chosen]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Turns:
    """At each report of the Paceline loop, notes its time and lets the bare loop do as many steps."""

    def __init__(self, bare: Bare, steps: int) -> None:
        self.bare, self.count = bare, steps
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.start = time.perf_counter()

    def row(self, row: Row) -> None:
        """A report has just read the device, so Paceline's steps are done."""
        if row["kind"] != "report":
            return
        now = time.perf_counter()
        self.ours.append(now - self.start)
        for _step in range(self.count):
            self.bare.step()
        if self.bare.device.type == "cuda":
            torch.cuda.synchronize()
        self.start = time.perf_counter()
        self.theirs.append(self.start - now)

    def progress(self, what: str, done: int, total: int) -> None:
        """Only reports count."""


def measure(options: argparse.Namespace) -> dict[str, object]:
    model = "{name: resnet18, stem: 3x3}" if options.model == "resnet18" else options.model
    epochs = (options.turns * options.steps + 0.5) * options.batch / 10_000
    data = "shapes"
    if options.side != 32:
        images, classes = 16 * options.batch, 1000 if options.model == "resnet50" else 10
        epochs *= 10_000 / images
        data = f"{{name: synthetic, images: {images}, validation_images: 1, classes: {classes}, side: {options.side}}}"
    text = (
        f"model: {model}\ndata: {data}\nglobal_batch: {options.batch}\nepochs: {epochs}\n"
        "optimizer: {name: sgd, lr: 0.01, momentum: 0.9, nesterov: true}\n"
        "weight_decay: {rate: 5e-4}\nschedule: constant\n"
        f"augment: {{pad: 4, flip: true}}\nreport: {options.steps} steps\nevaluate: {{every: 1000 epochs}}\n"
    )
    placement = {
        "device": options.device,
        "precision": options.precision,
        "compile": options.compile,
        "save": "1000 epochs",
    }
    recipe = build(Recipe, parse(text, "benchmark"))
    plan = plan_job("benchmark", recipe, build(Placement, Tree(placement)), None, Tree(), Tree()).plan
    with tempfile.TemporaryDirectory() as folder, open_session(plan, Path(folder)) as session:
        turns = Turns(Bare(plan, options.model, session.world.device), options.steps)
        session.run.sinks = [turns]
        restore_newest(session)
        train(session)
    ours, theirs = (statistics.median(times[options.warm :]) / options.steps for times in (turns.ours, turns.theirs))
    ratios = [b / a for a, b in zip(turns.ours[options.warm :], turns.theirs[options.warm :], strict=True)]
    return {
        "model": options.model, "side": options.side, "batch": options.batch,
        "device": options.device, "precision": options.precision,
        "compile": options.compile, "paceline_images_per_second": round(options.batch / ours, 1),
        "bare_images_per_second": round(options.batch / theirs, 1), "ratio_median": round(statistics.median(ratios), 4),
        "ratios": [round(r, 3) for r in ratios], "torch": torch.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["resnet20", "resnet18", "resnet50"], default="resnet20")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--side", type=int, help="pixels, 224 for resnet50 and else 32; other than 32, synthetic images"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=14)
    parser.add_argument("--warm", type=int, default=3, help="first turns that do not count")
    given = parser.parse_args()
    given.side = given.side or (224 if given.model == "resnet50" else 32)
    print(json.dumps(measure(given)))
