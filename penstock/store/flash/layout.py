"""Where everything lies in the flash tier's file.

A *unit* is the weights of one home stage that are treated alike: same format, trainable or
not, tied or not. Its weights lie one behind the other in one flat range of elements,
which is cut into *blocks*: what is read, updated and written at a time, and has one checksum. On
flash a unit has two extents: its weights as they stream, and its state, per block the parts of the
format that do not stream (low halves of split masters) and then each role of the optimizer.

A trainable unit has several *places*, each with room for both extents. An update goes to the next
place, never over what a durable step may need.
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
from penstock.store.holding import Holding, homes
from penstock.store.roles import MASTER, Role
from penstock.weight_formats import DENSE, FORMATS, SPLIT, WeightFormat

BLOCK_ELEMENTS = 1 << 19
"""5 MiB of state under AdamW: enough for full speed, and in the cache from check to update."""

_PAD_ELEMENTS = ALIGNMENT_BYTES // 2  # so that halves of a block are aligned on flash
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
    """Weights of one stage that are treated alike; `begins` are their first elements.

    `origins` say, of pieces of weights, at which elements of these they begin.
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
        """Whether a step changes it: it is trained, and its weights are not all empty."""
        return self.trainable and self.elements > 0

    @property
    def stream_width(self) -> int:
        """Bytes of an element as it streams."""
        return self.format.stream.width

    @property
    def stream_bytes(self) -> int:
        return self.elements * self.stream_width

    def role(self, name: str) -> Role:
        """Return the role of this name; a weight has one value per element."""
        return next((role for role in self.roles if role.name == name), Role(MASTER))

    def state_bytes(self, elements: int) -> int:
        """Bytes of a block's part that does not stream: the format's, and the optimizer's roles."""
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
        """Return where an element's stream value lies in the file."""
        return self.offset + place * self.place_bytes + element * self.stream_width

    def state_offset(self, place: int, block: Block) -> int:
        """Return where a block's state lies in the file."""
        state = self.offset + place * self.place_bytes + self.stream_bytes
        return state + block.number * self.state_bytes(self.block_elements)

    def pieces(self, block: Block) -> list[tuple[str, int, int, int]]:
        """Return the parts of weights within a block: name, begin and end in the unit, begin in
        the weight."""
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

        `block_elements` is a multiple of 2048, so that every part of a block can be read directly.
        """
        uses = Counter(name for stage in program.stages for name in stage.weights)
        groups: dict[tuple[int, WeightFormat, bool, bool], list[str]] = {}
        for name, stage in homes(program).items():
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
        """Lay out what `described` of another layout says."""
        units: list[Unit] = []
        offset = 0
        for index, group in enumerate(described):
            shapes = tuple(tuple(shape) for shape in group["weights"].values())
            roles = tuple(Role(**role) for role in group["roles"])
            # At a cache line, and where values are shared by neighbours, at the first of these.
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
        """Return the unit in which a weight lies."""
        return self.units[self.unit_of[name]]

    def units_of(self, names: Iterable[str]) -> list[int]:
        """Return the units in which weights lie, each once, in this order."""
        return list(dict.fromkeys(self.unit_of[name] for name in names))

    def begin_of(self, name: str) -> int:
        """Return the first element of a weight within its unit."""
        unit = self.units[self.unit_of[name]]
        return unit.begins[unit.names.index(name)]

    def described(self) -> list[dict[str, Any]]:
        """Return plain data that says all of this, for the journal's first record."""
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
    """Return the format that the description of a unit says."""
    if "format" in unit:
        return FORMATS[unit["format"]]
    return SPLIT if unit["split"] else DENSE


def _described_format(weight_format: WeightFormat) -> dict[str, Any]:
    """Return the entry of a description that says a unit's format.

    The two formats of the first releases are said as these said them, and read them.
    """
    if weight_format in (DENSE, SPLIT):
        return {"split": weight_format is SPLIT}
    return {"format": weight_format.name}


def _origins(begins: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the entry of a description that says where pieces begin; whole weights need none."""
    pieces = {name: begin for name, begin in begins.items() if begin}
    return {"origins": pieces} if pieces else {}
