"""Sparse weights on the wire: chunks of values, with the mask where the engines do not have it.

A chunk has a header (the mask's version, and the numbers of entries and of bytes of its mask), its
part of the mask in compact form if it is sent, and the values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.distributed.protocol import SPARSE_HEADER_BYTES, SparseChunk
from penstock.errors import ClusterError, CorruptionError, ProtocolError
from penstock.kernels.blocks import GRANULE
from penstock.program import WeightSpec
from penstock.sparsity import (
    PackedIndex,
    SparseWeight,
    compact_bytes,
    index_from_compact,
    joined,
)

_HEADER = struct.Struct("<QQQ")
_LENGTH = struct.Struct("<Q")  # of a part of a mask, which zeros follow up to the alignment
_ALIGNMENT = 8
assert _HEADER.size + _LENGTH.size + _ALIGNMENT == SPARSE_HEADER_BYTES


def range_of(index: PackedIndex, chunk: SparseChunk) -> tuple[int, int]:
    """Return the granules of a chunk, counted from the first of a mask."""
    return (chunk.begin - index.begin) // GRANULE, -(-(chunk.end - index.begin) // GRANULE)


def entries_in(index: PackedIndex, chunk: SparseChunk) -> slice:
    """Return where a chunk's entries are among those of a mask."""
    first, last = range_of(index, chunk)
    return slice(int(index.entry_offsets[first]), int(index.entry_offsets[last]))


def packed_chunk(weight: SparseWeight, chunk: SparseChunk, with_mask: bool) -> np.ndarray:
    """Return the bytes of a chunk of a weight, or of a shard's piece of it."""
    held = entries_in(weight.index, chunk)
    mask = b""
    if with_mask:
        compact = compact_bytes(weight.index.cut(*range_of(weight.index, chunk)))
        mask = _LENGTH.pack(len(compact)) + compact + bytes(-len(compact) % _ALIGNMENT)
    values = weight.values[held].view(torch.uint8).numpy()
    header = _HEADER.pack(weight.version, held.stop - held.start, len(mask))
    return np.concatenate([np.frombuffer(header + mask, np.uint8), values])


@dataclass(frozen=True, eq=False)
class _Part:
    version: int
    kept: int
    mask: np.ndarray  # empty if it was not sent
    values: np.ndarray

    @classmethod
    def read(cls, name: str, payload: np.ndarray, width: int) -> _Part:
        if payload.nbytes < _HEADER.size:
            raise ProtocolError(f"{name}: expected a header of {_HEADER.size} bytes in a chunk")
        version, kept, size = _HEADER.unpack_from(payload.data)
        values = payload[_HEADER.size + size :]
        if size > payload.nbytes - _HEADER.size or values.nbytes != kept * width:
            raise ProtocolError(
                f"{name}: expected a chunk with {kept} values of {width} bytes after {size} bytes "
                f"of its mask, got {payload.nbytes} bytes in all; do all nodes run the same "
                "version of Penstock?"
            )
        return cls(version, kept, payload[_HEADER.size : _HEADER.size + size], values)


class ReceivedMasks:
    """The masks that an engine has received, by weight; each is kept until it changes."""

    def __init__(self) -> None:
        self._masks: dict[str, tuple[int, PackedIndex]] = {}

    def index(self, name: str) -> PackedIndex:
        """Return the present mask of a weight."""
        return self._masks[name][1]

    def weight(
        self,
        spec: WeightSpec,
        chunks: Sequence[SparseChunk],
        payloads: Mapping[SparseChunk, np.ndarray],
        place: np.ndarray,
    ) -> SparseWeight:
        """Return a whole weight from its chunks.

        Args:
            spec: the weight.
            chunks: of one operation, in order.
            payloads: their bytes.
            place: memory for the values, bytes.

        Raises:
            ClusterError: a mask was not sent, and this engine does not have it.
            ProtocolError: the chunks do not belong together.
        """
        width = spec.stream_dtype.itemsize
        parts = [_Part.read(spec.name, payloads[chunk], width) for chunk in chunks]
        first = parts[0]
        if any(part.version != first.version for part in parts):
            raise ProtocolError(
                f"{spec.name}: expected chunks of one version of its mask, got those of versions "
                f"{sorted({part.version for part in parts})}; do all shards hold the same step?"
            )
        if all(part.mask.size for part in parts):
            self._masks[spec.name] = first.version, _mask_of(spec.name, chunks, parts)
        version, index = self._masks.get(spec.name, (-1, None))
        if index is None or version != first.version:
            raise ClusterError(
                f"{spec.name}: expected version {first.version} of its mask with the values, got "
                f"none, and this engine has {'none' if index is None else f'version {version}'}; a "
                "shard sends masks in the first step of an epoch and after every change"
            )
        kept = sum(part.kept for part in parts)
        if kept != index.kept or kept > spec.capacity:
            raise ProtocolError(
                f"{spec.name}: expected {index.kept} values, as its mask keeps, got {kept}"
            )
        data = place[: kept * width]
        np.concatenate([part.values for part in parts], out=data)
        values = torch.from_numpy(data).view(spec.stream_dtype)
        return SparseWeight(spec.name, spec.shape, values, index, version)


def _mask_of(name: str, chunks: Sequence[SparseChunk], parts: Sequence[_Part]) -> PackedIndex:
    found = []
    for chunk, part in zip(chunks, parts, strict=True):
        data, elements = part.mask.tobytes(), chunk.end - chunk.begin
        found.append(_index_of(name, data, elements, part.kept, chunk.begin))
    return found[0] if len(found) == 1 else joined(found)


def _index_of(name: str, data: bytes, elements: int, kept: int, begin: int) -> PackedIndex:
    """Decode a mask that up to 7 zero bytes follow."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        compact = data[_LENGTH.size : _LENGTH.size + length]
        return index_from_compact(compact, elements, kept, begin)
    except (struct.error, ValueError, CorruptionError) as error:
        raise ProtocolError(f"mask of {name}: {error}") from None
