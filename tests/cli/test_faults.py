"""Faults: one line that says where, what and what to write instead; exit status 2, and torch not even loaded."""

from __future__ import annotations

import fcntl
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SMALL, Paceline, environment
from folders_made import put
from paceline.checkpoint import saved_steps
from paceline.record import rows_of

FAULTS = [
    (["plan", "cifar10/resnet21"], "no recipe is named 'cifar10/resnet21'; did you mean 'cifar10/resnet20'?"),
    (["plan", "missing.yaml"], "missing.yaml: cannot be read: No such file or directory"),
    (["plan", "cifar10/resnet20", "epoch=5"], "'epoch=5': recipe has no 'epoch'; did you mean 'epochs'?"),
    (["plan", "cifar10/resnet20", "on.micro_batc=5"], "'on.micro_batc=5': placement has no 'micro_batc'; did you mean"),
    (
        ["plan", "cifar10/resnet20", "global_batch=x"],
        "'global_batch=x': global_batch: expected a whole number, found 'x'",
    ),
    (["plan", "cifar10/resnet20", "on.micro_batch=20"], "on.micro_batch 20 does not divide global_batch 128"),
    (["plan", "cifar10/resnet20", "model=resnet21"], "'model=resnet21': model: no model is named 'resnet21'"),
    (["train", "twice.yaml"], "twice.yaml:2: 'epochs' is written twice"),
    (["train", "typo.yaml"], "typo.yaml:3: optimizer: sgd has no 'momentm'; did you mean 'momentum'?"),
    (["train", "cifar10/resnet20"], "where is cifar10? write --data FOLDER"),
    (["train", "cifar10/resnet20", "--data", "nowhere"], "nowhere: there is no such folder"),
    (["train", "cifar10/resnet20", "--data", "."], "'data_batch_1.bin' is neither here"),
    (["resume", "nowhere"], "nowhere: this is no run folder"),
    (["validate", "."], "this is no run folder"),
    (["predict", "x.jpg"], "IMAGES... is missing; write paceline predict RUN IMAGES... [on.KEY=VALUE]..."),
    (
        ["export", "run"],
        "--to is missing; write paceline export RUN --to onnx|pt2|safetensors|torchvision",
    ),
    (["validate"], "RUN is missing; write paceline validate RUN [on.KEY=VALUE]..."),
    (["data", "show"], "SOURCE is missing; write paceline data show SOURCE"),
    (["models", "resnet5O"], "no model is named 'resnet5O'; did you mean 'resnet5"),
    (["train", "--data", "."], ".: no data set is recognized here; expected CIFAR's binary files"),
    (["train", "."], ".: no data set is recognized here; expected CIFAR's binary files"),
    (["plan", "."], ".: no data set is recognized here; expected CIFAR's binary files"),
    (["plan", "photos", "data.side=x"], "'data.side=x': data.side: expected a whole number"),
    (
        ["plan", "images/resnet18", "data=photos"],
        "'photos' is a folder, not the name of a data set; write --data photos",
    ),
    (["trian", "photos"], "no command is named 'trian'; did you mean 'train'?"),
    (["compare", "run", "run0"], "no command is named 'compare'; write paceline report RUN RUN --out FILE.html"),
    (["eval", "run"], "no command is named 'eval'; write paceline validate RUN"),
    (["tune", "photos"], "no command is named 'tune'; write paceline train for each setting, and paceline report RUN"),
    (["data", "test", "photos"], "no command is named 'test'; there is"),
    (["data", "chekc", "photos"], "no command is named 'chekc'; did you mean 'check'?"),
    (["photos"], "'photos' is a folder, not a command; to train on its images write: paceline train photos"),
    (["train", "photos", "epochs=0"], "'epochs=0': epochs: input should be greater than 0"),
    (["plan", "generated.yaml", "--data", "."], "--data .: generated.yaml draws its own images (generated)"),
    (["train", "cifar10/resnet20", "--data", "twice.yaml"], "twice.yaml: this is a file; --data takes the folder of"),
    (["train", "cifar10/resnet20", "--data", "labels.csv"], "here ., and data.labels=labels.csv the file"),
    (
        ["train", "cifar10/resnet20", "--data", ".", "--out", "run"],
        "--out run is in the folder of the images, .; choose",
    ),
    (["train", "cifar10/resnet20", "--data", ".", "--out", "."], "--out . is in the folder of the images, .; choose"),
    (["train", "vgg16"], "no recipe is named 'vgg16'; there is nvcnn/vgg16, cifar10/vgg16-bn"),
    (["plan", "--on", "timm"], "no placement is named 'timm'; did you mean 'timm/a3-4gpu'?"),
    (["plan", "--json", "--yaml"], "--json and --yaml are two forms of one plan; write one of them"),
    (["plan", "precision=16"], "'precision=16': recipe has no 'precision'; did you mean 'on.precision'?"),
    (
        ["plan", "on.epochs=3"],
        "'on.epochs=3': placement has no 'epochs'; it belongs to the recipe: write epochs=... without 'on.'",
    ),
    (["plan", "model=resnet18", "model.widths=8"], "model: resnet18 has no 'widths'; there is blur, first_projection"),
    (["plan", "optimizer.epochs=3"], "optimizer: sgd has no 'epochs'; did you mean 'epochs'?"),
    (["plan", "val=0.2"], "'val=0.2': recipe has no 'val'; other kinds have 'data.validation': images"),
    (["plan", "images/resnet18", "data.split=0.2"], "data: images has no 'split'; did you mean 'data.validation'?"),
    (
        ["train", "photos", "class_weights=balanced"],
        "recipe has no 'class_weights'; did you mean 'loss.class_weights'?",
    ),
    (
        ["train", "loss.class_weights={dog: 2}"],
        "no class is named 'dog'; the classes are disc, ring, square, frame, tri",
    ),
    (["train", "photos", "loss.class_weights={cats: 2}"], "no class is named 'cats'; did you mean 'cat'?"),
    (["plan", "freeze_layers=3"], "'freeze_layers=3': recipe has no 'freeze_layers'; did you mean 'freeze'?"),
    (
        ["train", "fotos"],
        "no recipe is named 'fotos', and no folder is there; there is images/efficientnet-lite0-finetune, images/",
    ),
    (["train", "generated.yaml", "init.from=broken.pth"], "broken.pth does not hold plain tensors by name"),
    (["plan", "generated.yaml", "init.from=run0"], "run0 is no run, and holds no model.safetensors; give a run with"),
    (["plan", "on.replicas.x=3"], "'on.replicas.x=3': replicas: expected a whole number above 0, or auto"),
    (["plan", "on.yaml"], "on.yaml:10: recipe has no 'on'; put its keys into a file given with --on FILE"),
    (["train", "--epochs", "3"], "there is no option --epochs; write epochs=3"),
    (["plan", "cifar10/resnet20", "--lr=0.1"], "there is no option --lr; write optimizer.lr=0.1"),
    (["train", "--batch-size", "64", "epochs=3"], "there is no option --batch-size; write global_batch=64"),
    (["bench", "data", "--workers"], "there is no option --workers; write on.loader_workers=..."),
    (["resume", "run", "--precision", "bf16"], "there is no option --precision; write on.precision=bf16"),
    (["train", "--resume", "r2"], "there is no option --resume; write paceline resume r2"),
    (["models", "resnet18", "--blocks", "stem=3x3"], "'stem=3x3': recipe has no 'stem'; did you mean 'model.stem'?"),
    (["verify", "shapes/resnet8", "on.replicas=2"], "verify chooses the placements itself"),
    (
        ["verify", "generated.yaml", "epochs=0.2"],
        "this recipe has one step, and what is killed after one needs another",
    ),
    (["plan", "generated.yaml", "schedule.start=0.01"], "and there is no warm-up; write schedule.warmup="),
]


def test_a_cuda_device_is_refused_before_torch_is_loaded_if_torch_has_no_cuda(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "generated.yaml").write_text(SMALL)
    program = (
        "import importlib.metadata, sys\nfrom paceline.cli import main\n"
        "importlib.metadata.version = lambda _: '2.13.0+cpu'\n"
        "try:\n main()\nfinally:\n assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = paceline("train", "generated.yaml", "--device", "cuda", "--out", "run", program=program)
    assert done.returncode == 2
    assert done.stderr == (
        "error: torch cannot use a CUDA device here; write on.device=cpu, or install a CUDA build of torch\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "message"), FAULTS, ids=[" ".join(words) for words, _ in FAULTS])
def test_a_fault_is_one_line_and_never_loads_torch(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "twice.yaml").write_text("epochs: 3\nepochs: 4\n")
    (tmp_path / "typo.yaml").write_text("model: resnet8\nepochs: 1\noptimizer: {name: sgd, momentm: 1}\n")
    (tmp_path / "labels.csv").write_text("")
    (tmp_path / "broken.pth").write_text("not weights")
    (tmp_path / "run0").mkdir()
    if any("photos" in word for word in words):
        put(tmp_path, *(f"photos/{name}/{number}.jpg" for name in ("cat", "dog") for number in range(3)))
    (tmp_path / "generated.yaml").write_text(SMALL)
    (tmp_path / "on.yaml").write_text(SMALL.replace("report: 1 steps", "on: {precision: bf16}"))
    program = (
        "import sys\nfrom paceline.cli import main\n"
        "try:\n main()\nfinally:\n assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_plan_recipes_models_and_help_never_load_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom paceline.cli import app\n"
        "for words in (['plan', 'cifar10/resnet20'], ['recipes'], ['models', 'resnet50'], ['train', '--help']):\n"
        "    try:\n        app(words)\n    except SystemExit as end:\n        assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), check=True, capture_output=True)


@pytest.mark.parametrize("words", [[], ["data"], ["bench"]])
def test_a_command_without_its_verb_prints_help_in_lines(paceline: Paceline, words: list[str]) -> None:
    done = paceline(*words)
    assert done.returncode == 2
    told = (done.stdout + done.stderr).splitlines()
    assert told[0].startswith("Usage: paceline")
    assert any(line.startswith("Commands:") for line in told)


def test_what_the_parser_refuses_is_one_line(paceline: Paceline) -> None:
    for words, said in (
        (["train", "--replica", "2"], "No such option: --replica"),
        (["recipes", "--epochs", "3"], "No such option: --epochs"),
        (["resume", "run", "--lr", "1"], "No such option: --lr"),
        (["train", "photos", "--out"], "Option '--out' requires an argument"),
        (["predict", "run", "x.jpg", "--top", "0"], "Invalid value for '--top'"),
    ):
        done = paceline(*words)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"error: {said}")
        assert "-h lists" in done.stderr


def test_a_folder_that_is_trained_in_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom paceline.cli import main\n"
        "try:\n main()\nfinally:\n assert 'torch' not in sys.modules, 'torch was loaded'\n"
    )
    (tmp_path / "run").mkdir()
    with (tmp_path / "run/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "-c", program, "train", "--out", "run", "on.replicas=2"],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: run: another process is training in this folder\n"


def test_a_cut_cifar_file_is_named(paceline: Paceline, tmp_path: Path) -> None:
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        with (tmp_path / name).open("wb") as file:
            file.truncate(30_730_000 if name != "data_batch_3.bin" else 1000)
    done = paceline("train", "cifar10/resnet20", "--data", ".")
    assert done.returncode == 2
    assert "data_batch_3.bin: the file has 1,000 bytes instead of 30,730,000" in done.stderr


def test_an_output_folder_that_cannot_be_made_is_refused(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = paceline("train", "shapes/resnet8", "--out", "file/run")
    assert done.returncode == 2
    assert "file/run: cannot be made: Not a directory; choose another folder with --out" in done.stderr


def test_a_full_disk_ends_in_one_line_and_keeps_what_was_saved(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    assert paceline("train", "small.yaml", "--out", "run", "on.save=2 steps", "on.keep_last=9").returncode == 0
    (tmp_path / "small.yaml").write_text(SMALL.replace("epochs: 1", "epochs: 2"))
    assert (
        paceline("train", "small.yaml", "--out", "full", "epochs=1", "on.save=2 steps", "on.keep_last=9").returncode
        == 0
    )
    record = tmp_path / "full/record.jsonl"
    for step in (4, 6):
        for file in (tmp_path / f"full/checkpoints/step-{step:09d}").iterdir():
            file.unlink()
    record.unlink()
    record.symlink_to("/dev/full")
    done = paceline("resume", "full")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "record.jsonl: cannot be written: No space left on device" in done.stderr
    assert 2 in saved_steps(tmp_path / "full/checkpoints")


def small_files() -> None:
    """Let this process write no file that holds a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_checkpoint_that_does_not_fit_the_disk_is_told_at_each_attempt_and_training_goes_on(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    assert paceline("train", "small.yaml", "--out", "run", "on.save=1 steps", "on.keep_last=9").returncode == 0
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:09d}")
    done = paceline("resume", "run", preexec_fn=small_files)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert (
        "step-000000006: the checkpoint cannot be written: File too large; the newest one is step-000000003"
        in done.stderr
    )
    told = "File too large; the newest one is step-000000003; training goes on"
    assert done.stdout.count(told) == 3
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows if row["kind"] == "report"][-3:] == [4, 5, 6]
    assert rows[-1]["kind"] == "failed"
    assert max(saved_steps(tmp_path / "run/checkpoints")) == 3


@pytest.mark.parametrize("words", [(), ("on.replicas=2", "on.micro_batch=8")])
def test_nothing_is_trained_before_the_first_checkpoint_is_on_disk(
    words: tuple[str, ...], paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    done = paceline("train", "small.yaml", "--out", "run", *words, preexec_fn=small_files)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "step-000000000: the checkpoint cannot be written: File too large; make room, and run" in done.stderr
    assert [row["kind"] for row in rows_of(tmp_path / "run")] == ["start", "failed"]
    assert paceline("train", "small.yaml", "--out", "run").returncode == 0
