"""What the store keeps of a weight besides its master: arrays of the optimizer, by role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

MASTER = "master"
"""The role of the float32 weight itself."""

_TORCH = {"float32": torch.float32, "uint8": torch.uint8}


@dataclass(frozen=True)
class Role:
    """An array that an optimizer keeps per weight: a value for every `group` elements of it."""

    name: str
    dtype: str = "float32"
    group: int = 1

    @property
    def numpy(self) -> np.dtype:
        return np.dtype(self.dtype)

    @property
    def torch(self) -> torch.dtype:
        return _TORCH[self.dtype]

    def count(self, elements: int) -> int:
        """Return how many values there are for a weight, or a part of one, of so many elements."""
        return -(-elements // self.group)

    def bytes(self, elements: int) -> int:
        """Return what they take."""
        return self.count(elements) * self.numpy.itemsize

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in which they are saved: the weight's, or flat where they are fewer."""
        return weight if self.group == 1 else (self.count(int(np.prod(weight, dtype=np.int64))),)


@dataclass(frozen=True)
class Stored:
    """Type and shape of one array that a store holds of a weight."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_of(weight: tuple[int, ...], roles: Iterable[Role]) -> dict[str, Stored]:
    """Return what a store holds of a weight of this shape: its master, then its state."""
    state = {role.name: Stored(role.torch, role.shape(weight)) for role in roles}
    return {MASTER: Stored(torch.float32, weight), **state}
