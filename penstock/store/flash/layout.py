"""The layout of the flash tier's file.

A *unit* is the weights of one home stage that have the same format and are alike in being trainable
or not, and tied or not. Its weights are contiguous in one flat range of elements. This range is cut
into *blocks*: a block is read, updated and written at once, and has one checksum. On flash a unit
has two extents. The first contains the weights as they are streamed. The second contains the state:
per block, the parts of the format that are not streamed (low halves of split masters), then each
role of the optimizer.

A trainable unit has several *places*, each with space for both extents. An update is written to the
next place, never over data that a durable step may need.

A sparse weight is a unit of its own, whose elements are the entries that its mask keeps, with space
for its capacity. Its blocks follow from the mask (`blocks_of`). The mask has an extent, and places,
of its own, because most steps do not change it.

A shard's part of a sparse weight may come to keep far more than its share of the entries. Its
extents have addresses for the most that it can keep. Disk space and memory are planned for its
share and some more (`Unit.expected`); what goes beyond is allocated when it is written.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.kernels.blocks import GRANULE
from penstock.kernels.packed_entries import group_offsets, max_groups
from penstock.store.flash.medium import ALIGNMENT_BYTES
from penstock.store.flash.unit_description import (
    described_format,
    spelled_capacity,
    spelled_format,
    spelled_origins,
)
from penstock.store.holding import Holding, home_stages, most_entries
from penstock.store.roles import MASTER, Role
from penstock.weight_formats import WeightFormat

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex

BLOCK_ELEMENTS = 1 << 19
"""5 MiB of state under AdamW: large enough for full speed, small enough to stay in the cache
between checksum and update."""

_PAD_ELEMENTS = ALIGNMENT_BYTES // 2  # halves of a block are then aligned on flash
_WEIGHT_PAD = 32
_PART_PAD_BYTES = 64  # between the parts of a sparse block, whose lengths are arbitrary


@dataclass(frozen=True)
class Granules:
    """The whole granules of a sparse weight that a block holds.

    `first` is the number of the first granule. `offsets`, int64 `[granules + 1]`, are the entries
    of the block before each granule.
    """

    first: int
    offsets: np.ndarray


@dataclass(frozen=True)
class Block:
    """Elements `begin` to `end` of a unit; its state is at `state_begin` within that of the unit.

    The elements of a sparse weight are entries, those of `granules`.
    """

    number: int
    begin: int
    end: int
    state_begin: int
    state_bytes: int
    granules: Granules | None = dataclasses.field(default=None, compare=False)

    @property
    def elements(self) -> int:
        return self.end - self.begin

    def count(self, role: Role) -> int:
        """Return the number of values of a role."""
        return _count(role, self.elements, self.granules)


def _count(role: Role, elements: int, granules: Granules | None) -> int:
    if granules is None or role.group == 1:
        return role.count(elements)
    return int(group_offsets(granules.offsets, role.group)[-1])


@dataclass(frozen=True)
class Unit:
    """Weights of one stage that are treated alike; `begins` are their first elements in the unit.

    For pieces of weights, `origins` are the elements of the whole weights at which the pieces
    begin. `capacity` is the most entries of a sparse weight, and 0 for other units. `planned` is
    the number of entries that a shard's part is planned for; 0 if that is the capacity.
    """

    index: int
    stage: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    begins: tuple[int, ...]
    origins: tuple[int, ...]
    elements: int
    format: WeightFormat
    trainable: bool
    tied: bool
    roles: tuple[Role, ...]
    places: int
    offset: int
    block_elements: int
    capacity: int = 0
    planned: int = 0

    @property
    def is_sparse(self) -> bool:
        """Whether the unit is one sparse weight."""
        return self.format.is_sparse

    @cached_property
    def expected(self) -> Unit:
        """The unit with the sizes that disk space and memory are planned for."""
        if not self.planned:
            return self
        elements = _rounded_up(_rounded_up(self.planned, _pad(self.roles)), _PAD_ELEMENTS)
        return dataclasses.replace(self, capacity=self.planned, elements=elements, planned=0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each weight."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def is_updated(self) -> bool:
        """Whether a step changes the unit: its weights are trained, and not all empty."""
        return self.trainable and self.elements > 0

    @property
    def block_count(self) -> int:
        """The number of blocks; the most of them, if the unit is a sparse weight."""
        if not self.is_sparse:
            return -(-self.elements // self.block_elements)
        if self.capacity <= self._block_entries:
            return 1
        # Of two blocks that follow each other, the entries do not fit in one.
        return 2 * -(-self.capacity // self._block_entries) + 1

    @property
    def stream_width(self) -> int:
        """Bytes per streamed element."""
        return self.format.stream.width

    @property
    def stream_bytes(self) -> int:
        return self.elements * self.stream_width

    def role(self, name: str) -> Role:
        """Return the role of this name; the weight itself has one value per element."""
        return next((role for role in self.roles if role.name == name), Role(MASTER))

    def state_parts(self, block: Block) -> Iterator[tuple[str, np.dtype, int, int]]:
        """Yield the parts of a block's state: name, type, first byte, number of values.

        First come the parts of the format that are not streamed, then the optimizer's roles.
        """
        begin = 0
        for part in self.format.rest:
            yield part.name, np.dtype(part.dtype), begin, block.elements
            begin += self._padded(part.width * block.elements)
        for role in self.roles:
            yield role.name, role.numpy, begin, block.count(role)
            begin += self._padded(block.count(role) * role.numpy.itemsize)

    def _padded(self, size: int) -> int:
        return _rounded_up(size, _PART_PAD_BYTES) if self.is_sparse else size

    def _state_bytes(self, elements: int, counts: Iterable[int]) -> int:
        """Bytes of a block's part that is not streamed: parts of the format, and roles of the
        optimizer with so many values."""
        sizes = [part.width * elements for part in self.format.rest]
        roles = zip(self.roles, counts, strict=True)
        sizes += [count * role.numpy.itemsize for role, count in roles]
        return _rounded_up(sum(map(self._padded, sizes)), ALIGNMENT_BYTES)

    def _dense_state_bytes(self, elements: int) -> int:
        return self._state_bytes(elements, [role.count(elements) for role in self.roles])

    @cached_property
    def state_room(self) -> int:
        """The most bytes of the state of all blocks."""
        if not self.is_sparse:
            whole, rest = divmod(self.elements, self.block_elements)
            state = whole * self._dense_state_bytes(self.block_elements)
            return state + (self._dense_state_bytes(rest) if rest else 0)
        parts = len(self.format.rest) + len(self.roles)
        padding = self.block_count * (ALIGNMENT_BYTES + _PART_PAD_BYTES * parts)
        entries = self._state_bytes(self.capacity, self._most_counts(self.capacity))
        return _rounded_up(entries + padding, ALIGNMENT_BYTES)

    @property
    def largest_state_bytes(self) -> int:
        """The most bytes of the state of one block."""
        if not self.is_sparse:
            return self._dense_state_bytes(min(self.elements, self.block_elements))
        entries = min(self.capacity, self._block_entries)
        return self._state_bytes(entries, self._most_counts(entries))

    def largest_gradient_bytes(self, width: int) -> int:
        """The most bytes of the gradient of one block, with the rest of its first and last page."""
        if not self.is_sparse:
            return min(self.elements, self.block_elements) * width
        entries = min(self.capacity, self._block_entries)
        return _rounded_up(entries * width, ALIGNMENT_BYTES) + ALIGNMENT_BYTES

    @property
    def _block_entries(self) -> int:
        """The most entries of a block of a sparse weight: those of a granule, at least."""
        return max(self.block_elements, GRANULE)

    def _most_counts(self, entries: int) -> list[int]:
        """The most values of each role that so many entries can have."""
        return [
            entries if r.group == 1 else max_groups(entries, self.sizes[0], r.group, GRANULE)
            for r in self.roles
        ]

    @property
    def place_bytes(self) -> int:
        return self.stream_bytes + self.state_room

    @cached_property
    def mask_room(self) -> int:
        """The most bytes of a mask in its compact form, in whole pages; 0 without a mask."""
        if not self.is_sparse:
            return 0
        from penstock.sparsity import max_compact_bytes

        return _rounded_up(max_compact_bytes(self.capacity, self.sizes[0]), ALIGNMENT_BYTES)

    @property
    def file_bytes(self) -> int:
        """Bytes of all places, of extents and mask."""
        return self.places * (self.place_bytes + self.mask_room)

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of a unit that is not sparse."""
        assert not self.is_sparse
        starts = range(0, self.elements, self.block_elements)
        found, state_begin = list[Block](), 0
        for number, begin in enumerate(starts):
            end = min(begin + self.block_elements, self.elements)
            size = self._dense_state_bytes(end - begin)
            found.append(Block(number, begin, end, state_begin, size))
            state_begin += size
        return found

    def blocks_of(self, index: PackedIndex) -> list[Block]:
        """Return the blocks of a sparse weight under a mask.

        A block holds as many whole granules as have no more entries than a block of other units
        has elements: 8-bit moments and their random rounding begin anew in every granule.
        """
        offsets, found = index.entry_offsets, list[Block]()
        first = state_begin = 0
        while first < offsets.size - 1:
            most = offsets[first] + self._block_entries
            last = int(np.searchsorted(offsets, most, side="right")) - 1
            begin, end = int(offsets[first]), int(offsets[last])
            granules = Granules(first, offsets[first : last + 1] - offsets[first])
            counts = [_count(role, end - begin, granules) for role in self.roles]
            size = self._state_bytes(end - begin, counts)
            found.append(Block(len(found), begin, end, state_begin, size, granules))
            state_begin, first = state_begin + size, last
        return found

    def stream_offset(self, place: int, element: int = 0) -> int:
        """Return the file offset of an element's streamed value."""
        return self.offset + place * self.place_bytes + element * self.stream_width

    def used_stream_bytes(self, blocks: Sequence[Block]) -> int:
        """Return the bytes of the streamed values of these blocks, in whole pages."""
        if not self.is_sparse:
            return self.stream_bytes
        return _rounded_up(blocks[-1].end * self.stream_width, ALIGNMENT_BYTES)

    def state_offset(self, place: int, block: Block) -> int:
        """Return the file offset of a block's state."""
        return self.offset + place * self.place_bytes + self.stream_bytes + block.state_begin

    def mask_offset(self, place: int) -> int:
        """Return the file offset of the mask of a sparse weight, in a place of its own."""
        return self.offset + self.places * self.place_bytes + place * self.mask_room

    def pieces(self, block: Block) -> list[tuple[str, int, int, int]]:
        """Return the parts of weights within a block: name, begin and end in the unit, begin in the
        weight."""
        if self.is_sparse:
            return [(self.names[0], block.begin, block.end, block.begin)]
        found = []
        for name, begin, size in zip(self.names, self.begins, self.sizes, strict=True):
            first, last = max(begin, block.begin), min(begin + size, block.end)
            if first < last:
                found.append((name, first, last, first - begin))
        return found


@dataclass(frozen=True)
class FlashLayout:
    """All units of a program, and the size of the file that holds them."""

    units: tuple[Unit, ...]
    unit_of: Mapping[str, int]
    file_bytes: int

    @classmethod
    def of(
        cls,
        program: Holding,
        roles: Sequence[Role],
        keep_steps: int,
        block_elements: int,
        age: Role | None = None,
    ) -> FlashLayout:
        """Lay out a program whose trainable weights have these roles of state.

        `block_elements` is a multiple of 2048, so that every part of a block can be read with
        direct I/O. `age` is the role that entries of trainable sparse weights have in addition.
        """
        uses = Counter(name for stage in program.stages for name in stage.weights)
        groups: dict[tuple[int, WeightFormat, bool, bool, str], list[str]] = {}
        for name, stage in home_stages(program).items():
            spec = program.weights[name]
            alone = name if spec.is_sparse else ""
            alike = (stage, spec.format, spec.trainable, uses[name] > 1, alone)
            groups.setdefault(alike, []).append(name)
        ages = [] if age is None else [age]
        described = [
            {
                "stage": stage,
                "weights": {name: list(program.weights[name].shape) for name in names},
                **spelled_origins({name: program.weights[name].begin for name in names}),
                **spelled_format(weight_format),
                **spelled_capacity(most_entries(program, alone) if alone else 0),
                "trainable": trainable,
                "tied": tied,
                "roles": [
                    dataclasses.asdict(role)
                    for role in (*roles, *(ages if alone else ()))
                    if trainable
                ],
            }
            for (stage, weight_format, trainable, tied, alone), names in groups.items()
        ]
        planned = {n: w.capacity for n, w in program.weights.items() if w.is_sparse}
        return cls.from_description(described, keep_steps, block_elements, planned)

    @classmethod
    def from_description(
        cls,
        described: Sequence[Mapping[str, Any]],
        keep_steps: int,
        block_elements: int,
        planned: Mapping[str, int] = MappingProxyType({}),
    ) -> FlashLayout:
        """Restore a layout from its `described` form.

        **Arguments:** `planned` are the entries that sparse weights are planned for, if less than
        their capacities.
        """
        units: list[Unit] = []
        offset = 0
        for index, group in enumerate(described):
            shapes = tuple(tuple(shape) for shape in group["weights"].values())
            roles = tuple(Role(**role) for role in group["roles"])
            begins, end, capacity = [], 0, group.get("capacity", 0)
            for shape in shapes:
                begins.append(end)
                end += _rounded_up(capacity or math.prod(shape), _pad(roles))
            few = min((planned.get(name, capacity) for name in group["weights"]), default=0)
            unit = Unit(
                index=index,
                stage=group["stage"],
                names=tuple(group["weights"]),
                shapes=shapes,
                begins=tuple(begins),
                origins=tuple(group.get("origins", {}).get(name, 0) for name in group["weights"]),
                elements=_rounded_up(end, _PAD_ELEMENTS),
                format=described_format(group),
                trainable=group["trainable"],
                tied=group["tied"],
                roles=roles,
                places=keep_steps + 1 if group["trainable"] else 1,
                offset=offset,
                block_elements=block_elements,
                capacity=capacity,
                planned=few if few < capacity else 0,
            )
            units.append(unit)
            offset += unit.file_bytes
        unit_of = {name: unit.index for unit in units for name in unit.names}
        return cls(tuple(units), unit_of, offset)

    @property
    def planned_bytes(self) -> int:
        """Bytes of the file that disk space is planned for."""
        return sum(unit.expected.file_bytes for unit in self.units)

    @property
    def planned_ranges(self) -> list[tuple[int, int]]:
        """The ranges of the file that disk space is planned for, as begin and size."""
        found = []
        for unit in self.units:
            few = unit.expected
            for place in range(unit.places):
                begin = unit.stream_offset(place)
                found.append((begin, few.stream_bytes))
                found.append((begin + unit.stream_bytes, few.state_room))
                found.append((unit.mask_offset(place), few.mask_room))
        return [(begin, size) for begin, size in found if size]

    @property
    def sparse(self) -> list[Unit]:
        """The units that are sparse weights."""
        return [unit for unit in self.units if unit.is_sparse]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight, by name, in the order of the stages."""
        return {
            name: shape
            for unit in self.units
            for name, shape in zip(unit.names, unit.shapes, strict=True)
        }

    def unit(self, name: str) -> Unit:
        """Return the unit that contains a weight."""
        return self.units[self.unit_of[name]]

    def units_of(self, names: Iterable[str]) -> list[int]:
        """Return the units that contain the weights, each once, in this order."""
        return list(dict.fromkeys(self.unit_of[name] for name in names))

    def begin_of(self, name: str) -> int:
        """Return the first element of a weight within its unit."""
        unit = self.units[self.unit_of[name]]
        return unit.begins[unit.names.index(name)]

    def described(self) -> list[dict[str, Any]]:
        """Return the layout as plain data, for the journal's first record."""
        return [
            {
                "stage": unit.stage,
                "weights": {n: list(s) for n, s in zip(unit.names, unit.shapes, strict=True)},
                **spelled_origins(dict(zip(unit.names, unit.origins, strict=True))),
                **spelled_format(unit.format),
                **spelled_capacity(unit.capacity),
                "trainable": unit.trainable,
                "tied": unit.tied,
                "roles": [dataclasses.asdict(role) for role in unit.roles],
            }
            for unit in self.units
        ]


def _pad(roles: Sequence[Role]) -> int:
    """Return the elements whose multiples weights begin at: at a cache line; if neighbours share
    values, at the first of these neighbours."""
    return max(_WEIGHT_PAD, *(role.group for role in roles), 1)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
