"""The trees over the engines of a view, by their position in the view.

Weights go down binary trees. A shard sends each byte once, whatever the number of engines, and the
depth of a tree is the logarithm of the number of engines. In one such tree half the engines send
everything twice and the other half send nothing. So every shard has two trees, in which the two
halves change roles, and its chunks alternate between the trees: an engine sends about as much as it
receives.

Gradients go up another tree: the fixed tree over micro-batches itself. An engine of its own makes
each inner node of this tree, so an engine sends at most two sums and receives at most two. A whole
subtree of micro-batches travels as one sum wherever the engines' shares allow it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


def root(shard: int, chunk: int, shards: int, engines: int) -> int:
    """Return the position of the first engine in the tree of a shard's chunk."""
    return (2 * shard + chunk % 2) * engines // (2 * shards)


def parent(position: int, root: int, engines: int) -> int | None:
    """Return the parent of an engine in the tree that begins at `root`; None for the shard."""
    distance = (position - root) % engines
    return None if distance == 0 else ((distance - 1) // 2 + root) % engines


def children(position: int, root: int, engines: int) -> list[int]:
    """Return the children of an engine in the tree that begins at `root`."""
    distance = (position - root) % engines
    below = (2 * distance + 1, 2 * distance + 2)
    return [(child + root) % engines for child in below if child < engines]


@dataclass(frozen=True)
class Summing:
    """One engine's part in the sum.

    The engine adds the parts of engines `begin` to `end` and sends that sum to `target`. It sends
    its own part to `own_target`. Targets are positions; None stands for the shards.
    """

    own_target: int | None
    begin: int
    end: int
    target: int | None

    @property
    def adds(self) -> bool:
        """Whether this engine adds the parts of other engines."""
        return self.end > self.begin


def summing(engines: int) -> Sequence[Summing]:
    """Return the part of each engine in the sum.

    The sum over engines a to b is split where its left part is a whole power of two, like the tree
    over micro-batches. The first engine of the right part makes the sum.
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


def tree_connections(engines: int, shards: int) -> set[tuple[int, int]]:
    """Return the connections of one view as pairs: engines by position, shard k as -1 - k.

    An engine with another position in an earlier view may have one more connection.
    """
    pairs = set()
    for shard, parity in itertools.product(range(shards), range(2)):
        begin = root(shard, parity, shards, engines)
        pairs.add((-1 - shard, begin))
        pairs |= {(p, child) for p in range(engines) for child in children(p, begin, engines)}
    for position, part in enumerate(summing(engines)):
        for target in (part.own_target, part.target) if part.adds else (part.own_target,):
            to = [-1 - shard for shard in range(shards)] if target is None else [target]
            pairs |= {(position, other) for other in to if other != position}
    return pairs
