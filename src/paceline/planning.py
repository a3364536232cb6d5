"""Recipe and placement reconciled: every number of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from paceline.facts import DataFacts, NetworkFacts
from paceline.settings.data import Data
from paceline.settings.duration import Duration, Rhythm
from paceline.settings.placement import ResolvedPlacement
from paceline.settings.recipe import BatchNorm, Recipe


@dataclass(frozen=True)
class Plan:
    """Every number that the step and the loop need; all of it follows from the recipe, the placement and the facts."""

    recipe: Recipe
    placement: ResolvedPlacement
    network: NetworkFacts
    evaluates: bool = False
    """Whether nothing is trained by it, so that its micro-batch may be one that no step is made of."""
    chosen_by: str = "the placement"
    """Where the micro-batch comes from: the placement, an estimate, or a probe."""
    shares: tuple[float, ...] = ()
    """What part of the time of the passes each stage has, where a probe has measured that."""
    most_evaluated: int = 1024
    """No more images are evaluated at a time: fewer where a probe says that the memory holds no more."""
    ran_out: int | None = None
    """A micro-batch for which the memory did not suffice before, so that this one is smaller."""

    @property
    def data(self) -> Data:
        """The images, which are located by now."""
        assert self.recipe.data is not None
        return self.recipe.data

    @cached_property
    def facts(self) -> DataFacts:
        """The numbers of the images."""
        return self.data.facts

    @property
    def frozen(self) -> list[str]:
        """The blocks that stand still."""
        return self.network.chosen("freeze", self.recipe.freeze)

    @property
    def recomputed(self) -> list[str]:
        """The blocks before which the network is cut for recomputation."""
        return self.network.chosen("on.recompute", self.placement.recompute)

    def lr_factor(self, block: str) -> float:
        """What a block's learning rate is multiplied by: what is written for the longest name that stands for it."""
        names = [name for name in self.recipe.lr_factors if block in self.network.chosen("lr_factors", [name])]
        return self.recipe.lr_factors[max(names, key=lambda name: (name != "all", len(name)))] if names else 1.0

    @property
    def global_batch(self) -> int:
        return self.recipe.global_batch

    @property
    def replicas(self) -> int:
        return self.placement.replicas

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def parts(self) -> int:
        """Runs of blocks that the network is cut into: one for each stage, or as many as it has virtual stages."""
        return self.stages * self.placement.virtual_stages if self.stages > 1 else 1

    @property
    def processes(self) -> int:
        """Processes of all replicas together: each stage is one."""
        return self.replicas * self.stages

    @property
    def splits(self) -> list[str]:
        """The blocks that begin the second part and those after it; none where parts are balanced at the start."""
        names = {self.network.chosen("on.splits", [name])[0] for name in self.placement.splits}
        return [block for block in self.network.blocks if block in names]

    @property
    def shards(self) -> bool:
        """Whether replicas keep shares of the optimizer's state."""
        return self.placement.shard == "optimizer"

    @property
    def parts_state(self) -> bool:
        """Whether no process has the whole state."""
        return self.shards or self.stages > 1

    @property
    def micro_batch(self) -> int:
        return self.placement.micro_batch

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step, over all replicas."""
        return self.global_batch // self.micro_batch

    @property
    def rounds(self) -> int:
        """Forward passes of the busiest replica in one step."""
        return math.ceil(self.micro_batches / self.replicas)

    @property
    def epoch_images(self) -> int:
        """Images that one pass through the list shows: fewer than there are with `drop_last`."""
        if not self.recipe.drop_last:
            return self.facts.images
        return self.facts.images // self.global_batch * self.global_batch

    @cached_property
    def length(self) -> Fraction:
        """Images that the recipe asks for; the run ends with the last step that they fill."""
        length = self.recipe.epochs
        asked = length if isinstance(length, Duration) else Duration(Fraction(str(length)), "epochs")
        return asked.images(self.epoch_images, self.global_batch, 0)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of the whole run; epochs that were worked out from steps may be a rounding short of them."""
        return max(1, math.floor(self.length / self.global_batch * (1 + Fraction(1, 1 << 50))))

    @property
    def epochs(self) -> float:
        """Epochs that the recipe asks for."""
        return float(self.length / self.epoch_images)

    @cached_property
    def warm_steps(self) -> int:
        """Steps in which the learning rate climbs."""
        return math.floor(self.steps_in(self.recipe.schedule.warmup))

    @property
    def norm_batch(self) -> int | None:
        """Images that share a batch-norm statistic; None where the norm sees one image."""
        return norm_batch_of(self.recipe, self.network)

    @property
    def norm_groups(self) -> int:
        """Norm groups inside one micro-batch; 1 where a group spans replicas."""
        return 1 if self.norm_batch is None else max(1, self.micro_batch // self.norm_batch)

    @property
    def norm_replicas(self) -> int:
        """Neighboring replicas that share one norm group."""
        return 1 if self.norm_batch is None or self.evaluates else max(1, self.norm_batch // self.micro_batch)

    @property
    def norm_total(self) -> int:
        """Norm groups of one step, over all replicas."""
        return self.global_batch // self.norm_batch if self.norm_batch else 0

    @property
    def peak_lr(self) -> float:
        """The learning rate that the schedule multiplies."""
        return self.recipe.optimizer.lr.at(self.global_batch)

    @property
    def evaluated_images(self) -> int:
        """Images that one validation evaluates: all, unless `evaluate.limit` is less."""
        limit, count = self.recipe.evaluate.limit, self.facts.validation_images
        return count if limit is None else min(count, math.ceil(self.images_in(limit)))

    @property
    def evaluation_batch(self) -> int:
        """Images evaluated at a time by one replica: without a backward pass, four micro-batches fit, as a rule."""
        return max(1, min(4 * self.micro_batch, self.most_evaluated, self.evaluated_images))

    @cached_property
    def validations(self) -> Rhythm | None:
        """When the validation images are evaluated, apart from the end; None where they never are."""
        evaluate = self.recipe.evaluate
        return self.rhythm(evaluate.every, evaluate.offset) if isinstance(evaluate.every, Duration) else None

    @cached_property
    def reports(self) -> Rhythm | None:
        """When losses are reported, apart from the end; None where the clock decides."""
        every = self.recipe.report
        return None if every.unit == "seconds" else self.rhythm(every)

    @cached_property
    def saves(self) -> Rhythm | None:
        """When checkpoints are written, apart from the start and the end; None where the clock decides."""
        every, offset = self.placement.save, self.placement.save_offset
        return None if every.unit == "seconds" else self.rhythm(every, offset)

    @cached_property
    def histograms(self) -> Rhythm | None:
        """When histograms of weights and gradients are written, apart from the end; None where they never are."""
        every = self.placement.histograms
        return self.rhythm(every) if isinstance(every, Duration) else None

    @cached_property
    def samples(self) -> Rhythm | None:
        """When a picture of a step's images is written; None where none ever is."""
        every = self.placement.samples
        return self.rhythm(every) if isinstance(every, Duration) else None

    @cached_property
    def averaged_steps(self) -> list[int]:
        """The steps whose checkpoints the end of the run averages, which are saved whatever else is."""
        if self.recipe.average.last is None:
            return []
        rhythm = self.rhythm(self.recipe.average.every)
        steps = [self.steps]
        while len(steps) < self.recipe.average.last and (step := rhythm.before(steps[-1])):
            steps.append(step)
        return steps[::-1]

    def images_in(self, duration: Duration) -> Fraction:
        """How many images an amount of this run's training sees."""
        return duration.images(self.epoch_images, self.global_batch, self.steps)

    def steps_in(self, duration: Duration) -> Fraction:
        """The same in optimizer steps."""
        return self.images_in(duration) / self.global_batch

    def epoch(self, step: int) -> float:
        """How many epochs were seen after `step` steps."""
        return step * self.global_batch / self.epoch_images

    def rhythm(self, every: Duration, offset: Duration | None = None) -> Rhythm:
        """When something comes back that is due every so often."""
        start = self.images_in(offset) if offset else Fraction(0)
        return Rhythm.of(self.images_in(every), start, self.global_batch)


def norm_batch_of(recipe: Recipe, network: NetworkFacts) -> int | None:
    """Images that share a batch-norm statistic; None where no norm keeps any."""
    if not network.norms or not isinstance(recipe.norm, BatchNorm):
        return None
    return recipe.norm_batch or recipe.global_batch
