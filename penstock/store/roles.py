"""The data that the store keeps of a weight besides its master: optimizer arrays, by role."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from penstock.program import WeightSpec

MASTER = "master"
"""The role of the weight itself; of a sparse weight, the dense one, with zeros where it has no
entry: it is read so, and not saved."""

VALUES = "values"
"""The role of a sparse weight's entries, in the order of its mask."""

INDEX = "index"
"""The role of a sparse weight's mask, in its compact form."""

AGE = "age"
"""The role of the numbers of mask changes that the entries have survived."""

CHANGES = "mask_changes"
"""The role of the number of updates up to now, followed by those at the changes of a mask."""

_TORCH = {
    "float32": torch.float32,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
}


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
        """Return the number of values for a weight, or a part of a weight, of so many elements."""
        return -(-elements // self.group)

    def bytes(self, elements: int) -> int:
        """Return the bytes of these values."""
        return self.count(elements) * self.numpy.itemsize

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in a checkpoint: the weight's shape, or flat if there are fewer
        values."""
        return weight if self.group == 1 else (self.count(int(np.prod(weight, dtype=np.int64))),)


@dataclass(frozen=True)
class Stored:
    """Type and shape in which a checkpoint holds one array of a weight.

    The store reads and writes the weight itself as float32, whatever the type here.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]


def holds_weight(role: str) -> bool:
    """Return whether a role is that of a weight's own values, dense or packed."""
    return role in (MASTER, VALUES)


def stored_of(weight: WeightSpec, roles: Iterable[Role]) -> dict[str, Stored]:
    """Return the arrays that a checkpoint holds of a weight: the weight, then its state."""
    state = {role.name: Stored(role.torch, role.shape(weight.shape)) for role in roles}
    return {MASTER: Stored(weight.format.saved_dtype, weight.shape), **state}
