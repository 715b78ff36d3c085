"""The layout of the flash tier's file.

A *unit* is the weights of one home stage that have the same format and are alike in being trainable
or not, and tied or not. Its weights are contiguous in one flat range of elements. This range is cut
into *blocks*: a block is read, updated and written at once, and has one checksum. On flash a unit
has two extents. The first contains the weights as they are streamed. The second contains the state:
per block, the parts of the format that are not streamed (low halves of split masters), then each
role of the optimizer.

A trainable unit has several *places*, each with space for both extents. An update is written to the
next place, never over data that a durable step may need.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.store.flash.medium import ALIGNMENT_BYTES
from penstock.store.holding import Holding, home_stages
from penstock.store.roles import MASTER, Role
from penstock.weight_formats import DENSE, FORMATS, SPLIT, WeightFormat

BLOCK_ELEMENTS = 1 << 19
"""5 MiB of state under AdamW: large enough for full speed, small enough to stay in the cache
between checksum and update."""

_PAD_ELEMENTS = ALIGNMENT_BYTES // 2  # halves of a block are then aligned on flash
_WEIGHT_PAD = 32


@dataclass(frozen=True)
class Block:
    """Elements `begin` to `end` of a unit."""

    number: int
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Unit:
    """Weights of one stage that are treated alike; `begins` are their first elements in the unit.

    For pieces of weights, `origins` are the elements of the whole weights at which the pieces
    begin.
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

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each weight."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @property
    def is_updated(self) -> bool:
        """Whether a step changes the unit: its weights are trained, and not all empty."""
        return self.trainable and self.elements > 0

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

    def state_bytes(self, elements: int) -> int:
        """Bytes of a block's part that is not streamed: parts of the format, and roles of the
        optimizer."""
        size = self.format.rest_width * elements + sum(r.bytes(elements) for r in self.roles)
        return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def place_bytes(self) -> int:
        whole, rest = divmod(self.elements, self.block_elements)
        state = whole * self.state_bytes(self.block_elements)
        return self.stream_bytes + state + (self.state_bytes(rest) if rest else 0)

    @property
    def block_count(self) -> int:
        return -(-self.elements // self.block_elements)

    @cached_property
    def blocks(self) -> list[Block]:
        starts = range(0, self.elements, self.block_elements)
        return [
            Block(number, begin, min(begin + self.block_elements, self.elements))
            for number, begin in enumerate(starts)
        ]

    def stream_offset(self, place: int, element: int = 0) -> int:
        """Return the file offset of an element's streamed value."""
        return self.offset + place * self.place_bytes + element * self.stream_width

    def state_offset(self, place: int, block: Block) -> int:
        """Return the file offset of a block's state."""
        state = self.offset + place * self.place_bytes + self.stream_bytes
        return state + block.number * self.state_bytes(self.block_elements)

    def pieces(self, block: Block) -> list[tuple[str, int, int, int]]:
        """Return the parts of weights within a block: name, begin and end in the unit, begin in the
        weight."""
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
        cls, program: Holding, roles: Sequence[Role], keep_steps: int, block_elements: int
    ) -> FlashLayout:
        """Lay out a program whose trainable weights have these roles of state.

        `block_elements` is a multiple of 2048, so that every part of a block can be read with
        direct I/O.
        """
        uses = Counter(name for stage in program.stages for name in stage.weights)
        groups: dict[tuple[int, WeightFormat, bool, bool], list[str]] = {}
        for name, stage in home_stages(program).items():
            spec = program.weights[name]
            alike = (stage, spec.format, spec.trainable, uses[name] > 1)
            groups.setdefault(alike, []).append(name)
        described = [
            {
                "stage": stage,
                "weights": {name: list(program.weights[name].shape) for name in names},
                **_origins({name: program.weights[name].begin for name in names}),
                **_described_format(weight_format),
                "trainable": trainable,
                "tied": tied,
                "roles": [dataclasses.asdict(role) for role in roles] if trainable else [],
            }
            for (stage, weight_format, trainable, tied), names in groups.items()
        ]
        return cls.from_description(described, keep_steps, block_elements)

    @classmethod
    def from_description(
        cls, described: Sequence[Mapping[str, Any]], keep_steps: int, block_elements: int
    ) -> FlashLayout:
        """Restore a layout from its `described` form."""
        units: list[Unit] = []
        offset = 0
        for index, group in enumerate(described):
            shapes = tuple(tuple(shape) for shape in group["weights"].values())
            roles = tuple(Role(**role) for role in group["roles"])
            # Begin at a cache line. If neighbours share values, begin at the first of these
            # neighbours.
            pad = max(_WEIGHT_PAD, *(role.group for role in roles), 1)
            begins, end = [], 0
            for shape in shapes:
                begins.append(end)
                end += -(-math.prod(shape) // pad) * pad
            unit = Unit(
                index=index,
                stage=group["stage"],
                names=tuple(group["weights"]),
                shapes=shapes,
                begins=tuple(begins),
                origins=tuple(group.get("origins", {}).get(name, 0) for name in group["weights"]),
                elements=-(-end // _PAD_ELEMENTS) * _PAD_ELEMENTS,
                format=described_format(group),
                trainable=group["trainable"],
                tied=group["tied"],
                roles=roles,
                places=keep_steps + 1 if group["trainable"] else 1,
                offset=offset,
                block_elements=block_elements,
            )
            units.append(unit)
            offset += unit.places * unit.place_bytes
        unit_of = {name: unit.index for unit in units for name in unit.names}
        return cls(tuple(units), unit_of, offset)

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
                **_origins(dict(zip(unit.names, unit.origins, strict=True))),
                **_described_format(unit.format),
                "trainable": unit.trainable,
                "tied": unit.tied,
                "roles": [dataclasses.asdict(role) for role in unit.roles],
            }
            for unit in self.units
        ]


def described_format(unit: Mapping[str, Any]) -> WeightFormat:
    """Return the format in the description of a unit."""
    if "format" in unit:
        return FORMATS[unit["format"]]
    return SPLIT if unit["split"] else DENSE


def _described_format(weight_format: WeightFormat) -> dict[str, Any]:
    """Return the description's entry for a unit's format.

    The two formats of the first releases keep their first spelling, so that those releases can read
    the description.
    """
    if weight_format in (DENSE, SPLIT):
        return {"split": weight_format is SPLIT}
    return {"format": weight_format.name}


def _origins(begins: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the description's entry for where pieces begin; empty for whole weights."""
    pieces = {name: begin for name, begin in begins.items() if begin}
    return {"origins": pieces} if pieces else {}
