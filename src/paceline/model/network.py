"""A network is an ordered list of named blocks: it can be cut before any of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Carried = tuple[Tensor, ...]
"""What goes from block to block: the picture, and behind it the scores of the auxiliary heads passed so far."""


class Network(nn.Sequential):
    """Blocks in order. A block takes the picture and gives the next, or in training a pair of it and auxiliary scores,
    which ride along to the loss. A slice of a network is a network."""

    def forward(self, *carried: Tensor) -> Any:
        """The scores, or in training a tuple of them and of every auxiliary head's; in mid-network, what is carried."""
        for block in self:
            made = block(carried[0])
            picture, *scores = (made,) if isinstance(made, Tensor) else made
            carried = (picture, *carried[1:], *scores)
        return carried[0] if len(carried) == 1 else carried

    def cut(self, names: Sequence[str]) -> list[Network]:
        """The pieces that begin at these blocks; the first piece begins at the first block."""
        order = list(self._modules)
        starts = sorted({0, *(order.index(name) for name in names)})
        blocks, ends = list(self._modules.items()), [*starts[1:], len(order)]
        return [Network(OrderedDict(blocks[a:b])) for a, b in zip(starts, ends, strict=True)]

    def freeze(self, names: Sequence[str]) -> None:
        """Let these blocks stand still: no gradients, and norms that use the statistics they have."""
        self._frozen = [self.get_submodule(name) for name in names]
        for block in self._frozen:
            block.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Network:
        """Blocks that stand still stay in evaluation."""
        super().train(mode)
        for block in getattr(self, "_frozen", ()):
            block.eval()
        return self


def recomputing(pieces: Sequence[Network]) -> Callable[..., Any]:
    """The network of these pieces, of which only the last keeps what its backward pass needs; the others compute it
    again. There is no random state to restore: random numbers are keyed."""

    def forward(*carried: Tensor) -> Any:
        for piece in pieces[:-1]:
            made = checkpoint(piece, *carried, use_reentrant=False, preserve_rng_state=False)
            carried = (made,) if isinstance(made, Tensor) else made
        return pieces[-1](*carried)

    return forward
