"""What is trained: every setting of a recipe with its one-sentence meaning; none of them names hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from paceline.settings.augment import Augment, Mix
from paceline.settings.data import Data, Files
from paceline.settings.duration import ClockInterval, Duration, Images, Interval, IntervalOrNever, Length, RunLength
from paceline.settings.model import Model, split_package
from paceline.settings.optimizer import Clip, OptimizerSettings, WeightDecay
from paceline.settings.schedule import Schedule
from paceline.settings.stop import Stop
from paceline.settings.types import Count, Fraction, Names, NotNegative, Positive, Settings


def _class_weights(value: Any) -> str | dict[str, float]:
    if value in ("none", "balanced"):
        return str(value)
    if not isinstance(value, dict) or not value:
        raise ValueError(f"expected none, balanced, or weights such as {{cat: 3, dog: 1}}; found {value!r}")
    for name, weight in value.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1e9:
            raise ValueError(f"expected a weight above 0 for class '{name}', such as 3, found {weight!r}")
    return {name: float(weight) for name, weight in value.items()}


ClassWeights = Annotated[
    Literal["none", "balanced"] | dict[str, float],
    PlainValidator(_class_weights),
    WithJsonSchema({"anyOf": [{"enum": ["none", "balanced"]}, {"type": "object"}]}),
]


class BatchNorm(Settings):
    """Normalization over `norm_batch` images of each channel."""

    name: Literal["batch"]
    momentum: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction by which running statistics move to a step's statistics (torch's convention; TF's decay is 1 - this);
    left out, what the network was published with, mostly 0.1."""
    epsilon: Positive | None = None
    """Added to the variance; left out, what the network was published with, mostly 1e-5."""


class GroupNorm(Settings):
    """Normalization over groups of channels of one image."""

    name: Literal["group"]
    groups: Count = 32
    """How many groups the channels of a layer are divided into; a narrower layer uses as many as divide it."""
    epsilon: Positive | None = None
    """Added to the variance; left out, what the network was published with, mostly 1e-5."""
    proxy: bool = False
    """Proxy norm: shift and scale what comes out of each activation to where a Gaussian input would have mean 0 and
    standard deviation 1; for networks whose activations follow their norms directly."""
    proxy_epsilon: Positive = 0.03
    """Added to the variance of proxy norm."""


class NoNorm(Settings):
    """No normalization: a scale and a shift for each channel."""

    name: Literal["none"]


class Init(Settings):
    """How weights start; every tensor is keyed by the seed and its own name."""

    conv: Literal[
        "published", "he-fan-out", "he-fan-in", "he-mixed", "truncated-fan-in", "glorot-uniform", "uniform-fan-in",
        "normal-0.1", "normal-0.01",
    ] = "published"  # fmt: skip
    """Convolutions: as the network was published; He normal by outputs, inputs, or outputs but inputs where grouped
    (TF1 EfficientNet); TF's truncated normal; Glorot uniform; torch's default (biases random too); or normal with a
    deviation of 0.1 or 0.01."""
    dense: Literal[
        "published", "uniform-fan-in", "uniform-fan-out", "glorot-uniform", "normal-0.1", "normal-0.01",
    ] = "published"  # fmt: skip
    """Dense layers: as the network was published (a new head of an EfficientNet beside pretrained weights is
    normal-0.01); torch's default (with a random bias); uniform by outputs; Glorot uniform; or normal with a deviation
    of 0.1 or 0.01 (biases zero)."""
    zero_gamma: Literal["none", "residual", "identity", "one-branch"] = "none"
    """Which norm scales start at zero: none, the last of each residual branch, only those of units without projection
    (as TF1 does in bottlenecks), or the projection's where there is one and else the branch's (Graphcore PyTorch)."""
    from_: str | None = Field(default=None, alias="from")
    """Weights to start from: a run folder, a .safetensors or .pth file, published ones as timm:NAME or
    torchvision:NAME, or the file in a Python package as pip:NAME. What they were trained with (mean, std, side, resize,
    padding, epsilon) holds where the recipe says nothing; a head for another number of classes starts anew."""


class Loss(Settings):
    """What is minimized, summed over images."""

    kind: Literal["cross-entropy", "binary"] = "cross-entropy"
    """Cross-entropy over all classes, or the mean over classes of a binary cross-entropy for each."""
    label_smoothing: Fraction = 0.0
    """Fraction of each target that is distributed over classes."""
    smooth_over: Literal["all", "others"] = "all"
    """Spread over all classes (epsilon / K, torch) or over the other ones (epsilon / (K - 1), TensorFlow)."""
    threshold: Fraction | None = None
    """Binary only: targets above this become 1 and the others 0, so that mixed images have several classes."""
    class_weights: ClassWeights = "none"
    """How much a class counts in training: none, every image the same; balanced, every class the same; or weights such
    as {cat: 3, dog: 1}, 1 for a class that is not named. Scaled to a mean of 1 over the training images. Of a mixed or
    smoothed target, each class's part has its weight; in a binary loss, only what speaks for a class is weighted."""


class Evaluate(Settings):
    """When and how the validation images are evaluated; the end of a run always is, unless that is never."""

    every: IntervalOrNever = Duration.parse("1 epoch")
    """How often; never leaves validation to `paceline validate`, which can follow the run while it trains."""
    offset: Length = Duration.parse("0 epochs")
    """How long before the rhythm starts: every 4 epochs with offset 3 epochs evaluates after epochs 3, 7, 11, ..."""
    limit: Images | None = None
    """Evaluate only so many images, evenly spread over all: 2500 images, or 50 steps of global_batch images; rows of
    the record then say that they are partial."""
    flip: bool = False
    """Evaluate by the mean of an image's scores and its mirror image's, at twice the work."""


class EmaSettings(Settings):
    """An exponential moving average of weights and running statistics, validated in place of the weights."""

    decay: Fraction | None = None
    """average = decay * average + (1 - decay) * weights; left out, no average is kept."""
    every: Interval = Duration.parse("1 step")
    """How often it moves; the older systems' average of 0.97 per epoch is decay 0.97 every 1 epoch."""
    start: Length = Duration.parse("0 epochs")
    """How long before it begins, as a copy of the weights; until then the weights themselves are evaluated."""


class CheckpointAverage(Settings):
    """The mean of the last checkpoints, taken at the end of a run."""

    last: Annotated[int, Field(gt=0, le=10_000)] | None = None
    """How many checkpoints to average, the last one included; the average is validated too. Left out, none."""
    every: Interval = Duration.parse("1 epoch")
    """How far apart those checkpoints are."""


class Recipe(Settings):
    """What is trained."""

    about: str = ""
    """One line on where the recipe comes from and what to expect of it."""
    published: str = ""
    """The accuracy that its authors published, such as 76.2 % top-1."""
    source: str = ""
    """Where they published it."""
    model: Annotated[Model, Field(discriminator="name"), BeforeValidator(split_package)]
    """The network, by name: see `paceline models`."""
    data: Annotated[Data, Field(discriminator="name")] | None = None
    """The images, by name; left out, they are recognized in the folder given by --data."""
    global_batch: Count
    """Images per optimizer step, over all replicas."""
    norm_batch: Count | None = None
    """Images that share one batch-norm statistic; left out, all images of a step do."""
    epochs: RunLength
    """How often the training images are seen, or any length of the run, such as 500 steps or 1000000 images."""
    drop_last: bool = False
    """Leave out the last images of an epoch if they do not fill a step; otherwise they go into the next epoch's first
    step."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Fixes the order, the augmentations and the initial weights."""
    norm: Annotated[BatchNorm | GroupNorm | NoNorm, Field(discriminator="name")] = BatchNorm(name="batch")
    """The normalization layers."""
    init: Init = Init()
    """How weights start."""
    freeze: Names = ()
    """Blocks that stand still, norm statistics included; stage1 means every block whose name begins with stage1/."""
    optimizer: Annotated[OptimizerSettings, Field(discriminator="name")]
    """How gradients become steps."""
    lr_factors: dict[str, NotNegative] = Field(default_factory=dict)
    """What the learning rate of a block is multiplied by, such as {head: 10, stage1: 0.1}."""
    weight_decay: WeightDecay = WeightDecay()
    """Pull of the weights toward zero."""
    clip: Clip = Clip()
    """Bounds on the gradient, before it becomes a step."""
    schedule: Annotated[Schedule, Field(discriminator="name")]
    """The learning rate over the run."""
    loss: Loss = Loss()
    """What is minimized."""
    augment: Augment = Augment()
    """What happens to training images."""
    mix: Mix = Mix()
    """How training images are mixed with their neighbors."""
    ema: EmaSettings = EmaSettings()
    """An exponential moving average of the weights."""
    average: CheckpointAverage = CheckpointAverage()
    """The mean of the last checkpoints, taken at the end."""
    evaluate: Evaluate = Evaluate()
    """When and how validation images are evaluated."""
    stop: Stop = Stop()
    """When validations end the run before its last step."""
    on_bad_step: Literal["skip", "stop"] = "skip"
    """What follows a step whose gradient or norm statistics are not finite, which changes nothing: the next one, or, at
    the next report, the end of the run."""
    bad_steps_in_a_row: Count = 100
    """So many bad steps in a row end the run in any case, at the next report."""
    report: ClockInterval = Duration.parse("0.1 epochs")
    """How often losses are read from the device and reported: epochs, steps, images, % or seconds."""

    def with_paths(self, change: Callable[[str, str], str]) -> Recipe:
        """The recipe with the paths in it changed, each by its address: files of labels and initial weights."""
        changed: dict[str, Settings] = {}
        if self.init.from_ is not None:
            changed["init"] = self.init.model_copy(update={"from_": change("init.from", self.init.from_)})
        if isinstance(self.data, Files):
            written = {"labels": self.data.labels, "relabel": self.data.relabel}
            paths = {key: change(f"data.{key}", path) for key, path in written.items() if path is not None}
            changed["data"] = self.data.model_copy(update=paths)
        return self.model_copy(update=changed)
