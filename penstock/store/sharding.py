"""The division of every weight among shards: a pure function of program and number of shards.

Shards have equal bytes of every stage, since all of them stream the stage concurrently. A weight is
cut into one piece per shard, at multiples of `GRANULE` elements. There all kernels can be divided
without changing a bit (a whole number of 8-bit moment groups, of sums of squares, of vectors). A
weight with fewer granules than there are shards stays whole, in the shard that is lightest in its
stage.

Within a stage the bytes that stream of the heaviest and of the lightest shard differ by no more
than a granule's or, where there are whole weights, the largest one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.kernels.blocks import GRANULE
from penstock.kernels.packed_entries import group_offsets
from penstock.program import WeightSpec
from penstock.store.holding import HeldPart, Holding, PartStage, home_stages
from penstock.store.packed import capacity_of_part, index_bytes_of

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


@dataclass(frozen=True)
class Piece:
    """Elements `begin` to `end` of a flattened weight, in one shard."""

    shard: int
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class HeldRange:
    """Values `begin` to `end` of a shard's part of a weight; `offset` is their destination."""

    shard: int
    begin: int
    end: int
    offset: int

    @property
    def there(self) -> slice:
        """Their range among the requested values."""
        return slice(self.offset, self.offset + self.end - self.begin)


@dataclass(frozen=True)
class ShardMap:
    """The pieces of every weight, in the order in which they form the weight."""

    count: int
    pieces: Mapping[str, tuple[Piece, ...]]

    @classmethod
    def of(cls, holding: Holding, count: int) -> ShardMap:
        """Divide the weights of `holding` among `count` shards."""
        by_stage: dict[int, list[str]] = {}
        for name, home in home_stages(holding).items():
            by_stage.setdefault(home, []).append(name)
        pieces: dict[str, tuple[Piece, ...]] = {}
        loads = _Loads(count)
        for names in by_stage.values():
            loads.begin_stage()
            widths = {n: holding.weights[n].format.stream.width for n in names}
            sizes = {name: holding.weights[name].elements for name in names}
            for name in names:
                if sizes[name] // GRANULE >= count:
                    pieces[name] = _cut(sizes[name], widths[name], loads)
            whole = [name for name in names if name not in pieces]
            for name in sorted(whole, key=lambda n: sizes[n] * widths[n], reverse=True):
                shard = loads.lightest()[0]
                loads.add(shard, sizes[name] * widths[name])
                pieces[name] = (Piece(shard, 0, sizes[name]),)
        return cls(count, {name: pieces[name] for name in holding.weights})

    def part(self, holding: Holding, shard: int) -> HeldPart:
        """Return the content of one shard of a holding that this map divides."""
        weights = {
            name: _part_of(holding.weights[name], piece)
            for name, pieces in self.pieces.items()
            for piece in pieces
            if piece.shard == shard
        }
        stages = tuple(
            PartStage(s.index, s.name, tuple(n for n in s.weights if n in weights))
            for s in holding.stages
        )
        capacities = {
            name: holding.weights[name].capacity for name, part in weights.items() if part.is_sparse
        }
        return HeldPart(f"shard {shard} of {holding.name}", stages, weights, capacities)

    def whole(self, holding: Holding) -> HeldPart:
        """Return the content of the only shard, with the names and shapes of the whole weights."""
        if self.count != 1:
            raise ValueError(f"a shard with whole weights: expected 1 shard, got {self.count}")
        stages = tuple(PartStage(s.index, s.name, tuple(s.weights)) for s in holding.stages)
        capacities = {name: w.capacity for name, w in holding.weights.items() if w.is_sparse}
        return HeldPart(holding.name, stages, holding.weights, capacities)

    def parts(self, holding: Holding) -> Iterator[HeldPart]:
        """Yield the content of each shard, in order."""
        return (self.part(holding, shard) for shard in range(self.count))

    def spans(self, name: str, begin: int, end: int, group: int = 1) -> Iterator[HeldRange]:
        """Yield where values `begin` to `end` of a weight are, in order.

        With `group`, the values are of a role that has one for so many elements.
        """
        for piece in self.pieces[name]:
            origin, last = piece.begin // group, -(-piece.end // group)
            first, last = max(begin, origin), min(end, last)
            if first < last:
                yield HeldRange(piece.shard, first - origin, last - origin, first - begin)


def entries_of(index: PackedIndex, piece: Piece, group: int = 1) -> slice:
    """Return where a piece's values are among those of a whole sparse weight; `group` entries of a
    granule share a value."""
    offsets = index.entry_offsets
    if group > 1:
        offsets = group_offsets(offsets, group)
    first, last = piece.begin // GRANULE, -(-piece.end // GRANULE)
    return slice(int(offsets[first]), int(offsets[last]))


def entry_spans(
    index: PackedIndex, pieces: Iterable[Piece], group: int, begin: int, end: int
) -> Iterator[HeldRange]:
    """Yield where values `begin` to `end` of a role of a sparse weight are, in order."""
    for piece in pieces:
        held = entries_of(index, piece, group)
        first, last = max(begin, held.start), min(end, held.stop)
        if first < last:
            origin = held.start
            yield HeldRange(piece.shard, first - origin, last - origin, first - begin)


def _part_of(weight: WeightSpec, piece: Piece) -> WeightSpec:
    part = replace(weight, shape=(piece.elements,), begin=piece.begin)
    if not weight.is_sparse:
        return part
    capacity = capacity_of_part(weight, piece.elements)
    return replace(part, capacity=capacity, index_bytes=index_bytes_of(capacity, piece.elements))


class _Loads:
    """Bytes per shard: of the stage that is being divided, and of all earlier stages."""

    def __init__(self, count: int) -> None:
        self._stage = [0] * count
        self._total = [0] * count

    def begin_stage(self) -> None:
        self._stage = [0] * len(self._total)

    def add(self, shard: int, size: int) -> None:
        self._stage[shard] += size
        self._total[shard] += size

    def lightest(self) -> Sequence[int]:
        """Return the shards, the lightest in the stage first; among equals, in all stages."""
        return sorted(
            range(len(self._total)), key=lambda shard: (self._stage[shard], self._total[shard])
        )


def _cut(elements: int, width: int, loads: _Loads) -> tuple[Piece, ...]:
    """Divide a weight into equal numbers of granules.

    The lightest shards get the remaining granules; then the lightest shard gets the tail.
    """
    order = loads.lightest()
    count = len(order)
    each, more = divmod(elements // GRANULE, count)
    sizes = [each * GRANULE] * count
    for shard in order[:more]:
        sizes[shard] += GRANULE
    for shard, size in enumerate(sizes):
        loads.add(shard, size * width)
    tail = elements % GRANULE
    last = loads.lightest()[0] if tail else count - 1  # the tail is no granule, so it is last
    loads.add(last, tail * width)
    sizes[last] += tail
    found, begin = [], 0
    for shard in [*(s for s in range(count) if s != last), last]:
        found.append(Piece(shard, begin, begin + sizes[shard]))
        begin += sizes[shard]
    return tuple(found)
