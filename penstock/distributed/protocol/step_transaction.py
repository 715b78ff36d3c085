"""One transaction: what is sent to the nodes that take part in a step, and what they have reported.

Nothing counts twice, and nothing of one transaction counts for another: each is an object.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.collectives import partition
from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import Message, MessageType, pack_arrays
from penstock.distributed.protocol.step_request import StepRequest, StepResult
from penstock.errors import CorruptionError


class Send(Protocol):
    """Sends to a node, in the present epoch and of the step in flight."""

    def __call__(
        self,
        to: int,
        kind: MessageType,
        body: Mapping[str, Any] | None = None,
        payload: np.ndarray | None = None,
    ) -> None: ...


class StepTransaction:
    """One attempt.

    Args:
        view: who takes part.
        order: the step that is to be made.
        send: sends to a node.
    """

    def __init__(self, view: MembershipView, request: StepRequest, send: Send) -> None:
        self.request = request
        self._view, self._send = view, send
        self._losses: dict[int, list[float]] = {}
        self._prepared: dict[int, Any] = {}
        self._answers: dict[int, Any] = {}
        self._decision: Mapping[str, Any] = {}
        self.commits = 0  # how often the decision has been said again
        self._nodes = list(view.shard_nodes)  # the shards' that have not left

    def begin(self) -> None:
        """Have all begin, engines with their rows.

        **Raises:** whatever the data raise; nobody has begun then.
        """
        engines = self._view.engines
        parts = [
            (engine, part.body, *pack_arrays(part.rows))
            for engine, part in zip(engines, self.request.parts(len(engines)), strict=True)
        ]
        for node in self._nodes:
            self._send(node, MessageType.BEGIN)
        for engine, body, described, payload in parts:
            self._send(engine, MessageType.BEGIN, {**body, "rows": described}, payload)

    def decide(self) -> None:
        """Decide by what has come how the step is committed.

        **Raises:** whatever forbids it; nothing is committed then.
        """
        self._decision = self.request.decide(self.losses, self.reports)

    def commit(self) -> None:
        """Say the decision to all nodes of shards that have not answered to it."""
        for node in self.unanswered:
            self._send(node, MessageType.COMMIT, self._decision)

    @property
    def outcome(self) -> StepResult:
        """How the step has ended, once all have committed."""
        return StepResult(self.request.step, self.losses, self._decision, self.answers)

    def leave(self, node: int) -> None:
        """Do without a node of a shard that has others, which do the same."""
        if node in self._nodes:
            self._nodes.remove(node)

    def lose(self, message: Message) -> None:
        """Take the losses of an engine's micro-batches.

        **Raises:** `ProtocolError` if they are none.
        """
        engines = self._view.engines
        if message.sender in engines:
            part = partition(self.request.micro_batches, len(engines))[
                engines.index(message.sender)
            ]
            self._losses[message.sender] = message_validation.hexadecimals(
                message, "losses", len(part)
            )

    def prepare(self, message: Message) -> None:
        """Take what a node of a shard says of its gradients.

        **Raises:** `ProtocolError` if it makes no sense.
        """
        self._prepared[message.sender] = self.request.report(message)

    def answer(self, message: Message) -> None:
        """Take the answer of a node of a shard to the commit.

        **Raises:** `ProtocolError` if it makes no sense.
        """
        self._answers[message.sender] = self.request.answer(message)

    @property
    def is_whole(self) -> bool:
        """Whether all losses and all shards' gradients are in."""
        has_losses = len(self._losses) == len(self._view.engines)
        return has_losses and self._prepared.keys() >= {*self._nodes}

    @property
    def unanswered(self) -> list[int]:
        """The nodes of shards that have not answered to the commit."""
        return [node for node in self._nodes if node not in self._answers]

    @property
    def behind(self) -> list[int]:
        """The nodes that lack gradients which others of their shard have; none while a shard does.

        It is the links to these, then, over which nothing comes.
        """
        for nodes in self._shards:
            if not any(node in self._prepared for node in nodes):
                return []
        return [node for node in self._nodes if node not in self._prepared]

    @property
    def losses(self) -> list[float]:
        """The losses of all micro-batches, in their order."""
        return [x for engine in self._view.engines for x in self._losses[engine]]

    @property
    def reports(self) -> Sequence[Any]:
        """What all shards say of their gradients, in their order.

        Raises:
            CorruptionError: two nodes of a shard have said different things.
        """
        for shard, (first, *others) in enumerate(self._shards):
            for other in others:
                what = self.request.difference(self._prepared[first], self._prepared[other])
                if what is not None:
                    raise CorruptionError(
                        f"shard {shard}: node {first} and its replica, node {other}, should hold "
                        f"the same and do not say the same of {what}; step {self.request.step} was "
                        "not committed: the memory or the processor of one of their hosts is "
                        "faulty. Test them, and give the same command again; the run goes on from "
                        "the last step that is safe"
                    )
        return [self._prepared[nodes[0]] for nodes in self._shards]

    @property
    def answers(self) -> Sequence[Any]:
        """What all shards have answered to the commit, in their order."""
        return [self._answers[nodes[0]] for nodes in self._shards]

    @property
    def _shards(self) -> list[list[int]]:
        """The nodes of each shard that have not left."""
        return [[node for node in nodes if node in self._nodes] for nodes in self._view.shards]

    @property
    def counts(self) -> tuple[int, ...]:
        """How much has come: it grows as long as something moves."""
        return len(self._losses), len(self._prepared), len(self._answers)


class Phase(enum.Enum):
    """Where the step in flight stands."""

    IDLE = "no step"
    GATHERING = "waiting for engines or shards"
    FORMING = "waiting until all have seen the view"
    AGREEING = "waiting until all shards stand at one step"
    RUNNING = "waiting for losses and gradients"
    COMMITTING = "waiting until the shards have committed"
