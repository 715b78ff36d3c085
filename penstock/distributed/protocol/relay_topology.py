"""The trees of relays over the engines of a view, by position in the view.

A relay is in one tree only, and every chunk goes through one tree: chunks alternate between them.
The inner nodes of a tree are relays, its leaves are all engines. So an engine receives each weight
once and sends each of its gradients once. In a tree with fan-out f a relay sends f copies of the
weights of its tree down and one sum up, so it carries (f + 1) / lanes of what an engine's link
carries. With lanes = f + 1 relays just keep up with engines whose links are busy all the time, in
both directions.

The fan-outs are powers of two: engines with a power of two of micro-batches each then form whole
subtrees of the tree over micro-batches, and a relay sends one sum for all that it receives.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

_FLAT, _USUAL_FAN_OUT = 16, 8  # up to so many engines one level; else this fan-out
_SPARE_LANES = 1  # beside those that just keep up: queues would never become shorter
_BUSY = 0.9  # share of the time that a relay's link may be busy; below it shorter ways count


@dataclass(frozen=True)
class RelayTrees:
    """The trees of a view with relays: `lanes` trees of equal shape, in which relays have fan-out
    `fan_out`; `levels` has the number of relays of each level of a tree, the root's level first."""

    engines: int
    lanes: int
    fan_out: int
    levels: tuple[int, ...]

    @classmethod
    @functools.cache
    def of(cls, engines: int, relays: int) -> RelayTrees:
        """Return the trees of `relays` relays in which a step of `engines` engines is shortest.

        First the busiest relay should keep up with an engine's link, with some room; then a chunk
        should arrive early; then relays should carry little.
        """

        def cost(trees: RelayTrees) -> tuple[float, int, float]:
            copies = min(trees.fan_out, engines)
            load = (copies + 1) / trees.lanes
            return max(_BUSY, load), len(trees.levels) * (copies + 1), load

        shapes = [_levels(engines, fan_out) for fan_out in _fan_outs(engines)]
        return min(
            (
                cls(engines, lanes, fan_out, levels)
                for fan_out, levels in zip(_fan_outs(engines), shapes, strict=True)
                if (lanes := relays // sum(levels))
            ),
            key=cost,
        )

    @property
    def relays(self) -> int:
        """How many relays are in a tree; relays in later positions wait for the loss of another."""
        return self.lanes * sum(self.levels)

    def root(self, lane: int) -> int:
        """Return the position of the relay that receives a tree's chunks from the shards."""
        return lane * sum(self.levels)

    def lane_of(self, relay: int) -> int | None:
        """Return the tree of a relay; None for a relay that waits."""
        return relay // sum(self.levels) if relay < self.relays else None

    def parent(self, relay: int) -> int | None:
        """Return the relay above a relay; None for the shards."""
        level, place, begin = self._place(relay)
        if level == 0:
            return None
        return begin - self.levels[level - 1] + place // self.fan_out

    def child_relays(self, relay: int) -> range:
        """Return the relays below a relay."""
        level, place, begin = self._place(relay)
        if level + 1 == len(self.levels):
            return range(0)
        below = begin + self.levels[level]
        first, end = place * self.fan_out, (place + 1) * self.fan_out
        return range(below + first, below + min(end, self.levels[level + 1]))

    def child_engines(self, relay: int) -> range:
        """Return the engines that a relay sends to and receives from itself."""
        level, _, _ = self._place(relay)
        return self.engines_of(relay) if level + 1 == len(self.levels) else range(0)

    def engines_of(self, relay: int) -> range:
        """Return all engines below a relay, whose gradients it adds."""
        level, place, _ = self._place(relay)
        each = self.fan_out ** (len(self.levels) - level)
        return range(place * each, min((place + 1) * each, self.engines))

    def relay_of(self, engine: int, lane: int) -> int:
        """Return the relay above an engine in a tree."""
        return self.root(lane) + sum(self.levels[:-1]) + engine // self.fan_out

    def _place(self, relay: int) -> tuple[int, int, int]:
        """Return the level of a relay, its place in the level, and the first relay of the level."""
        begin = relay - relay % sum(self.levels)
        for level, count in enumerate(self.levels):
            if relay < begin + count:
                return level, relay - begin, begin
            begin += count
        raise AssertionError("a relay is in one of the levels of its tree")


def enough_relays(engines: int) -> int:
    """Return how many relays keep up with engines whose links are busy all the time.

    One engine needs none. Two without relays pass weights and gradients on to each other, over the
    links that also carry their own.
    """
    if engines == 1:
        return 0
    if engines <= _FLAT:
        return engines + 1 + _SPARE_LANES
    return (_USUAL_FAN_OUT + 1 + _SPARE_LANES) * sum(_levels(engines, _USUAL_FAN_OUT))


def relay_connections(trees: RelayTrees, shards: int) -> set[tuple[int, int]]:
    """Return the connections of a view with relays as pairs: engines by position, shard k as
    -1 - k, relays after the engines."""
    pairs, first = set(), trees.engines
    for relay in range(trees.relays):
        here, above = first + relay, trees.parent(relay)
        over = [-1 - shard for shard in range(shards)] if above is None else [first + above]
        below = [*(first + child for child in trees.child_relays(relay))]
        below += trees.child_engines(relay)
        pairs |= {pair for other in (*over, *below) for pair in ((here, other), (other, here))}
    return pairs


def _fan_outs(engines: int) -> list[int]:
    """Return the powers of two from 2 to the first with which one relay has all engines."""
    powers = itertools.takewhile(
        lambda power: power < 2 * engines, (1 << n for n in itertools.count(1))
    )
    return [*powers] or [2]


def _levels(engines: int, fan_out: int) -> tuple[int, ...]:
    """Return the relays of each level of a tree over the engines, the root's level first."""
    levels = [-(-engines // fan_out)]
    while levels[0] > 1:
        levels.insert(0, -(-levels[0] // fan_out))
    return tuple(levels)
