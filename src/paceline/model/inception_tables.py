"""The modules of the Inception networks as lines of text, for building and for planning (no torch).

A module is several chains of layers over the same picture. "|" separates chains, and spaces separate layers:

    1x7:64        a convolution of 1 row and 7 columns to 64 channels that keeps the side
    3x3v:64       one without padding
    3x3/2:64      one of stride 2, without padding
    1x3+3x1:384   two side by side, of 384 channels each
    max           a 3x3 maximum that keeps the side; max/2 nearly halves it
    mean          a 3x3 mean that keeps the side and counts the padding as black; inner-mean leaves the padding out
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.settings.model import GoogLeNet, Inception, InceptionResNetV2, InceptionV3, InceptionV4

# The third branch has 3x3 where the paper has 5x5, as the networks have whose weights are published.
GOOGLENET = {
    "inception3a": "1x1:64  | 1x1:96  3x3:128 | 1x1:16 3x3:32  | max 1x1:32",
    "inception3b": "1x1:128 | 1x1:128 3x3:192 | 1x1:32 3x3:96  | max 1x1:64",
    "inception4a": "1x1:192 | 1x1:96  3x3:208 | 1x1:16 3x3:48  | max 1x1:64",
    "inception4b": "1x1:160 | 1x1:112 3x3:224 | 1x1:24 3x3:64  | max 1x1:64",
    "inception4c": "1x1:128 | 1x1:128 3x3:256 | 1x1:24 3x3:64  | max 1x1:64",
    "inception4d": "1x1:112 | 1x1:144 3x3:288 | 1x1:32 3x3:64  | max 1x1:64",
    "inception4e": "1x1:256 | 1x1:160 3x3:320 | 1x1:32 3x3:128 | max 1x1:128",
    "inception5a": "1x1:256 | 1x1:160 3x3:320 | 1x1:32 3x3:128 | max 1x1:128",
    "inception5b": "1x1:384 | 1x1:192 3x3:384 | 1x1:48 3x3:128 | max 1x1:128",
}

INCEPTION3 = {
    "stem/conv1": "3x3/2:32",
    "stem/conv2": "3x3v:32",
    "stem/conv3": "3x3:64 max/2",
    "stem/conv4": "1x1:80",
    "stem/conv5": "3x3v:192 max/2",
    "mixed5b": "1x1:64 | 1x1:48 5x5:64 | 1x1:64 3x3:96 3x3:96 | mean 1x1:32",
    "mixed5c": "1x1:64 | 1x1:48 5x5:64 | 1x1:64 3x3:96 3x3:96 | mean 1x1:64",
    "mixed5d": "1x1:64 | 1x1:48 5x5:64 | 1x1:64 3x3:96 3x3:96 | mean 1x1:64",
    "mixed6a": "3x3/2:384 | 1x1:64 3x3:96 3x3/2:96 | max/2",
    "mixed6b": "1x1:192 | 1x1:128 1x7:128 7x1:192 | 1x1:128 7x1:128 1x7:128 7x1:128 1x7:192 | mean 1x1:192",
    "mixed6c": "1x1:192 | 1x1:160 1x7:160 7x1:192 | 1x1:160 7x1:160 1x7:160 7x1:160 1x7:192 | mean 1x1:192",
    "mixed6d": "1x1:192 | 1x1:160 1x7:160 7x1:192 | 1x1:160 7x1:160 1x7:160 7x1:160 1x7:192 | mean 1x1:192",
    "mixed6e": "1x1:192 | 1x1:192 1x7:192 7x1:192 | 1x1:192 7x1:192 1x7:192 7x1:192 1x7:192 | mean 1x1:192",
    "mixed7a": "1x1:192 3x3/2:320 | 1x1:192 1x7:192 7x1:192 3x3/2:192 | max/2",
    "mixed7b": "1x1:320 | 1x1:384 1x3+3x1:384 | 1x1:448 3x3:384 1x3+3x1:384 | mean 1x1:192",
    "mixed7c": "1x1:320 | 1x1:384 1x3+3x1:384 | 1x1:448 3x3:384 1x3+3x1:384 | mean 1x1:192",
}

INCEPTION4 = {
    "stem/conv1": "3x3/2:32",
    "stem/conv2": "3x3v:32",
    "stem/conv3": "3x3:64",
    "stem/mixed3a": "max/2 | 3x3/2:96",
    "stem/mixed4a": "1x1:64 3x3v:96 | 1x1:64 1x7:64 7x1:64 3x3v:96",
    "stem/mixed5a": "3x3/2:192 | max/2",
    "stage1": "1x1:96 | 1x1:64 3x3:96 | 1x1:64 3x3:96 3x3:96 | inner-mean 1x1:96",
    "reduction1": "3x3/2:384 | 1x1:192 3x3:224 3x3/2:256 | max/2",
    "stage2": "1x1:384 | 1x1:192 1x7:224 7x1:256 | 1x1:192 7x1:192 1x7:224 7x1:224 1x7:256 | inner-mean 1x1:128",
    "reduction2": "1x1:192 3x3/2:192 | 1x1:256 1x7:256 7x1:320 3x3/2:320 | max/2",
    "stage3": "1x1:256 | 1x1:384 1x3+3x1:256 | 1x1:384 3x1:448 1x3:512 1x3+3x1:256 | inner-mean 1x1:256",
}

INCEPTION_RESNET = {
    "stem/conv1": "3x3/2:32",
    "stem/conv2": "3x3v:32",
    "stem/conv3": "3x3:64 max/2",
    "stem/conv4": "1x1:80",
    "stem/conv5": "3x3v:192 max/2",
    "mixed5b": "1x1:96 | 1x1:48 5x5:64 | 1x1:64 3x3:96 3x3:96 | inner-mean 1x1:64",
    "stage1": "1x1:32 | 1x1:32 3x3:32 | 1x1:32 3x3:48 3x3:64",
    "reduction1": "3x3/2:384 | 1x1:256 3x3:256 3x3/2:384 | max/2",
    "stage2": "1x1:192 | 1x1:128 1x7:160 7x1:192",
    "reduction2": "1x1:256 3x3/2:384 | 1x1:256 3x3/2:288 | 1x1:256 3x3:288 3x3/2:320 | max/2",
    "stage3": "1x1:192 | 1x1:192 1x3:224 3x1:256",
    "top": "1x1:1536",
}
"""Modules of the stages are the branches of residual units."""

AUXILIARY = {"inception4a": "aux1", "inception4d": "aux2", "mixed6e": "aux"}
"""The auxiliary head that follows a module."""


def modules(model: Inception) -> Iterator[tuple[str, str]]:
    """Each block but the last, and its text: stages as units; an auxiliary head, where there is one, has none."""
    match model:
        case GoogLeNet():
            yield from ((f"stem/conv{index}", "") for index in (1, 2, 3))
            yield from _with_auxiliary(GOOGLENET, model.auxiliary)
        case InceptionV3():
            yield from _with_auxiliary(INCEPTION3, model.auxiliary)
        case InceptionV4():
            yield from _with_units(INCEPTION4, (4, 7, 3))
        case InceptionResNetV2():
            yield from _with_units(INCEPTION_RESNET, model.units)


def _with_auxiliary(table: dict[str, str], weight: float) -> Iterator[tuple[str, str]]:
    for name, text in table.items():
        yield name, text
        if weight and name in AUXILIARY:
            yield AUXILIARY[name], ""


def _with_units(table: dict[str, str], units: tuple[int, int, int]) -> Iterator[tuple[str, str]]:
    stages = dict(zip(("stage1", "stage2", "stage3"), units, strict=True))
    for name, text in table.items():
        if name in stages:
            yield from ((f"{name}/unit{unit}", text) for unit in range(1, stages[name] + 1))
        else:
            yield name, text
