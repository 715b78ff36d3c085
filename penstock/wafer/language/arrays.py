"""Data in the memories of cores: arrays, parts of them, registers and counters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.errors import MeshError


@dataclass(frozen=True)
class Register:
    """A whole number that each core has; `number` is its place."""

    number: int
    name: str


@dataclass(frozen=True)
class Counter:
    """A number of things that a core's threads count for each other, such as rows that are free.

    A thread that waits for a counter goes on when it is large enough, and takes away what it
    waited for.
    """

    number: int
    name: str


@dataclass(frozen=True)
class Part:
    """Cells of an array, at a fixed place or at one that a register says.

    Attributes:
        base: first cell, if the register is 0.
        register: its number, or -1.
        stride: cells per step of the register.
        low, high: cells of the whole array.
        length: cells of the part.
        element_bytes: of its elements, 2 or 4.
        cores: that have the array, ascending; None for what every core has.
    """

    name: str
    base: int
    register: int
    stride: int
    low: int
    high: int
    length: int
    element_bytes: int
    cores: np.ndarray | None = field(default=None, compare=False, repr=False)

    def part(self, start: int, length: int) -> Part:
        """Return some of these cells, from `start` on."""
        if start < 0 or length < 1 or start + length > self.length:
            raise MeshError(
                f"{self.name}: expected a part within {self.length} elements, got {length} from "
                f"element {start} on"
            )
        return replace(self, base=self.base + start, length=length)


@dataclass(frozen=True, eq=False)
class Array:
    """An array that each of some cores has, at the same place of its memory.

    Attributes:
        cores: numbers of those cores, ascending.
        base: first cell.
    """

    name: str
    shape: tuple[int, ...]
    cores: np.ndarray
    base: int
    element_bytes: int

    @property
    def size(self) -> int:
        """Elements in one core."""
        return math.prod(self.shape)

    @property
    def all(self) -> Part:
        """The whole array."""
        return self._part(0, -1, 0, self.size)

    def __getitem__(self, index: int | Register) -> Part:
        """Return the row that a number or a register says; of a line of elements, one of them."""
        row = self.size // self.shape[0]
        if isinstance(index, Register):
            return self._part(0, index.number, row, row)
        if not 0 <= index < self.shape[0]:
            raise MeshError(
                f"{self.name}: expected an index from 0 to {self.shape[0] - 1}, got {index}"
            )
        return self._part(index * row, -1, 0, row)

    def _part(self, start: int, register: int, stride: int, length: int) -> Part:
        return Part(
            self.name,
            self.base + start,
            register,
            stride,
            self.base,
            self.base + self.size,
            length,
            self.element_bytes,
            self.cores,
        )
