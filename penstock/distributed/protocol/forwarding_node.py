"""What engines and relays have in common: forward weights, pass credit on, add gradients.

Chunks of weights arrive from the parent in a tree, and the node forwards each chunk to its children
at once. Gradients go up a tree, in which the node adds those of other nodes. The node ignores
messages of another epoch or step.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from penstock.collectives import PartialSum, TreeReduction, partition
from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import Message, MessageType, sent_on
from penstock.distributed.protocol.node_base import ProtocolNode
from penstock.distributed.protocol.node_context import NodeContext
from penstock.distributed.protocol.routes import NOWHERE, position_of
from penstock.distributed.protocol.transfer_schedule import (
    GRADIENT_WIDTH,
    Chunk,
    TransferSchedule,
)
from penstock.errors import ProtocolError


@dataclass
class _Sum:
    """A chunk of gradients that this node adds, and the number of missing micro-batches."""

    tree: TreeReduction
    missing: int
    elements: int = 0  # of the sums that exist; all have equally many
    seen: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class ForwardingStep:
    """A node's state of the step in flight; the number is 0 before the epoch's first step."""

    number: int
    transfers: TransferSchedule
    total: int | None = None  # the step's micro-batches; known after BEGIN
    sums_begin: int = 0  # this node adds the sums of micro-batches sums_begin to sums_end
    sums_end: int = 0
    credits: dict[tuple[int, int], int] = field(default_factory=dict)
    announced: dict[int, int] = field(default_factory=dict)
    sums: dict[tuple[int, int], _Sum] = field(default_factory=dict)
    early_gradients: list[Message] = field(default_factory=list)  # that arrived before BEGIN


Step = TypeVar("Step", bound=ForwardingStep)


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


class ForwardingNode(ProtocolNode[Step]):
    """An engine or a relay.

    Args:
        number: its node number.
        context: carries its messages.
        step: creates the state of a step from its number.
    """

    def __init__(self, number: int, context: NodeContext, step: Callable[[int], Step]) -> None:
        super().__init__(number, context, step)
        self._position = NOWHERE

    def _enter(self, view: MembershipView) -> None:
        self._position = position_of(view, self.number)

    def _take(self, message: Message) -> None:
        if message.step < self._step.number:
            self.refused += 1
            return
        if message.step > self._step.number:
            # A step begins only after the previous step has ended on all nodes.
            self._step = self._new_step(message.step)
        if message.kind is MessageType.BEGIN:
            if self._step.total is None:
                self._begin(message)
        elif message.kind is MessageType.WEIGHTS:
            self._take_weights(message)
        elif message.kind is MessageType.GRADIENT:
            self._take_gradient(message)
        elif message.kind is MessageType.WEIGHT_CREDIT:
            self._take_credit(message)
        else:
            self.refused += 1

    @abstractmethod
    def _begin(self, message: Message) -> None:
        """Handle the first BEGIN of a step."""

    @abstractmethod
    def _take_weights(self, message: Message) -> None:
        """Handle a chunk of weights."""

    def _learn_total(self, message: Message) -> None:
        """Read the number of micro-batches, and derive which of them this node adds."""
        step, view = self._step, self._view
        assert view is not None
        total = message_validation.integer(message, "total", len(view.engines))
        step.total = total
        if adds := self._position.adds:
            shares = partition(total, len(view.engines))
            step.sums_begin, step.sums_end = shares[adds[0]].start, shares[adds[-1]].stop

    def _take_early_gradients(self) -> None:
        """Add the gradients that arrived before BEGIN."""
        early_gradients, self._step.early_gradients = self._step.early_gradients, []
        for gradient in early_gradients:
            self._take_gradient(gradient)

    # Weights

    def _forward(self, message: Message, piece: Chunk) -> None:
        """Send a chunk of weights to this node's children in the tree of the chunk."""
        position = self._position
        lane = position.lane(message.op, message.chunk)
        below = position.child_nodes.get((piece.shard, lane))
        if below is None:
            raise message_validation.refuse(message, "is for another tree of relays")
        self.progress += 1
        forwarded = sent_on(message, self.number)
        for child in below:
            self._context.send(child, forwarded)

    @property
    def _own_credit(self) -> Sequence[int]:
        """The nodes beside the children without whose credit none is passed on: an engine."""
        return ()

    def _take_credit(self, message: Message) -> None:
        shard, count = message.chunk, message.op
        if message.sender not in self._position.credit_children.get(shard, ()):
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
        subtree = (*self._own_credit, *self._position.credit_children[shard])
        least = min(step.credits.get((shard, node), 0) for node in subtree)
        if least <= step.announced.get(shard, 0):
            return
        step.announced[shard] = least
        message = Message(
            MessageType.WEIGHT_CREDIT, self.epoch, self.number, step.number, least, shard
        )
        self._context.send(self._position.credit_parents[shard], message)

    # Gradients

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
                f"sums micro-batches {first} to {last}; this node adds those of "
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
                "node adds; do all nodes run the same version of Penstock?"
            )
        self._require_as_many(op, chunk, total, node)
        self.progress += 1
        total.tree.add(node)
        if total.missing:
            return
        nodes = total.tree.nodes()
        total.tree = TreeReduction(step.total)  # frees the memory of the sent sums
        for added in nodes:
            self._send_sum(self._position.target, op, chunk, added)

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
        if target == self.number:
            self._add(op, chunk, node)
            return
        to: Sequence[int] = () if target is None else (target,)
        if target is None:
            piece = self._step.transfers.operations[op].gradients[chunk]
            to = view.shards[piece.shard]  # all replicas of the shard
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
