"""The log of a model's constructor as plain data: operations on views of numbered storages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

DEFAULT_GENERATOR = 0
BEFORE_FIRST_DRAW = -1


@dataclass(frozen=True)
class Window:
    """A tensor as a strided view: `storage` is its number in the log, `offset` counts elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def covers(self, storage_bytes: int) -> bool:
        """Return whether a write of every element of the window writes every byte of its
        storage."""
        elements, expected = 1, 1
        for size, stride in sorted(
            zip(self.size, self.stride, strict=True), key=lambda pair: (pair[1], pair[0])
        ):
            elements *= size
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return self.offset == 0 and elements * self.dtype.itemsize == storage_bytes


@dataclass(frozen=True)
class Constant:
    """A real tensor that the constructor created, such as `torch.tensor([1.0, 2.0])`."""

    value: torch.Tensor


@dataclass(frozen=True)
class GeneratorNumber:
    """A `torch.Generator` argument, by its number in the log."""

    index: int


@dataclass(frozen=True)
class Draw:
    """One use of a random generator.

    `number` counts the uses of this generator. `restore` says how the constructor changed the
    state of the generator between the last use and this one: not at all (None), back to the state
    after an earlier use (the number of that use), or to a new state, for example by
    `torch.manual_seed` (the state itself).
    """

    generator: int
    number: int
    restore: int | torch.Tensor | None


@dataclass(frozen=True)
class RecordedOperation:
    """One logged call: `arguments` is its flattened (args, kwargs) with tensors as windows.

    `writes` are windows changed in place, `overwrites` are the windows among them whose old bytes
    are not read; `creates` pairs a position in the flattened result with the window that it
    becomes.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    structure: TreeSpec
    reads: tuple[Window, ...]
    writes: tuple[Window, ...]
    overwrites: tuple[Window, ...]
    creates: tuple[tuple[int, Window], ...]
    draw: Draw | None
