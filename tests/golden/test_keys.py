"""Every use of keyed random numbers by its purpose: a renamed purpose, split or setting would change every run."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import paceline
from paceline import keyed
from paceline.data.index.scan import open_index
from paceline.settings.data import Files

FIRST_WORDS = {
    ("rounding", "stem.conv.weight"): [1123312139, 3618940678, 3443462056, 11363745],
    ("weights",): [4235437050, 3357920969, 4010199228, 2598564880],
    ("weights", "stem.conv.weight"): [2393057397, 1173646540, 2386408683, 3816629633],
    ("dropout",): [2625677159, 4160246463, 1224484764, 2108854161],
    ("stochastic depth",): [3368809005, 1294458629, 1226008591, 52100714],
    ("mixup",): [544587581, 1939737136, 905881529, 1705077237],
    ("mix chance",): [3269862104, 1493969987, 654620623, 4078734583],
    ("cutmix",): [3380085980, 913485059, 3298954214, 213450714],
    ("cutmix beta",): [1079109250, 1408277307, 546687193, 3922159704],
    ("cutmix box",): [118070974, 2408883226, 1429518253, 1325483207],
    ("data.validation", "a.jpg"): [248201415, 2828128860, 1851808027, 1825781721],
    ("data.use", "a.jpg"): [1019963397, 1336272983, 3617826655, 934220784],
    ("cifar fraction",): [1187722271, 3725486638, 4095996134, 1333511736],
    ("peak",): [3352730471, 4097309554, 3252538767, 3006284627],
    ("python",): [2340814209, 2798907440, 2059836882, 4118474824],
    ("made", "training"): [2806930387, 1359173955, 700677083, 1106220087],
    ("made", "validation"): [1100744235, 1133826301, 2514712418, 2251975568],
    ("made labels", "training"): [815191165, 1381461826, 3253495169, 2097122054],
    ("made labels", "validation"): [1462264660, 4276697151, 2268683126, 1245563136],
    ("order", 0): [227179652, 2396476402, 3101175806, 68261963],
    ("order", 1): [2901921361, 159989678, 1772229307, 1036481790],
    ("policy",): [990116474, 222380108, 723548430, 103131178],
    ("policy cutout",): [3433701461, 3077080669, 3856195703, 2842388491],
    ("policy spread",): [3801905868, 3261599095, 3538643128, 1358809276],
    ("crop box",): [1147594608, 2788742047, 2775828628, 2202340164],
    ("crop and flip",): [4262789470, 71516060, 3733392795, 941443945],
    ("alternate flip",): [3283075411, 692436566, 2216750810, 3006668643],
    ("colour",): [3296285839, 156942615, 2681911034, 797553808],
    ("erase",): [3144138217, 1077488755, 3097300147, 2322586457],
    ("cutout",): [3387891691, 1380866983, 191421248, 3056694828],
    ("convert", "training"): [1023191857, 1648094614, 1853212374, 3862862351],
    ("convert", "validation"): [2511668692, 3181382049, 552799449, 447087443],
    ("shapes", "train", "label"): [440270888, 4168666537, 4062867130, 3424120704],
    ("shapes", "train", "noise"): [485335485, 1504817528, 2401531728, 297543064],
    ("shapes", "train", "colour"): [3665243333, 3054343113, 1315366237, 480337260],
    ("shapes", "train", "gradient"): [2463793271, 4054517569, 3099756385, 1372869321],
    ("shapes", "train", "stroke"): [3780259342, 2888575284, 1474461021, 824769260],
    ("shapes", "train", "stroke colour"): [847819948, 1663361654, 2477178218, 2502754624],
    ("shapes", "train", "shape"): [2075171954, 2167258267, 1997215702, 4184889213],
    ("shapes", "validation", "label"): [2888149336, 2142078527, 1485074330, 3541477564],
    ("shapes", "validation", "noise"): [372099832, 2543823169, 2677753105, 1937727255],
    ("shapes", "validation", "colour"): [525701762, 1141206616, 2270787898, 1738006720],
    ("shapes", "validation", "gradient"): [2639460909, 220218554, 2080651562, 1988094570],
    ("shapes", "validation", "stroke"): [3052297620, 4146585594, 1129930572, 759407802],
    ("shapes", "validation", "stroke colour"): [554139753, 312168251, 1468708574, 3756101503],
    ("shapes", "validation", "shape"): [4037577900, 1753683898, 2865704091, 1750237824],
}
"""The key's purpose and names with seed 0, and the four words at position 7, index 3."""

SPLIT = [["a/0.png", "b/1.png", "a/2.png", "b/4.png"], ["a/3.png", "b/5.png"]]
"""Training and validation images of six in each of two classes, with data.validation=20% and data.fraction=50%."""

KEY_FUNCTIONS = {"key", "_key", "_uniforms"}
"""The calls whose texts are purposes or split names."""


def texts_of_keys() -> set[str]:
    """Every text that stands in a call which makes a key, anywhere in the sources."""
    texts = set()
    for path in Path(paceline.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in KEY_FUNCTIONS:
                texts |= {
                    arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                }
    return texts


@pytest.mark.parametrize(("names", "words"), FIRST_WORDS.items(), ids=str)
def test_a_purpose_has_the_words_it_always_had(names: tuple[str, *tuple[str | int, ...]], words: list[int]) -> None:
    found = keyed.words(keyed.key(0, *names), np.array([7]), 3)
    assert [int(word[0]) for word in found] == words


def test_no_purpose_was_renamed_and_none_is_new() -> None:
    listed = {name for names in FIRST_WORDS for name in names if isinstance(name, str)}
    by_value = {"data.validation", "data.use", "a.jpg", "stem.conv.weight", "train", "training", "validation"}
    assert texts_of_keys() == listed - by_value


def test_splits_are_drawn_by_the_purposes_they_always_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(6):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / label / f"{number}.png")
    used = set()
    real = keyed.key

    def key(seed: int, purpose: str, *names: str | int) -> int:
        used.add((seed, purpose))
        return real(seed, purpose, *names)

    monkeypatch.setattr(keyed, "key", key)
    index = open_index(Files(name="images", validation=0.2, fraction=0.5), tmp_path)
    assert used == {(0, "data.validation"), (0, "data.use")}
    tables = (index.training, index.validation)
    assert [[table.name(row) for row in range(len(table))] for table in tables] == SPLIT
