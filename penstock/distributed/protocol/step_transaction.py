"""One transaction: the messages to the nodes of a step, and the reports of the nodes.

A repeated report changes nothing. Each transaction is an object of its own, so no report of one
transaction counts for another.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.collectives import partition
from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import (
    MAX_PAYLOAD_BYTES,
    Message,
    MessageType,
    pack_arrays,
)
from penstock.distributed.protocol.step_request import EngineInput, StepRequest, StepResult
from penstock.errors import ConfigError, CorruptionError


class Send(Protocol):
    """Sends a message to a node, in the current epoch and for a step; None: the one in flight."""

    def __call__(
        self,
        to: int,
        kind: MessageType,
        body: Mapping[str, Any] | None = None,
        payload: np.ndarray | None = None,
        step: int | None = None,
    ) -> None: ...


class StepTransaction:
    """One attempt to make a step.

    Args:
        view: the nodes that take part.
        request: the step to make.
        send: sends a message to a node.
    """

    def __init__(self, view: MembershipView, request: StepRequest, send: Send) -> None:
        self.request = request
        self._view, self._send = view, send
        self._losses: dict[int, list[float]] = {}
        self._reports: dict[int, Any] = {}
        self._acknowledgements: dict[int, Any] = {}
        self._decision: Mapping[str, Any] | None = None
        self._round = 0  # of the selection of mask entries; 0 before the first
        self._histograms: dict[int, tuple[Message, Any]] = {}  # and its content
        self._stored: dict[int, int] = {}  # the operations whose gradients a replica has stored
        self.commits = 0  # how often the decision was sent again
        self._nodes = list(view.shard_nodes)  # the replicas that have not left

    def begin(self, ahead: Sequence[EngineInput] | None = None) -> None:
        """Send BEGIN to all nodes, and to each engine its rows.

        **Arguments:** `ahead` is the engines' input without rows, if they were sent before.

        **Raises:** whatever the data raise; no node has begun then.
        """
        engines = self._view.engines
        inputs = self.request.parts(len(engines)) if ahead is None else ahead
        parts = [
            (engine, part.body, *packed_rows(part, self.request.step))
            for engine, part in zip(engines, inputs, strict=True)
        ]
        for node in self._nodes:
            self._send(node, MessageType.BEGIN)
        for relay in self._view.relays:
            self._send(relay, MessageType.BEGIN, {"total": self.request.micro_batches})
        for engine, body, described, payload in parts:
            rows = {"rows": described} if ahead is None else {}
            self._send(engine, MessageType.BEGIN, {**body, **rows}, payload)

    def decide(self) -> bool:
        """Make the decision from the losses, the reports, and the histograms if masks change.

        Returns whether it is made; otherwise the replicas make histograms for the next round.

        **Raises:** whatever forbids the commit; nothing is committed then.
        """
        if self._decision is None:
            self._decision = self.request.decide(self.losses, self.reports)
        elif not self._histograms.keys() >= {*self._nodes}:
            return False
        if self._round:
            self.request.narrow(self._equal_histograms())
        selections = self.request.open_selections()
        if selections is None:
            return True
        self._round, self._histograms = self._round + 1, {}
        for node in self._nodes:
            self._send(node, MessageType.HISTOGRAM_REQUEST, {"round": self._round}, selections)
        return False

    def record_histograms(self, message: Message) -> None:
        """Record a replica's histograms, if they are those of this round.

        **Raises:** `ProtocolError` if the round is none, or the histograms are invalid.
        """
        if message_validation.integer(message, "round", 1) == self._round:
            content = self.request.histograms(message, self._view.shard_of(message.sender))
            self._histograms[message.sender] = message, content

    def _equal_histograms(self) -> list[Any]:
        """Return the histograms of all shards, in order.

        **Raises:** `CorruptionError` if replicas of a shard have sent different ones.
        """
        for shard, (first, *others) in enumerate(self._shards):
            for other in others:
                if not _is_equal(self._histograms[first][0], self._histograms[other][0]):
                    raise self._differ(shard, first, other, "their histograms of mask entries")
        return [self._histograms[nodes[0]][1] for nodes in self._shards]

    def commit(self) -> None:
        """Send the decision to all replicas that have not acknowledged it."""
        masks = self.request.masks()
        for node in self.unacknowledged:
            self._send(node, MessageType.COMMIT, self._decision, masks)

    @property
    def result(self) -> StepResult:
        """The result of the step, once all replicas have committed."""
        decision = self._decision or {}
        return StepResult(self.request.step, self.losses, decision, self.acknowledgements)

    def remove_replica(self, node: int) -> None:
        """Remove a replica; the other replicas of its shard do the same work."""
        if node in self._nodes:
            self._nodes.remove(node)
            self._send_gradient_credit(self._view.shard_of(node))

    def record(self, message: Message) -> None:
        """Record a report of an engine or a replica before the step is decided.

        **Raises:** `ProtocolError` if the report is invalid.
        """
        match message.kind:
            case MessageType.LOSSES:
                self.record_losses(message)
            case MessageType.PREPARED if message.sender in self._nodes:
                self.record_report(message)
            case MessageType.HISTOGRAM_REPLY if message.sender in self._nodes:
                self.record_histograms(message)
            case MessageType.GRADIENT_CREDIT if message.sender in self._nodes:
                self._record_stored(message)

    def _record_stored(self, message: Message) -> None:
        sender, stored = message.sender, message_validation.integer(message, "stored", 0)
        self._stored[sender] = max(stored, self._stored.get(sender, 0))
        shard = self._view.shard_of(sender)
        if sender != self._view.shards[shard][0]:
            self._send_gradient_credit(shard)

    def _send_gradient_credit(self, shard: int) -> None:
        """Tell a shard's streaming replica what all other replicas have stored; an empty body: no
        other is left."""
        streaming, *others = self._view.shards[shard]
        stored = [self._stored.get(node, 0) for node in others if node in self._nodes]
        body = {"stored": min(stored)} if stored else {}
        self._send(streaming, MessageType.GRADIENT_CREDIT, body)

    def record_losses(self, message: Message) -> None:
        """Record the losses of an engine's micro-batches.

        **Raises:** `ProtocolError` if the message has no valid losses.
        """
        engines = self._view.engines
        if message.sender in engines:
            part = partition(self.request.micro_batches, len(engines))[
                engines.index(message.sender)
            ]
            self._losses[message.sender] = message_validation.hexadecimals(
                message, "losses", len(part)
            )

    def record_report(self, message: Message) -> None:
        """Record a replica's report on its gradients.

        **Raises:** `ProtocolError` if the report is invalid.
        """
        self._reports[message.sender] = self.request.report(
            message, self._view.shard_of(message.sender)
        )

    def record_acknowledgement(self, message: Message) -> None:
        """Record a replica's acknowledgement of the commit.

        **Raises:** `ProtocolError` if the acknowledgement is invalid.
        """
        self._acknowledgements[message.sender] = self.request.answer(message)

    @property
    def is_complete(self) -> bool:
        """Whether all losses and the reports of all replicas have arrived."""
        has_losses = len(self._losses) == len(self._view.engines)
        return has_losses and self._reports.keys() >= {*self._nodes}

    @property
    def unacknowledged(self) -> list[int]:
        """The replicas that have not acknowledged the commit."""
        return [node for node in self._nodes if node not in self._acknowledgements]

    @property
    def without_histograms(self) -> list[int]:
        """The replicas that have not answered in the round of histograms; empty without a round."""
        if not self._round:
            return []
        return [node for node in self._nodes if node not in self._histograms]

    @property
    def behind(self) -> list[int]:
        """The replicas that lack gradients, if every shard has another replica with all gradients.

        The list is empty while all replicas of a shard lack gradients. The stall is on the
        connections to the listed replicas. A replica that has stored less than another of its
        shard is behind, too: the streaming replica waits for its credit.
        """
        slower = []
        for nodes in self._shards:
            most = max((self._stored.get(node, 0) for node in nodes), default=0)
            slower += [node for node in nodes if self._stored.get(node, 0) < most]
        if slower:
            return slower
        for nodes in self._shards:
            if not any(node in self._reports for node in nodes):
                return []
        return [node for node in self._nodes if node not in self._reports]

    @property
    def losses(self) -> list[float]:
        """The losses of all micro-batches, in order."""
        return [x for engine in self._view.engines for x in self._losses[engine]]

    @property
    def reports(self) -> Sequence[Any]:
        """The reports on gradients, one per shard, in shard order.

        Raises:
            CorruptionError: the reports of two replicas of a shard differ.
        """
        for shard, (first, *others) in enumerate(self._shards):
            for other in others:
                what = self.request.difference(self._reports[first], self._reports[other])
                if what is not None:
                    raise self._differ(shard, first, other, what)
        return [self._reports[nodes[0]] for nodes in self._shards]

    def _differ(self, shard: int, first: int, other: int, what: str) -> CorruptionError:
        return CorruptionError(
            f"shard {shard}: the replicas on nodes {first} and {other} must be equal, but differ "
            f"in {what}; step {self.request.step} was not committed. The memory or the processor "
            "of one of their hosts is faulty. Test both hosts, then give the same command again; "
            "the run resumes from the last saved step"
        )

    @property
    def acknowledgements(self) -> Sequence[Any]:
        """The acknowledgements of the commit, one per shard, in shard order."""
        return [self._acknowledgements[nodes[0]] for nodes in self._shards]

    @property
    def _shards(self) -> list[list[int]]:
        """The replicas of each shard that have not left."""
        return [[node for node in nodes if node in self._nodes] for nodes in self._view.shards]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many losses, reports, histograms and acknowledgements have arrived."""
        counted = self._round, len(self._histograms)
        return len(self._losses), len(self._reports), *counted, len(self._acknowledgements)


def packed_rows(part: EngineInput, step: int) -> tuple[list[list[Any]], np.ndarray]:
    """Return the description of an engine's rows for a body, and their bytes for the payload.

    **Raises:** `ConfigError` if they have more bytes than a message carries.
    """
    described, payload = pack_arrays(part.rows)
    if payload.nbytes > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"batch.size: an engine's rows of step {step} have {payload.nbytes:,} bytes, a message "
            f"carries at most {MAX_PAYLOAD_BYTES:,}; lower batch.size, or use more engines"
        )
    return described, payload


def _is_equal(first: Message, other: Message) -> bool:
    if first.payload is None or other.payload is None:
        return first.payload is other.payload
    return np.array_equal(first.payload, other.payload)


class Phase(enum.Enum):
    """The phase of the step in flight."""

    IDLE = "no step"
    GATHERING = "waiting for engines or shards"
    FORMING = "waiting until all nodes acknowledge the view"
    AGREEING = "waiting until all shards are at the same step"
    RUNNING = "waiting for losses, gradients and histograms"
    COMMITTING = "waiting until the shards have committed"
