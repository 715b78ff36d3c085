"""A store shard's part of the step protocol.

One replica of the shard streams its pieces of the weights, operation by operation. Two limits apply
back-pressure: the buffers of the engines, and the number of operations whose gradients not all
replicas have stored yet. Without weights the engines compute no more gradients, so only a few
operations' gradients wait in an engine's memory, however slow its connections to the replicas are,
or in a replica's, however slow its store is. The coordinator passes the credit of the other
replicas on: it knows which of them are lost. The shard
receives the sum of each of its gradients once. It reports when all gradients have arrived. It
commits once, on the coordinator's decision. Between steps the coordinator may roll the shard back
to a step that it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import (
    COORDINATOR,
    Message,
    MessageType,
    message_with,
)
from penstock.distributed.protocol.node_base import ProtocolNode
from penstock.distributed.protocol.node_context import NodeContext
from penstock.distributed.protocol.routes import first_node
from penstock.distributed.protocol.transfer_schedule import TransferOperation, TransferSchedule
from penstock.spans import Spans
from penstock.step_schedule import ByStep

WINDOW = 2  # operations in flight; a store on flash keeps the memory of this many fetches valid
GRADIENTS = 4  # operations with gradients in progress or in flight: two computing, two going up
_FROM_ENGINES = (MessageType.WEIGHT_CREDIT, MessageType.GRADIENT)  # and relays; may overtake BEGIN


class ShardExecutor(Protocol):
    """The store operations of a shard; the worker calls them one at a time."""

    @property
    def spans(self) -> Sequence[Spans]:
        """The measurements of its store."""
        ...

    def held_steps(self) -> Sequence[int]:
        """Return the steps that this shard can roll back to, even after a crash.

        A store on flash returns its durable steps. A store in memory returns its current step.
        """
        ...

    def roll_back(self, step: int) -> None:
        """Roll back to a held step and drop all later state."""
        ...

    def enter(self) -> None:
        """Begin an epoch: its engines may be others, which have no mask of a sparse weight."""
        ...

    def begin(self, step: int) -> None:
        """Drop the state of a step that was not committed; `step` comes next."""
        ...

    def settle(self) -> None:
        """Finish pending work of the previous step; called on replicas that do not stream."""
        ...

    def fetch(self, operation: TransferOperation) -> Sequence[np.ndarray | None]:
        """Return the bytes of every chunk of this shard in the operation.

        The memory stays valid until the shard has fetched as many more operations as may be in
        flight at once. None stands for bytes that a simulation leaves out.
        """
        ...

    def receive(
        self, operation: TransferOperation, gradients: Mapping[int, np.ndarray | None]
    ) -> None:
        """Store this shard's gradients of an operation: by chunk, float32; None for no gradient."""
        ...

    def prepare(self) -> Mapping[str, Any]:
        """Return the shard's report on the gradients for the coordinator, as JSON."""
        ...

    def histograms(self, selections: np.ndarray | None) -> np.ndarray:
        """Return the histograms of the shard's entries for selections of the step, bytes."""
        ...

    def commit(
        self, step: int, decision: Mapping[str, Any], masks: np.ndarray | None
    ) -> Mapping[str, Any]:
        """Commit a step, with changes of masks if there are any. Called once per step, unless the
        shard rolled back to before the step."""
        ...


@dataclass(frozen=True)
class _ShardTransfers:
    """One shard's part of the transfers of a step.

    `sends` are the numbers of the weight chunks that it sends, by operation. `receives` are the
    operations of which it receives gradients, with the numbers of their gradient chunks.
    """

    schedule: TransferSchedule
    sends: Sequence[Sequence[int]]
    receives: Sequence[tuple[TransferOperation, Sequence[int]]]

    @classmethod
    def of(cls, schedule: TransferSchedule, shard: int) -> _ShardTransfers:
        operations = schedule.operations
        received = [(op, op.gradients_of(shard)) for op in operations]
        return cls(
            schedule,
            [op.of_shard(shard) for op in operations],
            [(op, numbers) for op, numbers in received if numbers],
        )


@dataclass
class _ShardStep:
    """A shard's state of the step in flight; the number is 0 before the epoch's first step."""

    number: int
    transfers: _ShardTransfers
    fetched: int = 0
    is_fetching: bool = False
    credit: int = 0
    begun: bool = False
    gradients: dict[int, dict[int, np.ndarray | None]] = field(default_factory=dict)
    received: int = 0  # of the operations with gradients, in order: how many have all gradients
    stored: int = 0  # how many of these the store has taken
    stored_by_others: int | None = None  # and all other replicas have; None: there is no other
    is_prepared: bool = False
    commit_began: bool = False
    histogram_round: int = 0  # the last one requested
    answer: Mapping[str, Any] | None = None  # to the commit


class ShardNode(ProtocolNode[_ShardStep]):
    """One replica of a shard.

    Args:
        number: its node number.
        shard: the shard that it holds.
        context: carries its messages.
        transfers: the operations of each step.
        work: reads and writes the shard's store.
        window: how many operations' weights may be in flight; equal to the slots of an engine.
        gradients: how many operations may have gradients in progress or in flight.
    """

    lane = "store"

    def __init__(
        self,
        number: int,
        shard: int,
        context: NodeContext,
        transfers: ByStep[TransferSchedule],
        work: ShardExecutor,
        window: int = WINDOW,
        gradients: int = GRADIENTS,
    ) -> None:
        own = transfers.map(lambda schedule: _ShardTransfers.of(schedule, shard))
        super().__init__(number, context, lambda step: _ShardStep(step, own(step)))
        self._shard, self._work = shard, work
        self._window, self._most_gradients = window, gradients
        self._streams = False  # whether this replica streams the weights
        self._has_others = False  # whether the shard has other replicas in this epoch
        self._questions: set[MessageType] = set()  # the coordinator's questions in this epoch
        self._early: list[Message] = []  # of engines and relays, before BEGIN of their step
        self.sent_bytes = 0  # weights sent since the node was created

    def _takes_part(self, view: MembershipView) -> bool:
        return self._shard < len(view.shards) and self.number in view.shards[self._shard]

    def _enter(self, view: MembershipView) -> None:
        self._questions.clear()
        self._early.clear()
        replicas = view.shards[self._shard]
        self._streams, self._has_others = replicas[0] == self.number, len(replicas) > 1

    def _take(self, message: Message) -> None:
        if message.kind is MessageType.BEGIN:
            self._begin(message)
        elif message.kind in (MessageType.HELD_STEPS, MessageType.ROLLBACK):
            self._take_question(message)
        elif message.step > self._step.number and message.kind in _FROM_ENGINES:
            self._early.append(message)
        elif message.step != self._step.number:
            self.refused += 1
        elif message.kind is MessageType.COMMIT:
            self._commit(message)
        elif message.kind is MessageType.HISTOGRAM_REQUEST:
            self._count_entries(message)
        elif message.kind is MessageType.WEIGHT_CREDIT:
            self._take_credit(message)
        elif message.kind is MessageType.GRADIENT:
            self._take_gradient(message)
        elif message.kind is MessageType.GRADIENT_CREDIT:
            self._take_gradient_credit(message)
        else:
            self.refused += 1

    def _take_question(self, message: Message) -> None:
        """Answer with the held steps, or roll back; valid only before the epoch's first step."""
        if self._step.number or message.kind in self._questions:
            self.refused += 1  # a repetition: the first answer is sent or in progress
            return
        self._questions.add(message.kind)
        step, kind = self._step, message.kind
        if kind is MessageType.HELD_STEPS:
            self._run(
                step,
                "held steps",
                self._work.held_steps,
                lambda steps: self._notify(kind, {"steps": [int(held) for held in steps]}),
            )
            return
        to = message_validation.integer(message, "to", 0)
        self._run(
            step,
            "rollback",
            lambda: self._work.roll_back(to),
            lambda _: self._notify(kind, {"to": to}),
        )

    def _begin(self, message: Message) -> None:
        if message.step <= self._step.number:
            return
        is_first = not self._step.number
        step = self._step = self._new_step(message.step)
        step.stored_by_others = 0 if self._has_others else None

        def ready(_: object) -> None:
            step.begun = True
            self._fetch_next()
            self._prepare_if_complete()  # this shard may have no gradients

        def begin() -> None:
            if is_first:
                self._work.enter()
            self._work.begin(message.step)
            if not self._streams:
                self._work.settle()

        self._run(step, "begin", begin, ready)
        early, self._early = self._early, []
        for each in early:
            self.handle(each)

    def _fetch_next(self) -> None:
        """Fetch the next operation, if the two limits allow it."""
        step = self._step
        if not self._streams or not step.begun or step.is_fetching:
            return
        operations = step.transfers.schedule.operations
        if step.fetched == len(operations):
            return
        if step.fetched >= step.credit + self._window:
            return
        operation = operations[step.fetched]
        earlier = sum(op.number < operation.number for op, _ in step.transfers.receives)
        others = step.stored_by_others
        stored = step.stored if others is None else min(step.stored, others)
        if earlier - stored >= self._most_gradients:
            return
        step.is_fetching = True

        def fetched(parts: Sequence[np.ndarray | None]) -> None:
            step.is_fetching = False
            step.fetched += 1
            self._send_weights(operation, parts)
            self._fetch_next()

        job = functools.partial(self._work.fetch, operation)
        self._run(step, "fetch", job, fetched, operation.number)

    def _send_weights(
        self, operation: TransferOperation, parts: Sequence[np.ndarray | None]
    ) -> None:
        view, sends = self._view, self._step.transfers.sends
        assert view is not None
        for chunk, part in zip(sends[operation.number], parts, strict=True):
            size = operation.weights[chunk].size if part is None else part.nbytes
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
            self._context.send(first_node(view, self._shard, operation.number, chunk), message)

    def _take_credit(self, message: Message) -> None:
        if message.op > len(self._step.transfers.schedule.operations):
            raise message_validation.refuse(message, f"counts {message.op} operations")
        self._step.credit = max(self._step.credit, message.op)
        self._fetch_next()

    def _take_gradient_credit(self, message: Message) -> None:
        """Take how many operations' gradients the other replicas have stored."""
        step = self._step
        if not message.body:
            step.stored_by_others = None
        elif step.stored_by_others is not None:
            stored = message_validation.integer(message, "stored", 0)
            step.stored_by_others = max(step.stored_by_others, stored)
        self._fetch_next()

    def _take_gradient(self, message: Message) -> None:
        step = self._step
        _, piece = message_validation.gradient_of(step.transfers.schedule, message)
        if piece.shard != self._shard:
            raise message_validation.refuse(
                message, f"is for shard {piece.shard}, but was sent to shard {self._shard}"
            )
        if message.index:
            raise message_validation.refuse(message, "is not the sum over all micro-batches")
        arrived = step.gradients.setdefault(message.op, {})
        if message.chunk in arrived:
            return  # a repeated chunk is ignored
        arrived[message.chunk] = None
        if message.payload is not None:
            arrived[message.chunk] = message.payload.view(np.float32)
        self.progress += 1
        self._prepare_if_complete()

    def _prepare_if_complete(self) -> None:
        """Store operations whose gradients have arrived, in order; report when all are stored."""
        step = self._step

        def stored(_: object) -> None:
            step.stored += 1
            if self._has_others:
                self._notify(MessageType.GRADIENT_CREDIT, {"stored": step.stored})
            self._fetch_next()

        receives = step.transfers.receives
        while step.received < len(receives):
            operation, numbers = receives[step.received]
            arrived = step.gradients.get(operation.number, {})
            if len(arrived) < len(numbers):
                return
            step.gradients[operation.number] = dict.fromkeys(numbers)  # the job owns the memory
            step.received += 1
            job = functools.partial(self._work.receive, operation, arrived)
            self._run(step, "receive", job, stored, operation.number)
        if step.is_prepared:
            return
        step.is_prepared = True
        self._run(
            step,
            "prepare",
            self._work.prepare,
            lambda body: self._notify(MessageType.PREPARED, body),
        )

    def _count_entries(self, message: Message) -> None:
        step = self._step
        self._require_prepared(message)
        number = message_validation.integer(message, "round", 1)
        if number <= step.histogram_round:
            return  # a repetition
        step.histogram_round = number

        def counted(histograms: np.ndarray) -> None:
            fields = {"epoch": self.epoch, "sender": self.number, "step": step.number}
            kind, body = MessageType.HISTOGRAM_REPLY, {"round": number}
            sent = message_with(histograms, kind=kind, body=body, **fields)
            self._context.send(COORDINATOR, sent)

        job = functools.partial(self._work.histograms, message.payload)
        self._run(step, "histograms", job, counted)

    def _require_prepared(self, message: Message) -> None:
        if not self._step.is_prepared:
            raise message_validation.refuse(
                message, "is too early: this shard has not received all gradients"
            )

    def _commit(self, message: Message) -> None:
        step = self._step
        self._require_prepared(message)
        if step.answer is not None:
            self._notify(MessageType.COMMITTED, step.answer)
            return
        if step.commit_began:
            return  # the commit is still running
        step.commit_began = True
        decision, masks = dict(message.body), message.payload

        def committed(answer: Mapping[str, Any]) -> None:
            step.answer = answer
            self._notify(MessageType.COMMITTED, answer)

        job = functools.partial(self._work.commit, step.number, decision, masks)
        self._run(step, "commit", job, committed)

    def _work_spans(self) -> Sequence[Spans]:
        return self._work.spans
