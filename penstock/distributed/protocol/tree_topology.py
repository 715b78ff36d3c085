"""Who passes what to whom: trees over the engines of a view, by their place in it.

Weights go down binary trees, so that a shard sends each byte once, whatever the number of engines,
and the last engine is a logarithm of it away. Half the engines of such a tree send everything twice
and the others nothing; so every shard has two of them, in which they change places, and its chunks
take turns: an engine sends about as much as it takes. Gradients go up another: the
fixed tree over micro-batches itself, whose every inner node is made by an engine of its own, so
that an engine sends at most two sums and takes at most two, and a whole subtree of micro-batches
travels as one sum wherever the engines' shares allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


def root(shard: int, chunk: int, shards: int, engines: int) -> int:
    """Return the place at which the tree begins that a chunk of a shard's weights goes down."""
    return (2 * shard + chunk % 2) * engines // (2 * shards)


def parent(place: int, root: int, engines: int) -> int | None:
    """Return who hands weights to an engine in the tree that begins at `root`; None: a shard."""
    distance = (place - root) % engines
    return None if distance == 0 else ((distance - 1) // 2 + root) % engines


def children(place: int, root: int, engines: int) -> list[int]:
    """Return to whom an engine hands weights on."""
    distance = (place - root) % engines
    below = (2 * distance + 1, 2 * distance + 2)
    return [(child + root) % engines for child in below if child < engines]


@dataclass(frozen=True)
class Summing:
    """What one engine does in the sum: where its own part goes, and what it adds, if anything.

    `begin` and `end` are the engines whose parts it adds; `target` is where that sum goes, and
    `own_target` where its own part does, as places; None stands for the shards.
    """

    own_target: int | None
    begin: int
    end: int
    target: int | None

    @property
    def adds(self) -> bool:
        """Whether parts of others come here."""
        return self.end > self.begin


def summing(engines: int) -> Sequence[Summing]:
    """Return what each of so many engines does.

    The sum over engines a to b is split where its left part is a whole power of two, as the tree
    over micro-batches is, and is made by the first engine of the right part.
    """
    own: list[int | None] = [None] * engines
    inner: dict[int, tuple[int, int, int | None]] = {}

    def visit(begin: int, end: int, target: int | None) -> None:
        if end - begin == 1:
            own[begin] = target
            return
        split = begin + (1 << (end - begin - 1).bit_length() - 1)
        inner[split] = (begin, end, target)
        visit(begin, split, split)
        visit(split, end, split)

    visit(0, engines, None)
    return [Summing(own[i], *inner.get(i, (0, 0, None))) for i in range(engines)]


def ways(engines: int, shards: int) -> set[tuple[int, int]]:
    """Return from whom to whom weights or gradients go: engines by their place, shard k as -1 - k.

    In one view; who had other places in an earlier one may have a link more.
    """
    pairs = set()
    for shard, parity in itertools.product(range(shards), range(2)):
        begin = root(shard, parity, shards, engines)
        pairs.add((-1 - shard, begin))
        pairs |= {(p, child) for p in range(engines) for child in children(p, begin, engines)}
    for place, part in enumerate(summing(engines)):
        for target in (part.own_target, part.target) if part.adds else (part.own_target,):
            to = [-1 - shard for shard in range(shards)] if target is None else [target]
            pairs |= {(place, other) for other in to if other != place}
    return pairs
