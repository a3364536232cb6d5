"""Which images are trained on and evaluated: every setting of a data set."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline.facts import DataFacts
from paceline.settings.types import Channels, ClassCount, ImageCount, Pixels, Settings, percent

# Every kind of data has these three, each with defaults of its own.
Mean = Annotated[
    tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...],
    Field(description="Mean of each channel on a scale of 0 to 1, subtracted from the pixels."),
]
Std = Annotated[
    tuple[Annotated[float, Field(gt=0, le=1e6)], ...],
    Field(description="Standard deviation of each channel, which the pixels are divided by."),
]
Normalization = Annotated[
    Literal["mean-std", "mean", "unit", "image"],
    Field(
        description="How pixels become numbers: less the mean and divided by the standard deviation; less the mean "
        "only, on a scale of 0 to 255; on a scale of -1 to 1; or each image by its own mean and deviation (at least "
        "1 / root of its numbers)."
    ),
]


POOL = 256
"""How many different images `generated` and `synthetic` sets have."""

Part = Annotated[float, BeforeValidator(percent), Field(ge=0, lt=1)]
Percent = Annotated[float, BeforeValidator(percent), Field(gt=0, le=1)]


def _part_of(images: int, fraction: float) -> int:
    return max(1, round(fraction * images))


class Shapes(Settings):
    """The built-in data set: ten kinds of shapes, drawn by Paceline itself; needs no folder."""

    name: Literal["shapes"]
    mean: Mean = (0.5, 0.5, 0.5)
    std: Std = (0.25, 0.25, 0.25)
    normalize: Normalization = "mean-std"

    @property
    def facts(self) -> DataFacts:
        return DataFacts(images=10_000, validation_images=2_000, classes=10, side=32)


class Cifar(Settings):
    """CIFAR-10 or CIFAR-100 in the published binary files."""

    name: Literal["cifar10", "cifar100"]
    fraction: Percent = 1.0
    """Fraction of the training images that is used, chosen at random, the same of each class."""
    mean: Mean = (0.4914, 0.4822, 0.4465)
    std: Std = (0.2470, 0.2435, 0.2616)
    normalize: Normalization = "mean-std"

    @property
    def facts(self) -> DataFacts:
        classes = 10 if self.name == "cifar10" else 100
        return DataFacts(_part_of(50_000, self.fraction), validation_images=10_000, classes=classes, side=32)


class Made(Settings):
    """Random images for measuring: `generated` ones come from the host, `synthetic` ones stay on the device. In place
    of a recipe's own data they have its sizes, counts and normalization, unless these are written too."""

    name: Literal["generated", "synthetic"]
    images: ImageCount = 1_281_167
    """How many training images the epoch counts."""
    validation_images: ImageCount = 1_000
    """How many images a validation counts; they are as random as their labels."""
    classes: ClassCount = 1000
    """How many classes the labels are drawn from."""
    side: Pixels = 224
    """Height and width of an image in pixels."""
    evaluation_side: Pixels | None = None
    """Height and width of a validation image; left out, as in training."""
    channels: Channels = 3
    """Color channels of an image."""
    mean: Mean = (0.485, 0.456, 0.406)
    std: Std = (0.229, 0.224, 0.225)
    normalize: Normalization = "mean-std"

    @property
    def facts(self) -> DataFacts:
        counts = (self.images, self.validation_images, self.classes)
        return DataFacts(*counts, self.side, self.channels, self.evaluation_side)


class Center(Settings):
    """The shorter edge is resized and the center cut out, in one resampling."""

    name: Literal["center"]
    short: Pixels | None = None
    """Pixels that the shorter edge is resized to; left out, 8/7 of what is cut out, as 256 is of 224."""

    def shorter(self, side: int) -> int:
        """The same for a cut of so many pixels a side."""
        return self.short or round(side * 8 / 7)


class Squash(Settings):
    """The same fraction of both edges is cut out at the center and squashed into a square."""

    name: Literal["squash"]
    fraction: Percent = 0.875
    """How much of each edge is kept."""


class Files(Settings):
    """Encoded images (JPEG, PNG and whatever Pillow reads) in class folders, TFRecords, WebDataset tars or Paceline
    packs, recognized by their files; `imagenet` plans without them."""

    name: Literal["images", "imagenet"]
    side: Pixels = 224
    """Height and width that training images are resized to."""
    resize: Literal["bilinear", "bicubic"] = "bilinear"
    """The filter that makes images larger or smaller; it sees every pixel (antialiased)."""
    evaluation: Annotated[Center | Squash, Field(discriminator="name")] = Center(name="center")
    """What of a validation image is evaluated."""
    evaluation_side: Pixels | None = None
    """Height and width that validation images are resized to; left out, as in training."""
    validation: Part | None = None
    """Fraction of the images, chosen at random, that is kept for validation; for data without a validation split. 0
    keeps none, for runs with `evaluate.every: never`."""
    fraction: Percent = 1.0
    """Fraction of the training images that is used, chosen at random."""
    labels: str | None = None
    """A CSV, TSV or JSON file with the class of each folder or file, and its split if there is such a column; left out,
    folders are classes."""
    relabel: str | None = None
    """A file of corrections over the labels, with the class of each folder or file; an empty class leaves an image
    out."""
    first_label: Annotated[int, Field(ge=-(10**9), le=10**9)] | None = None
    """The number of the first class where labels are numbers; left out, 1 in TFRecords and 0 elsewhere."""
    orientation: Literal["ignore", "honor"] = "ignore"
    """Whether an image is turned as its EXIF data says; by ImageNet's convention it is not."""
    max_bad: Annotated[float, BeforeValidator(percent), Field(ge=0, le=1)] | None = None
    """Fraction of the images that may be damaged, and replaced by their next neighbor, before the run ends; left out,
    0.1 %, or 10 images where that is more, but no more than a tenth."""
    images: ImageCount | None = None
    """How many training images there are; left out, as many as are found."""
    validation_images: Annotated[int, Field(ge=0, le=10**12)] | None = None
    """How many validation images there are; left out, as many as are found."""
    classes: ClassCount | None = None
    """How many classes there are; left out, as many as are found."""
    class_names: tuple[str, ...] | None = None
    """The classes by name, in the order of their numbers; left out, as the data keep them, and the names of folders
    sorted."""
    mean: Mean = (0.485, 0.456, 0.406)
    std: Std = (0.229, 0.224, 0.225)
    normalize: Normalization = "mean-std"

    @model_validator(mode="after")
    def _classes_have_one_name_each(self) -> Files:
        names = self.class_names or ()
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"class_names: '{twice}' is there twice; each class has one name of its own")
        if self.class_names == ():
            raise ValueError("class_names: there is none; leave it out, or write [cat, dog]")
        if names and self.classes not in (None, len(names)):
            raise ValueError(f"class_names has {len(names)} names, and classes says {self.classes}; leave classes out")
        return self

    @property
    def turns(self) -> bool:
        """Whether images are turned upright."""
        return self.orientation == "honor"

    def bad_allowed(self, images: int) -> int:
        """How many of so many images may be damaged."""
        if self.max_bad is not None:
            return math.ceil(self.max_bad * images)
        return max(math.ceil(0.001 * images), min(10, math.ceil(0.1 * images)))

    @property
    def facts(self) -> DataFacts:
        assert None not in self._counts, "the index of the files fills these in"
        return self.known

    @property
    def known(self) -> DataFacts:
        """The facts before the files are looked at: 0 for what only they tell."""
        images, validation, classes = self._counts
        return DataFacts(
            images or 0, validation or 0, classes or 0, self.side, evaluation_side=self.evaluation_side or self.side
        )

    @property
    def _counts(self) -> tuple[int | None, int | None, int | None]:
        """Training images, validation images and classes, as far as they are written or published."""
        images, validation, classes = self.images, self.validation_images, self.classes
        if self.name == "imagenet":
            published = _part_of(1_281_167, self.fraction)  # up to the rounding of each class, which the files decide
            validation = 50_000 if validation is None else validation
            images, classes = images or published, classes or 1000
        return images, validation, classes or len(self.class_names or ()) or None


Data = Shapes | Cifar | Made | Files


def likeness(data: Data) -> dict[str, Any]:
    """The settings with which made-up images are like others: sizes, counts and normalization; what only files tell is
    left out."""
    facts = data.known if isinstance(data, Files) else data.facts
    known = {key: value for key, value in asdict(facts).items() if value}
    if facts.evaluation_side == facts.side:
        del known["evaluation_side"]
    return {**known, "mean": data.mean, "std": data.std, "normalize": data.normalize}
