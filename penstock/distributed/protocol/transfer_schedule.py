"""The transfers of a step: which operations there are, and in which chunks their bytes travel.

They are the schedule of a step (`step_schedule.py`) seen through the map of shards: per operation,
the chunks in which its weights come and its gradients go. Every node of a run derives the same list
from the same program, so that an operation and a chunk are numbers on the wire.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.step_schedule import Sweep

CHUNK_BYTES = 4 << 20
GRADIENT_WIDTH = 4  # bytes of a float32


@dataclass(frozen=True)
class Chunk:
    """Elements `begin` to `end` of a flat tensor, as one shard holds them.

    `tensor` is the tensor's place in its operation; `width` the bytes of an element.
    """

    shard: int
    tensor: int
    begin: int
    end: int
    width: int

    @property
    def size(self) -> int:
        """Its bytes."""
        return (self.end - self.begin) * self.width


@dataclass(frozen=True)
class TransferOperation:
    """One stage in one sweep: the chunks of its weights, and those of its gradients."""

    number: int
    stage: int
    sweep: Sweep
    weights: tuple[Chunk, ...]
    gradients: tuple[Chunk, ...]

    def of_shard(self, shard: int) -> list[int]:
        """Return the numbers of the weights' chunks that a shard sends."""
        return [n for n, piece in enumerate(self.weights) if piece.shard == shard]

    def gradients_of(self, shard: int) -> list[int]:
        """Return the numbers of the gradients' chunks that go to a shard."""
        return [n for n, piece in enumerate(self.gradients) if piece.shard == shard]


@dataclass(frozen=True)
class TransferSchedule:
    """The operations of a step in their order, between so many shards and any engines."""

    operations: tuple[TransferOperation, ...]
    shards: int

    @property
    def weight_bytes(self) -> int:
        """What the shards send in a step, whatever the number of engines."""
        return sum(piece.size for op in self.operations for piece in op.weights)

    @property
    def gradient_bytes(self) -> int:
        """What the shards receive in a step."""
        return sum(piece.size for op in self.operations for piece in op.gradients)


def chunks(pieces: Sequence[Chunk], chunk_bytes: int = CHUNK_BYTES) -> tuple[Chunk, ...]:
    """Cut pieces into chunks of at most so many bytes."""
    result: list[Chunk] = []
    for piece in pieces:
        step = max(1, chunk_bytes // piece.width)
        bounds = [*range(piece.begin, piece.end, step), piece.end]
        result.extend(
            Chunk(piece.shard, piece.tensor, begin, end, piece.width)
            for begin, end in itertools.pairwise(bounds)
        )
    return tuple(result)
