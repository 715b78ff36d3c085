"""Loading a checkpoint: every piece is verified before use, and read only once.

The verified bytes are the bytes that are used. A file that changes during the load, or a disk that
returns different bytes on a second read, therefore cannot corrupt the store.
"""

import bisect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from penstock.errors import ConfigError, CorruptionError
from penstock.io import Extent, open_plain
from penstock.store import tensor_file
from penstock.store.checkpoint.base import ReadBase
from penstock.store.checkpoint.index import read_index
from penstock.store.checkpoint.reader import SavedWeights
from penstock.store.checkpoint.state import (
    CheckpointState,
    read_state,
    tensor_name,
)
from penstock.store.checkpoint.verified_pieces import (
    holds_header,
    read_into,
    require_checksum,
    unreadable,
)
from penstock.store.codecs import values_of_saved
from penstock.store.files import ANOTHER_CHECKPOINT, CHUNK_BYTES, FileRecord
from penstock.store.interface import Store
from penstock.store.roles import MASTER, VALUES, holds_weight

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex

_WEIGHT, _WEIGHT_TYPES = "F32", ("F32", "BF16")


@runtime_checkable
class _TakesMasks(Protocol):
    """A store that must know the masks of sparse weights before their entries."""

    def take_mask(self, name: str, index: "PackedIndex") -> None: ...


Piece = tuple[str, int, np.ndarray]
"""Name of a tensor, index of the first element, elements (valid until the next piece)."""


def load_checkpoint(
    store: Store, folder: Path, verify: bool = True, base: ReadBase | None = None
) -> dict[str, Any]:
    """Restore a store to exactly the state in which it was saved.

    Args:
        store: has the same weights and the same kind of optimizer as the saved store; stages and
            precision may differ.
        folder: the checkpoint, such as `checkpoints/step-00000100`.
        verify: compare checksums; headers and sizes are checked in any case.
        base: reads the weights that the checkpoint omits, if any.

    Returns:
        The `extra` table given to `save_checkpoint`.

    Raises:
        ConfigError: there is no checkpoint, the checkpoint is of another model or optimizer, or a
            newer penstock wrote it; the store is unchanged. Or the base is not that of the
            checkpoint; the store is then unusable.
        CorruptionError: some bytes have changed since they were written. The store is unusable
            until another checkpoint is loaded.
        StorageError: the operating system could not read a file.
    """
    state = read_state(folder)
    sources = {
        tensor_name(role, name): (name, role)
        for name in store.program.weights
        for role in store.roles(name)
    }
    _require_same_model(store, folder, state)
    frozen = state.base.read(state.base.reader(base)) if state.base is not None else ()
    store.begin_restore()
    if state.sparse and isinstance(store, _TakesMasks):
        saved = SavedWeights(folder)
        for name in state.sparse:
            store.take_mask(name, saved.sparse_mask(name))
    for tensor, begin, values in _pieces(folder, state, verify):
        name, role = sources[tensor]
        store.write(name, role, begin, values_of_saved(values) if holds_weight(role) else values)
    for name, values in frozen:
        store.write(name, MASTER, 0, values)
    store.finish_restore(state.step)
    return state.extra


def verify_checkpoint(folder: Path) -> CheckpointState:
    """Read a whole checkpoint, verify all of it, and return its description.

    Errors are those of `load_checkpoint`.
    """
    state = read_state(folder)
    for _ in _pieces(folder, state):
        pass
    return state


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """Return the listed checkpoints of a run, oldest first, whether their folders exist or not."""
    return [checkpoints / name for name in read_index(checkpoints).folders]


def _require_same_model(store: Store, folder: Path, state: CheckpointState) -> None:
    # The store may hold a weight in any type that represents its values exactly. The write checks
    # this.
    _require_same_sparsity(store, folder, state)
    masters = tensor_name(MASTER, "")
    found = {
        name: (_type_of(name, place.extent.dtype), place.extent.shape)
        for name, place in state.tensors.items()
    }
    wanted = {
        tensor_name(role, name): (
            _WEIGHT if holds_weight(role) else tensor_file.DTYPES[stored.dtype],
            # The mask in the checkpoint says how many numbers a sparse weight has.
            _flat_shape(found, tensor_name(role, name)) if spec.is_sparse else stored.shape,
        )
        for name, spec in store.program.weights.items()
        for role, stored in store.roles(name).items()
    }
    found |= {masters + name: (_WEIGHT, shape) for name, shape in state.base_weights.items()}
    if wanted == found:
        return
    same_weights = {n: w for n, w in wanted.items() if n.startswith(masters)} == {
        n: f for n, f in found.items() if n.startswith(masters)
    }
    differences = []
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        if name not in found:
            differences.append(f"{name} is missing in it")
        elif name not in wanted:
            differences.append(f"{name} is only in it")
        elif found[name] != wanted[name]:
            differences.append(f"{name} is {_spelled(*found[name])}, not {_spelled(*wanted[name])}")
    shown = "; ".join(differences[:5])
    rest = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
    what = "of another optimizer" if same_weights else "of another model"
    advice = (
        "use the optimizer that wrote it, or export it and start a new run from the export "
        "(model.hf)"
        if same_weights
        else "use the configuration that wrote it"
    )
    raise ConfigError(f"{folder}: a checkpoint {what}: {shown}{rest}; {advice}")


def _require_same_sparsity(store: Store, folder: Path, state: CheckpointState) -> None:
    """Reject a checkpoint in which other weights are sparse, or with more entries than fit."""
    differences = []
    for name, spec in store.program.weights.items():
        if spec.is_sparse != (name in state.sparse) and name in state.weights:
            is_now = "sparse" if spec.is_sparse else "dense"
            differences.append(
                f"{name} is {'dense' if spec.is_sparse else 'sparse'} in it, and "
                f"{is_now} in this run"
            )
        elif spec.is_sparse and name in state.sparse:
            kept = state.tensors[tensor_name(VALUES, name)].extent.shape[0]
            if state.sparse[name] != spec.shape:
                differences.append(
                    f"{name} is {_spelled(_WEIGHT, state.sparse[name])}, not "
                    f"{_spelled(_WEIGHT, spec.shape)}"
                )
            elif kept > spec.capacity:
                differences.append(
                    f"{name} keeps {kept:,} of {spec.elements:,} entries in it, this run has room "
                    f"for {spec.capacity:,}"
                )
    if differences:
        shown = "; ".join(differences[:5])
        rest = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ConfigError(
            f"{folder}: a checkpoint of another sparsity: {shown}{rest}; use the sparsity section "
            "that wrote it, or export it and start a new run from the export (model.hf)"
        )


def _flat_shape(found: Mapping[str, tuple[str, tuple[int, ...]]], tensor: str) -> tuple[int, ...]:
    """Return the shape of a tensor in a checkpoint, whatever its length."""
    shape = found[tensor][1] if tensor in found else ()
    return shape if len(shape) == 1 else (0,)


def _type_of(tensor: str, dtype: str) -> str:
    is_weight = tensor.startswith(tensor_name(MASTER, "")) and dtype in _WEIGHT_TYPES
    return _WEIGHT if is_weight else dtype


def _spelled(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _pieces(folder: Path, state: CheckpointState, verify: bool = True) -> Iterator[Piece]:
    """Read the tensors of all files in file order."""
    for file_name, record in state.files.items():
        extents = {
            name: place.extent for name, place in state.tensors.items() if place.file == file_name
        }
        yield from _file_pieces(folder / file_name, record, extents, verify)


def _file_pieces(
    path: Path, record: FileRecord, extents: dict[str, Extent], verify: bool
) -> Iterator[Piece]:
    ordered = sorted(
        ((name, extent) for name, extent in extents.items() if extent.begin < extent.end),
        key=lambda item: item[1].begin,
    )
    ends = [extent.end for _, extent in ordered]
    head: bytearray | None = bytearray()
    for offset, data in _chunks(path, record, ordered, verify):
        if head is not None:
            head += data
            if holds_header(path, head, record, extents):
                head = None
        end = offset + len(data)
        # The first tensor that ends after the begin of this chunk, then all that begin in this
        # chunk.
        for name, extent in ordered[bisect.bisect_right(ends, offset) :]:
            if extent.begin >= end:
                break
            first, last = max(extent.begin, offset), min(extent.end, end)
            values = tensor_file.elements(data[first - offset : last - offset], extent.dtype)
            yield name, (first - extent.begin) // values.itemsize, values


def _chunks(
    path: Path, record: FileRecord, ordered: list[tuple[str, Extent]], verify: bool
) -> Iterator[tuple[int, memoryview]]:
    """Read a file in chunks into one buffer; each chunk is compared with its checksum."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.bytes:
                raise CorruptionError(
                    f"{path}: expected {record.bytes:,} bytes, got {size:,}; {ANOTHER_CHECKPOINT}"
                )
            buffer = memoryview(bytearray(min(CHUNK_BYTES, record.bytes)))
            for number in range(len(record.checksums)):
                offset = number * CHUNK_BYTES
                data = buffer[: min(CHUNK_BYTES, record.bytes - offset)]
                read_into(path, file, data)
                if verify:
                    require_checksum(path, record, number, data, ordered)
                yield offset, data
    except OSError as error:
        raise unreadable(path, error) from error
