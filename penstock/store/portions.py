"""The whole content of a store as stored, in numbered portions, for bit-exact copies.

Two stores of the same program with the same settings have the same portions, so a number identifies
a portion. Weights and state are copied in their stored form: nothing is joined, cast or assembled.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import xxhash

from penstock.errors import ClusterError
from penstock.store.comparing import Compared
from penstock.store.interface import Store

PORTION_BYTES = 4 << 20  # bytes per portion of a copy to another process: one message each


class Portions(Protocol):
    """The portions of one store; they are written in order."""

    @property
    def sizes(self) -> Sequence[int]:
        """The number of bytes of each portion."""
        ...

    def read(self, number: int) -> np.ndarray:
        """Return a portion, uint8; possibly a view, valid while the store does not change."""
        ...

    def write(self, number: int, data: np.ndarray) -> None:
        """Write a portion to its place, during a restore."""
        ...

    def checksum(self) -> str:
        """Return a checksum of all portions; equal for two stores with the same content."""
        ...


@runtime_checkable
class ReplicatedStore(Store, Protocol):
    """A store that can be replicated: copied, and compared with its replicas."""

    def portions(self, portion_bytes: int) -> Portions: ...

    def compared(self) -> Compared: ...


class SlabPortions:
    """The portions of a store in memory; the slabs are uint8 `[bytes]` each."""

    def __init__(self, slabs: Iterable[np.ndarray], portion_bytes: int) -> None:
        self._portions = [
            slab[begin : begin + portion_bytes]
            for slab in slabs
            for begin in range(0, slab.nbytes, portion_bytes)
        ]

    @property
    def sizes(self) -> Sequence[int]:
        """The number of bytes of each portion."""
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
        """Return a checksum of the whole present content of memory."""
        state = xxhash.xxh3_128()
        for portion in self._portions:
            state.update(portion.data)
        return state.hexdigest()


def require_size(number: int, data: np.ndarray, size: int) -> None:
    """Reject data that is no valid portion.

    **Raises:** `ValueError`.
    """
    if data.nbytes != size:
        raise ValueError(f"portion {number}: expected {size:,} bytes, got {data.nbytes:,}")


def portions_of(store: Store) -> Portions:
    """Return the portions for a copy of a store.

    **Raises:** `ClusterError` if the store cannot be copied.
    """
    if not isinstance(store, ReplicatedStore):
        raise ClusterError(f"{type(store).__name__}: this type of store cannot be copied")
    return store.portions(PORTION_BYTES)
