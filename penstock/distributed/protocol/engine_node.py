"""An engine's part of the step protocol.

The engine computes an operation when all weights of the operation have arrived and all earlier
operations are computed. In a view without relays it also forwards weights and adds the gradients of
other engines (`forwarding_node.py`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from penstock.collectives import PartialSum
from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.forwarding_node import ForwardingNode, ForwardingStep
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import Message, MessageType, unpack_arrays
from penstock.distributed.protocol.node_context import NodeContext
from penstock.distributed.protocol.transfer_schedule import (
    Chunk,
    SparseChunk,
    TransferOperation,
    TransferSchedule,
)
from penstock.step_schedule import ByStep


class EngineExecutor(Protocol):
    """The computation of an engine.

    The node's own thread calls `place`; the worker calls the other methods. The worker calls none
    of them while a job of an earlier step is still running.
    """

    def begin(self, step: int, part: Mapping[str, float], rows: Mapping[str, np.ndarray]) -> None:
        """Begin a step with these rows, and drop the state of the previous step."""
        ...

    def place(self, operation: TransferOperation, piece: Chunk, payload: np.ndarray | None) -> None:
        """Store a chunk of weights where the operation reads it."""
        ...

    def compute(self, operation: TransferOperation) -> Sequence[PartialSum]:
        """Compute an operation whose weights are placed; return the sums of its gradients.

        The node owns the returned tensors: it adds to them, and sends them.
        """
        ...

    def entries(
        self, operation: TransferOperation, piece: Chunk, gradient: torch.Tensor
    ) -> torch.Tensor:
        """Return the part of a sparse weight's flat gradient that is in a chunk; of a chunk without
        an entry, a single zero, because an empty gradient stands for none."""
        ...

    def losses(self) -> list[float]:
        """Return the loss of each micro-batch, after the operation whose sweep is "turn"."""
        ...


@dataclass
class _EngineStep(ForwardingStep):
    """An engine's state of the step in flight."""

    is_ready: bool = False  # whether the executor has the rows
    arrived: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    waiting: list[tuple[TransferOperation, Chunk, np.ndarray | None]] = field(default_factory=list)
    computed: int = 0
    is_busy: bool = False


class EngineNode(ForwardingNode[_EngineStep]):
    """One engine of a run.

    Args:
        number: its node number.
        context: carries its messages.
        transfers: the operations of each step.
        work: computes the operations.
    """

    lane = "compute"

    def __init__(
        self,
        number: int,
        context: NodeContext,
        transfers: ByStep[TransferSchedule],
        work: EngineExecutor,
    ) -> None:
        super().__init__(number, context, lambda step: _EngineStep(step, transfers(step)))
        self._work = work
        self._rows: Message | None = None  # of the next step, sent ahead in this epoch
        self._begins: Message | None = None  # BEGIN of the step in flight, while its rows lack

    def _enter(self, view: MembershipView) -> None:
        super()._enter(view)
        self._rows = self._begins = None

    def _take(self, message: Message) -> None:
        if message.kind is not MessageType.ROWS:
            super()._take(message)  # ROWS may be of the next step, and does not begin it
            return
        if self._rows is None or self._rows.step <= message.step:
            self._rows = message
        if self._begins is not None and self._begins.step == message.step:
            self._begin_job(self._begins, message)

    def _takes_part(self, view: MembershipView) -> bool:
        return self.number in view.engines

    @property
    def _own_credit(self) -> Sequence[int]:
        return (self.number,)

    def _begin(self, message: Message) -> None:
        self._learn_total(message)
        rows = message if "rows" in message.body else self._rows
        if rows is not None and rows.step == message.step:
            self._begin_job(message, rows)
        else:
            self._begins = message
        self._take_early_gradients()

    def _begin_job(self, message: Message, with_rows: Message) -> None:
        step = self._step
        part = {key: message_validation.real(message, key) for key in message.body if key != "rows"}
        self._rows = self._begins = None

        def begin() -> None:
            rows = unpack_arrays(with_rows.body.get("rows", ()), with_rows.payload)
            self._work.begin(step.number, part, rows)

        def ready(_: object) -> None:
            step.is_ready = True
            # Only now is the memory free that a job of an earlier step may have used.
            waiting, step.waiting = step.waiting, []
            for operation, piece, payload in waiting:
                self._work.place(operation, piece, payload)
            self._compute_next()

        self._run(step, "begin", begin, ready)

    def _take_weights(self, message: Message) -> None:
        step = self._step
        operation, piece = message_validation.weights_of(step.transfers, message)
        if message.op < step.computed or message.chunk in step.arrived[message.op]:
            return
        step.arrived[message.op].add(message.chunk)
        self._forward(message, piece)
        if not step.is_ready:
            step.waiting.append((operation, piece, message.payload))
            return
        try:
            self._work.place(operation, piece, message.payload)
        except Exception as error:  # the executor's error; the coordinator recovers
            self._report(self.epoch, step.number, error)
            return
        self._compute_next()

    def _compute_next(self) -> None:
        """Compute the next operation, if its weights and rows are here and no job is running."""
        step = self._step
        operations = step.transfers.operations
        if not step.is_ready or step.is_busy or step.computed == len(operations):
            return
        operation = operations[step.computed]
        if len(step.arrived[operation.number]) < len(operation.weights):
            return
        step.is_busy = True

        def compute() -> tuple[Sequence[PartialSum], Sequence[float] | None]:
            nodes = self._work.compute(operation)
            return nodes, self._work.losses() if operation.sweep == "turn" else None

        def done(results: tuple[Sequence[PartialSum], Sequence[float] | None]) -> None:
            nodes, losses = results
            step.is_busy = False
            step.computed += 1
            del step.arrived[operation.number]
            for shard in range(step.transfers.shards):
                self._send_credit(shard, self.number, step.computed)
            if losses is not None:
                self._notify(MessageType.LOSSES, {"losses": [loss.hex() for loss in losses]})
            for node in nodes:
                self._send_own(operation, node)
            self._compute_next()

        self._run(step, operation.sweep, compute, done, operation.number)

    # Gradients

    def _send_own(self, operation: TransferOperation, node: PartialSum) -> None:
        position = self._position
        for number, piece in enumerate(operation.gradients):
            tensor = node.tensors[piece.tensor]
            part = None
            if tensor is not None and isinstance(piece, SparseChunk):
                part = self._work.entries(operation, piece, tensor.view(-1)).float()
            elif tensor is not None:
                part = tensor.view(-1)[piece.begin : piece.end].float()
            self._send_sum(
                position.own_targets[position.lane(operation.number, number)],
                operation.number,
                number,
                PartialSum(node.level, node.index, (part,)),
            )
