"""How long a plan and a settings fault take from the shell: the promise is under 0.8 s, since torch is never loaded.

python benchmarks/start_up.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

LIMIT = 0.8
CALLS = {
    "plan": ["plan", "cifar10/resnet20"],
    "recipes": ["recipes"],
    "models": ["models"],
    "help": ["--help"],
    "unknown key": ["train", "cifar10/resnet20", "epoch=5"],
    "impossible batch": ["train", "shapes/resnet8", "on.micro_batch=20"],
}


def seconds(words: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "paceline", *words], capture_output=True, check=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    rows = {name: sorted(seconds(words) for _ in range(9)) for name, words in CALLS.items()}
    for name, times in rows.items():
        print(json.dumps({"call": name, "median": round(statistics.median(times), 3), "slowest": round(times[-1], 3)}))
    sys.exit(any(statistics.median(times) > LIMIT for times in rows.values()))
