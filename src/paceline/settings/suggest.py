"""What to write instead: the nearest name, the address of a key, and what other programs' words are called here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

FOREIGN = {
    "batch_size": "global_batch",
    "batch": "global_batch",
    "learning_rate": "optimizer.lr",
    "rate": "optimizer.lr",
    "wd": "weight_decay.rate",
    "ema_decay": "ema.decay",
    "steps": "epochs",
    "max_steps": "epochs",
    "iterations": "epochs",
    "pretrained": "init.from",
    "workers": "on.loader_workers",
    "num_workers": "on.loader_workers",
    "gpus": "on.replicas",
    "devices": "on.replicas",
    "amp": "on.precision",
    "fp16": "on.precision",
    "bf16": "on.precision",
}
"""Words of other programs, and the addresses that stand for them here."""

_VALUES = {
    "gpu": "cuda",
    **dict.fromkeys(("16", "16.32", "bfloat16", "amp"), "bf16"),
    **dict.fromkeys(("fp16.32", "float16", "half"), "fp16"),
    **dict.fromkeys(("32", "32.32", "float32"), "fp32"),
    **dict.fromkeys(("64", "64.64", "float64", "double"), "fp64"),
    "tf32.32": "tf32",
}
"""The same for values."""


def nearest(word: str, choices: Sequence[str]) -> str:
    """'; did you mean ...?' when a choice is close to the word, else the choices themselves."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return _meant(close) or _listed(sorted(choices))


def nearest_value(word: str, choices: Sequence[str]) -> str:
    """'; did you mean ...?' when a choice is close to the word or is what others call by it, else nothing."""
    ours = _VALUES.get(word.lower(), "")
    return _meant([ours] if ours in choices else difflib.get_close_matches(word, choices, n=1, cutoff=0.6))


def nearest_key(word: str, section: str, keys: Sequence[str], addresses: Sequence[str]) -> str:
    """The same for a key that a section does not have: it may stand elsewhere, or have another name here."""
    near, exact = difflib.get_close_matches(word, keys, n=1, cutoff=0.6), elsewhere(word, addresses)
    # Who names a section means a key of it; a bare word may belong anywhere.
    found = (near or exact) if section else (exact or near)
    return _meant(found or _similar(word, addresses)) or _listed(sorted(keys))


def elsewhere(word: str, addresses: Sequence[str]) -> list[str]:
    """The addresses that a word stands for: another program's word, an address itself, or the last part of some."""
    ours = FOREIGN.get(word, "")
    if ours in addresses:
        return [ours]
    return [address for address in addresses if f".{address}".endswith(f".{word}")][:3]


def nearest_name(word: str, names: Sequence[str]) -> str:
    """The names that contain the word, or its last part; else the nearest one, or some of all."""
    for part in (word, word.rpartition("/")[2]):
        # Short ones come closest; those for images of one's own before those of a published set.
        found = sorted((not name.startswith("images/"), len(name), name) for name in names if part and part in name)
        if found:
            return _meant([found[0][2]]) if len(found) == 1 else _listed([name for *_, name in found], most=6)
    return nearest(word, names)


def _similar(word: str, addresses: Sequence[str]) -> list[str]:
    """An address whose last part is close to the word."""
    close = difflib.get_close_matches(word, [address.rpartition(".")[2] for address in addresses], n=1, cutoff=0.7)
    return elsewhere(close[0], addresses) if close else []


def _meant(choices: Sequence[str]) -> str:
    quoted = " or ".join(f"'{choice}'" for choice in choices)
    return f"; did you mean {quoted}?" if choices else ""


def _listed(choices: Sequence[str], most: int = 12) -> str:
    return f"; there is {', '.join(choices[:most])}{', ...' if len(choices) > most else ''}" if choices else ""
