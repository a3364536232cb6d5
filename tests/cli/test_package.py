"""What people get who have no clone: a wheel with every file, which trains where nothing else is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from browser import CHROMIUM
from conftest import environment
from paceline import __version__

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "chromium": "chromium", "fish": "fish", "mpiexec": "openmpi-bin", "mpiexec.hydra": "mpich", "zsh": "zsh",
}  # fmt: skip
"""What tests run beside Python, and the packages of Debian that hold it."""


@pytest.fixture(scope="module")
def built() -> Iterator[Path]:
    """A folder with the wheel and the source archive."""
    program = "import sys; from hatchling import build; build.build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])"
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", program, folder], cwd=ROOT, check=True, capture_output=True)
        yield Path(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    "package", ["kubeflow_trainer_api", "matplotlib", "mlflow", "playwright", "tensorboard", "wandb"]
)
def test_all_packages_that_tests_use_are_installed(package: str) -> None:
    assert find_spec(package), "`make test-all` installs the extra 'all'"


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_all_programs_that_tests_use_are_installed(program: str) -> None:
    found = CHROMIUM if program == "chromium" else shutil.which(program)
    assert found, f"write apt-get install {PROGRAMS[program]}; PACELINE_BROWSER may name another browser"


def sources() -> set[str]:
    """Every file of the package, as it lies in the source tree."""
    folder = ROOT / "src"
    files = (path for path in (folder / "paceline").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder).as_posix() for path in files}


def test_the_wheel_has_every_file_of_the_package(built: Path) -> None:
    with zipfile.ZipFile(built / f"paceline-{__version__}-py3-none-any.whl") as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == sources()
    assert {Path(name).suffix for name in packed} >= {".py", ".yaml", ".css", ".js", ".json", ".typed"}


def test_the_source_archive_has_them_too_and_what_the_readme_needs(built: Path) -> None:
    with tarfile.open(built / f"paceline-{__version__}.tar.gz") as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed >= {f"src/{name}" for name in sources()}
    assert packed >= {"README.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml", "docs/first-run.md"}


@pytest.mark.long
def test_the_wheel_trains_where_nothing_else_is_installed(built: Path) -> None:
    with TemporaryDirectory() as folder:

        def run(*words: str) -> str:
            done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder, env=env)
            assert done.returncode == 0, done.stderr
            return done.stdout

        env = {key: value for key, value in environment().items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        run(sys.executable, "-m", "venv", "venv")
        wheel, constraints = built / f"paceline-{__version__}-py3-none-any.whl", ROOT / "constraints.txt"
        run("venv/bin/pip", "install", "--quiet", "-c", str(constraints), str(wheel))
        assert run("venv/bin/paceline", "--version") == f"paceline {__version__}\n"
        assert "shapes/resnet8" in run("venv/bin/paceline", "recipes")
        assert "graphcore/" in run("venv/bin/paceline", "placements", "graphcore")
        assert "top-1" in run("venv/bin/paceline", "train", "epochs=0.5", "--out", "run")
        assert "came to its end" in Path(folder, "run/report.html").read_text()
        run("venv/bin/paceline", "validate", "run")
        run("venv/bin/paceline", "predict", "run", str(ROOT / "docs/pictures/report-light.png"))
        checked = run("venv/bin/paceline", "doctor")
        assert "FAILED" not in checked
        assert str(Path(folder).resolve() / "venv") in checked
