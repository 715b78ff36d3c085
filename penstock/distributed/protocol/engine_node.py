"""An engine's part of the step protocol.

Chunks of weights arrive from the parent in a tree, and the engine forwards each chunk to its
children at once. The engine computes an operation when all weights of the operation have arrived
and all earlier operations are computed. The gradients go up a tree, in which this engine may also
add the gradients of other engines. The engine ignores messages of another epoch or step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from penstock.collectives import PartialSum, TreeReduction, partition
from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import Message, MessageType, sent_on, unpack_arrays
from penstock.distributed.protocol.node_base import ProtocolNode
from penstock.distributed.protocol.node_context import NodeContext
from penstock.distributed.protocol.transfer_schedule import (
    GRADIENT_WIDTH,
    Chunk,
    SparseChunk,
    TransferOperation,
    TransferSchedule,
)
from penstock.distributed.protocol.tree_topology import Summing, children, parent, root, summing
from penstock.errors import ProtocolError
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
class _Sum:
    """A chunk of gradients that this engine adds, and the number of missing micro-batches."""

    tree: TreeReduction
    missing: int
    elements: int = 0  # of the sums that exist; all have equally many
    seen: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class _TreePosition:
    """One engine's position in the trees of a view: its children, its parents, and its sums."""

    number: int
    child_nodes: Mapping[tuple[int, int], Sequence[int]]  # by shard and parity of the chunk
    parent_nodes: Sequence[int]  # by shard, the node that receives this engine's credit
    summing: Summing

    @classmethod
    def of(cls, view: MembershipView, engine: int) -> _TreePosition:
        """Return the position of an engine, given its node number."""
        position, engines, shards = view.engines.index(engine), view.engines, len(view.shards)
        child_nodes, parent_nodes = {}, []
        for shard, parity in itertools.product(range(shards), range(2)):
            begin = root(shard, parity, shards, len(engines))
            nodes = [engines[child] for child in children(position, begin, len(engines))]
            child_nodes[shard, parity] = nodes
        for shard, holders in enumerate(view.shards):
            over = parent(position, root(shard, 0, shards, len(engines)), len(engines))
            parent_nodes.append(holders[0] if over is None else engines[over])
        return cls(position, child_nodes, parent_nodes, summing(len(engines))[position])


@dataclass
class _EngineStep:
    """An engine's state of the step in flight."""

    number: int
    transfers: TransferSchedule
    total: int | None = None  # its micro-batches; known after BEGIN
    sums_begin: int = 0  # this engine adds the sums of micro-batches sums_begin to sums_end
    sums_end: int = 0
    is_ready: bool = False  # whether the executor has the rows
    arrived: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    waiting: list[tuple[TransferOperation, Chunk, np.ndarray | None]] = field(default_factory=list)
    computed: int = 0
    is_busy: bool = False
    credits: dict[tuple[int, int], int] = field(default_factory=dict)
    announced: dict[int, int] = field(default_factory=dict)
    sums: dict[tuple[int, int], _Sum] = field(default_factory=dict)
    early_gradients: list[Message] = field(default_factory=list)  # that arrived before BEGIN


def _tensor_of(message: Message) -> torch.Tensor:
    """Return a received gradient; a meta tensor where a simulation has omitted the bytes."""
    if message.payload is None:
        return torch.empty(message.size // GRADIENT_WIDTH, device="meta")
    return torch.frombuffer(message.payload, dtype=torch.float32)


def _bytes_of(tensor: torch.Tensor | None) -> tuple[np.ndarray | None, int]:
    """Return a gradient's memory, and its size in bytes."""
    if tensor is None:
        return None, 0
    if tensor.is_meta:
        return None, tensor.nbytes
    return tensor.contiguous().numpy().view(np.uint8), tensor.nbytes


class EngineNode(ProtocolNode[_EngineStep]):
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
        self._position = _TreePosition(0, {}, (), Summing(None, 0, 0, None))

    def _takes_part(self, view: MembershipView) -> bool:
        return self.number in view.engines

    def _enter(self, view: MembershipView) -> None:
        self._position = _TreePosition.of(view, self.number)

    def _take(self, message: Message) -> None:
        if message.step < self._step.number:
            self.refused += 1
            return
        if message.step > self._step.number:
            # A step begins only after the previous step has ended on all nodes.
            self._step = self._new_step(message.step)
        if message.kind is MessageType.BEGIN:
            self._begin(message)
        elif message.kind is MessageType.WEIGHTS:
            self._take_weights(message)
        elif message.kind is MessageType.GRADIENT:
            self._take_gradient(message)
        elif message.kind is MessageType.WEIGHT_CREDIT:
            self._take_credit(message)
        else:
            self.refused += 1

    # Weights

    def _begin(self, message: Message) -> None:
        step, view = self._step, self._view
        assert view is not None
        if step.total is not None:
            return
        total = message_validation.integer(message, "total", len(view.engines))
        part = {key: message_validation.real(message, key) for key in message.body if key != "rows"}
        step.total = total
        role = self._position.summing
        if role.adds:
            shares = partition(total, len(view.engines))
            step.sums_begin, step.sums_end = shares[role.begin].start, shares[role.end - 1].stop

        def begin() -> None:
            rows = unpack_arrays(message.body.get("rows", ()), message.payload)
            self._work.begin(step.number, part, rows)

        def ready(_: object) -> None:
            step.is_ready = True
            # Only now is the memory free that a job of an earlier step may have used.
            waiting, step.waiting = step.waiting, []
            for operation, piece, payload in waiting:
                self._work.place(operation, piece, payload)
            self._compute_next()

        self._run(step, "begin", begin, ready)
        early_gradients, step.early_gradients = step.early_gradients, []
        for gradient in early_gradients:
            self._take_gradient(gradient)

    def _take_weights(self, message: Message) -> None:
        step = self._step
        operation, piece = message_validation.weights_of(step.transfers, message)
        if message.op < step.computed or message.chunk in step.arrived[message.op]:
            return
        step.arrived[message.op].add(message.chunk)
        self.progress += 1
        for child in self._position.child_nodes[piece.shard, message.chunk % 2]:
            self._context.send(child, sent_on(message, self.number))
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

    def _take_credit(self, message: Message) -> None:
        shard, count = message.chunk, message.op
        children_of_shard = self._position.child_nodes.get((shard, 0), ())
        if message.sender not in children_of_shard:
            raise message_validation.refuse(
                message, f"is not from a child of this node in the tree of shard {shard}"
            )
        if count > len(self._step.transfers.operations):
            raise message_validation.refuse(message, f"counts {count} operations")
        self._send_credit(shard, message.sender, count)

    def _send_credit(self, shard: int, sender: int, count: int) -> None:
        """Send credit to the parent when more operations need no weights here and below."""
        step = self._step
        step.credits[shard, sender] = max(count, step.credits.get((shard, sender), 0))
        subtree = (self.number, *self._position.child_nodes[shard, 0])
        least = min(step.credits.get((shard, node), 0) for node in subtree)
        if least <= step.announced.get(shard, 0):
            return
        step.announced[shard] = least
        message = Message(
            MessageType.WEIGHT_CREDIT, self.epoch, self.number, step.number, least, shard
        )
        self._context.send(self._position.parent_nodes[shard], message)

    # Gradients

    def _send_own(self, operation: TransferOperation, node: PartialSum) -> None:
        for number, piece in enumerate(operation.gradients):
            tensor = node.tensors[piece.tensor]
            part = None
            if tensor is not None and isinstance(piece, SparseChunk):
                part = self._work.entries(operation, piece, tensor.view(-1)).float()
            elif tensor is not None:
                part = tensor.view(-1)[piece.begin : piece.end].float()
            self._send_sum(
                self._position.summing.own_target,
                operation.number,
                number,
                PartialSum(node.level, node.index, (part,)),
            )

    def _take_gradient(self, message: Message) -> None:
        """Add a chunk of a sum; send the sum when it is complete."""
        step = self._step
        if step.total is None:
            step.early_gradients.append(message)
            return
        message_validation.gradient_of(step.transfers, message)
        if message.level > step.total.bit_length():
            raise message_validation.refuse(
                message, f"names level {message.level} of a tree over {step.total} micro-batches"
            )
        first = message.index << message.level
        node = PartialSum(message.level, message.index, (None,))
        last = first + node.leaves(step.total)
        if not step.sums_begin <= first < last <= step.sums_end:
            raise message_validation.refuse(
                message,
                f"sums micro-batches {first} to {last}; this engine adds those of "
                f"{step.sums_begin} to {step.sums_end}",
            )
        if message.size:
            node = PartialSum(message.level, message.index, (_tensor_of(message),))
        self._add(message.op, message.chunk, node)

    def _add(self, op: int, chunk: int, node: PartialSum) -> None:
        step = self._step
        assert step.total is not None
        total = step.sums.get((op, chunk))
        if total is None:
            missing = step.sums_end - step.sums_begin
            total = step.sums[op, chunk] = _Sum(TreeReduction(step.total), missing)
        if (node.level, node.index) in total.seen:
            return  # a repeated sum is not added twice
        total.seen.add((node.level, node.index))
        total.missing -= node.leaves(step.total)
        if total.missing < 0:
            raise ProtocolError(
                f"gradient {chunk} of operation {op} was received for more micro-batches than this "
                "engine adds; do all nodes run the same version of Penstock?"
            )
        self._require_as_many(op, chunk, total, node)
        self.progress += 1
        total.tree.add(node)
        if total.missing:
            return
        nodes = total.tree.nodes()
        total.tree = TreeReduction(step.total)  # frees the memory of the sent sums
        for added in nodes:
            self._send_sum(self._position.summing.target, op, chunk, added)

    def _require_as_many(self, op: int, chunk: int, total: _Sum, node: PartialSum) -> None:
        """Check that a sum has as many elements as the others; those of a sparse weight vary."""
        tensor = node.tensors[0]
        if tensor is None:
            return
        total.elements = total.elements or tensor.numel()
        if tensor.numel() != total.elements:
            raise ProtocolError(
                f"gradient {chunk} of operation {op}: expected {total.elements} elements, as in "
                f"the other sums, got {tensor.numel()}; do all nodes have the same masks?"
            )

    def _send_sum(self, target: int | None, op: int, chunk: int, node: PartialSum) -> None:
        view = self._view
        assert view is not None
        if target == self._position.number:
            self._add(op, chunk, node)
            return
        if target is None:
            piece = self._step.transfers.operations[op].gradients[chunk]
            to = view.shards[piece.shard]  # all replicas of the shard
        else:
            to = (view.engines[target],)
        payload, size = _bytes_of(node.tensors[0])
        message = Message(
            MessageType.GRADIENT,
            self.epoch,
            self.number,
            self._step.number,
            op,
            chunk,
            node.level,
            node.index,
            payload=payload,
            size=size,
        )
        for receiver in to:
            self._context.send(receiver, message)
