"""The command line from outside: what a user types, sees and gets."""

from __future__ import annotations

import csv
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SMALL, Paceline, environment, run_in
from paceline import __version__
from paceline.launch import OPEN_MPI
from paceline.record import latest, rows_of

COMMANDS = (
    "train",
    "resume",
    "validate",
    "predict",
    "export",
    "average",
    "report",
    "plan",
    "verify",
    "recipes",
    "placements",
    "models",
)


def small(folder: Path) -> str:
    (folder / "small.yaml").write_text(SMALL)
    return "small.yaml"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which the tests copy."""
    folder = tmp_path_factory.mktemp("commands")
    done = run_in(folder, "train", small(folder), "epochs=3", "--out", "run", "on.keep_last=9", "on.save=6 steps")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def trained(made: Path, tmp_path: Path) -> Path:
    small(tmp_path)
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_version_and_help_of_every_command(paceline: Paceline) -> None:
    assert paceline("--version").stdout == f"paceline {__version__}\n"
    listing = paceline("--help").stdout
    for command in COMMANDS:
        assert command in listing
        shown = paceline(command, "-h").stdout
        assert f"Example: paceline {command}" in " ".join(shown.split())
        assert max(map(len, (listing + shown).splitlines())) <= 80
    assert not any(line.endswith("...") for line in listing.splitlines()[1:])


def test_train_leaves_a_complete_run_folder(trained: Path) -> None:
    rows = rows_of(trained)
    assert [row["kind"] for row in rows][:1] == ["start"]
    assert (rows[-1]["kind"], rows[-1]["step"]) == ("end", 18)
    assert rows[-1]["images_per_second"] == rows[-1]["images_per_second_spread"]["median"] > 0
    start = rows[0]
    assert start["versions"]["torch"]
    assert start["placement"]["micro_batch"] == 16
    assert [row["step"] for row in latest(rows, "report")] == list(range(1, 19))
    assert [row["step"] for row in latest(rows, "validation")] == [6, 12, 18]
    assert all(row["images"] == 37 for row in latest(rows, "validation"))
    assert sorted(child.name for child in (trained / "checkpoints").iterdir()) == [
        f"step-{step:09d}" for step in (0, 6, 12, 18)
    ]
    with (trained / "training.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == [
        "step", "iteration", "epoch", "lr", "loss_batch", "loss_avg", "train_acc_batch", "train_acc_avg", "it_time",
        "img_per_sec", "total_time",
    ]  # fmt: skip
    assert len(table) == 18
    with (trained / "validation.csv").open() as file:
        assert [row["val_size"] for row in csv.DictReader(file)] == ["37"] * 3


def test_train_without_words_is_the_demo(paceline: Paceline, tmp_path: Path) -> None:
    done = paceline("train", "epochs=0.02", "on.micro_batch=128")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("shapes-resnet8-")
    assert f"Run folder: runs/{run.name}" in done.stdout
    assert "Next:" in done.stdout


def test_train_again_in_the_same_folder_goes_on_and_another_recipe_is_refused(
    paceline: Paceline, trained: Path
) -> None:
    again = paceline("train", "small.yaml", "epochs=3", "--out", "run")
    assert again.returncode == 0
    assert "complete" in again.stdout
    other = paceline("train", "small.yaml", "epochs=4", "--out", "run")
    assert other.returncode == 2
    assert "epochs: 3.0 -> 4.0" in other.stderr


def test_validate_judges_from_the_run_alone(paceline: Paceline, trained: Path) -> None:
    in_training = latest(rows_of(trained), "validation")
    newest = json.loads(paceline("validate", "run", "--json").stdout)
    assert [row["step"] for row in newest] == [18]
    assert newest[0]["loss"] == in_training[-1]["loss"]
    chosen = json.loads(paceline("validate", "run", "--checkpoint", "6", "--json").stdout)
    assert chosen[0]["top1"] == in_training[0]["top1"]
    best = json.loads(paceline("validate", "run", "--checkpoint", "best", "--json").stdout)
    assert best[0]["top1"] == max(row["top1"] for row in in_training)
    rest = json.loads(paceline("validate", "run", "--all", "--json").stdout)
    assert [row["step"] for row in rest] == [0]
    assert json.loads(paceline("validate", "run", "--all", "--json").stdout) == []
    wrong = paceline("validate", "run", "--checkpoint", "7")
    assert wrong.returncode == 2
    assert "there is 0, 6, 12, 18" in wrong.stderr


@pytest.mark.parametrize(
    "words", [("on.replicas=3", "on.micro_batch=4"), ("on.micro_batch=4",), ("on.micro_batch=16",)]
)
def test_validation_counts_every_image_once_on_any_placement(
    paceline: Paceline, trained: Path, words: tuple[str, ...]
) -> None:
    done = paceline("validate", "run", "--json", *words)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["images"] == 37
    assert row["loss"] == pytest.approx(latest(rows_of(trained), "validation")[-1]["loss"], rel=1e-4)


def test_resume_takes_placement_words_only(paceline: Paceline, trained: Path) -> None:
    refused = paceline("resume", "run", "epochs=5")
    assert refused.returncode == 2
    assert "only on.* words may change" in refused.stderr
    assert paceline("resume", "run", "on.micro_batch=4").returncode == 0


def test_a_resume_that_changes_arithmetic_says_so(paceline: Paceline, tmp_path: Path) -> None:
    assert paceline("train", small(tmp_path), "--out", "run", "on.save=2 steps", "on.keep_last=9").returncode == 0
    for step in (4, 6):
        for file in (tmp_path / f"run/checkpoints/step-{step:09d}").iterdir():
            file.unlink()
    done = paceline("resume", "run", "on.precision=fp64")
    assert done.returncode == 0, done.stderr
    assert "damaged" in done.stdout
    assert [row["step"] for row in rows_of(tmp_path / "run") if row["kind"] == "start"] == [0, 2]
    starts = [row for row in rows_of(tmp_path / "run") if row["kind"] == "start"]
    changed = ("precision", "weights", "communication")
    assert starts[1]["arithmetic_changed"] == {key: ["fp32", "fp64"] for key in changed}


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    paceline: Paceline, tmp_path: Path, damage: str
) -> None:
    assert paceline("train", small(tmp_path), "--out", "run", "on.save=2 steps", "on.keep_last=9").returncode == 0
    path = tmp_path / "run/checkpoints/step-000000006/network.safetensors"
    content = bytearray(path.read_bytes())
    expected = bytes(content)
    if damage == "cut":
        content = content[:-100]
    else:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)
    done = paceline("resume", "run")
    assert done.returncode == 0, done.stderr
    assert "step-000000006/network.safetensors" in done.stdout.replace("\n", "")
    assert path.read_bytes() == expected


def test_plan_prints_the_arithmetic_as_table_json_yaml_and_schema(paceline: Paceline) -> None:
    facts = json.loads(
        paceline("plan", "cifar10/resnet20", "--json", "on.micro_batch=64", "on.replicas=2", "--device", "cpu").stdout
    )
    assert facts["total_steps"] == 62500
    assert facts["micro_batches_per_step"] == 2
    assert facts["replicas_per_norm_group"] == 2
    assert "62,500" in paceline("plan", "cifar10/resnet20").stdout
    resolved = paceline("plan", "cifar10/resnet20", "epochs=7", "--yaml").stdout
    assert re.search(r"epochs: 7.0 +# 'epochs=7'", resolved)
    assert re.search(r"global_batch: 128 +# cifar10/resnet20:\d", resolved)
    assert re.search(r"drop_last: false +# default", resolved)
    schema = json.loads(paceline("plan", "--schema").stdout)
    assert "global_batch" in schema["recipe"]["properties"]


def test_recipes_and_models_list_names(paceline: Paceline) -> None:
    recipes = json.loads(paceline("recipes", "--json").stdout)
    assert {"cifar10/resnet18", "cifar10/resnet20", "shapes/resnet8"} <= {row["name"] for row in recipes}
    models = {row["name"]: row["parameters"] for row in json.loads(paceline("models", "--json").stdout)}
    assert models["resnet50"] == 25_557_032
    assert models["resnet20"] == 269_722
    page = paceline("recipes", "cifar10/resnet20").stdout
    assert "global_batch: 128" in page
    one = json.loads(paceline("models", "resnet50", "--json").stdout)
    assert {setting["key"] for setting in one["settings"]} == {"version", "stem", "first_projection", "blur"}
    assert "7x7" in paceline("models", "resnet50").stdout


def torchrun(folder: Path, *words: str) -> int:
    """The exit status of two replicas that torchrun starts."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "paceline"]
    return subprocess.run([*run, *words], cwd=folder, env=environment(), timeout=120, check=False).returncode


def launched_with(folder: Path, variables: dict[str, str], *words: str) -> list[int]:
    """The exit statuses of two processes that are told their places; RANK stands for that in the variables."""
    processes = []
    for rank in range(2):
        told = {key: value.replace("RANK", str(rank)) for key, value in variables.items()}
        run = [sys.executable, "-m", "paceline", *words]
        processes.append(subprocess.Popen(run, cwd=folder, env=environment() | told, stdout=subprocess.DEVNULL))
    return [process.wait(120) for process in processes]


@pytest.mark.long
def test_the_variables_of_every_launcher_join_what_it_started(tmp_path: Path) -> None:
    small(tmp_path)
    words = ("train", "small.yaml", "--device", "cpu", "--out")
    assert torchrun(tmp_path, *words, "torchrun") == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": str(free.getsockname()[1])}
    places = ("RANK", "2", "RANK", "2")
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "localhost"}
    launchers = {
        "slurm": slurm | {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "RANK"},
        "open-mpi": dict(zip(OPEN_MPI, places, strict=True)),
    }
    for name, variables in launchers.items():
        assert launched_with(tmp_path, common | variables, *words, name) == [0, 0]
    losses = set()
    for name in ("torchrun", *launchers):
        rows = rows_of(tmp_path / name)
        assert rows[0]["placement"]["replicas"] == 2
        assert rows[-1]["kind"] == "end"
        losses.add(latest(rows, "report")[-1]["loss"])
    assert len(losses) == 1


def test_a_process_that_cannot_find_the_others_says_so_in_one_line(tmp_path: Path) -> None:
    small(tmp_path)
    run = [sys.executable, "-m", "paceline", "train", "small.yaml", "--out", "run"]
    told = environment() | {"PMIX_RANK": "1"}
    done = subprocess.run(run, cwd=tmp_path, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: PMIX_RANK=1 says that a launcher started this process")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_verify_command_passes_on_a_small_recipe(paceline: Paceline, tmp_path: Path) -> None:
    words = ("epochs=2 steps", "loss.class_weights=balanced", "--no-whole-runs", "--json")
    done = paceline("verify", small(tmp_path), *words)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert found["passed"]
    assert found["steps"] == 2  # of ten, for it has no more
    assert len(found["layouts"]) >= 5
    assert next(row["bitwise"] for row in found["resumes"])


def test_a_validation_set_larger_than_its_pool_is_evaluated_whole(paceline: Paceline) -> None:
    words = ["data.name=generated", "data.images=256", "data.validation_images=600", "data.side=8", "data.classes=10"]
    done = paceline("train", "shapes/resnet8", *words, "epochs=0.5", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "of 600 validation images" in done.stdout


def test_a_folder_name_in_brackets_is_shown_as_it_is(paceline: Paceline, tmp_path: Path) -> None:
    small(tmp_path)
    done = paceline("train", "small.yaml", "--out", "runs/[lr=0.1]")
    assert done.returncode == 0, done.stderr
    assert "Run folder: runs/[lr=0.1]" in done.stdout


@pytest.mark.long
def test_a_module_in_the_users_folder_is_not_imported_by_replicas(paceline: Paceline, tmp_path: Path) -> None:
    small(tmp_path)
    (tmp_path / "safetensors.py").write_text("raise RuntimeError('not this one')\n")
    program = "import sys; sys.path.pop(0); from paceline.cli import main; main()"
    done = paceline("train", "small.yaml", "--out", "run", "--replicas", "2", program=program)
    assert done.returncode == 0, done.stderr


def test_a_run_that_diverges_says_so_and_its_record_stays_json(paceline: Paceline, tmp_path: Path) -> None:
    small(tmp_path)
    done = paceline("train", "small.yaml", "optimizer.lr=1e30", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "steps were skipped" in done.stdout

    def refuse(word: str) -> None:
        raise AssertionError(word)

    for line in (tmp_path / "run/record.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_rewording_a_recipe_does_not_make_it_another_run(paceline: Paceline, tmp_path: Path) -> None:
    small(tmp_path)
    assert paceline("train", "small.yaml", "--out", "run").returncode == 0
    assert paceline("train", "small.yaml", "about=other words", "--out", "run").returncode == 0


def test_keys_alone_are_those_of_the_default_kind(paceline: Paceline) -> None:
    assert "momentum: 0.2" in paceline("plan", "norm.momentum=0.2", "--yaml").stdout


def test_a_moved_data_folder_asks_for_its_new_place(paceline: Paceline, tmp_path: Path) -> None:
    small(tmp_path)
    assert paceline("train", "small.yaml", "--out", "run").returncode == 0
    plan = tmp_path / "run/plan.yaml"
    text = plan.read_text().replace("data_folder: null", 'data_folder: "/gone/cifar10"')
    start = text.index("  data:\n")
    end = text.index("  global_batch:")
    plan.write_text(text[:start] + "  data: cifar10\n" + text[end:])
    shutil.rmtree(tmp_path / "run/checkpoints")  # they know that this is not the recipe that was trained
    done = paceline("resume", "run")
    assert done.returncode == 2
    assert "write --data FOLDER" in done.stderr
    assert rows_of(tmp_path / "run")[-1]["kind"] == "end"


@pytest.mark.long
def test_verify_judges_the_same_without_whole_runs(paceline: Paceline, tmp_path: Path) -> None:
    words = ("verify", small(tmp_path), "epochs=0.5", "--steps", "2")
    whole, short = (json.loads(paceline(*words, *more, "--json").stdout) for more in ((), ("--no-whole-runs",)))
    for key in ("passed", "largest_difference", "amplification", "amplified", "first_loss_amplification"):
        assert short[key] == whole[key], key
    last = whole["layouts"][-1]["layout"]
    for there, here in zip(short["layouts"], whole["layouts"], strict=True):
        assert "weights" in here
        assert "weights" not in there
        assert all(here[key] == there[key] for key in there if not key.startswith("float32_"))
        assert there.get("float32_first_loss", here["float32_first_loss"]) == here["float32_first_loss"]
    assert [row["layout"] for row in short["layouts"] if "float32_first_loss" in row] == ["whole", last]
    assert [row["bitwise"] for row in short["resumes"] if row["same_layout"]] == [True]
    shown = paceline(*words, "--no-whole-runs")
    assert shown.returncode == 0, shown.stderr
    assert "the whole run" not in shown.stdout
