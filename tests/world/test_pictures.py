"""The promise, with everything that can happen to an image: the same run on every layout, and after a kill."""

from __future__ import annotations

from pathlib import Path

from conftest import make_plan
from paceline.planning import Plan
from paceline.training.trials import Trial, compare_outcomes

EXACT = 1e-12
STEPS = 4
EVERYTHING = (
    "augment={pad: 1, alternate_flip: true, cutout: 3, side: {0%: 6, 2 steps: 8}}",
    "augment.policy={name: randaugment, layers: 2, form: tensorflow, sampling: bilinear}",
    "augment.color={brightness: 0.1, saturation: [0.5, 1.5], hue: 0.2, contrast: [0.5, 1.5]}",
    "augment.erase.probability=0.5",
    "data.normalize=image",
    "data.images=40",
    "epochs=3",
    "mix.mixup=0.5",
    "mix.cutmix=beta",
)


def plan(*words: str) -> Plan:
    return make_plan("on.precision=fp64", "on.cpu_threads=1", *EVERYTHING, *words)


def test_all_augmentations_together_are_the_same_run_on_another_layout_and_after_a_kill(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "cut")]
    for folder in folders:
        folder.mkdir()
    whole = Trial(folders[0], None, STEPS).finish(plan("on.micro_batch=16"))
    trial = Trial(folders[1], None, STEPS)
    cut = plan("on.micro_batch=4", "on.replicas=2", "on.data_on_device=false", "on.loader_workers=2")
    assert trial.kill_after(cut, 1) < STEPS
    found = compare_outcomes(whole, trial.finish(cut))
    assert max(found.values()) <= EXACT, found
