"""A shell completes commands, names, settings and their values, and run folders."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import environment, run_in
from paceline import completing
from paceline.cli import main
from paceline.options import Shell
from paceline.settings.shipped import names, own_names
from runs_made import write_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images, a run and a recipe."""
    (tmp_path / "photos/cat").mkdir(parents=True)
    (tmp_path / "my photos").mkdir()
    (tmp_path / "mine.yaml").touch()
    write_run(tmp_path / "runs/first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(words: list[str]) -> None:
    """Ask Paceline, as bash does, for the last of the words that follow its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("_PACELINE_COMPLETE", "complete_bash")
        patch.setenv("COMP_WORDS", "\n".join(["paceline", *map(shlex.quote, words)]))
        patch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tr", ["train"]),
        ("bench i", ["infer"]),
        ("bench infer --bat", ["--batch"]),
        ("train cifar10/resnet", ["cifar10/resnet18", "cifar10/resnet20"]),
        ("train ph", ["photos/"]),
        ("train photos/", ["photos/cat/"]),
        ("train mi", ["mine.yaml", "mix."]),
        ("train opt", ["optimizer.", "optimizer="]),
        ("train shapes/resnet8 schedule.warm", ["schedule.warmup="]),
        ("train schedule.warmup='50 steps' on.micro", ["on.micro_batch="]),
        ("train mine.yaml optimizer=l", ["optimizer=lars", "optimizer=larc", "optimizer=lamb"]),
        ("train mine.yaml optimizer = l", ["lars", "larc", "lamb"]),
        ("train optimizer = lam", ["lamb"]),
        ("plan optimizer.name = lam", ["lamb"]),
        ("plan augment.flip=", ["augment.flip=true", "augment.flip=false"]),
        ("plan data.validation=", []),
        ("plan --device c", ["cpu", "cuda"]),
        ("plan --on graphcore/mk2-resnex", ["graphcore/mk2-resnext101-16ipus"]),
        ("resume runs/f", ["runs/first"]),
        ("resume ru", ["runs/"]),
        ("resume runs/first on.det", ["on.deterministic="]),
        ("resume runs/first epo", []),
        ("watch runs/first runs/", ["runs/first"]),
        ("validate runs/first --checkpoint ", ["best"]),
        ("bench infer runs/first --checkpoint b", ["best"]),
        ("export runs/first --to on", ["onnx"]),
        ("models vgg19", ["vgg19", "vgg19-bn"]),
        ("placements graphcore/mk2-resnex", ["graphcore/mk2-resnext101-16ipus"]),
        ("data check photos first", ["first_label="]),
        ("data show photos images/resnet1", ["images/resnet18"]),
        ("launch sl", ["slurm"]),
        ("trian --x", []),
        ("train no/such/folder/", []),
    ],
)  # fmt: skip
def test_words_are_completed(words: str, offered: list[str], capsys: Capture) -> None:
    ask([*shlex.split(words), *([""] if words.endswith(" ") else [])])
    assert sorted(capsys.readouterr().out.split()) == sorted(offered)


def test_published_recipes_are_offered_once_a_letter_is_there(capsys: Capture) -> None:
    ask(["recipes", ""])
    assert capsys.readouterr().out.split() == own_names("recipes")
    ask(["recipes", "nvidia/"])
    assert capsys.readouterr().out.split() == [name for name in names("recipes") if name.startswith("nvidia/")]


def test_completing_loads_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; from paceline.cli import main\ntry: main()\n"
        "finally: assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    asking = {
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": "paceline train shapes/resnet8 opt",
        "COMP_CWORD": "3",
    }
    done = run_in(Path(), program=program, env=asking)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["optimizer.", "optimizer="], "")


def test_each_shell_has_a_script(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {shell.value for shell in Shell} == set(completing.SCRIPTS)
    for shell in Shell:
        monkeypatch.setattr(sys, "argv", ["paceline", "--completion", shell.value])
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().out.strip() == completing.SCRIPTS[shell.value].strip()


TYPED = [
    ("paceline plan on.micro_b\t48", "error: on.micro_batch 48 does not divide"),
    ("paceline recipes shapes/r\t| head -n 2", "model: resnet8"),
    ('paceline plan schedule.warmup="50 steps" optimizer.form=torc\t optimizer.lr=x', "'optimizer.lr=x'"),
]
"""What somebody types, and what the command then prints; a space after '=' would be another command."""


BASH = ["bash", "--norc", "--noprofile", "-i"]


@pytest.mark.parametrize(
    ("start", "typed"),
    [
        (BASH, TYPED[:1]),
        pytest.param(BASH, TYPED[1:], marks=pytest.mark.long),
        pytest.param(["zsh", "-f", "-i"], TYPED, marks=pytest.mark.long),
        pytest.param(["fish", "--no-config"], TYPED, marks=pytest.mark.long),
    ],
)
def test_a_real_shell_completes(folder: Path, start: list[str], typed: list[tuple[str, str]]) -> None:
    for program in ("setsid", start[0]):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} is installed")
    paceline = folder / "bin/paceline"
    paceline.parent.mkdir()
    paceline.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m paceline "$@"\n')
    paceline.chmod(0o755)
    path = f"{paceline.parent}:{os.environ['PATH']}"
    terminal, inside = pty.openpty()
    env = environment() | {"PATH": path, "PS1": "", "TERM": "xterm", "HOME": str(folder)}
    with subprocess.Popen(["setsid", "--ctty", *start], stdin=inside, stdout=inside, stderr=inside, env=env) as shell:
        os.close(inside)
        load = (
            "paceline --completion fish | source"
            if start[0] == "fish"
            else f'eval "$(paceline --completion {start[0]})"'
        )
        os.write(terminal, f"{load}; echo lo''aded\n".encode())
        wait_for(terminal, "loaded")
        for line, printed in typed:
            before, _, after = line.partition("\t")
            os.write(terminal, f"{before}\t".encode())
            os.write(terminal, f"{after}\n".encode())
            wait_for(terminal, printed)
        shell.kill()
    os.close(terminal)


def wait_for(terminal: int, text: str) -> None:
    """Read what the shell shows until it holds a text."""
    shown, end = "", time.monotonic() + 60
    while text not in shown:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", os.read(terminal, 65_536).decode(errors="replace"))
