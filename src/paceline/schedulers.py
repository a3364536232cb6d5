"""The files that schedulers take: each starts a run on several hosts, and continues it by the same command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import INTERRUPTED

PORT = 29500
_SECONDS_TO_SAVE = 120
"""How long a scheduler waits between the signal to stop and the end."""
_MINUTES_AROUND = 15
"""What a start takes beside the time that on.time_limit counts: loading, the first step, saving."""
_RESTARTS = 3
"""After a failure that is no interruption, so that a wrong setting does not start for ever."""


@dataclass(frozen=True)
class HostedRun:
    """A run on several hosts: what each of them starts, and what it needs for that."""

    name: str
    summary: str
    """The plan in one line."""
    hosts: int
    devices: int
    """Replicas of each host, each on a device of its own."""
    accelerated: bool
    words: tuple[str, ...]
    """What follows the word paceline."""
    out: Path
    mounts: tuple[str, ...]
    """The folders that a container needs from outside, each of which has the same path inside."""
    seconds: float | None = None
    """The time limit of one start."""
    image: str = ""
    """The container image that holds Paceline."""
    volume: str = ""
    """What is mounted there, if not folders of the host."""
    accelerator: str = ""
    """The scheduler's name of the device."""


def slurm(run: HostedRun) -> str:
    """A batch script: srun starts a process for each device, and status 75 puts the job back into the queue."""
    minutes = None if run.seconds is None else int(run.seconds / 60) + _MINUTES_AROUND
    options = [
        f"--job-name={run.name}",
        f"--nodes={run.hosts}",
        f"--ntasks-per-node={run.devices}",
        *([f"--gpus-per-node={run.devices}"] if run.accelerated else []),
        "--exclusive",
        "--mem=0",
        *([f"--time={minutes}"] if minutes else []),
        f"--signal=TERM@{_SECONDS_TO_SAVE}",
        "--requeue",
        "--open-mode=append",
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            f"# {run.summary}",
            "# Submit it with: sbatch FILE. Submitted again, it continues.",
            f"srun --cpu-bind=none --wait={_SECONDS_TO_SAVE} paceline {shlex.join(run.words)}",
            "status=$?",
            f'if [ "$status" -eq {INTERRUPTED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            'exit "$status"',
            "",
        ]
    )


def torchrun(run: HostedRun) -> str:
    """A script for a person to start on every host."""
    alone = run.hosts == 1
    restarts = 0 if run.seconds else _RESTARTS  # torchrun would begin again at the end of the time
    meeting = (
        "--standalone" if alone else f'--rdzv-backend=c10d --rdzv-id={run.name} --rdzv-endpoint="$first_host:{PORT}"'
    )
    say = "Start it with: bash FILE" if alone else "Start it on every host with: bash FILE FIRST_HOST"
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {run.summary}",
            f"# {say}. Started again, it continues.",
            *([] if alone else ["first_host=${1:?write the name of the first host}"]),
            _script(run, f"{meeting} --max-restarts={restarts}"),
        ]
    )


def kubernetes(run: HostedRun) -> str:
    """A JobSet: a pod for each host, started again together; status 75 does not count as a failure."""
    names = {path: f"folder-{number}" for number, path in enumerate(run.mounts)}
    container: dict[str, Any] = {
        "name": "train",
        "image": run.image,
        "command": [
            "bash",
            "-c",
            _script(run, _static("$JOB_COMPLETION_INDEX", f"{run.name}-hosts-0-0.{run.name}")),
        ],
        "resources": {"limits": {"nvidia.com/gpu": run.devices}} if run.accelerated else {},
        "volumeMounts": [
            *({"name": names[path], "mountPath": path} for path in run.mounts),
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SECONDS_TO_SAVE,
        "containers": [container],
        "volumes": [
            *({"name": names[path], **_source(run, path)} for path in run.mounts),
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    interrupted = {"containerName": "train", "operator": "In", "values": [INTERRUPTED]}
    job = {
        "parallelism": run.hosts,
        "completions": run.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": interrupted}]},
        "template": {"spec": pod},
    }
    again = {
        "name": "interrupted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": run.name},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": _RESTARTS, "rules": [again]},
            "replicatedJobs": [{"name": "hosts", "replicas": 1, "template": {"spec": job}}],
        },
    }
    return _page(run, "kubectl create -f FILE", job_set)


def skypilot(run: HostedRun) -> str:
    """A task for a managed job, which is started again after status 75 and after a host was taken away."""
    recovery = {"max_restarts_on_errors": _RESTARTS, "recover_on_exit_codes": [INTERRUPTED]}
    task = {
        "name": run.name,
        "num_nodes": run.hosts,
        "resources": {
            **({"accelerators": f"{run.accelerator}:{run.devices}"} if run.accelerated else {}),
            "image_id": f"docker:{run.image}",
            "job_recovery": recovery,
        },
        "volumes": dict.fromkeys(run.mounts, run.volume),
        "run": _script(run, _static("$SKYPILOT_NODE_RANK", '"$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"')),
    }
    return _page(run, "sky jobs launch FILE", task)


def docker(run: HostedRun) -> str:
    """A Compose file for a person to start on every host, who says which host it is."""
    alone = run.hosts == 1
    rank, first = ("0", "127.0.0.1") if alone else ("$HOST", "$FIRST_HOST")
    devices = [{"driver": "nvidia", "count": run.devices, "capabilities": ["gpu"]}]
    told = {"HOST": "${HOST:?write the number of the host, from 0}", "FIRST_HOST": "${FIRST_HOST:?write its name}"}
    service: dict[str, Any] = {
        "image": run.image,
        "command": ["bash", "-c", _script(run, _static(rank, first)).replace("$", "$$")],
        **({} if alone else {"environment": told}),
        "network_mode": "host",
        "ipc": "host",
        "restart": f"on-failure:{_RESTARTS}",
        "stop_grace_period": f"{_SECONDS_TO_SAVE}s",
        "volumes": [f"{path}:{path}" for path in run.mounts],
        **({"deploy": {"resources": {"reservations": {"devices": devices}}}} if run.accelerated else {}),
    }
    told_words = "" if alone else "HOST=0 FIRST_HOST=NAME "
    return _page(run, f"{told_words}docker compose -f FILE up", {"name": run.name, "services": {"train": service}})


SCHEDULERS: dict[str, Callable[[HostedRun], str]] = {
    "slurm": slurm,
    "kubernetes": kubernetes,
    "skypilot": skypilot,
    "docker": docker,
    "torchrun": torchrun,
}


def name_of_run(out: Path) -> str:
    """A name that every scheduler takes: lower case, digits and hyphens, at most 40 of them."""
    name = re.sub(r"[^a-z0-9]+", "-", out.name.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def _script(run: HostedRun, options: str) -> str:
    """Runs torchrun, hands a signal on to it, and gives back the status 75 of its processes, which it does not."""
    command = f"torchrun --nnodes={run.hosts} --nproc-per-node={run.devices} {options}"
    record = shlex.quote(str(run.out / "record.jsonl"))
    return "\n".join(
        [
            f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={_SECONDS_TO_SAVE - 20}",
            f"rows=$(cat {record} 2> /dev/null | wc -l)",
            f"{command} \\",
            f"  -m paceline {shlex.join(run.words)} &",
            "launcher=$!",
            "trap 'kill -TERM \"$launcher\"' TERM INT",
            'wait "$launcher"; status=$?',
            'while kill -0 "$launcher" 2> /dev/null; do wait "$launcher"; status=$?; done',
            f'if [ "$status" -ne 0 ] && tail -n "+$((rows + 1))" {record} | grep -q \'"kind": "interrupted"\'; then',
            f"  status={INTERRUPTED}",
            "fi",
            'exit "$status"',
            "",
        ]
    )


def _source(run: HostedRun, path: str) -> dict[str, Any]:
    """What Kubernetes mounts at a path."""
    return {"persistentVolumeClaim": {"claimName": run.volume}} if run.volume else {"hostPath": {"path": path}}


def _static(rank: str, first_host: str) -> str:
    """How hosts meet whose numbers the scheduler gives."""
    return f"--node-rank={rank} --master-addr={first_host} --master-port={PORT}"


class _Page(yaml.SafeDumper):
    """YAML in which a script is a block, as a person would write it."""


def _represent(page: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return page.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Page.add_representer(str, _represent)


def _page(run: HostedRun, command: str, content: dict[str, Any]) -> str:
    body = yaml.dump(content, Dumper=_Page, sort_keys=False, width=1000)
    return f"# {run.summary}\n# Start it with: {command}. Started again, it continues.\n{body}"
