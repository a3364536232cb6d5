"""Groups of parameters cut into parts: for the shares of replicas, and for state that comes and goes in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from paceline.optim.flat import ParameterGroup, in_flat_order, padded
from paceline.optim.rounding import Rounding
from paceline.optim.rule import Rule


@dataclass(frozen=True)
class GroupPart:
    """Parameters that are updated together, by one rule.

    A part has whole parameters: the norms of LARS and LAMB and the matrices of Muon are those of a parameter, so no
    rule needs to know that there are parts.
    """

    group: ParameterGroup
    rule: Rule
    rounding: Rounding | None = None
    stacked: bool = False
    """Whether the rule computes equal shapes in one stack, whose size may change the last bits."""
    owner: int = 0
    """The replica that keeps the state, and updates the weights."""

    def with_only(self, names: set[str]) -> GroupPart:
        """The part of these parameters."""
        return replace(self, group=self.group.split(lambda name, _: name in names)[0])


def in_shares(parts: Iterable[GroupPart], replicas: int) -> list[GroupPart]:
    """Parts cut so that each belongs to one replica.

    The largest parameter comes first, and each goes to the replica with the least state so far. This follows from the
    parameters' order and shapes alone, so all replicas agree.
    """
    parts, kept = list(parts), [0] * replicas
    sizes = [
        (padded(parameter.numel()) * max(1, len(part.rule.initial_state)), name)
        for part in parts
        for name, parameter in part.group.parameters.items()
    ]
    owned: list[set[str]] = [set() for _ in range(replicas)]
    for size, name in sorted(sizes, key=lambda pair: -pair[0]):
        least = kept.index(min(kept))
        kept[least] += size
        owned[least].add(name)
    shares = (replace(part.with_only(names), owner=owner) for part in parts for owner, names in enumerate(owned))
    return [share for share in shares if share.group.parameters]


def in_pieces(parts: Iterable[GroupPart], limit: int) -> list[GroupPart]:
    """Parts cut, in their order, into pieces that end once they have this many bytes of state; no stack is cut."""
    pieces = []
    for part in parts:
        names: list[str] = []
        size, ordered = 0, list(in_flat_order(part.group.parameters).items())
        for index, (name, parameter) in enumerate(ordered):
            names.append(name)
            size += padded(parameter.numel()) * max(4, parameter.itemsize) * len(part.rule.initial_state)
            last = index + 1 == len(ordered)
            inside = not last and part.stacked and ordered[index + 1][1].shape == parameter.shape
            if last or (size >= limit and not inside):
                pieces.append(part.with_only(set(names)))
                names, size = [], 0
    return pieces
