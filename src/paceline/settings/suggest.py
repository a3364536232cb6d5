"""What to write instead: the nearest name, the address of a key, and what other programs' words are called here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence

_ADDRESSES = {
    "optimizer.lr": "learning_rate base_lr lr0 rate optimiser.lr",
    "optimizer.momentum": "momentum",
    "optimizer.betas": "adam_betas",
    "optimizer.epsilon": "eps",
    "optimizer": "optim opt optimiser",
    "weight_decay.rate": "wd l2",
    "weight_decay.skip_names": "no_decay",
    "schedule": "scheduler sched lr_scheduler lr_schedule",
    "schedule.warmup": "warmup warm_up warmup_epochs warmup_steps warmup_iters lr_warmup_epochs",
    "schedule.start": "warmup_lr warmup_start_lr",
    "schedule.end": "min_lr lr_min eta_min end_lr final_lr",
    "schedule.drops": "milestones lr_steps decay_epochs",
    "schedule.factor": "gamma decay_rate",
    "global_batch": "batch batch_size bs train_batch_size global_batch_size total_batch_size",
    "epochs": "num_epochs max_epochs n_epochs train_epochs",
    "seed": "random_seed rng manual_seed",
    "drop_last": "tail",
    "clip.norm": "clip_grad grad_clip clip_grad_norm max_grad_norm gradient_clip_val",
    "loss.label_smoothing": "smoothing",
    "loss.class_weights": "class_weight cls_weights pos_weight balanced balance",
    "ema.decay": "ema_decay model_ema model_ema_decay average.decay",
    "ema.every": "model_ema_steps",
    "ema.start": "average.start",
    "average.every": "average.apart",
    "model": "arch architecture backbone model_name net",
    "model.dropout": "drop drop_rate dropout_rate",
    "model.survival": "drop_path drop_path_rate stochastic_depth",
    "init.from": "pretrained checkpoint finetune initial_checkpoint",
    "freeze": "freeze_layers frozen",
    "data.side": "img_size image_size imgsz input_size resolution size train_crop_size crop_size",
    "data.evaluation_side": "val_crop_size eval_size",
    "data.classes": "num_classes n_classes",
    "data.validation": "val val_split validation_split val_size test_size split",
    "data.fraction": "use",
    "augment.flip": "hflip fliplr horizontal_flip",
    "augment.erase.probability": "reprob random_erasing random_erase",
    "augment.color": "color_jitter colour jitter",
    "augment.policy": "aa auto_augment autoaugment randaugment randaug",
    "mix.mixup": "mixup_alpha",
    "mix.cutmix": "cutmix_alpha",
    "mix.switch_probability": "mixup_switch_prob",
    "evaluate.every": "eval_interval val_interval eval_every",
    "evaluate.flip": "mirror tta",
    "stop.patience": "early_stopping early_stop early_stopping_patience",
    "stop.target": "target_accuracy target_acc quality_target",
    "on.time_limit": "max_time walltime",
    "report": "log_interval log_every print_freq",
    "on.loader_workers": "workers num_workers loader_threads threads",
    "on.data_on_device": "resident",
    "on.replicas": "gpus devices num_gpus world_size nproc_per_node",
    "on.micro_batch": "accumulate accumulation grad_accum_steps gradient_accumulation_steps accumulate_grad_batches",
    "on.precision": "amp fp16 bf16 half mixed_precision dtype",
    "on.compile": "torch_compile torchcompile",
    "on.sinks": "loggers logger",
    "on.keep_best": "save_best save_best_only",
    "on.save": "save_every save_interval save_period checkpoint_interval",
}
FOREIGN = {word: address for address, words in _ADDRESSES.items() for word in words.split()}
"""Words of other programs, and earlier ones of ours, by what they are called here."""

_INSIDE = {
    "chance": ("probability",),
    "cutmix_chance": ("cutmix_probability",),
    "switch": ("switch_probability",),
    "spread": ("magnitude_std", "distribution"),
    "share": ("fraction",),
    "object_share": ("object_fraction",),
    "trust": ("trust_coefficient",),
    "eta": ("trust_coefficient",),
    "eps": ("epsilon",),
    "p": ("probability",),
    "alpha": ("decay",),
}
"""The same for keys inside a section."""

NOTHING = {
    **dict.fromkeys(
        ("sampler", "oversample", "weighted_sampler"),
        "an epoch shows each image once; write loss.class_weights=balanced, so that unequal classes count the same",
    ),
    **{name: f"write on.sinks=[console,csv,log,report,{name}]" for name in ("tensorboard", "wandb", "mlflow")},
    "resume": "write: paceline resume RUN",
    **dict.fromkeys(("steps", "max_steps", "iterations", "max_iters"), "write epochs='500 steps' for that many steps"),
    **dict.fromkeys(("name", "out", "output", "output_dir", "save_dir", "log_dir", "project"), "write --out FOLDER"),
    **dict.fromkeys(("data_dir", "data_path", "dataset", "root"), "write --data FOLDER"),
}
"""Words that no setting stands for, with what to say of them."""

_VALUES = {
    "gpu": "cuda",
    **dict.fromkeys(("bfloat16", "16.32", "amp"), "bf16"),
    **dict.fromkeys(("16", "float16", "half", "fp16.32"), "fp16"),
    **dict.fromkeys(("32", "float", "float32", "32.32"), "fp32"),
    **dict.fromkeys(("64", "double", "float64", "64.64"), "fp64"),
    "tf32.32": "tf32",
    "16.16": "bf16' with 'on.weights=bf16",
    "fp16.16": "fp16' with 'on.weights=fp16",
    "momentum": "sgd' with 'momentum: 0.9",
    "nesterov": "sgd' with 'momentum: 0.9, nesterov: true",
    "adam": "adamw",
    **dict.fromkeys(("step", "multistep", "steps"), "stepped"),
    **dict.fromkeys(("poly", "linear"), "polynomial"),
    **dict.fromkeys(("batchnorm", "bn", "batch_norm"), "batch"),
    **dict.fromkeys(("groupnorm", "gn", "group_norm"), "group"),
    **dict.fromkeys(("folder", "imagefolder"), "images"),
}
"""The same for values and names of kinds."""

COMPARE = "paceline report RUN RUN --out FILE.html"
"""What compares runs."""
_VERBS = {
    **dict.fromkeys(("compare", "diff"), COMPARE),
    **dict.fromkeys(("eval", "evaluate", "val", "test", "score"), "paceline validate RUN"),
    **dict.fromkeys(("infer", "inference", "classify"), "paceline predict RUN IMAGES"),
    **dict.fromkeys(("fit", "finetune", "fine-tune"), "paceline train FOLDER"),
    **dict.fromkeys(("tune", "sweep", "search", "hyperopt"), f"paceline train for each setting, and {COMPARE}"),
    **dict.fromkeys(("monitor", "status", "progress"), "paceline watch RUN"),
    "continue": "paceline resume RUN",
}
"""Commands of other programs, with what to write here."""

_CUTOFF = 0.75
"""How alike two words must be to be taken for each other: a wrong guess is worse than a list."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """'; did you mean ...?' if a choice is close to the word, else nothing."""
    return _meant(difflib.get_close_matches(word, [*choices], n=1, cutoff=_CUTOFF))


def nearest_kind(word: str, choices: Sequence[str]) -> str:
    """'; did you mean ...?' for the name of a kind, else all names."""
    return instead_of_value(word, choices) or _listed(sorted(choices))


def instead_of_value(word: str, choices: Sequence[str]) -> str:
    """'; did you mean ...?' if a choice is what others call by this word or is close to it, else nothing."""
    ours = _VALUES.get(word.lower(), "")
    return _meant([ours]) if ours.partition("'")[0] in choices else nearest(word, choices)


def instead_of_key(word: str, section: str, keys: Sequence[str], addresses: Sequence[str]) -> str:
    """What to write for a key that a section does not have: it may stand elsewhere, or have another name here."""
    here = [f"{section}.{ours}" for ours in _INSIDE.get(word, ()) if ours in keys]
    near = difflib.get_close_matches(word, keys, n=1, cutoff=_CUTOFF)
    address = f"{section}.{word}" if section else word
    foreign = [FOREIGN[each] for each in (address, word) if FOREIGN.get(each) in addresses][:1]
    # Who names a section means a key of it; a bare word may belong anywhere.
    exact = foreign or elsewhere(word, addresses)
    better = here or ((near or exact) if section else (exact or near))
    if not better and word in NOTHING:
        return f"; {NOTHING[word]}"
    meant = better or _similar(word, addresses)
    if meant == [word] and not section:
        return f"; it belongs to the recipe: write {word}=... without 'on.'"
    return _meant(meant) or _listed(sorted(keys))


def elsewhere(word: str, addresses: Sequence[str]) -> list[str]:
    """The addresses that a word stands for: another program's word, an address itself, or the last part of some."""
    ours = FOREIGN.get(word, "")
    if ours in addresses:
        return [ours]
    return [address for address in dict.fromkeys(addresses) if f".{address}".endswith(f".{word}")][:3]


def nearest_name(word: str, names: Sequence[str]) -> str:
    """The names that contain the word, or its last part; else the nearest one, or some of all."""
    for text in (word, word.rpartition("/")[2]):
        # Short ones come closest; those for images of one's own before those of a published set.
        alike = sorted((not name.startswith("images/"), len(name), name) for name in names if text and text in name)
        if alike:
            return _meant([alike[0][2]]) if len(alike) == 1 else _listed([name for *_, name in alike], most=6)
    return nearest(word, names) or _listed(sorted(names, key=lambda name: (name.count("/"), name)), most=12)


def is_near(word: str, names: Sequence[str]) -> bool:
    """Whether a word, or its last part, is in a name, or close to one."""
    texts = [text for text in (word, word.rpartition("/")[2]) if text]
    return bool(nearest(word, names)) or any(text in name for name in names for text in texts)


def unknown_command(word: str, commands: Sequence[str]) -> str:
    """What is said of a command that there is not: the nearest one, or what a folder is for, or all commands."""
    shown = word if len(word) <= 80 else f"{word[:80]}..."
    if os.path.isdir(word):  # noqa: PTH112
        return f"'{shown}' is a folder, not a command; to train on its images write: paceline train {shown}"
    here = _VERBS.get(word, "")
    ours = f"; write {here}" if here and here.split()[1] in commands else nearest(word, commands)
    return f"no command is named '{shown}'{ours or _listed(commands)}"


def _similar(word: str, addresses: Sequence[str]) -> list[str]:
    """An address whose last part is close to the word."""
    close = difflib.get_close_matches(word, [address.rpartition(".")[2] for address in addresses], n=1, cutoff=_CUTOFF)
    return elsewhere(close[0], addresses) if close else []


def _meant(choices: Sequence[str]) -> str:
    quoted = " or ".join(f"'{choice}'" for choice in choices)
    return f"; did you mean {quoted}?" if choices else ""


def _listed(choices: Sequence[str], most: int = 100) -> str:
    return f"; there is {', '.join(choices[:most])}{', ...' if len(choices) > most else ''}" if choices else ""
