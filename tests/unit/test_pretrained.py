"""Weights from elsewhere: where they are read, how they are matched, what starts anew, and what is refused."""

from __future__ import annotations

import argparse
import os
import pickle
import string
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from conftest import make_plan, make_session
from paceline import checkpoint
from paceline.errors import DataError, UserError
from paceline.facts import DataFacts
from paceline.model.batch import Chain
from paceline.model.inception import Auxiliary
from paceline.model.layers import Head
from paceline.model.network import Network
from paceline.model.norm import BatchNormAct
from paceline.model.pretrained import LoadedWeights, load_weights, read_weights
from paceline.training.restore import restore_newest
from paceline.training.save import to_files
from paceline.training.state import State, build_state, initialize_state
from paceline.world import World

WORLD = World(torch.device("cpu"))
FACTS = DataFacts(1, 1, 10, 8)
Tensors = dict[str, Tensor]

OTHER = "; if the weights are of another network, name it: model=NAME"


def make_state(*words: str) -> State:
    """A small network as it begins."""
    plan = make_plan(*words)
    state = build_state(plan, WORLD)
    initialize_state(state, plan)
    return state


def trained(*words: str) -> State:
    """The same with other numbers in every tensor."""
    state = make_state(*words)
    for number, tensor in enumerate(state.network.module.state_dict().values(), 1):
        tensor.copy_(torch.sin(number + torch.arange(tensor.numel())).view(tensor.shape) + 2)
    state.step = 7
    return state


def tensors_of(state: State) -> Tensors:
    return {name: value.clone().contiguous() for name, value in state.network.module.state_dict().items()}


def foreign(tensors: Tensors) -> Tensors:
    """The same in the same order under names that nobody knows, with the counters that torch's own norms have."""
    made: Tensors = {}
    parts = list(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
    for name, tensor in tensors.items():
        part, _, last = name.rpartition(".")
        made[f"part_{string.ascii_letters[parts.index(part)]}.{last}"] = tensor
        if last == "running_var":
            made[f"part_{string.ascii_letters[parts.index(part)]}.num_batches_tracked"] = torch.tensor(3)
    return made


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def words_from(source: Path) -> str:
    return f"init.from={source}"


def load_from(network: nn.Module, path: Path) -> LoadedWeights:
    return load_weights(network, read_weights(str(path)), str(path))


def test_a_run_folder_gives_its_newest_checkpoint(tmp_path: Path) -> None:
    old, new = make_state("seed=5"), trained()
    checkpoint.write(tmp_path / "checkpoints", 3, to_files(old))
    checkpoint.write(tmp_path / "checkpoints", 7, to_files(new))
    ours = make_state()
    assert not same(tensors_of(ours), tensors_of(new))
    loaded = load_from(ours.network.module, tmp_path)
    assert same(tensors_of(ours), tensors_of(new))
    assert loaded.initial == []
    assert loaded.tensors == len(tensors_of(new)) == 37


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "checkpoints", 3, to_files(trained()))
    damaged = checkpoint.write(tmp_path / "checkpoints", 7, to_files(make_state("seed=5")))
    (damaged / "network.safetensors").write_bytes(b"nothing")
    ours = make_state()
    load_from(ours.network.module, tmp_path)
    assert same(tensors_of(ours), tensors_of(trained()))


def test_the_optimizer_and_the_step_start_anew(tmp_path: Path) -> None:
    theirs = trained()
    for tensor in theirs.optimizer.tensors().values():
        tensor.fill_(3)
    checkpoint.write(tmp_path / "checkpoints", 7, to_files(theirs))
    ours = make_state(words_from(tmp_path))
    assert same(tensors_of(ours), tensors_of(theirs))
    assert ours.step == 0
    assert not any(tensor.any() for tensor in ours.optimizer.tensors().values())


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16])
def test_a_safetensors_file_with_paceline_s_names_is_matched_by_name(tmp_path: Path, kind: torch.dtype) -> None:
    theirs = {name: value.to(kind) for name, value in tensors_of(trained()).items()}
    save_file(theirs, tmp_path / "weights.safetensors")  # which sorts them
    ours = make_state(words_from(tmp_path / "weights.safetensors"))
    assert same(tensors_of(ours), {name: value.float() for name, value in theirs.items()})


def test_paceline_s_names_in_another_order_in_a_pth_file_are_matched_by_name(tmp_path: Path) -> None:
    theirs = tensors_of(trained())
    torch.save(dict(sorted(theirs.items())), tmp_path / "weights.pth")
    assert same(tensors_of(make_state(words_from(tmp_path / "weights.pth"))), theirs)


WRAPPERS: dict[str, Any] = {
    "bare": lambda tensors: tensors,
    "state_dict": lambda tensors: {"epoch": 90, "state_dict": tensors, "optimizer": {"lr": 0.1}},
    "model": lambda tensors: {"model": OrderedDict(tensors), "args": "none"},
    "model_state_dict": lambda tensors: {"model_state_dict": tensors},
    "module.": lambda tensors: {"state_dict": {f"module.{name}": tensor for name, tensor in tensors.items()}},
    "both": lambda tensors: {"state_dict": {"model": tensors}},
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("wrap", list(WRAPPERS))
def test_a_foreign_pth_file_is_matched_in_its_order(tmp_path: Path, wrap: str, legacy: bool) -> None:
    theirs = tensors_of(trained())
    torch.save(WRAPPERS[wrap](foreign(theirs)), tmp_path / "weights.pth", _use_new_zipfile_serialization=not legacy)
    ours = make_state()
    loaded = load_from(ours.network.module, tmp_path / "weights.pth")
    assert same(tensors_of(ours), theirs)
    assert (loaded.tensors, loaded.initial) == (37, [])


def test_prefixed_names_of_paceline_are_matched_by_name(tmp_path: Path) -> None:
    theirs = tensors_of(trained())
    torch.save({f"module.{name}": theirs[name] for name in sorted(theirs)}, tmp_path / "weights.pth")
    assert same(tensors_of(make_state(words_from(tmp_path / "weights.pth"))), theirs)


@pytest.mark.parametrize("order", ["alphabetical", "reversed", "swapped"])
def test_foreign_tensors_that_lost_their_order_are_refused_and_nothing_changes(tmp_path: Path, order: str) -> None:
    theirs = foreign(tensors_of(trained()))
    names = {"alphabetical": sorted(theirs), "reversed": list(theirs)[::-1], "swapped": list(theirs)}[order]
    if order == "swapped":  # two tensors of one shape
        a, b = names.index("part_b.weight"), names.index("part_b.bias")
        names[a], names[b] = names[b], names[a]
    torch.save({name: theirs[name] for name in names}, tmp_path / "weights.pth")
    ours = make_state()
    before = tensors_of(ours)
    with pytest.raises(UserError, match=r"does not fit this network: 'part_\w\.\w+' .* stands where '.*' .* should"):
        load_from(ours.network.module, tmp_path / "weights.pth")
    assert same(tensors_of(ours), before)


def published(tensors: Tensors) -> Tensors:
    """A residual network's tensors under torchvision's and timm's names."""
    words = {
        "stem.conv": "conv1",
        "stem.norm": "bn1",
        "/unit": ".",
        "stage": "layer",
        ".norm": ".bn",
        "head.dense": "fc",
    }
    made = {}
    for name, tensor in tensors.items():
        for ours, theirs in words.items():
            name = name.replace(ours, theirs)  # noqa: PLW2901 - word by word
        made[name] = tensor
    return made


@pytest.mark.parametrize("classes", [10, 7])
def test_published_names_in_a_safetensors_file_are_matched_though_it_sorts_them(tmp_path: Path, classes: int) -> None:
    theirs = tensors_of(trained(f"data.classes={classes}"))
    save_file(published(theirs), tmp_path / "model.safetensors")
    ours = make_state()
    loaded = load_from(ours.network.module, tmp_path / "model.safetensors")
    assert loaded.tensors == (37 if classes == 10 else 35)
    same_head = {} if classes == 10 else {name: theirs[name] for name in loaded.initial}
    expected = {name: value for name, value in theirs.items() if name not in same_head}
    assert all(torch.equal(tensors_of(ours)[name], value) for name, value in expected.items())


def test_unknown_names_in_a_safetensors_file_are_refused_with_what_to_do(tmp_path: Path) -> None:
    save_file(foreign(tensors_of(trained())), tmp_path / "w.safetensors")
    message = one_line(tmp_path / "w.safetensors")
    assert message.endswith("neither torchvision's nor timm's; save them with torch.save, which keeps it")


def test_the_arguments_that_training_scripts_save_beside_the_weights_do_no_harm(tmp_path: Path) -> None:
    theirs = tensors_of(trained())
    averaged = {name: value + 1 for name, value in theirs.items()}
    arguments = argparse.Namespace(lr=0.1, data=None)
    torch.save({"state_dict": foreign(theirs), "args": arguments}, tmp_path / "plain.pth")
    torch.save({"state_dict": theirs, "state_dict_ema": averaged, "args": arguments}, tmp_path / "ema.pth")
    assert same(tensors_of(make_state(words_from(tmp_path / "plain.pth"))), theirs)
    assert same(tensors_of(make_state(words_from(tmp_path / "ema.pth"))), averaged)


@pytest.mark.parametrize("side", [1, 3])
@torch.no_grad()
def test_a_dense_layer_may_be_a_convolution_over_the_whole_picture_elsewhere(side: int) -> None:
    dense = nn.Linear(4 * side * side, 6)
    ours = nn.Sequential(OrderedDict(stem=nn.Conv2d(3, 4, 1), dense1=dense, head=nn.Linear(6, 5)))
    theirs = {f"part_{name}": torch.rand_like(value) for name, value in ours.state_dict().items()}
    wide = {name: value.view(6, 4, side, side) if "dense1.weight" in name else value for name, value in theirs.items()}
    assert load_weights(ours, wide, "x").initial == []
    assert same({f"part_{name}": value for name, value in ours.state_dict().items()}, theirs)


@pytest.mark.parametrize("naming", ["ours", "foreign"])
def test_another_number_of_classes_starts_the_head_anew_and_nothing_else(tmp_path: Path, naming: str) -> None:
    theirs = tensors_of(trained("data.classes=7"))
    torch.save(theirs if naming == "ours" else foreign(theirs), tmp_path / "weights.pth")
    fresh_head = tensors_of(make_state("seed=4"))
    ours = make_state("seed=4")
    loaded = load_from(ours.network.module, tmp_path / "weights.pth")
    anew = {name for name, value in tensors_of(ours).items() if torch.equal(value, fresh_head[name])}
    assert anew == {"head.dense.weight", "head.dense.bias"}
    assert all(torch.equal(tensors_of(ours)[name], theirs[name]) for name in theirs.keys() - anew)
    assert loaded.initial == ["head.dense.weight", "head.dense.bias"]
    assert loaded.tensors == 35


def test_the_report_says_how_many_were_taken_and_what_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(tensors_of(trained("data.classes=7")), path)
    said = [str(load_from(make_state(f"data.classes={c}").network.module, path)) for c in (7, 10)]
    assert said[0] == f"init.from {path}: loaded 37 tensors"
    assert (
        said[1]
        == f"init.from {path}: loaded 35 tensors; these keep their initial values: head.dense.weight, head.dense.bias"
    )


def headed(classes: int = 5, auxiliary: bool = True) -> Network:
    """A small network with two heads on the way."""
    blocks: dict[str, nn.Module] = {"stem": Chain(nn.Conv2d(3, 4, 1), BatchNormAct(4, 0.1, 1e-5))}
    if auxiliary:
        blocks["aux1"] = Auxiliary(Chain(nn.Flatten(), nn.Linear(16, 8)), 8, classes)
    blocks["stage1/unit1"] = nn.Conv2d(4, 6, 1)
    if auxiliary:
        blocks["aux2"] = Auxiliary(Chain(nn.Flatten(), nn.Linear(24, 8)), 8, classes)
    blocks["head"] = Head(6, classes)
    made = Network(OrderedDict(blocks))
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.zero_()
    return made


def numbered(network: Network) -> Tensors:
    """A network's tensors, each filled with its place."""
    return {
        name: torch.full_like(value, number) for number, (name, value) in enumerate(network.state_dict().items(), 1)
    }


def renamed(tensors: Tensors, names: list[str]) -> Tensors:
    """These tensors in this order under names of another package, in which 'aux' still shows."""
    return {f"net.{name.replace('/', '_').replace('head', 'fc')}": tensors[name] for name in names}


def kinds(network: Network) -> tuple[list[str], list[str], list[str]]:
    names = list(network.state_dict())
    auxiliary = [name for name in names if name.startswith("aux")]
    head = [name for name in names if name.startswith("head")]
    return [name for name in names if name not in auxiliary + head], auxiliary, head


@pytest.mark.parametrize("order", ["as here", "before the head"])
def test_auxiliary_heads_may_be_listed_on_the_way_or_before_the_head(order: str) -> None:
    ours, theirs = headed(), numbered(headed())
    body, auxiliary, head = kinds(ours)
    names = list(theirs) if order == "as here" else [*body, *auxiliary, *head]
    assert load_weights(ours, renamed(theirs, names), "x").initial == []
    assert same(dict(ours.state_dict()), theirs)


@pytest.mark.parametrize("naming", ["ours", "foreign"])
def test_auxiliary_heads_that_are_missing_start_anew(naming: str) -> None:
    ours = headed()
    body, auxiliary, head = kinds(ours)
    theirs = numbered(headed())
    chosen = {name: theirs[name] for name in [*body, *head]}
    loaded = load_weights(
        ours, dict(sorted(chosen.items())) if naming == "ours" else renamed(theirs, [*body, *head]), "x"
    )
    assert loaded.initial == auxiliary
    assert loaded.tensors == len(body) + len(head)
    assert str(loaded).endswith(f"these keep their initial values: {', '.join(auxiliary)}")
    assert all(torch.equal(ours.state_dict()[name], theirs[name]) for name in chosen)
    assert not any(ours.state_dict()[name].any() for name in auxiliary)


@pytest.mark.parametrize("naming", ["ours", "as here", "before the head"])
def test_auxiliary_heads_that_this_network_does_not_have_are_left_out(naming: str) -> None:
    ours, theirs = headed(auxiliary=False), numbered(headed())
    body, auxiliary, head = kinds(headed())
    given = {
        "ours": dict(sorted(theirs.items())),
        "as here": renamed(theirs, list(theirs)),
        "before the head": renamed(theirs, [*body, *auxiliary, *head]),
    }[naming]
    assert load_weights(ours, given, "x").initial == []
    assert same(dict(ours.state_dict()), {name: theirs[name] for name in [*body, *head]})


@pytest.mark.parametrize("naming", ["ours", "foreign"])
def test_another_number_of_classes_starts_the_last_layer_of_every_head_anew(naming: str) -> None:
    ours, theirs = headed(classes=5), numbered(headed(classes=9))
    loaded = load_weights(ours, theirs if naming == "ours" else renamed(theirs, list(theirs)), "x")
    assert loaded.initial == [
        f"{head}.dense.{last}" for head in ("aux1", "aux2", "head") for last in ("weight", "bias")
    ]
    assert all(torch.equal(ours.state_dict()[name], theirs[name]) for name in theirs if name not in loaded.initial)


class Trap:
    """Makes a file when it is unpickled by a careless reader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["beside", "instead", "inside", "plain pickle"])
def test_a_pickled_object_is_refused_and_nothing_is_executed(tmp_path: Path, where: str) -> None:
    trap, path = Trap(tmp_path / "sprung"), tmp_path / "weights.pth"
    theirs = tensors_of(trained())
    content: Any = {
        "beside": {"state_dict": theirs, "args": trap}, "instead": trap, "inside": {**theirs, "more": trap},
        "plain pickle": trap,
    }[where]  # fmt: skip
    if where == "plain pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    ours = make_state()
    before = tensors_of(ours)
    with pytest.raises(DataError, match="holds other objects, which are never loaded"):
        load_from(ours.network.module, path)
    assert not (tmp_path / "sprung").exists()
    assert same(tensors_of(ours), before)
    if where == "plain pickle":
        pickle.loads(path.read_bytes())
        assert (tmp_path / "sprung").exists()  # the trap does work


def one_line(source: Path | str) -> str:
    """What a network says of a source that it cannot use."""
    with pytest.raises(UserError) as found:
        make_state(words_from(Path(source)))
    message = str(found.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"init.from: {source} ")
    return message


def test_a_source_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert "is not there; give a run folder, a .safetensors or .pth file, or timm:NAME" in one_line(tmp_path / "no.pth")
    assert "holds no intact checkpoint" in one_line(tmp_path)


@pytest.mark.parametrize("suffix", ["pth", "pt", "safetensors"])
@pytest.mark.parametrize(
    "damage", ["empty", "text", "yaml", "picture", "half", "last bytes", "zip", "numbers", "a list", "a tensor"]
)
def test_a_damaged_file_is_one_line(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"weights.{suffix}"
    theirs = tensors_of(trained())
    if suffix == "safetensors":
        save_file(theirs, path)
    else:
        torch.save({"a list": list(theirs), "a tensor": theirs["head.dense.bias"]}.get(damage, theirs), path)
    whole = path.read_bytes()
    wrong = {
        "empty": b"", "text": b"hello world\n", "yaml": b"a: 1\n", "picture": b"\x89PNG\r\n\x1a\n" + bytes(40),
        "half": whole[: len(whole) // 2], "last bytes": whole[:-100], "zip": b"PK\x03\x04",
        "numbers": bytes(range(256)),
    }  # fmt: skip
    if damage in wrong or suffix == "safetensors":
        path.write_bytes(wrong.get(damage, b"{}"))
    assert "does not hold plain tensors by name: it is damaged, or holds other objects" in one_line(path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("model=resnet14-cifar", "'stage1/unit2.conv1.weight' is in only one of the two"),
        ("data.channels=1", "'stem.conv.weight' has the shape (16, 1, 3, 3) instead of (16, 3, 3, 3)"),
        ("norm=group", "'stem.norm.running_mean' is in only one of the two"),
        ("model=efficientnet-cifar", "stands where 'stage1/unit1.conv1.weight' (16, 16, 3, 3) should"),
    ],
)
def test_weights_of_another_network_are_one_line(tmp_path: Path, other: str, message: str) -> None:
    colors = ("data.mean=[0.5]", "data.std=[0.5]") if "channels" in other else ()
    with torch.random.fork_rng(devices=[]):
        theirs = build_state(make_plan(other, *colors), WORLD)
    torch.save(tensors_of(theirs), tmp_path / "weights.pth")
    assert message in one_line(tmp_path / "weights.pth")


def test_too_few_or_too_many_foreign_tensors_are_one_line(tmp_path: Path) -> None:
    theirs = foreign(tensors_of(trained()))
    plain = {name: value for name, value in theirs.items() if "num_batches" not in name}
    torch.save(dict(list(theirs.items())[:-1]), tmp_path / "few.pth")
    assert one_line(tmp_path / "few.pth").endswith(f"has {len(plain) - 1} tensors, and this network has 37{OTHER}")
    torch.save({**theirs, "more.weight": torch.ones(1)}, tmp_path / "many.pth")
    assert one_line(tmp_path / "many.pth").endswith(f"has 38 tensors, and this network has 37{OTHER}")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_keeps_an_average_passes_that_on(tmp_path: Path, precision: str) -> None:
    theirs = trained("ema.decay=0.9", f"on.precision={precision}", f"on.weights={precision}")
    assert theirs.ema is not None
    for row in theirs.ema.tensors().values():
        row.fill_(0.75)
    checkpoint.write(tmp_path / "checkpoints", theirs.step, to_files(theirs))
    plan = make_plan(words_from(tmp_path))
    started = build_state(plan, WORLD)
    initialize_state(started, plan)
    assert all((tensor == 0.75).all() for tensor in tensors_of(started).values())


def test_a_run_that_started_from_weights_is_resumed_without_them(tmp_path: Path) -> None:
    theirs = tensors_of(trained())
    torch.save(theirs, tmp_path / "weights.pth")
    plan = make_plan(words_from(tmp_path / "weights.pth"))
    first = make_session(plan, tmp_path / "run", "own")
    restore_newest(first)
    started = first.state
    assert same(tensors_of(started), theirs)
    assert f"init.from {tmp_path}/weights.pth: loaded 37 tensors" in first.run.rows()[0]["text"]
    started.network.module.state_dict()["head.dense.bias"].fill_(9)
    started.step = 1
    checkpoint.write(first.run.checkpoints, 1, to_files(started))
    first.run.close()
    (tmp_path / "weights.pth").unlink()
    again = make_session(plan, tmp_path / "run", "own", state=build_state(plan, WORLD))
    restore_newest(again)
    again.run.close()
    resumed = again.state
    assert resumed.step == 1
    assert same(tensors_of(resumed), tensors_of(started))
    assert len(again.run.rows()) == 1
