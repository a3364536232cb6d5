"""paceline resume: continues a run from its newest intact checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.command.train import refuse_folder_in_use
from paceline.job import flag_words, stored_job
from paceline.worker import run_verb


def run(folder: Path, words: list[str], data: Path | None, replicas: int | None, device: str | None) -> int:
    """Continue; only on.* words may differ from the first start."""
    job = stored_job(folder, [*words, *flag_words(replicas, device)], data)
    refuse_folder_in_use(folder, job.launch is None)
    return int(run_verb("train", job, folder, command=sys.argv[1:]))
