"""What `paceline launch` prints is what is kept here, and what each scheduler's own models take."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import run_in

KEPT = Path(__file__).parent / "launch"
RUN = ["nvidia/resnet50", "--hosts", "2", "--devices", "8", "--data", "/shared/imagenet", "--out", "/shared/runs/mine"]
IMAGE = ["--image", "registry.example/paceline"]
ONE_HOST = ["shapes/resnet8", "--devices", "2", "--device", "cpu", "--out", "/runs/It's mine"]
COMMANDS = {
    "slurm.sh": ["slurm", *RUN, "--time-limit", "4 hours", "epochs=50"],
    "slurm-one-host.sh": ["slurm", *ONE_HOST],
    "torchrun.sh": ["torchrun", *RUN],
    "torchrun-one-host.sh": ["torchrun", *ONE_HOST, "--time-limit", "20 seconds"],
    "kubernetes.yaml": ["kubernetes", *RUN, *IMAGE],
    "kubernetes-volume.yaml": ["kubernetes", *RUN, *IMAGE, "--volume", "shared"],
    "skypilot.yaml": ["skypilot", *RUN, *IMAGE, "--volume", "shared", "--accelerator", "H100"],
    "docker.yaml": ["docker", *RUN, *IMAGE],
    "docker-one-host.yaml": ["docker", *ONE_HOST, *IMAGE],
}
"""The file that is kept of each command; to renew one, write into it what the command prints."""

SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "mem", "time", "signal", "requeue",
    "open-mode",
}  # fmt: skip
"""Options of sbatch, as its manual has them."""


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_printed_is_what_is_kept(name: str, tmp_path: Path) -> None:
    done = run_in(tmp_path, "launch", *COMMANDS[name])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (KEPT / name).read_text()


def test_every_file_that_is_kept_is_printed() -> None:
    assert {path.name for path in KEPT.iterdir()} == set(COMMANDS)


def scripts() -> dict[str, str]:
    """Every script in the files, those inside YAML too."""
    found = {path.name: path.read_text() for path in KEPT.glob("*.sh")}
    for path in KEPT.glob("*.yaml"):
        page = yaml.safe_load(path.read_text())
        if "services" in page:
            found[path.name] = page["services"]["train"]["command"][2].replace("$$", "$")
        elif "run" in page:
            found[path.name] = page["run"]
        else:
            found[path.name] = container_of(page)["command"][2]
    return found


def container_of(job_set: dict[str, Any]) -> dict[str, Any]:
    """The container of a JobSet's pods."""
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    container: dict[str, Any] = job["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize("name", COMMANDS)
def test_every_script_is_one_that_bash_takes(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=scripts()[name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith("slurm")])
def test_a_batch_script_begins_with_options_of_sbatch(name: str) -> None:
    first, *lines = (KEPT / name).read_text().splitlines()
    assert first == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[: len(options)] == options  # sbatch reads none below the first other line
    for option in options:
        match = re.fullmatch(r"#SBATCH --([a-z-]+)(=[\w@-]+)?", option)
        assert match
        assert match[1] in SBATCH


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.endswith(".yaml")])
def test_every_mount_is_one_that_the_words_name(name: str) -> None:
    """What is mounted holds the images and the run, so that all hosts and later starts find them."""
    page, text = yaml.safe_load((KEPT / name).read_text()), scripts()[name]
    if "services" in page:
        mounts = [each.split(":")[1] for each in page["services"]["train"]["volumes"]]
    elif "run" in page:
        mounts = list(page["volumes"])
    else:
        mounts = [each["mountPath"] for each in container_of(page)["volumeMounts"]]
    for folder in re.findall(r"--(?:data|out) '?(/\S+)", text):
        assert any(folder.startswith(f"{mount}/") or folder == mount for mount in mounts)


def test_a_sky_task_has_the_sections_of_its_schema() -> None:
    task = yaml.safe_load((KEPT / "skypilot.yaml").read_text())
    assert set(task) == {"name", "num_nodes", "resources", "volumes", "run"}
    assert set(task["resources"]) == {"accelerators", "image_id", "job_recovery"}
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    assert (task["num_nodes"], task["volumes"]) == (2, {"/shared": "shared"})


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith("docker")])
def test_a_compose_file_has_the_sections_of_its_specification(name: str) -> None:
    page = yaml.safe_load((KEPT / name).read_text())
    assert set(page) == {"name", "services"}
    service = page["services"]["train"]
    assert {"image", "command", "network_mode", "ipc", "restart", "stop_grace_period", "volumes"} <= set(service)
    assert set(service) <= {
        "image", "command", "environment", "network_mode", "ipc", "restart", "stop_grace_period", "volumes", "deploy",
    }  # fmt: skip
    assert "$" not in service["command"][2].replace("$$", "")  # Compose would put a variable of its own there


def strictly(page: dict[str, Any]) -> Any:
    """The JobSet of a page by Kubernetes' own models, which refuse every key that they do not know."""
    models = importlib.import_module("kubeflow_trainer_api.models")
    for module in pkgutil.iter_modules(models.__path__):
        importlib.import_module(f"kubeflow_trainer_api.models.{module.name}")
    resources = container_of(page)["resources"]  # amounts are made by hand there, not by pydantic
    amount = models.IoK8sApimachineryPkgApiResourceQuantity
    resources["limits"] = {key: amount.from_json(str(value)) for key, value in resources["limits"].items()}
    return models.JobsetV1alpha2JobSet.model_validate(page, extra="forbid", by_alias=True, by_name=False)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith("kubernetes")])
def test_a_job_set_is_one_that_kubernetes_models_take(name: str) -> None:
    job_set = strictly(yaml.safe_load((KEPT / name).read_text()))
    job = job_set.spec.replicated_jobs[0].template.spec
    assert (job.parallelism, job.completions, job.completion_mode) == (2, 2, "Indexed")
    assert job.pod_failure_policy.rules[0].on_exit_codes.values == [75]
    assert job.template.spec.containers[0].resources.limits is not None


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("maxRestarts", "maxRestart"), ("completionMode", "completionmode"), ("hostPath", "hostpath")],
)
def test_a_misspelt_key_is_refused(right: str, wrong: str) -> None:
    page = (KEPT / "kubernetes.yaml").read_text()
    assert f"{right}:" in page
    with pytest.raises(ValueError, match=rf"{wrong}\n +Extra inputs are not permitted"):
        strictly(yaml.safe_load(page.replace(f"{right}:", f"{wrong}:")))
