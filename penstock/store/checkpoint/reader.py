"""The weights of a checkpoint, read in pieces in any order, without a store."""

import math
from pathlib import Path

import numpy as np

from penstock.errors import CorruptionError
from penstock.io import ITEM_BYTES, open_plain
from penstock.sparsity import PackedIndex, index_from_compact
from penstock.store import tensor_file
from penstock.store.checkpoint.base import ReadBase
from penstock.store.checkpoint.state import read_state, tensor_name
from penstock.store.checkpoint.verified_pieces import (
    holds_header,
    read_into,
    require_checksum,
    unreadable,
)
from penstock.store.codecs import values_of_saved
from penstock.store.content_hash import hash_read
from penstock.store.files import ANOTHER_CHECKPOINT, CHUNK_BYTES
from penstock.store.packed import dense_values
from penstock.store.roles import INDEX, MASTER, VALUES, holds_weight


class SavedWeights:
    """Reads a checkpoint; every byte is compared with its checksum before it is returned.

    Memory holds one chunk, the requested piece and the last weight read from the base.

    Args:
        folder: the checkpoint, such as `checkpoints/step-00000100`.
        base: reads the weights that the checkpoint omits, if any.

    Raises:
        ConfigError: there is no checkpoint, or a newer penstock wrote it.
        CorruptionError: its description is damaged.
    """

    def __init__(self, folder: Path, base: ReadBase | None = None) -> None:
        self._folder = folder
        self._read_base = base
        self._base_weight: tuple[str, np.ndarray] | None = None
        self._mask: tuple[str, PackedIndex] | None = None
        self._state = read_state(folder)
        self._tensors = {
            name: sorted(
                ((t, p.extent) for t, p in self._state.tensors.items() if p.file == name),
                key=lambda item: item[1].begin,
            )
            for name in self._state.files
        }
        self._chunk: tuple[str, int, memoryview] | None = None
        self._known: set[str] = set()  # files whose header agrees with state.json

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight, by name."""
        return {**self._state.weights, **self._state.base_weights}

    def flush(self) -> None:
        """Do nothing: a checkpoint has no pending updates."""

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return elements `begin` to `end` of a weight (float32) or of its state, flat.

        A sparse weight has zeros where it has no entry; its state has a number per entry.

        Raises:
            CorruptionError: bytes have changed since they were written.
            ConfigError: a weight of the base is missing or has changed.
            StorageError: the operating system could not read a file.
        """
        if role == MASTER and name in self._state.base_weights:
            return self._of_base(name)[begin:end]
        if role == MASTER and name in self._state.sparse:
            index = self.sparse_mask(name)
            return dense_values(index, lambda b, e: self.read(name, VALUES, b, e), begin, end)
        place = self._state.tensors[tensor_name(role, name)]
        self._require_header(place.file)
        extent = place.extent
        item = ITEM_BYTES[extent.dtype]
        first, last = extent.begin + begin * item, extent.begin + end * item
        found = bytearray(last - first)
        for number in range(first // CHUNK_BYTES, -(-last // CHUNK_BYTES)):
            data, origin = self._checked(place.file, number), number * CHUNK_BYTES
            here = slice(max(first, origin), min(last, origin + len(data)))
            found[here.start - first : here.stop - first] = data[
                here.start - origin : here.stop - origin
            ]
        values = tensor_file.elements(memoryview(found), extent.dtype)
        return values_of_saved(values) if holds_weight(role) else values

    def mask(self, name: str) -> PackedIndex | None:
        """Return the mask of a weight; None if the weight is dense. Errors are those of `read`."""
        return self.sparse_mask(name) if name in self._state.sparse else None

    def sparse_mask(self, name: str) -> PackedIndex:
        """Return the mask of a sparse weight. The last one is cached."""
        if self._mask is None or self._mask[0] != name:
            shape = {
                role: self._state.tensors[tensor_name(role, name)].extent.shape[0]
                for role in (INDEX, VALUES)
            }
            data = self.read(name, INDEX, 0, shape[INDEX]).tobytes()
            elements = math.prod(self._state.sparse[name])
            try:
                index = index_from_compact(data, elements, shape[VALUES])
            except CorruptionError as error:
                raise CorruptionError(f"{self._folder}: mask of {name}: {error}") from error
            self._mask = name, index
        return self._mask[1]

    def _of_base(self, name: str) -> np.ndarray:
        assert self._state.base is not None
        if self._base_weight is None or self._base_weight[0] != name:
            self._base_weight = None  # freed before the next weight is allocated
            (self._base_weight,) = self._state.base.read(self._read_base, [name])
        return self._base_weight[1]

    def _require_header(self, file: str) -> None:
        if file in self._known:
            return
        head, record = bytearray(), self._state.files[file]
        for number in range(len(record.checksums)):
            head += self._checked(file, number)
            if holds_header(self._folder / file, head, record, dict(self._tensors[file])):
                break
        self._known.add(file)

    def _checked(self, file: str, number: int) -> memoryview:
        """Return a chunk of a file. The last chunk is cached, since small tensors share a chunk."""
        if self._chunk is not None and self._chunk[:2] == (file, number):
            return self._chunk[2]
        path, record = self._folder / file, self._state.files[file]
        data = memoryview(bytearray(min(CHUNK_BYTES, record.bytes - number * CHUNK_BYTES)))
        try:
            with open_plain(path) as opened:
                if path.stat().st_size != record.bytes:
                    raise CorruptionError(
                        f"{path}: expected {record.bytes:,} bytes, got {path.stat().st_size:,}; "
                        f"{ANOTHER_CHECKPOINT}"
                    )
                opened.seek(number * CHUNK_BYTES)
                read_into(path, opened, data)
        except OSError as error:
            raise unreadable(path, error) from error
        require_checksum(path, record, number, data, self._tensors[file])
        self._chunk = (file, number, data)
        return data


def checkpoint_hash(folder: Path, base: ReadBase | None = None) -> str:
    """Return the hash that `DramStore.content_hash` returns after this checkpoint is loaded.

    Tensors are read in pieces, so a model larger than memory can be hashed. Errors are those of
    `SavedWeights`.
    """
    saved = SavedWeights(folder, base)

    def read(name: str, begin: int, end: int) -> np.ndarray:
        role = MASTER if saved.mask(name) is None else VALUES
        return saved.read(name, role, begin, end)

    return hash_read(saved.shapes, read, saved.mask)
