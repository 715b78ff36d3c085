"""The portions of a store with sparse weights (`portions.py`): entries, state and masks.

How many values such a store has depends on its masks, so the first portion is a table of all
arrays. The receiver knows the other portions once it has the table. The room of arrays beyond their
masks is no content.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from penstock.errors import CorruptionError
from penstock.store.portions import require_size
from penstock.store.roles import CHANGES, INDEX

_TYPES = ("float32", "uint8", "uint16", "uint32", "int64")


class Content(Protocol):
    """Weights, masks and state of a store that are read and restored by array."""

    @property
    def weights(self) -> Iterable[str]: ...

    @property
    def updates(self) -> int: ...

    def role_names(self, name: str) -> list[str]: ...

    def restored_size(self, name: str, role: str) -> int: ...

    def read_restored(self, name: str, role: str, begin: int, end: int) -> np.ndarray: ...

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None: ...

    def expect_updates(self, updates: int) -> None: ...


@dataclass(frozen=True)
class _Array:
    """One array of a weight, as `WeightMemory.read` returns it."""

    name: str
    role: str
    dtype: str
    size: int

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize


class ContentPortions:
    """The portions of a store in memory whose numbers of values depend on masks.

    Args:
        memory: the content. While it is restored, it has the values that were written so far.
        portion_bytes: most bytes of a portion, but for the table.
    """

    def __init__(self, memory: Content, portion_bytes: int) -> None:
        self._memory, self._portion_bytes = memory, portion_bytes
        self._table: list[_Array] = []
        self._pieces: list[tuple[_Array, int, int]] = []
        self._header = np.empty(0, np.uint8)
        arrays = list(_arrays_of(memory))
        if arrays:
            table = [[a.name, a.role, a.dtype, a.size] for a in arrays]
            plain = {"updates": memory.updates, "arrays": table}
            self._take_table(np.frombuffer(json.dumps(plain).encode(), np.uint8), arrays)

    def _take_table(self, header: np.ndarray, arrays: list[_Array]) -> None:
        self._header, self._table = header, arrays
        self._pieces = []
        for array in arrays:
            step = max(1, self._portion_bytes // array.itemsize)
            self._pieces += [
                (array, begin, min(begin + step, array.size))
                for begin in range(0, array.size, step)
            ]

    @property
    def sizes(self) -> Sequence[int]:
        """The number of bytes of each portion; before the table has arrived, of the table alone."""
        pieces = (array.itemsize * (end - begin) for array, begin, end in self._pieces)
        return [self._header.nbytes, *pieces]

    def read(self, number: int) -> np.ndarray:
        """Return a portion; maybe a view of the store's memory."""
        if number == 0:
            return self._header
        array, begin, end = self._pieces[number - 1]
        values = self._memory.read_restored(array.name, array.role, begin, end)
        return np.ascontiguousarray(values).view(np.uint8)

    def write(self, number: int, data: np.ndarray) -> None:
        """Write a portion to its place, during a restore; the first one first.

        Raises:
            ValueError: the data has another size.
            CorruptionError: the table is not one of this store's arrays.
        """
        if number == 0:
            self._write_table(data)
            return
        array, begin, end = self._pieces[number - 1]
        require_size(number, data, array.itemsize * (end - begin))
        values = np.frombuffer(data.tobytes(), array.dtype)
        self._memory.write(array.name, array.role, begin, values)

    def _write_table(self, data: np.ndarray) -> None:
        try:
            plain = json.loads(data.tobytes())
            updates, arrays = _updates_of(plain), [_array_of(entry) for entry in plain["arrays"]]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CorruptionError(
                f"portion 0: expected a table of arrays, got invalid bytes ({error}); do all nodes "
                "run the same version of Penstock?"
            ) from None
        for array in arrays:
            if array.role not in self._memory.role_names(array.name):
                raise CorruptionError(
                    f"portion 0: expected arrays of this store, got {array.role!r} of "
                    f"{array.name!r}; do all nodes run with the same configuration?"
                )
        self._memory.expect_updates(updates)
        self._take_table(np.array(data), arrays)

    def checksum(self) -> str:
        """Return a checksum of the whole present content of memory."""
        state = xxhash.xxh3_128()
        for number in range(len(self.sizes)):
            state.update(self.read(number).data)
        return state.hexdigest()


def _arrays_of(memory: Content) -> Iterator[_Array]:
    """Yield the arrays of a store: of a sparse weight the mask first, since entries follow it."""
    for name in memory.weights:
        roles = memory.role_names(name)
        ordered = [r for r in (INDEX, CHANGES) if r in roles]
        ordered += [r for r in roles if r not in ordered]
        for role in ordered:
            size = memory.restored_size(name, role)
            if size:
                dtype = memory.read_restored(name, role, 0, 1).dtype.name
                yield _Array(name, role, dtype, size)


def _updates_of(plain: Any) -> int:
    updates = plain["updates"]
    if type(updates) is not int or updates < 0:
        raise ValueError(f"updates {str(updates)[:40]!r}")
    return updates


def _array_of(entry: Any) -> _Array:
    name, role, dtype, size = entry
    names = isinstance(name, str) and isinstance(role, str)
    if not names or dtype not in _TYPES or type(size) is not int or size < 1:
        raise ValueError(f"array {str(entry)[:80]!r}")
    return _Array(name, role, dtype, size)
