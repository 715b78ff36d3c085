"""Sparse weights in a folder that `penstock export --packed` wrote: values, mask and shape.

In `model.packed.safetensors` a sparse weight W is three tensors: W.packed_values (float, one per
kept entry, in the order of the dense weight), W.packed_index (uint8, the mask as a compact index)
and W.packed_shape (int64, the dense shape). Other weights are stored as usual. No other program
reads such a file, so its name is not one that other programs look for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.errors import CorruptionError
from penstock.io import Extent
from penstock.weight_formats import PACKED_INDEX, PACKED_SHAPE, PACKED_VALUES

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex

_PARTS = (PACKED_VALUES, PACKED_INDEX, PACKED_SHAPE)
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 2**48


@dataclass(frozen=True)
class PackedTensor:
    """The places of a sparse weight's values and mask in a file; its shape is dense."""

    values: Extent
    index: Extent
    shape: tuple[int, ...]

    @property
    def kept(self) -> int:
        """Number of kept entries."""
        return self.values.shape[0]


def fold_packed(
    path: Path, extents: Mapping[str, Extent], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, PackedTensor]:
    """Return the sparse weights of a packed file.

    Args:
        path: named in messages.
        extents: all tensors of the file.
        shapes: the content of the tensors that end in `PACKED_SHAPE`, by the name of the weight.

    Raises:
        CorruptionError: a part of a weight is missing, or the parts contradict each other.
    """
    found = {}
    for name in dict.fromkeys(_weight_of(tensor) for tensor in extents):
        if name is None:
            continue
        parts = [extents.get(name + suffix) for suffix in _PARTS]
        if any(part is None for part in parts) or name in extents:
            raise _broken(path, f"expected {', '.join(_PARTS)} of {name!r}, each once")
        values, index, _ = parts
        assert values is not None
        assert index is not None
        found[name] = PackedTensor(values, index, shapes[name])
        _check(path, name, found[name])
    return found


def _weight_of(tensor: str) -> str | None:
    for suffix in _PARTS:
        if tensor.endswith(suffix):
            return tensor.removesuffix(suffix)
    return None


def shape_extents(path: Path, extents: Mapping[str, Extent]) -> dict[str, Extent]:
    """Return the tensors that hold the dense shapes, by the name of the weight.

    Raises:
        CorruptionError: one of them cannot be a shape.
    """
    found = {}
    for tensor, extent in extents.items():
        if not tensor.endswith(PACKED_SHAPE):
            continue
        is_list = len(extent.shape) == 1 and 1 <= extent.shape[0] <= _MOST_DIMENSIONS
        if extent.dtype != "I64" or not is_list:
            raise _broken(path, f"{tensor!r} is {extent.dtype} {list(extent.shape)}, not a shape")
        found[tensor.removesuffix(PACKED_SHAPE)] = extent
    return found


def _check(path: Path, name: str, packed: PackedTensor) -> None:
    """Check everything that can be checked without reading values and mask."""
    from penstock.sparsity import max_compact_bytes  # loads a compiler, which other folders spare

    elements = math.prod(packed.shape)
    is_shape = all(size >= 1 for size in packed.shape) and elements <= _MOST_ELEMENTS
    if not is_shape:
        raise _broken(path, f"{name!r} has the shape {list(packed.shape)}")
    if len(packed.values.shape) != 1 or not 1 <= packed.kept <= elements:
        raise _broken(
            path,
            f"{name!r} has values {list(packed.values.shape)} of a weight {list(packed.shape)}",
        )
    size = packed.index.end - packed.index.begin
    if packed.index.dtype != "U8" or size > max_compact_bytes(packed.kept, elements):
        raise _broken(path, f"{name!r} has a mask of {packed.index.dtype} and {size:,} bytes")


def mask_of(path: Path, name: str, packed: PackedTensor, data: bytes | memoryview) -> PackedIndex:
    """Return the mask of a weight from its bytes.

    Raises:
        CorruptionError: the bytes are not the mask of such a weight.
    """
    from penstock.sparsity import index_from_compact

    try:
        return index_from_compact(data, math.prod(packed.shape), packed.kept)
    except CorruptionError as error:
        raise _broken(path, f"{name!r}: {error}") from error


def expanded(index: PackedIndex, values: torch.Tensor) -> torch.Tensor:
    """Return a weight `[elements]` of the values' type, 0 where the mask keeps no entry."""
    whole = torch.zeros(index.elements, dtype=values.dtype)
    whole[torch.from_numpy(index.positions().astype(np.int64, copy=False))] = values
    return whole


def _broken(path: Path, what: str) -> CorruptionError:
    return CorruptionError(
        f"{path}: not a usable packed checkpoint: {what}; export it again with "
        "`penstock export --packed`"
    )
