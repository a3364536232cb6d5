"""Paceline from Python: every function, twice in one process, with torch as it was before."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import paceline
from conftest import SMALL, environment
from paceline.api import TrainedRun
from paceline.prediction import Prediction, TrainedNetwork
from paceline.record import rows_of
from trained_run import CLASSES, train_on_images

QUICK = {"cpu_threads": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return train_on_images(tmp_path_factory.mktemp("api"))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "page.yaml").write_text(SMALL)
    return tmp_path / "page.yaml"


def torch_state() -> tuple[object, ...]:
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    return torch.get_num_threads(), *flags, torch.get_default_dtype(), torch.is_grad_enabled()


def test_importing_is_light_and_a_plan_needs_no_torch() -> None:
    program = (
        "import sys, paceline; before = set(sys.modules); assert 'train' in dir(paceline)\n"
        "assert not {'torch', 'numpy', 'pydantic', 'typer'} & before\n"
        "plan = paceline.plan('shapes/resnet8', epochs=2, on={'micro_batch': 32})\n"
        "assert (plan.micro_batch, plan.recipe.epochs) == (32, 2.0), plan\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_settings_are_words_and_arguments(page: Path) -> None:
    plan = paceline.plan(page, "optimizer.lr=0.3", epochs=7, augment={"flip": False}, on={"device": "cpu"})
    assert (plan.peak_lr, plan.recipe.epochs, plan.recipe.augment.flip) == (0.3, 7, False)
    assert paceline.plan(page, schedule={"name": "cosine"}, device="cpu").recipe.schedule.name == "cosine"
    weights = {"a.b: c_": 2.0, "plain_": 1.0}
    assert paceline.plan(page, loss={"class_weights": weights}, device="cpu").recipe.loss.class_weights == weights
    with pytest.raises(paceline.UserError, match=r"did you mean 'epochs'"):
        paceline.plan(page, epoch=7)


def test_training_twice_in_one_process_is_the_same_run_and_leaves_torch_as_it_was(page: Path) -> None:
    torch.set_num_threads(2)
    before = torch_state()
    runs = [paceline.train(page, out=page.parent / name, on=QUICK) for name in ("first", "second")]
    assert torch_state() == before
    first, second = (run.validations for run in runs)
    assert [row["loss"] for row in first] == [row["loss"] for row in second] != []
    assert runs[0].rows[-1]["kind"] == "end"
    assert os.fspath(runs[0]) == str(page.parent / "first")
    assert paceline.train(page, out=page.parent / "first", on=QUICK) == runs[0]


def test_an_interrupt_saves_and_is_raised_and_the_same_call_goes_on(page: Path) -> None:
    out, handler = page.parent / "run", signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        while not (out / "record.jsonl").exists() or not any(row["kind"] == "report" for row in rows_of(out)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="saved; go on with the same call and out="):
        paceline.train(page, epochs=20, out=out, on=QUICK)
    thread.join()
    assert rows_of(out)[-1]["kind"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is handler
    assert paceline.train(page, epochs=20, out=out, on=QUICK).rows[-1]["kind"] == "end"


def test_validate_predict_load_and_export_work_twice(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, data = trained
    torch.set_num_threads(2)
    before = torch_state()
    calls: list[Callable[[], object]] = [
        lambda: paceline.validate(run, "on.cpu_threads=1")["loss"],
        lambda: paceline.predict(run, data / "val", "on.cpu_threads=1", top=2),
        lambda: paceline.load(run).predict(data / "val" / "pear" / "pear0.jpg"),
        lambda: paceline.export(run, "safetensors", tmp_path / "out").comparison.equal,
    ]
    for call in calls:
        assert call() == call()
        assert torch_state() == before


def test_predictions_of_validation_images_agree_with_validate(trained: tuple[Path, Path]) -> None:
    run, data = trained
    found = paceline.predict(run, [data / "val"], checkpoint=paceline.validate(run)["step"])
    assert len(found) == 15
    right = sum(each.answer() == Path(each.image).parent.name for each in found)
    assert right / 15 == pytest.approx(paceline.validate(run)["top1"])


@pytest.mark.long
def test_a_script_without_a_guard_may_use_processes_that_decode(trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, data = trained
    words = "'on.loader_workers=5', 'on.cpu_threads=1'"
    script = tmp_path / "script.py"
    script.write_text(f"import paceline\nprint(len(paceline.predict({str(run)!r}, {str(data / 'val')!r}, {words})))\n")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment(), capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "15\n", "")


def test_the_page_on_python_runs_as_it_is_printed(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*words: str, out: str, **settings: Any) -> TrainedRun:
        paceline.plan(*words, **settings)  # the page's own settings are good, and too slow for a test
        return TrainedRun(trained[0])

    shutil.copytree(trained[1], tmp_path / "photos")
    (tmp_path / "photos/val/cat").mkdir()
    shutil.copy(tmp_path / "photos/val/pear/pear0.jpg", tmp_path / "photos/val/cat/1.jpg")
    (tmp_path / "photos/train/cat").mkdir()
    shutil.copy(tmp_path / "photos/val/pear/pear1.jpg", tmp_path / "photos/train/cat/10.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paceline, "train", train, raising=False)
    page = (Path(__file__).parents[2] / "docs/python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert (tmp_path / "shared/model.safetensors").is_file()


@pytest.mark.long
def test_the_notebook_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((Path(__file__).parents[2] / "docs/start.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        names: dict[str, Any] = {}
        for cell in cells:
            exec(cell.replace("epochs=1", "epochs=0.02"), names)
        assert names["exported"].comparison.equal == names["exported"].comparison.images == 200
        assert names["answer"].classes[0] in names["network"].classes


@pytest.fixture(scope="module")
def network(trained: tuple[Path, Path]) -> TrainedNetwork:
    return paceline.load(trained[0])


def test_a_loaded_network_takes_paths_images_pixels_and_tensors(
    trained: tuple[Path, Path], network: TrainedNetwork, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    path = tmp_path / "image.png"
    Image.fromarray(pixels).save(path)
    with Image.open(path) as image:
        answers = [network.predict(each) for each in (path, str(path), image, pixels, torch.from_numpy(pixels))]
    assert len({(each.classes, each.probabilities) for each in answers}) == 1
    (found,) = paceline.predict(trained[0], path)
    assert isinstance(found, Prediction)
    assert found.classes == answers[0].classes
    assert found.probabilities == pytest.approx(answers[0].probabilities, rel=1e-4)


def test_a_loaded_network_is_a_module_of_8_bit_images(network: TrainedNetwork) -> None:
    assert network.classes == CLASSES
    images = torch.zeros(2, network.side, network.side, 3, dtype=torch.uint8)
    scores = network(images)
    assert scores.shape == (2, 3)
    assert scores.requires_grad
    assert sum(parameter.numel() for parameter in network.parameters()) > 0


def test_what_is_no_image_is_a_fault_in_one_line(
    trained: tuple[Path, Path], network: TrainedNetwork, tmp_path: Path
) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    with pytest.raises(paceline.UserError, match=r"bad.jpg: its first bytes are not those of an image"):
        network.predict(tmp_path / "bad.jpg")
    with pytest.raises(paceline.UserError, match=r"pixels of float32 \(3, 8, 8\): expected uint8 \[rows, columns, 3\]"):
        network.predict(torch.zeros(3, 8, 8))
    with pytest.raises(paceline.UserError, match=r"bad.jpg: its first bytes .*, so that nothing can be predicted"):
        paceline.predict(trained[0], tmp_path / "bad.jpg")
    with pytest.raises(paceline.UserError, match="this is no run folder"):
        paceline.load(tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        paceline.fit  # noqa: B018


def test_values_of_a_wrong_type_are_one_clear_fault(
    trained: tuple[Path, Path], network: TrainedNetwork, tmp_path: Path
) -> None:
    run, file = trained[0], tmp_path / "file.jpg"
    file.touch()
    image = np.zeros((4, 4, 3), np.uint8)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: paceline.plan(3), "expected a path, found 3"),  # type: ignore[arg-type]
        (lambda: paceline.train("shapes/resnet8", data={"side": 8}), "settings are words"),  # type: ignore[arg-type]
        (lambda: paceline.plan("shapes/resnet8", epochs=object()), "epochs: expected text, a number"),
        (lambda: paceline.plan("shapes/resnet8", on=3), "on: expected a placement's name"),  # type: ignore[arg-type]
        (lambda: paceline.predict(run, file, top=0), "top: expected a whole number above 0"),
        (lambda: network.predict(image, top=-1), "top: expected a whole number above 0"),
        (lambda: network.predict(5), "int: expected a path"),  # type: ignore[arg-type]
        (lambda: network.predict(image[:0]), "no pixels"),
        (lambda: network.predict(tmp_path / "missing.jpg"), "cannot be read"),
        (lambda: network.predict(tmp_path), "cannot be read"),
    ]
    for call, said in calls:
        with pytest.raises(paceline.UserError, match=said):
            call()
