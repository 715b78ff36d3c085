"""How the devices of a group divide a stage's weights and the sums of its gradients.

Weights are adjacent in a slot, which is divided into one equal piece per device. Each device copies
its piece from the host, and the devices gather the other pieces from each other. Gradients are one
flat row of float32, divided likewise: each device receives all devices' sums of its piece, and adds
them in the tree over the micro-batches. The program and two numbers determine all sizes, so no
device needs to ask another.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.collectives import partial_sums, partition, root_level
from penstock.program import Program, Stage, largest_stage

ALIGNMENT = 512  # bytes; the alignment of device allocations
_ELEMENTS = ALIGNMENT // 4  # of float32
_ELEMENT_BYTES = 4
_NO_SHAPES: Mapping[str, Sequence[int]] = {}


def aligned(size: int) -> int:
    """Return a number of bytes rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def largest_slot(program: Program) -> int:
    """Return the bytes of the largest stage in a slot, the values of each weight aligned."""
    return largest_stage(program, lambda weight: aligned(weight.value_bytes))[1]


@dataclass(frozen=True)
class FlatSums:
    """The gradients of a stage as one row: shapes, offsets, elements of a piece."""

    shapes: tuple[torch.Size, ...]
    begins: tuple[int, ...]
    piece: int

    def cuts(self, tensor: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the division of a tensor over the devices: device, offset in the piece, and the
        first and last + 1 of the tensor's elements in that piece."""
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
    """The number of devices in a group, and the number of micro-batches that a step sums over.

    `dense_gradients` says that some steps compute the gradient of every element of sparse weights.
    """

    devices: int
    micro_batches: int
    dense_gradients: bool = False

    @cached_property
    def held(self) -> Sequence[Sequence[tuple[int, int]]]:
        """Per device, level and index of the sums that it has after computing its part."""
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
        """Return the bytes of a slot: the largest stage, padded to equal pieces."""
        return self.devices * self.piece_bytes(largest_slot(program))

    def flat_sums(
        self, stage: Stage, gradient_shapes: Mapping[str, Sequence[int]] = _NO_SHAPES
    ) -> FlatSums:
        """Return the layout of a stage's weight gradients in a row.

        `gradient_shapes` are the shapes of the gradients of sparse weights, by name; another
        gradient has the shape of its weight.
        """
        kind, begins, end = stage.kind, [], 0
        shapes = [
            torch.Size(gradient_shapes.get(name, spec.shape))
            for name, spec, trains in zip(stage.weights, kind.weights, kind.trainable, strict=True)
            if trains
        ]
        for shape in shapes:
            begins.append(end)
            end += math.prod(shape)
        piece = -(-end // (self.devices * _ELEMENTS)) * _ELEMENTS
        return FlatSums(tuple(shapes), tuple(begins), max(piece, _ELEMENTS))

    def outgoing_bytes(self, program: Program) -> int:
        """Return the bytes of the buffer from which a device sends its sums."""
        most = max(map(len, self.held))
        return most * self.devices * self._largest_piece(program) * _ELEMENT_BYTES

    def incoming_bytes(self, program: Program) -> int:
        """Return the bytes of the buffer that receives all devices' sums of a piece."""
        return sum(map(len, self.held)) * self._largest_piece(program) * _ELEMENT_BYTES

    def return_bytes(self, program: Program) -> int:
        """Return the bytes of a host buffer that all devices fill together."""
        return self.devices * self._largest_piece(program) * _ELEMENT_BYTES

    def device_bytes(self, program: Program, slots: int) -> int:
        """Return the bytes that a device holds permanently: slots and exchange buffers."""
        buffers = self.outgoing_bytes(program) + self.incoming_bytes(program)
        return slots * self.slot_bytes(program) + buffers

    def _largest_piece(self, program: Program) -> int:
        largest = {
            name: spec.shape if self.dense_gradients else (spec.capacity,)
            for name, spec in program.weights.items()
            if spec.is_sparse
        }
        pieces = [self.flat_sums(stage, largest).piece for stage in program.stages if sends(stage)]
        return max(pieces, default=0)


def sends(stage: Stage) -> bool:
    """Return whether a stage has weight gradients to send."""
    return any(stage.kind.trainable) and any(stage.kind.outputs_grad)
