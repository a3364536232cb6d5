"""A network is an ordered list of named blocks: it can be cut before any of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.model.batch import Batch


class Network(nn.Sequential):
    """Blocks in order: block(x, batch) gives the next picture, or in training a pair of it and auxiliary scores, which
    ride along to the loss. A slice of a network is a network."""

    def forward(self, x: Tensor, *scores: Tensor, batch: Batch | None = None) -> Any:
        """The class scores, or in training a tuple of them and of every auxiliary head's; of a slice, the arguments of
        the next slice."""
        for block in self:
            # A frozen block stays in evaluation; its norms use running statistics.
            output = block(x, batch if block.training else None)
            if isinstance(output, Tensor):
                x = output
            else:
                x, *more = output
                scores = (*scores, *more)
        return (x, *scores) if scores else x

    def cut(self, names: Sequence[str]) -> list[Network]:
        """The slices that begin at these blocks; the first slice begins at the first block."""
        order = list(self._modules)
        starts = sorted({0, *(order.index(name) for name in names)})
        blocks, ends = list(self._modules.items()), [*starts[1:], len(order)]
        return [Network(OrderedDict(blocks[a:b])) for a, b in zip(starts, ends, strict=True)]

    def only(self, names: Sequence[str]) -> Network:
        """A network of these blocks."""
        return Network(OrderedDict((name, self.get_submodule(name)) for name in names))

    def freeze(self, names: Sequence[str]) -> None:
        """Let these blocks learn nothing: no gradients, and norms that use the statistics they have."""
        self._frozen = [self.get_submodule(name) for name in names]
        for block in self._frozen:
            block.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Network:
        """Set the mode of all blocks but the frozen ones, which stay in evaluation."""
        super().train(mode)
        for block in getattr(self, "_frozen", ()):
            block.eval()
        return self


def takes_output(output: Tensor) -> bool:
    """Whether the block that gave this need not compute it again: fused bottlenecks take it as it is. It costs no
    memory, for it is what the next block begins with."""
    return output.requires_grad and hasattr(output, "handover")


def recomputing(pieces: Sequence[Network]) -> Callable[..., Any]:
    """The network of these pieces, of which only the last keeps what its backward pass needs; the others compute it
    again. There is no random state to restore: random numbers are keyed."""

    def forward(*carried: Tensor, batch: Batch | None = None) -> Any:
        for piece in pieces[:-1]:
            output = checkpoint(piece, *carried, batch=batch, use_reentrant=False, preserve_rng_state=False)
            carried = (output,) if isinstance(output, Tensor) else output
            if batch is not None and batch.outputs is not None and takes_output(carried[0]):
                batch.outputs[piece[-1]] = carried[0].detach()
        return pieces[-1](*carried, batch=batch)

    return forward


def mirrored_scores(class_scores: Callable[[Tensor], Tensor], images: Tensor, flip: bool) -> Tensor:
    """The class scores of images; with `flip`, the mean of an image's and its mirror image's."""
    scores = class_scores(images)
    return (scores + class_scores(images.flip(3))) / 2 if flip else scores
