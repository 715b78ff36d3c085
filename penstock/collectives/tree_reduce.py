"""One fixed binary tree over the micro-batches, in which every gradient of a step is summed.

Floating-point addition is not associative, so the order of the additions is part of the result. The
order is a fixed tree over the micro-batch index. So the sum has the same bits whichever engine
computed a micro-batch, and in whatever order the micro-batches arrive. An engine sums the complete
subtrees of its own micro-batches; the fabric adds the sums of the engines.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PartialSum:
    """The sum over micro-batches `index * 2**level` to `(index + 1) * 2**level`, exclusive.

    `tensors` are float32 after an addition; a leaf may still be in the stream's type. None stands
    for a gradient that does not exist.
    """

    level: int
    index: int
    tensors: tuple[torch.Tensor | None, ...]

    def leaves(self, total: int) -> int:
        """Return the number of micro-batches in the sum, of `total` in the tree."""
        return min((self.index + 1) << self.level, total) - (self.index << self.level)


class TreeReduction:
    """Adds the nodes of the tree; two siblings are added as soon as both have arrived.

    If leaves arrive in order, at most one node per level waits. So the sum of M micro-batches holds
    at most 1 + log2(M) gradients.
    """

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._waiting: dict[tuple[int, int], PartialSum] = {}

    def add(self, node: PartialSum) -> None:
        """Add a node; this object may overwrite its tensors from now on."""
        level, index, tensors = node.level, node.index, node.tensors
        while (1 << level) < self._leaves:
            sibling = index ^ 1
            if (sibling << level) < self._leaves:
                other = self._waiting.pop((level, sibling), None)
                if other is None:
                    break
                left, right = (
                    (other.tensors, tensors) if sibling < index else (tensors, other.tensors)
                )
                tensors = tuple(map(_add, left, right))
            level, index = level + 1, index >> 1
        self._waiting[(level, index)] = PartialSum(level, index, tensors)

    def nodes(self) -> list[PartialSum]:
        """Return the remaining sums: only the root after all leaves were added."""
        return [self._waiting[key] for key in sorted(self._waiting)]

    def root(self) -> tuple[torch.Tensor | None, ...]:
        """Return the sum over all leaves, in float32."""
        nodes = self.nodes()
        if len(nodes) != 1 or (1 << nodes[0].level) < self._leaves:
            have = ", ".join(f"(level {n.level}, index {n.index})" for n in nodes) or "nothing"
            raise ValueError(f"the sum over {self._leaves} micro-batches is incomplete: {have}")
        return tuple(None if t is None else t.float() for t in nodes[0].tensors)


def root_level(leaves: int) -> int:
    """Return the level of the sum over `leaves` leaves."""
    return (leaves - 1).bit_length()


def partial_sums(numbers: range, leaves: int) -> list[tuple[int, int]]:
    """Return level and index of the sums that remain after the leaves `numbers` were added."""
    total = TreeReduction(leaves)
    for number in numbers:
        total.add(PartialSum(0, number, ()))
    return [(node.level, node.index) for node in total.nodes()]


def _add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    if left.dtype != torch.float32:
        left = left.float()
    # A tensor without memory has no values to add; its shape rules would take most of a dry run.
    return left if left.is_meta else left.add_(right)


def partition(leaves: int, parts: int) -> Sequence[range]:
    """Divide micro-batches over engines: contiguous, nearly equal, aligned for powers of 2.

    **Raises:** `ValueError` if there are more parts than leaves.
    """
    if parts > leaves:
        raise ValueError(f"{parts} engines cannot share {leaves} micro-batches")
    bounds = [leaves * part // parts for part in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]
