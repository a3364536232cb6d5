"""Which loader is opened for which data and placement."""

from __future__ import annotations

import pytest
import torch

from conftest import make_plan
from paceline.data.load.in_memory import HostLoader, OnDeviceLoader, SyntheticLoader
from paceline.data.load.loader import open_loader

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("data.images=60", "data.validation_images=10"), OnDeviceLoader),
        (("data.images=60", "data.validation_images=10", "on.data_on_device=false"), HostLoader),
        (("data.images=1000000",), HostLoader),  # images that repeat a small pool are not all there
        (("data.name=synthetic",), SyntheticLoader),
    ],
)
def test_the_loader_suits_the_data_and_the_placement(words: tuple[str, ...], kind: type[HostLoader]) -> None:
    plan = make_plan(*words)
    assert type(open_loader(plan, None, 0, CPU)) is kind
