"""What replicas compare before they start together, and what is said where it differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import make_plan
from folders_made import put
from paceline.agreement import agreement, difference, digest_of_agreement
from paceline.data.index.fingerprint import data_digest
from paceline.settings.data import Files, Made


def facts(*words: str, data: str = "0123") -> dict[str, str]:
    return agreement(make_plan(*words), data)


def test_what_a_replica_may_decide_for_itself_is_not_compared() -> None:
    own = facts("on.loader_workers=3", "on.cpu_threads=2", "on.timeout=5", "on.save=3 steps", "on.sinks=[]")
    assert digest_of_agreement(own) == digest_of_agreement(facts())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("epochs=3", "epochs (3.0 and 1.0); start every process with the same arguments"),
        ("on.micro_batch=8", "on.micro_batch (8 and 16); start every process with the same arguments"),
    ],
)
def test_another_setting_is_named_with_both_values(word: str, said: str) -> None:
    assert difference(facts(), facts(word)) == said


def test_long_values_are_told_by_their_digests_and_many_by_their_number() -> None:
    words = ("optimizer={name: lars, lr: 1}", "epochs=9", "seed=5", "augment.pad=0", "global_batch=32")
    found = difference(facts(), facts(*words))
    assert found.count(" and ") == 4
    assert found.endswith(" more; start every process with the same arguments")
    assert len(found) < 200


def test_other_images_and_other_code_come_first_with_what_to_do() -> None:
    assert difference(facts(data="a"), facts("epochs=3", data="b")).startswith("the index of the images (b and a), ")
    assert difference(facts(data="a"), facts(data="b")).endswith("; give every host the same files")
    found = difference(facts(), facts() | {"the code of Paceline": "0.1 x"})
    assert found.startswith("the code of Paceline (0.1 x and ")
    assert found.endswith("; install the same on every host")


def test_the_digest_of_images_is_that_of_their_names_and_labels(tmp_path: Path) -> None:
    names = ("cat/1.jpg", "cat/2.jpg", "dog/3.jpg", "dog/4.jpg")
    here, there = put(tmp_path / "here", *names), put(tmp_path / "there", *names)
    data = Files(name="images", validation=0.5)
    assert data_digest(data, here) == data_digest(data, there)
    moved = put(tmp_path / "moved", "cat/1.jpg", "dog/2.jpg", *names[2:])
    assert data_digest(data, moved) != data_digest(data, here)
    assert data_digest(Made(name="generated"), None) == "generated"
