"""What happens to training images: crops, flips, boxes, colors, policies, image sides, and mixing with neighbors."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from paceline.settings.duration import refuse_clock
from paceline.settings.types import Few, Fraction, NotNegative, Positive, Probability, Settings


def _upright(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if low > high:
        raise ValueError(f"expected the smaller bound first, so [{high:g}, {low:g}], found [{low:g}, {high:g}]")
    return bounds


def _alpha(value: float) -> float:
    # Above 1 the method that draws from Beta refuses ever more pairs, and soon all that it tries.
    if not 0 <= value <= 1:
        raise ValueError(f"expected the alpha of Beta(alpha, alpha), at most 1, or 0 for no mixup; found {value}")
    return value


def _sides(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ValueError("expected times and pixels, such as {0%: 24, 50%: 32}")
    for when, side in value.items():
        if isinstance(side, bool) or not isinstance(side, int) or side < 1:
            raise ValueError(f"expected whole pixels a side from {when} on, such as 24, found {side!r}")
    return {str(refuse_clock(when)): side for when, side in value.items()}


Factors = Annotated[tuple[NotNegative, NotNegative], AfterValidator(_upright)]
Areas = Annotated[tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]],
                  AfterValidator(_upright)]  # fmt: skip
Aspects = Annotated[tuple[Positive, Positive], AfterValidator(_upright)]
Alpha = Annotated[float, AfterValidator(_alpha), WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1})]
Sides = Annotated[
    dict[str, int],
    PlainValidator(_sides),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}}),
]


class Erase(Settings):
    """A box of random size and shape that becomes zero after normalization, which is the mean color."""

    probability: Probability = 0.0
    """Fraction of the images that lose a box."""
    area: Areas = (0.02, 0.3333)
    """Smallest and largest fraction of the image that the box covers."""
    aspect: Aspects = (0.3, 3.3333)
    """Smallest and largest height of the box over its width; each doubling is as likely."""


class Color(Settings):
    """Random colors as TensorFlow's adjust functions make them, in one of two orders, clipped to 0 .. 255 at the end:
    brightness, saturation, hue, contrast; or brightness, contrast, saturation, hue."""

    brightness: Probability = 0.0
    """Up to this fraction of 255 is added to or taken from every pixel."""
    saturation: Factors = (1.0, 1.0)
    """Smallest and largest factor of the saturation (of hue, saturation and value)."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """The hue turns by up to this many turns either way."""
    contrast: Factors = (1.0, 1.0)
    """Smallest and largest factor of each pixel's distance from its channel's mean over the image."""

    @property
    def active(self) -> bool:
        """Whether any color changes."""
        return self != Color()

    @property
    def turns(self) -> bool:
        """Whether saturation or hue change."""
        return self.hue > 0 or self.saturation != (1.0, 1.0)


class AutoAugment(Settings):
    """Two operations for each image, from one of the 25 pairs that were found for a data set (Cubuk et al., 2019)."""

    name: Literal["autoaugment"]
    table: Literal["imagenet", "cifar10", "efficientnet"] = "imagenet"
    """The data set whose pairs these are, or the other pairs for ImageNet that came with EfficientNet ('v0')."""
    form: Literal["torch", "tensorflow"] = "torch"
    """What levels mean; torch: level 9 is the most, color factors are 1 +- 0.9 of it and posterize keeps 8 to 4 bits;
    tensorflow: 10 would be the most, color factors are 0.1 to 1.9 of it, posterize keeps 0 to 4 bits, solarize inverts
    less the higher the level, and images move further."""
    sampling: Literal["nearest", "bilinear"] = "nearest"
    """How pixels are found between pixels when an image is sheared, moved or turned."""
    fill: Annotated[int, Field(ge=0, le=255)] = 128
    """Gray of the pixels that come in from outside and of cut-out boxes."""


class RandAugment(Settings):
    """A few operations for each image, all of one magnitude, any of them as likely (Cubuk et al., 2020)."""

    name: Literal["randaugment"]
    layers: Annotated[int, Field(gt=0, le=100)] = 2
    """How many operations follow one another."""
    magnitude: Annotated[float, Field(ge=0, le=10)] = 9.0
    """How strong they are, from 0 to 10."""
    magnitude_std: NotNegative = 0.0
    """Standard deviation of the normal numbers that are added to the magnitude, drawn anew for each operation."""
    probability: Probability = 1.0
    """Fraction of the images that each layer changes."""
    form: Literal["torch", "tensorflow", "timm"] = "torch"
    """What magnitudes mean, as in autoaugment, and which operations there are: torch has identity; tensorflow has
    invert, cutout and solarize-add instead; timm has tensorflow's but for cutout, and the stronger the more they do."""
    sampling: Literal["nearest", "bilinear"] = "nearest"
    """How pixels are found between pixels when an image is sheared, moved or turned."""
    fill: Annotated[int, Field(ge=0, le=255)] = 128
    """Gray of the pixels that come in from outside and of cut-out boxes."""


Policy = AutoAugment | RandAugment


class Crop(Settings):
    """A box of random size, shape and place, resized to the image side; for data in files."""

    area: Areas = (0.08, 1.0)
    """Smallest and largest fraction of the image that the box covers."""
    aspect: Aspects = (0.75, 1.3333333333)
    """Smallest and largest width of the box over its height."""
    distribution: Literal["logarithmic", "uniform"] = "logarithmic"
    """Whether any area and each doubling of the shape are as likely (torch), or any shape and then any height that the
    areas allow (TensorFlow)."""
    tries: Few = 10
    """Boxes that are tried before what `otherwise` says."""
    otherwise: Literal["center", "whole"] = "center"
    """After the last try: as much of the center as the shapes allow (torch), or the whole image (TensorFlow)."""
    object_fraction: Probability = 0.0
    """The box must hold at least this fraction of one of the image's objects, where the data tells where they are."""


class Augment(Settings):
    """What happens to a training image, by numbers keyed to its position in the endless list: crop and flip, policy,
    color, side, and, after normalization, erase and cutout."""

    crop: Crop = Crop()
    """A random box, resized; for data in files."""
    pad: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Pixels added on each side before a random crop back to the image's size; 0 does not crop."""
    fill: Literal["black", "mirror"] = "black"
    """What the added pixels show."""
    flip: bool = False
    """Mirror half of the images."""
    alternate_flip: bool = False
    """Mirror each image in every other epoch; which half begins with it is random. Instead of flip."""
    policy: Annotated[Policy, Field(discriminator="name")] | None = None
    """A published way to choose among operations such as rotate, equalize and contrast."""
    python: str | None = None
    """A function of your own, as module:function; it takes a picture (height, width, 3; 8 bits) and four random words
    (32 bits) that are keyed to its place, and gives a picture of the same size. For data in files, after the flip."""
    color: Color = Color()
    """Random brightness, saturation, hue and contrast."""
    side: Sides = Field(default_factory=dict)
    """Pixels a side that training images are made smaller to, from a time on, such as {0%: 24, 50%: 32}; left out, and
    in validation, they are as large as the data's."""
    erase: Erase = Erase()
    """A random box of the mean color."""
    cutout: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Pixels a side of a square of the mean color, centered on any pixel and cut at the border; 0 is none."""

    @model_validator(mode="after")
    def _flips_one_way(self) -> Self:
        if self.flip and self.alternate_flip:
            raise ValueError("flip and alternate_flip exclude each other; write augment.flip=false")
        return self


class FixedCut(Settings):
    """Always the same fraction of an image's own pixels."""

    name: Literal["fixed"]
    kept: Annotated[Fraction, Field(examples=[0.5])]
    """Fraction of an image's own pixels that is kept."""


class LogarithmicCut(Settings):
    """No cut with a probability of 1.55 kept - 0.96; otherwise 1 + ln(u) / 4 is kept, u uniform between e^-4 and 1."""

    name: Literal["logarithmic"]
    kept: Annotated[float, Field(ge=0.62, lt=1, examples=[0.85])]
    """About the mean fraction of an image's own pixels that is kept."""


class UniformCut(Settings):
    """Any fraction between two bounds."""

    name: Literal["uniform"]
    low: Annotated[Fraction, Field(examples=[0.3])]
    """The smallest fraction of an image's own pixels that is kept."""
    high: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The largest."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _upright((self.low, self.high))
        return self


class BetaCut(Settings):
    """A fraction from Beta(alpha, alpha)."""

    name: Literal["beta"]
    alpha: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 makes every fraction equally likely."""


Cut = FixedCut | LogarithmicCut | UniformCut | BetaCut


class Mix(Settings):
    """Images blended with neighbors (mixup) or with a part of a neighbor pasted in (cutmix), and labels likewise."""

    block: Annotated[int, Field(ge=2, le=10**9)] = 4
    """How many neighbors exchange among themselves; divides the micro-batch."""
    mixup: Alpha = 0.0
    """Blend each image with the next of its block by a fraction from Beta(mixup, mixup); 0 does not."""
    mixup_larger: bool = True
    """An image's own fraction is the larger one."""
    cutmix: Annotated[Cut, Field(discriminator="name")] | None = None
    """Paste a part of the image after the next into each image; the kind says how much of its own pixels is kept."""
    cutmix_probability: Probability = 1.0
    """Fraction of the images that cutmix is for."""
    switch_probability: Probability | None = None
    """Each image takes cutmix with this probability and otherwise mixup; left out, both."""

    @property
    def active(self) -> bool:
        """Whether anything is mixed."""
        return self.mixup > 0 or self.cutmix is not None
