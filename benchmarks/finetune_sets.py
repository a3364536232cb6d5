"""Writes the three small sets that finetune_peer.py trains on, from checkouts of public repositories.

| set | from | split |
|---|---|---|
| flowers | Oldpel/flower_photos (TensorFlow's flower photographs) | its own, equal numbers of each class |
| brain | SartajBhuvaji/Brain-Tumor-Classification-DataSet (MRI slices, stored as grey) | its own, likewise |
| animals | imamun93/animal-image-classifications (of Animals-10) | made here; 1 sheep is kept to train on for 20 cows |

Images are picked evenly from the sorted names and made smaller, so that all three sets together are about 31 MB.

    python benchmarks/finetune_sets.py flowers=CHECKOUT brain=CHECKOUT animals=CHECKOUT --out sets
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

SHORT, QUALITY = 256, 80


@dataclass(frozen=True)
class Source:
    """Where the classes of a set are in its checkout, and how many images of each are taken."""

    training: str
    validation: str
    classes: Mapping[str, int]
    """Training images of each class; the folder of a class bears its name."""
    validated: int
    """Validation images of each class."""
    mode: str = field(default="RGB")


SOURCES = {
    "flowers": Source(
        "dataset/train", "dataset/val", dict.fromkeys(("daisy", "dandelion", "roses", "sunflowers", "tulips"), 60), 80
    ),
    "brain": Source(
        "Training",
        "Testing",
        dict.fromkeys(("glioma_tumor", "meningioma_tumor", "no_tumor", "pituitary_tumor"), 80),
        70,
        "L",
    ),
    "animals": Source("images", "images", {"cow": 200, "horse": 200, "sheep": 10}, 100),
}


def spread(paths: list[Path], count: int) -> list[Path]:
    """So many paths, evenly from a list."""
    if len(paths) < count:
        raise SystemExit(f"{paths[0].parent if paths else 'a folder'} holds {len(paths)} images, of {count} needed")
    return [paths[index * len(paths) // count] for index in range(count)]


def images_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not there; give the checkout that holds it")
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))


def write(path: Path, place: Path, mode: str) -> None:
    """A smaller copy, in the class's folder."""
    place.mkdir(parents=True, exist_ok=True)
    with Image.open(path) as image:
        smaller = image.convert("RGB").convert(mode)
    scale = SHORT / min(smaller.size)
    if scale < 1:
        size = max(SHORT, round(smaller.width * scale)), max(SHORT, round(smaller.height * scale))
        smaller = smaller.resize(size, Image.Resampling.LANCZOS)
    smaller.save(place / f"{path.stem}.jpg", quality=QUALITY)


def prepare(source: Source, checkout: Path, out: Path) -> None:
    for name, count in source.classes.items():
        validation = spread(images_in(checkout / source.validation / name), source.validated)
        left = sorted(set(images_in(checkout / source.training / name)) - set(validation))
        for part, paths in (("train", spread(left, count)), ("val", validation)):
            for path in paths:
                write(path, out / part / name, source.mode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="SET=FOLDER", help=f"sets: {', '.join(SOURCES)}")
    parser.add_argument("--out", type=Path, default=Path("sets"), help="where the folders of the sets go")
    options = parser.parse_args()
    for word in options.checkouts:
        name, _, checkout = word.partition("=")
        if name not in SOURCES:
            parser.error(f"'{word}': expected SET=FOLDER with a set of {', '.join(SOURCES)}")
        prepare(SOURCES[name], Path(checkout), options.out / name)
        files = list((options.out / name).rglob("*.jpg"))
        print(f"{name}: {len(files)} images, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
