"""Export of weights as a folder that only Penstock reads: sparse weights as values and mask.

At 90 % sparsity and in float32, a sparse weight takes 0.46 bytes per element instead of 4 (0.26 of
2 in bfloat16): 4 or 2 bytes per kept entry, and 0.64 for the mask.
`models/packed_tensors.py` describes the file, and `model.hf` reads it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.io import durable
from penstock.sparsity import PackedIndex, compact_bytes
from penstock.store import tensor_file
from penstock.store.files import appearing_folder
from penstock.store.interface import WeightReader
from penstock.store.narrowing import narrowed
from penstock.store.roles import MASTER
from penstock.weight_formats import PACKED_FILE, PACKED_INDEX, PACKED_SHAPE, PACKED_VALUES


@runtime_checkable
class MaskedReader(Protocol):
    """The masks of weights some of which may be sparse."""

    def mask(self, name: str) -> PackedIndex | None:
        """Return the mask of a sparse weight; None for a dense one."""
        ...


def mask_of(weights: WeightReader, name: str) -> PackedIndex | None:
    """Return the mask of a sparse weight; None for a dense one, and where no weight is sparse."""
    return weights.mask(name) if isinstance(weights, MaskedReader) else None


@dataclass(frozen=True, eq=False)
class _Part:
    """A tensor to write: of a dense weight (`what` is empty), or a part of a sparse one."""

    weight: str
    what: str
    entry: tensor_file.Entry


def export_packed(
    weights: WeightReader,
    folder: Path,
    *,
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    files: Sequence[Path] = (),
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> list[Path]:
    """Write a model folder in which sparse weights are stored as values and mask.

    Args:
        weights: a store, whose pending updates are applied first, or saved weights.
        folder: must not exist yet, or be empty; it appears only when all its files are on disk.
        config: the content of `config.json`; `dtype` is set in it.
        dtype: float32, bfloat16 or float16, the type of the written values.
        files: copied into the folder under their own names.
        buffers: further tensors, written with their own types.

    Returns:
        The weight file.

    Raises:
        ConfigError: no weight is sparse, the folder is in use, or a weight does not fit the type.
        NonFiniteError: a weight holds NaN or infinity.
        StorageError: the disk is full, read-only or failing; no partial file remains.
    """
    weights.flush()
    parts = _parts(weights, dtype)
    if not any(part.what for part in parts):
        raise ConfigError(
            "--packed: expected weights with masks, got none; export them without --packed"
        )
    buffers = buffers or {}
    tensor_file.refuse_unknown_types(buffers)
    by_entry = {part.entry: part for part in parts}
    kept = {tensor_file.Entry(n, b.dtype, tuple(b.shape)): b for n, b in buffers.items()}
    entries = tensor_file.in_file_order([*by_entry, *kept])

    def pieces(entry: tensor_file.Entry) -> Iterator[np.ndarray]:
        if entry in kept:
            return tensor_file.pieces_of(kept[entry])
        return _pieces(weights, by_entry[entry])

    document = {**config, "dtype": str(dtype).removeprefix("torch.")}
    with appearing_folder(folder, tensor_file.file_bytes(entries)) as temporary:
        tensor_file.write(temporary / PACKED_FILE, entries, pieces)
        durable.write_file(
            temporary / "config.json", json.dumps(document, indent=2).encode() + b"\n"
        )
        for path in files:
            durable.write_file(temporary / path.name, path.read_bytes())
    return [folder / PACKED_FILE]


def _parts(weights: WeightReader, dtype: torch.dtype) -> list[_Part]:
    parts = []
    for name, shape in weights.shapes.items():
        index = mask_of(weights, name)
        if index is None:
            parts.append(_Part(name, "", tensor_file.Entry(name, dtype, shape)))
            continue
        sizes = {
            PACKED_VALUES: (dtype, index.kept),
            PACKED_INDEX: (torch.uint8, len(compact_bytes(index))),
            PACKED_SHAPE: (torch.int64, len(shape)),
        }
        for what, (kind, size) in sizes.items():
            parts.append(_Part(name, what, tensor_file.Entry(name + what, kind, (size,))))
    return parts


def _pieces(weights: WeightReader, part: _Part) -> Iterator[np.ndarray]:
    shape, name = weights.shapes[part.weight], part.weight
    if part.what == PACKED_SHAPE:
        yield from tensor_file.pieces_of(torch.tensor(shape, dtype=torch.int64))
        return
    index = mask_of(weights, name) if part.what else None
    if part.what == PACKED_INDEX:
        assert index is not None
        yield np.frombuffer(compact_bytes(index), np.uint8)
        return
    values = weights.read(name, MASTER, 0, math.prod(shape))
    if index is not None:
        values = values[index.positions()]
    yield from tensor_file.pieces_of(narrowed(name, values, part.entry.dtype))
