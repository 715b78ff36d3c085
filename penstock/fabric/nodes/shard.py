"""A store shard's part of the step protocol.

It streams its pieces of the weights, an operation at a time and only so far ahead as the engines
have room; takes the sums of its pieces' gradients, once each; says when it has them all; and
commits when it is told to, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.errors import CorruptionError
from penstock.fabric.messages import Kind, Message, message_with
from penstock.fabric.nodes.engine import CONDUCTOR
from penstock.fabric.nodes.runtime import Runtime
from penstock.fabric.transfers import GRADIENT_WIDTH, Operation, Transfers
from penstock.fabric.view import View

WINDOW = 2  # operations on their way; what a store on flash hands out is good for as many


class ShardWork(Protocol):
    """What a shard does between the messages; called by the runtime's worker, one at a time."""

    def begin(self, step: int) -> None:
        """Forget what came of a step that was not committed; `step` comes next."""
        ...

    def fetch(self, operation: Operation) -> Sequence[np.ndarray]:
        """Return, for every chunk of this shard's in the operation, its bytes."""
        ...

    def receive(self, operation: Operation, gradients: Mapping[int, np.ndarray | None]) -> None:
        """Take this shard's gradients of an operation: by chunk, float32; None for no gradient."""
        ...

    def prepare(self) -> Mapping[str, Any]:
        """Say what the conductor must know of the gradients, as JSON."""
        ...

    def commit(self, step: int, decision: Mapping[str, Any]) -> Mapping[str, Any]:
        """Commit a step; again, if it is told twice, with the same answer."""
        ...


@dataclass
class _Step:
    """What a shard knows of the step in flight."""

    number: int
    fetched: int = 0
    is_fetching: bool = False
    released: int = 0
    begun: bool = False
    gradients: dict[int, dict[int, np.ndarray | None]] = field(default_factory=dict)
    received: int = 0  # of the operations with gradients, in their order
    is_prepared: bool = False
    commit_began: bool = False


class ShardNode:
    """One shard of the store among others.

    Args:
        number: its own among all nodes of the run.
        shard: its place among the shards.
        runtime: carries its messages.
        transfers: the operations of a step.
        work: reads and writes the shard's store.
    """

    def __init__(
        self, number: int, shard: int, runtime: Runtime, transfers: Transfers, work: ShardWork
    ) -> None:
        self.number = number
        self.epoch = 0
        self._shard = shard
        self._runtime, self._transfers, self._work = runtime, transfers, work
        operations = transfers.operations
        self._sends = [operation.of_shard(shard) for operation in operations]
        wanted = [(op, op.gradients_of(shard)) for op in operations]
        self._wanted = [(op, numbers) for op, numbers in wanted if numbers]
        self._view: View | None = None
        self._step = _Step(0)
        self._committed: tuple[int, Mapping[str, Any]] | None = None
        self.refused = 0
        self.progress = 0
        self.sent_bytes = 0  # of weights, since the node was made

    def handle(self, message: Message) -> None:
        """Take a message."""
        if message.kind is Kind.VIEW:
            self._take_view(message)
            return
        if self._view is None or message.epoch != self.epoch:
            self.refused += 1
            return
        if message.kind is Kind.BEGIN:
            self._begin(message)
        elif message.kind is Kind.COMMIT:
            self._commit(message)
        elif message.step != self._step.number:
            self.refused += 1
        elif message.kind is Kind.RELEASED:
            self._step.released = max(self._step.released, message.op)
            self._pump()
        elif message.kind is Kind.GRADIENT:
            self._take_gradient(message)
        else:
            self.refused += 1

    def _take_view(self, message: Message) -> None:
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            self._view = View.read(message.body)
            self._step = _Step(0)
        if message.epoch == self.epoch:
            self._send(CONDUCTOR, Kind.SEEN)

    def _begin(self, message: Message) -> None:
        if message.step <= self._step.number:
            return
        step = self._step = _Step(message.step)

        def ready(_: object) -> None:
            if step is self._step:
                step.begun = True
                self._pump()
                self._prepare_if_whole()

        self._run(step, lambda: self._work.begin(message.step), ready)

    def _pump(self) -> None:
        """Fetch the next operation, if the engines have room for it."""
        step = self._step
        if not step.begun or step.is_fetching or step.fetched == len(self._transfers.operations):
            return
        if step.fetched >= step.released + WINDOW:
            return
        operation = self._transfers.operations[step.fetched]
        step.is_fetching = True

        def fetched(parts: Sequence[np.ndarray]) -> None:
            if step is not self._step:
                return
            step.is_fetching = False
            step.fetched += 1
            self.progress += 1
            view = self._view
            assert view is not None
            root = view.engines[self._shard % len(view.engines)]
            for chunk, part in zip(self._sends[operation.number], parts, strict=True):
                message = message_with(
                    part,
                    kind=Kind.WEIGHTS,
                    epoch=self.epoch,
                    sender=self.number,
                    step=step.number,
                    op=operation.number,
                    chunk=chunk,
                )
                self.sent_bytes += message.size
                self._runtime.send(root, message)
            self._pump()

        self._run(step, lambda: self._work.fetch(operation), fetched)

    def _take_gradient(self, message: Message) -> None:
        step = self._step
        operation = self._operation(message)
        came = step.gradients.setdefault(message.op, {})
        if message.chunk in came:
            return  # nothing counts twice
        came[message.chunk] = None
        if message.payload is not None:
            came[message.chunk] = message.payload.view(np.float32)
        del operation
        self._prepare_if_whole()

    def _operation(self, message: Message) -> Operation:
        """Return a gradient's operation, having looked whether it can be one."""
        operations = self._transfers.operations
        if message.op < len(operations) and message.chunk < len(operations[message.op].gradients):
            operation = operations[message.op]
            piece = operation.gradients[message.chunk]
            size = (piece.end - piece.begin) * GRADIENT_WIDTH
            if piece.shard == self._shard and message.size in (0, size):
                return operation
        raise CorruptionError(
            f"node {message.sender} sent {message.size} bytes as chunk {message.chunk} of "
            f"operation {message.op}, which this shard has not"
        )

    def _prepare_if_whole(self) -> None:
        """Hand on what is whole, in the order of the sweep, and say when all of it is."""
        step = self._step
        if not step.begun:
            return
        while step.received < len(self._wanted):
            operation, numbers = self._wanted[step.received]
            came = step.gradients.get(operation.number, {})
            if len(came) < len(numbers):
                return
            step.gradients[operation.number] = dict.fromkeys(numbers)  # its memory is the job's
            step.received += 1
            self.progress += 1
            self._run(step, self._receiving(operation, came), lambda _: None)
        if step.is_prepared:
            return
        step.is_prepared = True

        def prepared(body: Mapping[str, Any]) -> None:
            if step is self._step:
                self._send(CONDUCTOR, Kind.PREPARED, body)

        self._run(step, self._work.prepare, prepared)

    def _receiving(
        self, operation: Operation, came: Mapping[int, np.ndarray | None]
    ) -> Callable[[], None]:
        return lambda: self._work.receive(operation, came)

    def _commit(self, message: Message) -> None:
        step = self._step
        if message.step != step.number or not step.is_prepared:
            self.refused += 1
            return
        if self._committed is not None and self._committed[0] == message.step:
            self._send(CONDUCTOR, Kind.COMMITTED, self._committed[1])
            return
        if step.commit_began:
            return  # the answer is on its way
        step.commit_began = True
        number, decision = message.step, dict(message.body)

        def committed(body: Mapping[str, Any]) -> None:
            self._committed = (number, body)
            self.progress += 1
            self._send(CONDUCTOR, Kind.COMMITTED, body)

        self._run(step, lambda: self._work.commit(number, decision), committed)

    def _send(self, to: int, kind: Kind, body: Mapping[str, Any] | None = None) -> None:
        message = Message(kind, self.epoch, self.number, self._step.number, body=body or {})
        self._runtime.send(to, message)

    def _run(self, step: _Step, job: Callable[[], Any], then: Callable[[Any], None]) -> None:
        def failed(error: Exception) -> None:
            if step is self._step:
                self._send(
                    CONDUCTOR, Kind.TROUBLE, {"error": type(error).__name__, "text": str(error)}
                )

        self._runtime.work(job, then, failed)
