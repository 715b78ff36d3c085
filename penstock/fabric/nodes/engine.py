"""An engine's part of the step protocol.

Weights come in chunks down the tree and are passed on as they come; when an operation has all of
its own, and those before it are computed, it is computed; its gradients go up the tree, where this
engine may also add those of others. All of it is of one epoch and one step: what comes from
another counts for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from penstock.fabric.messages import Kind, Message, message_with, unpack_arrays
from penstock.fabric.nodes.runtime import Runtime
from penstock.fabric.topology import Summing, children, parent, summing
from penstock.fabric.transfers import Operation, Piece, Transfers
from penstock.fabric.view import View
from penstock.tree import TreeNode, TreeSum, share

CONDUCTOR = 0


class EngineWork(Protocol):
    """What an engine does between the messages. `place` is called by the node's own thread, the
    others by the runtime's worker."""

    def begin(self, step: int, part: Mapping[str, float], rows: Mapping[str, np.ndarray]) -> None:
        """Begin a step with these rows; forget the one before."""
        ...

    def place(self, operation: Operation, piece: Piece, payload: np.ndarray | None) -> None:
        """Put a chunk of weights where the operation will find it."""
        ...

    def compute(self, operation: Operation) -> Sequence[TreeNode]:
        """Compute an operation whose weights are placed; return its gradients' sums."""
        ...

    def losses(self) -> list[float]:
        """Return the loss of each micro-batch, after the turn."""
        ...


@dataclass
class _Sum:
    """A chunk of gradients that this engine adds up."""

    tree: TreeSum
    seen: set[tuple[int, int]] = field(default_factory=set)
    leaves: int = 0


@dataclass
class _Step:
    """What an engine knows of the step in flight."""

    number: int
    total: int | None = None  # its micro-batches; known once it has begun
    is_ready: bool = False  # whether the engine has taken its rows
    arrived: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    computed: int = 0
    is_busy: bool = False
    released: dict[tuple[int, int], int] = field(default_factory=dict)
    announced: dict[int, int] = field(default_factory=dict)
    sums: dict[tuple[int, int], _Sum] = field(default_factory=dict)
    early: list[Message] = field(default_factory=list)  # gradients that came before the rows


class EngineNode:
    """One engine among others.

    Args:
        number: its own among all nodes of the run.
        runtime: carries its messages.
        transfers: the operations of a step.
        work: computes them.
    """

    def __init__(
        self, number: int, runtime: Runtime, transfers: Transfers, work: EngineWork
    ) -> None:
        self.number = number
        self.epoch = 0
        self._runtime, self._transfers, self._work = runtime, transfers, work
        self._view: View | None = None
        self._place = 0
        self._summing = Summing(None, 0, 0, None)
        self._step = _Step(0)
        self.refused = 0  # messages of another epoch or step
        self.progress = 0  # grows with everything that this engine gets done

    @property
    def is_busy(self) -> bool:
        """Whether it computes now."""
        return self._step.is_busy

    def handle(self, message: Message) -> None:
        """Take a message."""
        if message.kind is Kind.VIEW:
            self._take_view(message)
            return
        if self._view is None or message.epoch != self.epoch or message.step < self._step.number:
            self.refused += 1
            return
        if message.step > self._step.number:
            # The step before is over everywhere, or nobody would have begun this one.
            self._step = _Step(message.step)
        if message.kind is Kind.BEGIN:
            self._begin(message)
        elif message.kind is Kind.WEIGHTS:
            self._take_weights(message)
        elif message.kind is Kind.GRADIENT:
            self._take_gradient(message)
        elif message.kind is Kind.RELEASED:
            self._take_release(message.chunk, message.sender, message.op)
        else:
            self.refused += 1

    def _take_view(self, message: Message) -> None:
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            view = View.read(message.body)
            self._step = _Step(0)
            self._view = view if self.number in view.engines else None
            if self._view is not None:
                self._place = view.engines.index(self.number)
                self._summing = summing(len(view.engines))[self._place]
        if message.epoch == self.epoch:
            self._runtime.send(CONDUCTOR, Message(Kind.SEEN, self.epoch, self.number))

    # Weights come

    def _begin(self, message: Message) -> None:
        step = self._step
        if step.total is not None:
            return
        step.total = int(message.body["total"])
        part = {key: value for key, value in message.body.items() if key != "rows"}
        rows = unpack_arrays(message.body["rows"], message.payload)

        def ready(_: object) -> None:
            if step is self._step:
                step.is_ready = True
                self._compute_next()

        self._run(step, lambda: self._work.begin(step.number, part, rows), ready)
        early, step.early = step.early, []
        for gradient in early:
            self._take_gradient(gradient)

    def _take_weights(self, message: Message) -> None:
        operation = self._transfers.operations[message.op]
        arrived = self._step.arrived[message.op]
        if message.chunk in arrived or message.op < self._step.computed:
            return
        arrived.add(message.chunk)
        assert self._view is not None
        piece = operation.weights[message.chunk]
        engines = self._view.engines
        for child in children(self._place, piece.shard % len(engines), len(engines)):
            self._runtime.send(engines[child], replace(message, sender=self.number))
        self._work.place(operation, piece, message.payload)
        self._compute_next()

    def _compute_next(self) -> None:
        """Compute the next operation, if it is its time."""
        step = self._step
        if not step.is_ready or step.is_busy or step.computed == len(self._transfers.operations):
            return
        operation = self._transfers.operations[step.computed]
        if len(step.arrived[operation.number]) < len(operation.weights):
            return
        step.is_busy = True

        def done(nodes: Sequence[TreeNode]) -> None:
            if step is not self._step:
                return
            step.is_busy = False
            step.computed += 1
            self.progress += 1
            for shard in range(self._transfers.shards):
                self._take_release(shard, self.number, step.computed)
            if operation.sweep == "turn":
                self._send_losses()
            for node in nodes:
                self._send_own(operation, node)
            self._compute_next()

        self._run(step, lambda: self._work.compute(operation), done)

    def _take_release(self, shard: int, sender: int, count: int) -> None:
        """Say up the tree, when it grows, how many operations need no weights here or below."""
        step, view = self._step, self._view
        assert view is not None
        count = max(count, step.released.get((shard, sender), 0))
        step.released[shard, sender] = count
        root, engines = shard % len(view.engines), len(view.engines)
        below = [view.engines[child] for child in children(self._place, root, engines)]
        least = min(step.released.get((shard, node), 0) for node in (self.number, *below))
        if least <= step.announced.get(shard, 0):
            return
        step.announced[shard] = least
        above = parent(self._place, root, engines)
        to = view.shards[shard] if above is None else view.engines[above]
        self._send(to, Message(Kind.RELEASED, self.epoch, self.number, step.number, least, shard))

    # Gradients go

    def _send_own(self, operation: Operation, node: TreeNode) -> None:
        for number, piece in enumerate(operation.gradients):
            tensor = node.tensors[piece.tensor]
            part = None if tensor is None else tensor.view(-1)[piece.begin : piece.end].float()
            self._send_sum(
                self._summing.own_target,
                operation.number,
                number,
                TreeNode(node.level, node.index, (part,)),
            )

    def _take_gradient(self, message: Message) -> None:
        """Add a chunk of a sum, and send on what is whole."""
        if self._step.total is None:
            self._step.early.append(message)
            return
        tensor = None
        if message.payload is not None:
            tensor = torch.frombuffer(message.payload, dtype=torch.float32)
        self._add(message.op, message.chunk, TreeNode(message.level, message.index, (tensor,)))

    def _add(self, op: int, chunk: int, node: TreeNode) -> None:
        step, view, place = self._step, self._view, self._summing
        assert view is not None
        assert step.total is not None
        total = step.sums.setdefault((op, chunk), _Sum(TreeSum(step.total)))
        if (node.level, node.index) in total.seen:
            return  # nothing counts twice
        total.seen.add((node.level, node.index))
        total.leaves += node.leaves(step.total)
        total.tree.add(node)
        shares = share(step.total, len(view.engines))
        if total.leaves < shares[place.end - 1].stop - shares[place.begin].start:
            return
        self.progress += 1
        nodes = total.tree.nodes()
        total.tree = TreeSum(step.total)  # what is sent needs no memory here
        for node in nodes:
            self._send_sum(place.target, op, chunk, node)

    def _send_sum(self, target: int | None, op: int, chunk: int, node: TreeNode) -> None:
        view = self._view
        assert view is not None
        if target == self._place:
            self._add(op, chunk, node)
            return
        if target is None:
            piece = self._transfers.operations[op].gradients[chunk]
            to = view.shards[piece.shard]
        else:
            to = view.engines[target]
        tensor = node.tensors[0]
        message = message_with(
            None if tensor is None else tensor.numpy(),
            kind=Kind.GRADIENT,
            epoch=self.epoch,
            sender=self.number,
            step=self._step.number,
            op=op,
            chunk=chunk,
            level=node.level,
            index=node.index,
        )
        self._send(to, message)

    def _send_losses(self) -> None:
        losses = [loss.hex() for loss in self._work.losses()]
        self._send(
            CONDUCTOR,
            Message(
                Kind.LOSSES, self.epoch, self.number, self._step.number, body={"losses": losses}
            ),
        )

    def _send(self, to: int, message: Message) -> None:
        self._runtime.send(to, message)

    def _run(self, step: _Step, job: Callable[[], Any], then: Callable[[Any], None]) -> None:
        def failed(error: Exception) -> None:
            if step is self._step:
                body = {"error": type(error).__name__, "text": str(error)}
                self._send(
                    CONDUCTOR,
                    Message(Kind.TROUBLE, self.epoch, self.number, step.number, body=body),
                )

        self._runtime.work(job, then, failed)
