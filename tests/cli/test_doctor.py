"""`paceline doctor`: what it says of this machine, and how it ends where something does not work."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from conftest import Paceline
from paceline import __version__
from paceline.command import doctor
from paceline.command.doctor import CHECKS


def test_a_machine_that_works_is_described_and_measured(paceline: Paceline) -> None:
    done = paceline("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert list(found) == [name.replace(" ", "_") for name in CHECKS]
    assert found["paceline"].startswith(__version__)
    assert f"torch {torch.__version__}" in found["packages"]
    assert f"typer {version('typer')}" in found["packages"]
    assert all(name in found["extras"] for name in ("onnxruntime", "tensorboard", "pillow-heif", "mlflow"))
    assert not any(name in found["extras"] for name in ("ruff", "playwright"))
    assert found["random_numbers"].startswith("the same bits in NumPy and in torch on cpu")
    assert " MB/s, reads " in found["this_folder"]
    assert found["exchange_of_two_replicas"].startswith("25 MiB in ")


def test_what_does_not_work_is_named_and_all_else_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.delitem(CHECKS, "exchange of two replicas")
    assert doctor.run(as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["cache"] == f"FAILED: {tmp_path}/file/cache: Not a directory"
    assert sum(text.startswith("FAILED") for text in found.values()) == 1


def test_variables_that_matter_are_told_and_secrets_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "secret", "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in CHECKS if name != "variables"]:
        monkeypatch.delitem(CHECKS, name)
    assert doctor.run(as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)["variables"]
    assert "NCCL_DEBUG=INFO" in shown
    assert "WANDB_MODE=offline" in shown
    assert "secret" not in shown


def test_other_random_numbers_than_in_numpy_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *given, **options: drawn(*given, **options) + 1)
    for name in [name for name in CHECKS if name != "random numbers"]:
        monkeypatch.delitem(CHECKS, name)
    assert doctor.run(as_json=False) == 1
    assert "FAILED: other numbers on cpu than in NumPy" in capsys.readouterr().out.replace("\n", " ")
