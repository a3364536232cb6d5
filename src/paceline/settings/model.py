"""Every network by name: the settings of each family; defaults are torchvision's network of that name, or timm's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.settings.read import quoted
from paceline.settings.schema import kinds
from paceline.settings.suggest import nearest
from paceline.settings.types import Channels, Factor, Few, Fraction, NotNegative, Positive, Settings

Activation = Literal["relu", "relu6", "silu", "hardswish"]


class AlexNet(Settings):
    """AlexNet in one tower ('one weird trick'): five convolutions, three dense layers."""

    name: Literal["alexnet"]
    dropout: Fraction = 0.5
    """Fraction of the features dropped before each of the first two dense layers."""


class Vgg(Settings):
    """Stacks of 3x3 convolutions; names with -bn have a norm after each convolution, the others none."""

    name: Literal["vgg11", "vgg13", "vgg16", "vgg19", "vgg11-bn", "vgg13-bn", "vgg16-bn", "vgg19-bn"]
    head: Literal["dense", "mean"] = "dense"
    """Three dense layers over 7x7 pixels, or one over the mean of all pixels, for images of about 32 pixels."""
    dropout: Fraction = 0.5
    """Fraction of the features dropped before the last dense layers."""


class GoogLeNet(Settings):
    """GoogLeNet (Inception v1) with a norm after each convolution."""

    name: Literal["googlenet"]
    auxiliary: NotNegative = 0.3
    """Weight of the losses of the two auxiliary heads; 0 leaves the heads out."""
    dropout: Fraction = 0.2
    """Fraction of the features dropped before the last dense layer."""
    auxiliary_dropout: Fraction = 0.7
    """Fraction of the features dropped in the auxiliary heads."""


class InceptionV3(Settings):
    """Inception v3 for images of 299 pixels."""

    name: Literal["inception-v3"]
    auxiliary: NotNegative = 0.4
    """Weight of the loss of the auxiliary head; 0 leaves the head out."""
    dropout: Fraction = 0.5
    """Fraction of the features dropped before the last dense layer."""


class InceptionV4(Settings):
    """Inception v4 for images of 299 pixels."""

    name: Literal["inception-v4"]
    dropout: Fraction = 0.0
    """Fraction of the features dropped before the last dense layer; the paper drops 0.2."""


class InceptionResNetV2(Settings):
    """Inception-ResNet v2 for images of 299 pixels."""

    name: Literal["inception-resnet-v2"]
    units: tuple[Few, Few, Few] = (10, 20, 10)
    """How many residual units each of the three stages has; nvcnn has 5, 10 and 5."""
    residual_scale: tuple[Positive, Positive, Positive] = (0.17, 0.1, 0.2)
    """What the residual branches of each stage are multiplied by."""
    dropout: Fraction = 0.0
    """Fraction of the features dropped before the last dense layer; the paper drops 0.2."""


class ResNet(Settings):
    """Residual networks with the ImageNet widths (64 to 512)."""

    name: Literal["resnet10", "resnet14", "resnet18", "resnet26", "resnet34", "resnet50", "resnet101", "resnet152"]
    version: Literal["v1", "v1.5"] = "v1.5"
    """Where a bottleneck strides: v1 in its first 1x1 convolution, v1.5 in its 3x3 one."""
    stem: Literal["7x7", "3x3"] = "7x7"
    """First layers: 7x7 stride 2 with a max-pool, or one 3x3 of stride 1 for images of about 32 pixels."""
    first_projection: bool = False
    """Give the first unit of stage 1 a projection even where its shape does not change, as TF1 networks have."""
    blur: bool = False
    """Blur what a strided convolution sees, by weights of 1, 2, 1 either way, wherever a unit strides (FFCV)."""


class CifarResNet(Settings):
    """The narrow residual networks for 32-pixel images: three stages of 16, 32 and 64 channels."""

    name: Literal[
        "resnet8", "resnet14-cifar", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110",
        "resnet11-bottleneck", "resnet29-bottleneck", "resnet38-bottleneck", "resnet47-bottleneck",
        "resnet56-bottleneck", "resnet65-bottleneck",
    ]  # fmt: skip
    shortcut: Literal["auto", "pad", "projection"] = "auto"
    """Where the shape changes: strided slice padded with zero channels, or 1x1 convolution with norm; auto pads basic
    units and projects bottlenecks."""


class ResNeXt(Settings):
    """Residual networks whose 3x3 convolutions are grouped, with the ImageNet widths."""

    name: Literal["resnext14", "resnext26", "resnext50", "resnext101", "resnext152"]
    cardinality: Channels = 32
    """How many groups the 3x3 convolutions have."""
    group_width: Channels = 4
    """Channels of each group in the first stage; torchvision's resnext101_32x8d has 8."""
    version: Literal["v1", "v1.5"] = "v1.5"
    """Where a bottleneck strides: v1 in its first 1x1 convolution, v1.5 in its 3x3 one."""
    stem: Literal["7x7", "3x3"] = "7x7"
    """First layers: 7x7 stride 2 with a max-pool, or one 3x3 of stride 1 for images of about 32 pixels."""


class CifarResNeXt(Settings):
    """The ResNeXts for 32-pixel images: three stages."""

    name: Literal["resnext11", "resnext29", "resnext38", "resnext47", "resnext56", "resnext65"]
    cardinality: Channels = 32
    """How many groups the 3x3 convolutions have."""
    group_width: Channels = 4
    """Channels of each group in the first stage."""
    wide: bool = False
    """Stages of 256, 512 and 1024 channels instead of 64, 128 and 256."""


class EfficientNet(Settings):
    """EfficientNet B0 to B7, the half-width one for 32-pixel images, and Lite 0 to 4, which have ReLU6, no
    squeeze-and-excite, and the same stem and last layers at any width and depth."""

    name: Literal[
        "efficientnet-b0", "efficientnet-b1", "efficientnet-b2", "efficientnet-b3", "efficientnet-b4",
        "efficientnet-b5", "efficientnet-b6", "efficientnet-b7", "efficientnet-cifar", "efficientnet-lite0",
        "efficientnet-lite1", "efficientnet-lite2", "efficientnet-lite3", "efficientnet-lite4",
    ]  # fmt: skip
    width: Factor | None = None
    """What B0's channels are multiplied by; left out, what the name stands for."""
    depth: Factor | None = None
    """What B0's units are multiplied by; left out, what the name stands for."""
    divisor: Channels = 8
    """Channels are rounded to a multiple of this."""
    top_width: Annotated[int, Field(gt=0, le=100_000)] = 1280
    """Channels of the last convolution, before `width`, which leaves it alone in Lite networks."""
    expand_ratio: Few = 6
    """How much wider a unit is inside than outside, after the first stage."""
    group_dim: Channels = 1
    """Channels of each group of the k x k convolutions: 1 is depthwise, the modified networks have 16 (and
    expand_ratio 4)."""
    squeeze_excite: Fraction | None = None
    """Channels of squeeze-and-excite as a fraction of a unit's input, 0 for none; left out, 0.25, and 0 in Lite
    networks."""
    survival: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Probability that the last unit's branch is kept for an image; earlier units' are kept more often."""
    dropout: Fraction | None = None
    """Fraction of the features dropped before the last dense layer; left out, what the name stands for."""
    activation: Literal["silu", "relu", "relu6"] | None = None
    """The activation; left out, silu (also called swish), and relu6 in Lite networks."""
    padding: Literal["symmetric", "same"] | None = None
    """Zeros around what a strided convolution sees: as many on either side, or TensorFlow's 'SAME', which puts the odd
    one after the last pixel; left out, symmetric, and same in Lite networks."""


class MobileNetV2(Settings):
    """MobileNet v2: inverted residuals with ReLU6."""

    name: Literal["mobilenet-v2"]
    width: Factor = 1.0
    """What the channels are multiplied by."""
    dropout: Fraction = 0.2
    """Fraction of the features dropped before the last dense layer."""


class MobileNetV3(Settings):
    """MobileNet v3: inverted residuals with squeeze-and-excite and hard swish."""

    name: Literal["mobilenet-v3-small", "mobilenet-v3-large"]
    width: Factor = 1.0
    """What the channels are multiplied by."""
    dropout: Fraction = 0.2
    """Fraction of the features dropped before the last dense layer."""


class External(Settings):
    """A network of another package, written timm:NAME or torchvision:NAME; the package must be installed."""

    name: Literal["timm", "torchvision"]
    network: Annotated[str, Field(examples=["resnet18"])]
    """The network's name in that package."""
    auxiliary: NotNegative = 0.3
    """Weight of the losses of auxiliary heads, where the network has any."""


Residual = ResNet | CifarResNet | ResNeXt | CifarResNeXt
Inception = GoogLeNet | InceptionV3 | InceptionV4 | InceptionResNetV2
Mobile = EfficientNet | MobileNetV2 | MobileNetV3
Model = AlexNet | Vgg | Residual | Inception | Mobile | External


def split_package(value: object) -> object:
    """Read `timm:NAME` as the kind `timm` with `network: NAME`, and refuse the name of a network that there is not."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return value
    name = value["name"]
    package, colon, network = name.partition(":")
    if colon and package in kinds(External):
        if "network" in value:
            raise ValueError(f"'{name}' names a network already; write model={package}:{value['network']}")
        value = {**value, "name": package, "network": network}
    elif name not in kinds(Model):
        hint = nearest(name, kinds(Model)) or "; `paceline models` lists them, and networks of timm are timm:NAME"
        raise ValueError(f"no model is named {quoted(name)}{hint}")
    # Behind a validator of ours a list is no tuple any more for strict settings.
    return {key: tuple(each) if isinstance(each, list) else each for key, each in value.items()}
