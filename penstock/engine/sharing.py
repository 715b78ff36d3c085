"""How the devices of a group share out a stage's weights and the sums of its gradients.

Weights lie side by side in a slot, cut into as many equal pieces as there are devices: each
device fetches its piece from the host and they gather the rest from each other. Gradients are one
flat row of float32, cut likewise: each device gets everyone's sums of its piece, and adds them in
the tree over the micro-batches. All of it follows from the program and two numbers, so that no
device need ask another how much will come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.collectives import partial_sums, partition, root_level
from penstock.program import Kind, Program, Stage, largest_stage

ALIGNMENT = 512  # bytes; what device allocations are aligned to
_ELEMENTS = ALIGNMENT // 4  # of float32
_ELEMENT_BYTES = 4


def aligned(size: int) -> int:
    """Return a number of bytes rounded up to a whole number of alignments."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def largest_slot(program: Program) -> int:
    """Return the bytes that the largest stage takes in a slot, each weight aligned."""
    return largest_stage(program, lambda weight: aligned(weight.stream_bytes))[1]


@dataclass(frozen=True)
class FlatSums:
    """The gradients of a stage as one row: shapes, where each begins, elements of a piece."""

    shapes: tuple[torch.Size, ...]
    begins: tuple[int, ...]
    piece: int

    def cuts(self, tensor: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield how a tensor is divided over the devices: device, place in the piece, and the
        first and last + 1 of the tensor's elements that go there."""
        first, last = self.begins[tensor], self.begins[tensor] + math.prod(self.shapes[tensor])
        for device in range(first // self.piece, -(-last // self.piece)):
            begin, end = max(first, device * self.piece), min(last, (device + 1) * self.piece)
            yield device, begin - device * self.piece, begin - first, end - first

    def views(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in a row, float32 [devices * piece]."""
        return [
            row[begin : begin + math.prod(shape)].view(shape)
            for begin, shape in zip(self.begins, self.shapes, strict=True)
        ]


@dataclass(frozen=True)
class Sharing:
    """A group of so many devices, and over how many micro-batches a step's gradients are summed."""

    devices: int
    micro_batches: int

    @cached_property
    def held(self) -> Sequence[Sequence[tuple[int, int]]]:
        """By device, level and index of the sums that it has when it has computed its part."""
        parts = partition(self.micro_batches, self.devices)
        return [partial_sums(numbers, self.micro_batches) for numbers in parts]

    @property
    def root(self) -> tuple[int, int]:
        """Level and index of the sum over all micro-batches."""
        return root_level(self.micro_batches), 0

    def piece_bytes(self, size_bytes: int) -> int:
        """Return the bytes of one device's piece of so many bytes in a slot."""
        return aligned(-(-size_bytes // self.devices))

    def slot_bytes(self, program: Program) -> int:
        """Return the bytes of a slot: the largest stage, filled up to equal pieces."""
        return self.devices * self.piece_bytes(largest_slot(program))

    def flat_sums(self, kind: Kind) -> FlatSums:
        """Return how the gradients of a kind's trainable weights lie in a row."""
        trained = [w for w, trains in zip(kind.weights, kind.trainable, strict=True) if trains]
        shapes, begins, end = [], [], 0
        for spec in trained:
            shapes.append(torch.Size(spec.shape))
            begins.append(end)
            end += math.prod(spec.shape)
        piece = -(-end // (self.devices * _ELEMENTS)) * _ELEMENTS
        return FlatSums(tuple(shapes), tuple(begins), max(piece, _ELEMENTS))

    def outgoing_bytes(self, program: Program) -> int:
        """Return the bytes of the buffer from which a device sends its sums."""
        most = max(map(len, self.held))
        return most * self.devices * self._largest_piece(program) * _ELEMENT_BYTES

    def incoming_bytes(self, program: Program) -> int:
        """Return the bytes of the buffer into which everyone's sums of a piece come."""
        return sum(map(len, self.held)) * self._largest_piece(program) * _ELEMENT_BYTES

    def return_bytes(self, program: Program) -> int:
        """Return the bytes of a buffer in host memory that all devices fill together."""
        return self.devices * self._largest_piece(program) * _ELEMENT_BYTES

    def device_bytes(self, program: Program, slots: int) -> int:
        """Return what a device holds all the time: slots, and the buffers of the exchange."""
        buffers = self.outgoing_bytes(program) + self.incoming_bytes(program)
        return slots * self.slot_bytes(program) + buffers

    def _largest_piece(self, program: Program) -> int:
        pieces = [self.flat_sums(stage.kind).piece for stage in program.stages if sends(stage)]
        return max(pieces, default=0)


def sends(stage: Stage) -> bool:
    """Tell whether a stage has gradients of weights to send."""
    return any(stage.kind.trainable) and any(stage.kind.outputs_grad)
