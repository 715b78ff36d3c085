"""The computation of an engine process: runs the operations that the protocol node hands over."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock.collectives import PartialSum
from penstock.distributed.protocol import WINDOW, Chunk, SparseChunk, TransferOperation
from penstock.distributed.worker.sparse_transfer import ReceivedMasks, entries_in
from penstock.engine import (
    Batch,
    Engine,
    compute,
    micro_batches,
    return_unused_pages,
    target_of,
)
from penstock.kernels.memory import allocate
from penstock.program import Program, WeightSpec, largest_stage
from penstock.spans import Spans
from penstock.sparsity import StreamedWeight
from penstock.step_schedule import ByStep, StepSchedule

_ALIGNMENT = 64


class LocalEngineExecutor:
    """Feeds an engine with received weights and returns its gradients.

    The weights of an operation are assembled in one of `WINDOW` buffers, each as large as the
    largest stage. At most `WINDOW` operations are in flight. The operations of every step read the
    same weights.
    """

    def __init__(
        self,
        engine: Engine,
        program: Program,
        schedules: ByStep[StepSchedule],
        device: str = "cpu",
    ) -> None:
        self._engine = engine
        self._schedules, self._schedule = schedules, schedules.usual  # and that of the step
        self._places: list[list[tuple[int, WeightSpec]]] = []
        for operation in schedules.usual.operations:
            begin, places = 0, []
            for spec in (program.weights[name] for name in operation.weights):
                places.append((begin, spec))
                begin += _aligned_bytes(spec)
            self._places.append(places)
        _, largest = largest_stage(program, _aligned_bytes)
        self._target = target_of(device)
        self._micro_batches = 0
        self._begun = 0  # steps
        self._spans, self._computed = Spans(), 0  # and the number of micro-batches computed so far
        self._buffers = [allocate(largest) for _ in range(WINDOW)]
        self._masks = ReceivedMasks()
        # Chunks of sparse weights, whose places follow from their masks, by operation.
        self._chunks: dict[int, dict[SparseChunk, np.ndarray]] = {}

    @property
    def peak_bytes(self) -> int:
        """The engine's peak memory."""
        return self._engine.memory.peak_bytes

    @property
    def computed(self) -> tuple[float, int]:
        """Seconds of computing so far, and the number of micro-batches computed in this time."""
        return self._spans.seconds("compute"), self._computed

    def begin(self, step: int, part: Mapping[str, float], rows: Mapping[str, np.ndarray]) -> None:
        """Begin a step with these rows."""
        return_unused_pages(self._begun)
        self._begun += 1
        first, total, count = int(part["first"]), int(part["total"]), int(part["count"])
        self._micro_batches = count
        self._schedule = self._schedules(step)
        self._chunks.clear()
        tensors = {name: torch.from_numpy(array) for name, array in rows.items()}
        self._engine.begin(
            Batch(
                micro_batches(tensors, count),
                first,
                total,
                int(part["seed"]),
                step - 1,
                float(part["scale"]),
            )
        )

    def place(self, operation: TransferOperation, piece: Chunk, payload: np.ndarray | None) -> None:
        """Copy a chunk of weights into the operation's buffer."""
        if payload is None:
            return
        if isinstance(piece, SparseChunk):
            self._chunks.setdefault(operation.number, {})[piece] = payload.copy()
            return
        begin = self._places[operation.number][piece.tensor][0] + piece.begin * piece.width
        self._buffers[operation.number % WINDOW][begin : begin + payload.nbytes] = payload

    def compute(self, operation: TransferOperation) -> Sequence[PartialSum]:
        """Compute an operation; return its partial sums of gradients."""
        with self._spans.span("compute", operation.sweep, op=operation.number):
            nodes = self._compute(operation)
        if operation.sweep == "turn":
            self._computed += self._micro_batches
        return nodes if operation.gradients else []

    def _compute(self, operation: TransferOperation) -> Sequence[PartialSum]:
        engine = self._engine
        scheduled = self._schedule.operations[operation.number]
        engine.load(operation.stage, self._received(operation, scheduled.dense_gradients))
        pending = compute(engine, scheduled)
        nodes: Sequence[PartialSum] = [] if pending is None else pending.wait()
        if self._target.has_own_memory:
            self._target.synchronize()  # the buffer is reused when this returns
            nodes = [_kept(node) for node in nodes]
        return nodes

    def _received(
        self, operation: TransferOperation, dense_gradients: Collection[str]
    ) -> list[StreamedWeight]:
        """Return the weights of an operation, all of whose chunks are placed.

        **Arguments:** `dense_gradients` are the sparse weights whose dense gradients are computed.
        """
        buffer = self._buffers[operation.number % WINDOW]
        payloads = self._chunks.pop(operation.number, {})
        weights: list[StreamedWeight] = []
        for tensor, (begin, spec) in enumerate(self._places[operation.number]):
            place = buffer[begin : begin + spec.entries * spec.stream_dtype.itemsize]
            if spec.is_sparse:
                pieces = (piece for piece in operation.weights if piece.tensor == tensor)
                chunks = [piece for piece in pieces if isinstance(piece, SparseChunk)]
                weight = self._masks.weight(spec, chunks, payloads, place)
                is_dense = spec.name in dense_gradients
                weights.append(replace(weight, dense_gradient=True) if is_dense else weight)
            else:
                weights.append(torch.from_numpy(place).view(spec.stream_dtype).view(spec.shape))
        return weights

    def entries(
        self, operation: TransferOperation, piece: Chunk, gradient: torch.Tensor
    ) -> torch.Tensor:
        """Return the part of a sparse weight's flat gradient that is in a chunk."""
        assert isinstance(piece, SparseChunk)
        name = self._schedule.operations[operation.number].gradients[piece.tensor]
        part = gradient[entries_in(self._masks.index(name), piece)]
        return part if part.numel() else torch.zeros(1)

    def losses(self) -> list[float]:
        """Return the loss of each micro-batch."""
        return self._engine.losses()


def _aligned_bytes(weight: WeightSpec) -> int:
    return -(-weight.stream_bytes // _ALIGNMENT) * _ALIGNMENT


def _kept(node: PartialSum) -> PartialSum:
    """Return a partial sum with memory of its own.

    A device returns sums in buffers that are reused, but a sum is sent or added later.
    """
    return replace(node, tensors=tuple(None if t is None else t.clone() for t in node.tensors))
