"""The transfers of a step: its operations, and the chunks of their weights and gradients.

The operations are the schedule of a step (`step_schedule.py`). The map of shards gives the chunks
of each operation. Every node of a run derives the same list from the same program, so a message
names an operation and a chunk by number.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.distributed.protocol.messages import MAX_PAYLOAD_BYTES
from penstock.kernels.blocks import GRANULE
from penstock.sparsity import max_compact_bytes
from penstock.step_schedule import Sweep

CHUNK_BYTES = 4 << 20
GRADIENT_WIDTH = 4  # bytes of a float32
SPARSE_HEADER_BYTES = 40  # of a chunk of a sparse weight, besides its values and its mask


@dataclass(frozen=True)
class Chunk:
    """Elements `begin` to `end` of a flat tensor; one shard holds them.

    `tensor` is the tensor's position in its operation; `width` the bytes of an element.
    """

    shard: int
    tensor: int
    begin: int
    end: int
    width: int

    @property
    def size(self) -> int:
        """The chunk's bytes."""
        return (self.end - self.begin) * self.width


@dataclass(frozen=True)
class SparseChunk(Chunk):
    """The entries of a sparse weight in elements `begin` to `end`, which are whole granules.

    Its bytes depend on the mask: values, and the mask unless the engines have it. `size` is the
    most of them. A gradient has one number per entry; in steps with dense gradients it is a
    `Chunk`.
    """

    @property
    def size(self) -> int:
        """The most bytes of the chunk."""
        elements = self.end - self.begin
        return SPARSE_HEADER_BYTES + elements * self.width + max_compact_bytes(elements, elements)


@dataclass(frozen=True)
class TransferOperation:
    """One stage in one sweep: the chunks of its weights, and the chunks of its gradients."""

    number: int
    stage: int
    sweep: Sweep
    weights: tuple[Chunk, ...]
    gradients: tuple[Chunk, ...]

    def of_shard(self, shard: int) -> list[int]:
        """Return the numbers of the weight chunks that a shard sends."""
        return [n for n, piece in enumerate(self.weights) if piece.shard == shard]

    def gradients_of(self, shard: int) -> list[int]:
        """Return the numbers of the gradient chunks that a shard receives."""
        return [n for n, piece in enumerate(self.gradients) if piece.shard == shard]


@dataclass(frozen=True)
class TransferSchedule:
    """The operations of a step in order, for `shards` shards and any number of engines."""

    operations: tuple[TransferOperation, ...]
    shards: int

    @property
    def weight_bytes(self) -> int:
        """The bytes that the shards send in a step, whatever the number of engines; the most of
        them, for sparse weights."""
        return sum(piece.size for op in self.operations for piece in op.weights)

    @property
    def gradient_bytes(self) -> int:
        """The bytes that the shards receive in a step; the most of them, for sparse weights."""
        pieces = (piece for op in self.operations for piece in op.gradients)
        return sum(GRADIENT_WIDTH * (piece.end - piece.begin) for piece in pieces)


def chunks(pieces: Sequence[Chunk], chunk_bytes: int = CHUNK_BYTES) -> tuple[Chunk, ...]:
    """Split pieces into chunks of at most `chunk_bytes` bytes."""
    result: list[Chunk] = []
    for piece in pieces:
        step = max(1, chunk_bytes // piece.width)
        bounds = [*range(piece.begin, piece.end, step), piece.end]
        result.extend(
            Chunk(piece.shard, piece.tensor, begin, end, piece.width)
            for begin, end in itertools.pairwise(bounds)
        )
    return tuple(result)


def sparse_chunks(
    piece: Chunk, density: float, chunk_bytes: int = CHUNK_BYTES
) -> tuple[SparseChunk, ...]:
    """Split a piece of a sparse weight at granules into chunks of about `chunk_bytes` bytes.

    **Arguments:** `density` is the share of the elements that the weight's capacity is.
    """
    elements = min(chunk_bytes / piece.width / density, MAX_PAYLOAD_BYTES // 8)
    step = max(1, int(elements) // GRANULE) * GRANULE
    bounds = [*range(piece.begin, piece.end, step), piece.end]
    return tuple(
        SparseChunk(piece.shard, piece.tensor, begin, end, piece.width)
        for begin, end in itertools.pairwise(bounds)
    )
