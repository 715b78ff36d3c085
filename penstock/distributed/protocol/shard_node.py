"""A store shard's part of the step protocol.

It streams its pieces of the weights, an operation at a time and only so far ahead as the engines
It streams its pieces of the weights, unless another node of the shard does: an operation at a time
and only so far ahead as the engines have room and their gradients have been taken. Without weights
nobody computes more of these, so that no more than a few wait in an engine's memory, however slow
its links are. It takes the sums of its pieces' gradients, once each; says when it has them all; and
commits when it is told to, once. Between steps it may be told to go back to a step that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.protocol.node_base import ProtocolNode
from penstock.distributed.protocol.node_context import NodeContext
from penstock.distributed.protocol.transfer_schedule import TransferOperation, TransferSchedule
from penstock.distributed.protocol.tree_topology import root

WINDOW = 2  # operations on their way; what a store on flash hands out is good for as many
GRADIENTS = 4  # operations whose gradients are made or on their way: two computing, two going up


class ShardExecutor(Protocol):
    """What a shard does between the messages; called by the runtime's worker, one at a time."""

    def held_steps(self) -> Sequence[int]:
        """Return the steps that this shard can go back to, as a crash of it would leave them.

        A store on flash says its durable steps; one in memory the step at which it stands.
        """
        ...

    def go_back(self, step: int) -> None:
        """Stand at a step that is held: forget whatever came after it."""
        ...

    def begin(self, step: int) -> None:
        """Forget what came of a step that was not committed; `step` comes next."""
        ...

    def settle(self) -> None:
        """Make whatever is still awaited of the step before: no fetch will ask for it."""
        ...

    def fetch(self, operation: TransferOperation) -> Sequence[np.ndarray | None]:
        """Return, for every chunk of this shard's in the operation, its bytes.

        The memory stays as it is until so many more operations are fetched as there are on their
        way at once. None stands for bytes that a simulation leaves out.
        """
        ...

    def receive(
        self, operation: TransferOperation, gradients: Mapping[int, np.ndarray | None]
    ) -> None:
        """Take this shard's gradients of an operation: by chunk, float32; None for no gradient."""
        ...

    def prepare(self) -> Mapping[str, Any]:
        """Say what the coordinator must know of the gradients, as JSON."""
        ...

    def commit(self, step: int, decision: Mapping[str, Any]) -> Mapping[str, Any]:
        """Commit a step. Called once for it, unless the shard went back before it."""
        ...


@dataclass
class _ShardStep:
    """What a shard knows of the step in flight; its number is 0 before the epoch's first."""

    number: int
    fetched: int = 0
    is_fetching: bool = False
    released: int = 0
    begun: bool = False
    gradients: dict[int, dict[int, np.ndarray | None]] = field(default_factory=dict)
    received: int = 0  # of the operations with gradients, in their order
    stored: int = 0  # of these, those whose gradients the store has taken
    is_prepared: bool = False
    commit_began: bool = False
    answer: Mapping[str, Any] | None = None  # to the commit


class ShardNode(ProtocolNode[_ShardStep]):
    """One shard of the store among others.

    Args:
        number: its own among all nodes of the run.
        shard: which shard it holds.
        runtime: carries its messages.
        transfers: the operations of a step.
        work: reads and writes the shard's store.
        window: how many operations' weights may be on their way; as many as engines have slots.
        gradients: of how many operations gradients may be made or on their way.
    """

    def __init__(
        self,
        number: int,
        shard: int,
        runtime: NodeContext,
        transfers: TransferSchedule,
        work: ShardExecutor,
        window: int = WINDOW,
        gradients: int = GRADIENTS,
    ) -> None:
        super().__init__(number, runtime, _ShardStep)
        self._shard, self._transfers, self._work = shard, transfers, work
        self._window, self._most_gradients = window, gradients
        operations = transfers.operations
        self._sends = [operation.of_shard(shard) for operation in operations]
        wanted = [(op, op.gradients_of(shard)) for op in operations]
        self._wanted = [(op, numbers) for op, numbers in wanted if numbers]
        self._streams = False  # whether it is this node of the shard that does
        self._asked: set[MessageType] = set()  # what the coordinator has asked in this epoch
        self.sent_bytes = 0  # of weights, since the node was made

    def _takes_part(self, view: MembershipView) -> bool:
        return self._shard < len(view.shards) and self.number in view.shards[self._shard]

    def _enter(self, view: MembershipView) -> None:
        self._asked.clear()
        self._streams = view.shards[self._shard][0] == self.number

    def _take(self, message: Message) -> None:
        if message.kind is MessageType.BEGIN:
            self._begin(message)
        elif message.kind in (MessageType.HELD_STEPS, MessageType.ROLLBACK):
            self._take_question(message)
        elif message.step != self._step.number:
            self.refused += 1
        elif message.kind is MessageType.COMMIT:
            self._commit(message)
        elif message.kind is MessageType.WEIGHT_CREDIT:
            self._take_release(message)
        elif message.kind is MessageType.GRADIENT:
            self._take_gradient(message)
        else:
            self.refused += 1

    def _take_question(self, message: Message) -> None:
        """Say which steps this shard holds, or go back to one: before the epoch's first step."""
        if self._step.number or message.kind in self._asked:
            self.refused += 1  # a repetition: the first one is answered or being answered
            return
        self._asked.add(message.kind)
        step, kind = self._step, message.kind
        if kind is MessageType.HELD_STEPS:
            self._run(
                step,
                self._work.held_steps,
                lambda steps: self._say(kind, {"steps": [int(held) for held in steps]}),
            )
            return
        to = message_validation.integer(message, "to", 0)
        self._run(step, lambda: self._work.go_back(to), lambda _: self._say(kind, {"to": to}))

    def _begin(self, message: Message) -> None:
        if message.step <= self._step.number:
            return
        step = self._step = _ShardStep(message.step)

        def ready(_: object) -> None:
            step.begun = True
            self._pump()
            self._prepare_if_whole()  # it may be that this shard has no gradients to wait for

        def begin() -> None:
            self._work.begin(message.step)
            if not self._streams:
                self._work.settle()

        self._run(step, begin, ready)

    def _pump(self) -> None:
        """Fetch the next operation, if the engines have room for it."""
        step = self._step
        if not self._streams or not step.begun or step.is_fetching:
            return
        if step.fetched == len(self._transfers.operations):
            return
        if step.fetched >= step.released + self._window:
            return
        operation = self._transfers.operations[step.fetched]
        let_go = sum(op.number < operation.number for op, _ in self._wanted)
        if let_go - step.stored >= self._most_gradients:
            return
        step.is_fetching = True

        def fetched(parts: Sequence[np.ndarray | None]) -> None:
            step.is_fetching = False
            step.fetched += 1
            self._send_weights(operation, parts)
            self._pump()

        self._run(step, lambda: self._work.fetch(operation), fetched)

    def _send_weights(
        self, operation: TransferOperation, parts: Sequence[np.ndarray | None]
    ) -> None:
        view = self._view
        assert view is not None
        engines, shards = view.engines, len(view.shards)
        for chunk, part in zip(self._sends[operation.number], parts, strict=True):
            size = operation.weights[chunk].size
            message = Message(
                MessageType.WEIGHTS,
                self.epoch,
                self.number,
                self._step.number,
                operation.number,
                chunk,
                payload=None if part is None else part.reshape(-1).view(np.uint8),
                size=size,
            )
            self.sent_bytes += size
            begin = root(self._shard, chunk, shards, len(engines))
            self._runtime.send(engines[begin], message)

    def _take_release(self, message: Message) -> None:
        if message.op > len(self._transfers.operations):
            raise message_validation.refuse(message, f"counts {message.op} operations")
        self._step.released = max(self._step.released, message.op)
        self._pump()

    def _take_gradient(self, message: Message) -> None:
        step = self._step
        _, piece = message_validation.gradient_of(self._transfers, message)
        if piece.shard != self._shard:
            raise message_validation.refuse(
                message, f"is for shard {piece.shard}, and came to {self._shard}"
            )
        if message.index:
            raise message_validation.refuse(message, "is no sum over all micro-batches")
        came = step.gradients.setdefault(message.op, {})
        if message.chunk in came:
            return  # nothing counts twice
        came[message.chunk] = None
        if message.payload is not None:
            came[message.chunk] = message.payload.view(np.float32)
        self.progress += 1
        self._prepare_if_whole()

    def _prepare_if_whole(self) -> None:
        """Hand on what is whole, in the order of the sweep, and say when all of it is."""
        step = self._step

        def stored(_: object) -> None:
            step.stored += 1
            self._pump()

        while step.received < len(self._wanted):
            operation, numbers = self._wanted[step.received]
            came = step.gradients.get(operation.number, {})
            if len(came) < len(numbers):
                return
            step.gradients[operation.number] = dict.fromkeys(numbers)  # its memory is the job's
            step.received += 1
            self._run(step, self._receiving(operation, came), stored)
        if step.is_prepared:
            return
        step.is_prepared = True
        self._run(step, self._work.prepare, lambda body: self._say(MessageType.PREPARED, body))

    def _receiving(
        self, operation: TransferOperation, came: Mapping[int, np.ndarray | None]
    ) -> Callable[[], None]:
        return lambda: self._work.receive(operation, came)

    def _commit(self, message: Message) -> None:
        step = self._step
        if not step.is_prepared:
            raise message_validation.refuse(
                message, "is too early: this shard has not all gradients"
            )
        if step.answer is not None:
            self._say(MessageType.COMMITTED, step.answer)
            return
        if step.commit_began:
            return  # the answer is on its way
        step.commit_began = True
        decision = dict(message.body)

        def committed(answer: Mapping[str, Any]) -> None:
            step.answer = answer
            self._say(MessageType.COMMITTED, answer)

        self._run(step, lambda: self._work.commit(step.number, decision), committed)
