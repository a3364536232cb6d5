"""Paceline's training or inference step against the network of torchvision or timm under torch.compile, in one call.

Each measurement is a process of its own. With --ahead, all of them first run once side by side, which fills the caches
of both compilers; then they are measured one after the other. Peers get the same batch, image side and precision (bf16,
channels last), images as bytes on the device that are normalized there, label smoothing and SGD with momentum.

    python benchmarks/peer_speed.py train resnet50 resnet18 --ahead
    python benchmarks/peer_speed.py infer resnet50 efficientnet-b0 --out infer.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = """
model: {model}
data: {{name: synthetic, images: 1281167, validation_images: 1000, classes: 1000, side: {side}}}
global_batch: {batch}
epochs: 90
optimizer: {{name: sgd, lr: 0.01, momentum: 0.9}}
weight_decay: {{rate: 5e-5}}
schedule: constant
loss: {{label_smoothing: 0.1}}
"""
INFER_BATCHES = "1,32,256"
AHEAD_TOGETHER = 5
"""How many processes fill caches at a time, so that their networks fit one device."""


@dataclass(frozen=True)
class Case:
    """A network here and there."""

    peer: str
    batch: int
    side: int = 224
    model: str = ""
    """Paceline's settings of the network, if its name is not enough."""


CASES = {
    "resnet50": Case("torchvision:resnet50", 512),
    "resnet18": Case("torchvision:resnet18", 512),
    "resnet101": Case("torchvision:resnet101", 256),
    "resnext50": Case("torchvision:resnext50_32x4d", 256),
    "inception-v3": Case("timm:inception_v3", 256, 299, "{name: inception-v3, auxiliary: 0}"),
    "efficientnet-b0": Case("timm:efficientnet_b0", 256),
    "efficientnet-b4": Case("timm:efficientnet_b4", 128, 380),
    "vgg16": Case("torchvision:vgg16", 256),
}


def our_command(what: str, name: str, seconds: float, folder: Path, batches: str) -> list[str]:
    case, page = CASES[name], folder / f"{name}.yaml"
    page.write_text(RECIPE.format(model=case.model or name, side=case.side, batch=case.batch))
    bench = [sys.executable, "-m", "paceline", "bench", what, str(page), "on.precision=bf16"]
    command = [*bench, "--seconds", f"{seconds:g}", "--json"]
    return command + (["--batch", batches] if what == "infer" else [])


def peer_command(what: str, name: str, steps: int, batches: str) -> list[str]:
    return [sys.executable, __file__, what, name, "--peer", "--steps", str(steps), "--batch", batches]


def run(command: list[str]) -> dict[str, Any]:
    """What a process prints as its last line, with the seconds that it took; or why it failed."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1][:300]}
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return result | {"process_seconds": time.perf_counter() - start}


def compare(options: argparse.Namespace, names: list[str], folder: Path) -> list[dict[str, Any]]:
    """Measure each network here and there; the commands come in pairs, one after the other."""
    what, batches = options.what, options.batch

    def ours(name: str, seconds: float) -> list[str]:
        return our_command(what, name, seconds, folder, batches)

    def theirs(name: str, steps: int) -> list[str]:
        return peer_command(what, name, steps, batches)

    firsts: dict[str, Any] = {}
    if options.ahead:
        short = [(name, ours(name, 1)) for name in names]
        short += [(f"peer of {name}", theirs(name, 1)) for name in names]
        with ThreadPoolExecutor(AHEAD_TOGETHER) as pool:
            for (label, _), result in zip(short, pool.map(run, [command for _, command in short]), strict=True):
                firsts[label] = result
                seconds_taken = f"{result.get('process_seconds', 0):.0f} s"
                print(f"ahead: {label}: {result.get('failed', seconds_taken)}", flush=True)
    rows = []
    for name in names:
        measured = {"ours": run(ours(name, options.seconds)), "peer": run(theirs(name, options.steps))}
        row = {"what": what, "name": name, **measured, "first": firsts.get(name)}
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    case, ours, peer = CASES[row["name"]], row["ours"], row["peer"]
    head = f"| {row['what']} | {row['name']} | {case.side} | {case.peer} |"
    if "failed" in ours or "failed" in peer:
        return f"{head} ours: {ours.get('failed', 'measured')} | peer: {peer.get('failed', 'measured')} |"
    if row["what"] == "infer":
        cells = []
        for one, other in zip(ours["batches"], peer["batches"], strict=True):
            ratio = one["images_per_second"] / other["images_per_second"]
            latency = f"{one['latency_ms']['p50']:.2f} / {other['latency_ms']['p50']:.2f} ms"
            cells.append(f"{one['batch']}: {one['images_per_second']:,.0f} / {other['images_per_second']:,.0f}"
                         f" = {ratio:.2f}, {latency}")  # fmt: skip
        return f"{head} {' | '.join(cells)} |"
    ratio, memory = (ours[key] / peer[key] for key in ("images_per_second", "peak_memory"))
    speeds = f"{ours['images_per_second']:,.0f} | {peer['images_per_second']:,.0f} | {ratio:.3f}"
    start = f"{ours['first_step_seconds']:.1f} | {peer['first_seconds']:.1f}"
    return f"{head} {case.batch} | {speeds} | {ours['peak_memory'] / 2**30:.1f} GiB | {memory:.2f} | {start} |"


def measure_peer(what: str, name: str, steps: int, batches: str) -> dict[str, Any]:
    """The peer's images per second, by device events."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    case = CASES[name]
    network = build_peer(case).cuda().to(memory_format=torch.channels_last)
    if what == "train":
        return train_peer(network, case, steps)
    return infer_peer(network, case, steps, [int(batch) for batch in batches.split(",")])


def build_peer(case: Case) -> Any:
    package, _, name = case.peer.partition(":")
    if package == "timm":
        import timm  # type: ignore[import-not-found]

        return timm.create_model(name)
    from torchvision import models

    return models.get_model(name, weights=None)


def pictures(case: Case, batch: int) -> Any:
    import torch

    shape = (batch, 3, case.side, case.side)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    return images.contiguous(memory_format=torch.channels_last)


def normalized(images: Any) -> Any:
    import torch

    mean, std = torch.tensor([[123.675, 116.28, 103.53], [58.395, 57.12, 57.375]], device="cuda").view(2, 3, 1, 1)
    return ((images.float() - mean) / std).bfloat16()


def train_peer(network: Any, case: Case, steps: int) -> dict[str, Any]:
    import torch
    from torch.nn import functional as F

    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5, fused=True)
    batches, labels = [pictures(case, case.batch) for _ in range(2)], torch.randint(0, 1000, (case.batch,)).cuda()

    @torch.compile
    def loss_of(images: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            scores = network(normalized(images))
        return F.cross_entropy(scores.float(), labels, label_smoothing=0.1)

    def step(index: int) -> None:
        loss_of(batches[index % 2]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    start = time.perf_counter()
    step(0)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    ms = timed(step, steps)
    peak = torch.cuda.max_memory_allocated()
    return {"images_per_second": case.batch / ms * 1000, "ms": ms, "peak_memory": peak, "first_seconds": first}


def infer_peer(network: Any, case: Case, steps: int, batches: list[int]) -> dict[str, Any]:
    import torch

    network.eval()

    @torch.compile(mode="reduce-overhead", dynamic=False)
    def scores_of(images: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return network(normalized(images))

    rows = []
    with torch.inference_mode():
        for batch in batches:
            images = pictures(case, batch)
            host = images.cpu().pin_memory()
            for _ in range(3):
                scores_of(images)
            ms = timed(lambda _, images=images: scores_of(images), 5 * steps)
            latencies = []
            for _ in range(5 * steps):
                start = time.perf_counter()
                scores_of(host.cuda(non_blocking=True)).float().cpu()
                latencies.append((time.perf_counter() - start) * 1000)
            latency = {"p50": statistics.median(latencies)}
            rows.append({"batch": batch, "images_per_second": batch / ms * 1000, "latency_ms": latency})
    return {"batches": rows}


def timed(step: Any, steps: int) -> float:
    """Milliseconds of a step: after a warm-up, the median of three blocks."""
    import torch

    for index in range(min(8, 2 * steps)):
        step(index)
    blocks: list[float] = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for index in range(steps):
            step(index)
        end.record()
        torch.cuda.synchronize()
        blocks.append(begin.elapsed_time(end) / steps)
    return statistics.median(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "infer"])
    parser.add_argument("names", nargs="*", help=f"networks, of {', '.join(CASES)}; all if none is named")
    parser.add_argument("--ahead", action="store_true", help="fill the compilers' caches first, side by side")
    parser.add_argument("--seconds", type=float, default=8, help="how long each network of ours is measured")
    parser.add_argument("--steps", type=int, default=20, help="how many steps a block of the peer's has")
    parser.add_argument("--batch", default=INFER_BATCHES, help="batch sizes of inference")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where all results go as JSON")
    options = parser.parse_args()
    names = options.names or list(CASES)
    if options.peer:
        print(json.dumps(measure_peer(options.what, names[0], options.steps, options.batch)))
        return
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(options, names, Path(folder))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
