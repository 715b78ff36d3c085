"""All that a store holds, as it lies there, in numbered portions: to be copied to the bit.

Two stores of the same program with the same settings have the same portions, so that a number is
all that need be said of one. Weights and state go as they are in memory, or on flash: nothing is
joined, cast or put together on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import xxhash

from penstock.errors import ClusterError
from penstock.store.comparing import Compared
from penstock.store.interface import Store

PORTION_BYTES = 4 << 20  # of what is copied to another process: one message each


class Portions(Protocol):
    """The portions of one store; they are written in their order."""

    @property
    def sizes(self) -> Sequence[int]:
        """Their bytes."""
        ...

    def read(self, number: int) -> np.ndarray:
        """Return a portion, uint8; maybe a view, good as long as the store stands still."""
        ...

    def write(self, number: int, data: np.ndarray) -> None:
        """Put a portion where it belongs, while restoring."""
        ...

    def checksum(self) -> str:
        """Return a checksum of all portions: it is equal for two stores that hold the same."""
        ...


@runtime_checkable
class ReplicatedStore(Store, Protocol):
    """A store that another of its kind may hold the same as: it is copied, and compared."""

    def portions(self, portion_bytes: int) -> Portions: ...

    def compared(self) -> Compared: ...


class SlabPortions:
    """The portions of a store in memory, whose slabs these are, each uint8 `[bytes]`."""

    def __init__(self, slabs: Iterable[np.ndarray], portion_bytes: int) -> None:
        self._portions = [
            slab[begin : begin + portion_bytes]
            for slab in slabs
            for begin in range(0, slab.nbytes, portion_bytes)
        ]

    @property
    def sizes(self) -> Sequence[int]:
        """Their bytes."""
        return [portion.nbytes for portion in self._portions]

    def read(self, number: int) -> np.ndarray:
        """Return a portion: a view of the store's memory."""
        return self._portions[number]

    def write(self, number: int, data: np.ndarray) -> None:
        """Overwrite a portion.

        **Raises:** `ValueError` if the data has another size.
        """
        portion = self._portions[number]
        require_size(number, data, portion.nbytes)
        portion[:] = data

    def checksum(self) -> str:
        """Return a checksum of what is in memory now, all of it."""
        state = xxhash.xxh3_128()
        for portion in self._portions:
            state.update(portion.data)
        return state.hexdigest()


def require_size(number: int, data: np.ndarray, size: int) -> None:
    """Refuse data that cannot be a portion.

    **Raises:** `ValueError`.
    """
    if data.nbytes != size:
        raise ValueError(f"portion {number} has {size:,} bytes, {data.nbytes:,} came for it")


def portions_of(store: Store) -> Portions:
    """Return the portions in which a store is copied.

    **Raises:** `ClusterError` if it is none that can be.
    """
    if not isinstance(store, ReplicatedStore):
        raise ClusterError(f"{type(store).__name__}: it cannot be copied")
    return store.portions(PORTION_BYTES)
