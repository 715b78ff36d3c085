"""The coordinator of the step protocol: a two-phase commit decides whether a step counts.

A step is a transaction in an epoch. Every node acknowledges the epoch's view, begins the step, and
reports. When all losses and the gradients of all shards have arrived, the step is decided. The
decision is sent to the shards until each has acknowledged it. The loss of a node before the
decision aborts the transaction: the epoch advances, and the remaining nodes retry the step. After
the decision the engines are not needed. `membership.py` has the nodes, `epoch.py` the epoch.

A shard may have several replicas. They do the same work and hold the same bits, so the loss of one
replica loses no state. The loss of the last replica ends the step with an error. A new node may
take over the shard with the stored state of the lost node. Before the next step all shards roll
back to the newest step that all of them hold. `recovery_policy.py` handles corruption and stalls.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.coordinator_state import CoordinatorState
from penstock.distributed.protocol.epoch import EpochManager
from penstock.distributed.protocol.failure_detector import (
    LEAST_BYTES_PER_SECOND,
    Heartbeat,
    StallTimer,
)
from penstock.distributed.protocol.membership import Membership
from penstock.distributed.protocol.messages import COORDINATOR, Message, MessageType, message_with
from penstock.distributed.protocol.node_context import NodeContext
from penstock.distributed.protocol.recovery_policy import (
    AbortStep,
    EvictNode,
    RecoveryAction,
    RecoveryPolicy,
    ResendDecision,
    RetryStep,
    StepStatus,
    took_too_long,
)
from penstock.distributed.protocol.rows_ahead import RowsAhead
from penstock.distributed.protocol.step_request import (
    ProtocolEvent,
    RolledBackError,
    StepRequest,
    StepResult,
    Timeouts,
    UnrecoverableError,
)
from penstock.distributed.protocol.step_transaction import Phase, StepTransaction
from penstock.errors import ClusterError, ProtocolError, StorageError

# In these phases the transaction can be aborted and retried.
_OPEN = (Phase.FORMING, Phase.AGREEING, Phase.RUNNING)


class Coordinator(CoordinatorState):
    """Drives one step at a time.

    Args:
        context: carries the coordinator's messages.
        shards: the node numbers of each shard's replicas, in shard order.
        engines: how many engines are wanted; `wanted` may be set at any time.
        timeouts: the limits for silence, stalls and jobs.
        on_event: receives the protocol's events.
        least: the number of engines whose memory suffices; with fewer engines no step is made.
        addresses: the listening addresses by node number; a view is sent with its nodes' addresses.
        can_replace_engine: whether a new engine may join when no engine is left.
        is_alive: whether a node is alive although it has been silent for so many seconds.
        relays: how many relays are wanted; `wanted_relays` may be set at any time.
    """

    def __init__(
        self,
        context: NodeContext,
        shards: Sequence[Sequence[int]],
        engines: int,
        timeouts: Timeouts,
        on_event: Callable[[ProtocolEvent], None],
        least: int = 1,
        addresses: Mapping[int, Any] | None = None,
        can_replace_engine: Callable[[], bool] = lambda: True,
        is_alive: Callable[[int, float], bool] = lambda node, silent: False,
        relays: int = 0,
    ) -> None:
        membership = Membership(shards, engines, least, relays)
        epochs = EpochManager(membership, addresses if addresses is not None else {}, self._send)
        super().__init__(membership, epochs, on_event)
        self._context, self._timeouts = context, timeouts
        self._is_alive = is_alive
        self._recovery = RecoveryPolicy(self.membership, timeouts.attempts, can_replace_engine)
        self._transaction: StepTransaction | None = None  # of the step in flight
        self._on_result: Callable[[StepResult], None] = lambda result: None
        self._stall_timer = StallTimer(LEAST_BYTES_PER_SECOND)
        self._rows_ahead = RowsAhead(self._send)
        self._following: StepRequest | None = None

    # Requests of the trainer process

    def lost(self, node: int, why: str) -> None:
        """Remove a lost node."""
        if node not in self.membership:
            return
        if node in self._shards:
            self._lose_replica(node, why)
            return
        shard = self.membership.holders.learners.get(node)
        what = "relay" if node in self.membership.relays else "engine"
        self.membership.lose(node)
        self._detector.forget(node)
        if shard is not None:
            text = f"shard {shard}: node {node}, before its copy was complete: {why}"
            self._report("replica lost", text, node)
            return
        self._report(f"{what} lost", f"{what} {node}: {why}", node)
        if node in self._epochs.view.nodes and self.phase in _OPEN:
            self._form()

    def start(
        self,
        request: StepRequest,
        on_result: Callable[[StepResult], None],
        following: StepRequest | None = None,
    ) -> None:
        """Start a step; `on_result` is called once, with the result.

        If the step that follows is known, its rows are sent while this step runs.
        """
        if self.phase is not Phase.IDLE:
            raise RuntimeError(f"a step is in flight: {self.phase.value}")
        view = self.membership.view(request.micro_batches)
        self._transaction, self._on_result = StepTransaction(view, request, self._send), on_result
        self._recovery.begin(request.step)
        self._following = following
        if self._epochs.is_ready(view):
            self._begin()
        else:
            self._form()

    def cancel(self) -> None:
        """Abort the step in flight, unless the step is decided: a decided step runs to its end."""
        if self.phase in (Phase.GATHERING, *_OPEN):
            self._epochs.is_quiescent = False
            self._end(StepResult(self._step, error=InterruptedError("the step was cancelled")))

    def advance_epoch(self) -> None:
        """Fence the last step after it ended with an error: no node continues it."""
        if self.phase is Phase.IDLE and self.engines:  # else no node has begun a step
            self._epochs.advance_epoch()

    # Messages and time

    def handle(self, message: Message) -> None:
        """Handle a message; a node that sends an invalid message is evicted."""
        try:
            self._take(message)
        except ProtocolError as error:
            self._blame(message.sender, type(error).__name__, str(error))

    def _take(self, message: Message) -> None:
        sender, kind = message.sender, message.kind
        if kind is MessageType.HEARTBEAT:
            self._hear(sender, Heartbeat.read(message))
            return
        self._hear(sender)
        if message.epoch != self.epoch:
            self.counts["stale messages"] += 1
            return
        phase, is_shard = self.phase, sender in self._shards
        if kind is MessageType.CORRUPT_FRAME:
            self._take_corrupt_frame(message)
        elif kind is MessageType.VIEW_ACK and phase is Phase.FORMING:
            self._take_view_ack(sender)
        elif kind is MessageType.HELD_STEPS and phase is Phase.AGREEING and is_shard:
            self._take_held_steps(message)
        elif kind is MessageType.ROLLBACK and phase is Phase.AGREEING and is_shard:
            self._take_rollback(message)
        elif kind is MessageType.FAILURE and message.step in (0, self._step):
            self._take_failure(message)
        elif message.step != self._step:
            self.counts["stale messages"] += 1
        elif phase is Phase.RUNNING:
            self._present.record(message)
            self._decide_if_complete()
        elif kind is MessageType.COMMITTED and phase is Phase.COMMITTING and is_shard:
            self._take_committed(message)

    def _hear(self, sender: int, heartbeat: Heartbeat | None = None) -> None:
        if sender in self.membership:  # a lost node does not count
            self._detector.hear(sender, heartbeat)

    def report_corruption(self, text: str, ends: Collection[int] = ()) -> None:
        """Handle a frame with a wrong checksum, whose content is unknown.

        Args:
            ends: the nodes at the two ends of the connection, as far as they are known.
        """
        self.counts["damaged"] += 1
        if self.phase in (Phase.COMMITTING, *_OPEN):
            self._recover(self._recovery.after_corruption(self._status, text, ends))

    def tick(self, now: float, received_bytes: int = 0) -> None:
        """Check the timeouts: silent nodes, and a step without progress.

        `received_bytes` are those of the payloads that this process has received (`Heartbeat`).
        """
        detector = self._detector
        self._stall_timer.pause(detector.pass_time(now, self._timeouts.silence / 4))
        for node, silent in detector.silent(self.membership.all, self._timeouts.silence):
            if not self._is_alive(node, silent):
                self.lost(node, f"silent for {silent:.1f} s")
        transaction = self._transaction
        if transaction is None or self.phase is Phase.GATHERING:
            self._stall_timer.begin(now)
            return
        members = self._epochs.view.nodes
        stall = self._timeouts.stall
        busy, progress = detector.busy(members), tuple(detector.progress(members).values())
        arrived = (self._epochs.acknowledged, *transaction.counts)
        received = {COORDINATOR: received_bytes, **detector.received_bytes(members)}
        state = (self.phase, self.epoch, arrived, progress)
        stalled = self._stall_timer.stalled_seconds(now, state, received)
        if stalled > self._timeouts.job and busy:
            self._stall_timer.begin(now)
            self._blame(busy[0], ClusterError.__name__, took_too_long(stalled))
        elif stalled > stall and not busy and not detector.may_work(members, stall):
            self._stall_timer.begin(now)
            self._recover(self._recovery.after_stall(self._status))

    # The epoch

    def _admitted(self) -> None:
        if self.phase is Phase.GATHERING:
            self._form()

    @property
    def _step(self) -> int:
        return self._transaction.request.step if self._transaction is not None else 0

    @property
    def _shards(self) -> tuple[int, ...]:
        return self.membership.holders.nodes

    def _form(self) -> None:
        """Advance the epoch and send the view to its nodes."""
        request = self._present.request
        view = self.membership.view(request.micro_batches)
        self._epochs.is_quiescent = False
        lacks = self.membership.lacks(view)
        if lacks is not None:
            self._phase(Phase.GATHERING)
            self._report("waiting", f"{lacks}; waiting")
            return
        self._transaction = StepTransaction(view, request, self._send)
        self._phase(Phase.FORMING)
        self._epochs.form(view)

    def _take_view_ack(self, sender: int) -> None:
        if not self._epochs.acknowledge(sender):
            return
        if self.is_agreed:
            self._begin()
            return
        self._phase(Phase.AGREEING)
        self._epochs.request_held_steps()

    def _take_held_steps(self, message: Message) -> None:
        try:
            without = self._epochs.record_held_steps(message, self._step)
        except StorageError as error:
            self._end(StepResult(self._step, error=error))
            return
        for node, why in without:
            self.lost(node, why)

    def _take_rollback(self, message: Message) -> None:
        to = message_validation.integer(message, "to", 0)
        if not self._epochs.record_rollback(message.sender):
            return
        if to + 1 == self._step:
            self._begin()
            return
        self._report("went back", f"all shards are at step {to}")
        self._end(StepResult(self._step, error=RolledBackError(to)))

    # The transaction

    @property
    def _present(self) -> StepTransaction:
        assert self._transaction is not None
        return self._transaction

    def _begin(self) -> None:
        # No other step may begin before this step has ended.
        self._epochs.is_quiescent = False
        self._phase(Phase.RUNNING)
        transaction = self._present
        try:
            transaction.begin(self._rows_ahead.of(transaction.request, self.epoch))
        except Exception as error:  # the data's error ends the step, not the coordinator
            self._end(StepResult(self._step, error=error))
            return
        if self._following is not None:
            self._rows_ahead.send(self._following, self.epoch, self.engines)

    def _decide_if_complete(self) -> None:
        transaction = self._present
        if not transaction.is_complete:
            return
        try:
            is_decided = transaction.decide()
        except Exception as error:  # the step is not committed; the caller receives the error
            self._end(StepResult(self._step, error=error))
            return
        if is_decided:
            self._phase(Phase.COMMITTING)
            transaction.commit()

    def _take_committed(self, message: Message) -> None:
        self._present.record_acknowledgement(message)
        self._end_if_committed()

    def _end_if_committed(self) -> None:
        if not self._present.unacknowledged:
            self._epochs.is_quiescent = True
            self._end(self._present.result)

    # Failures and recovery

    def _take_corrupt_frame(self, message: Message) -> None:
        sender, peer = message.sender, message.body.get("peer")
        if sender not in self.membership:
            return
        ends = [sender, peer] if type(peer) is int else [sender]
        self.report_corruption(f"node {sender}: {str(message.body.get('text'))[:200]}", ends)

    def _take_failure(self, message: Message) -> None:
        sender, about = message.sender, message.body.get("about")
        relays = self._epochs.view.relays
        if sender not in (*self.engines, *relays, *self._shards):
            return
        if self.phase is Phase.COMMITTING:
            if sender not in self._shards:
                return  # a decided step needs no engine and no relay
        elif self.phase not in _OPEN:
            return  # the report is about an aborted transaction
        kind, text = str(message.body.get("error")), str(message.body.get("text"))
        defective: int | None = sender
        if about not in self._epochs.view.nodes:
            about = None
        if about is not None:  # the error is an invalid message of another node
            if self.phase is Phase.COMMITTING:
                return  # a decided step needs no message between nodes
            defective = self._recovery.find_defective(sender, about)
        if defective is None:
            self._recover(self._recovery.after_invalid_message(self._status, text))
        elif defective in self.engines:
            self._fail(defective, kind, text)
        elif defective in relays:
            self._fail_relay(defective, f"it failed: {kind}: {text}")
        elif self.membership.holders.is_last_replica(defective):
            self._end(StepResult(self._step, error=UnrecoverableError(defective, kind, text)))
        else:
            self.lost(defective, f"it {'reported' if about is None else 'caused'} an error: {text}")

    def _blame(self, node: int, kind: str, text: str) -> None:
        """Fail an engine of the step in flight; evict any other node."""
        if node in self.engines and self.phase in _OPEN:
            self._fail(node, kind, text)
        else:
            self.lost(node, text)

    def _fail(self, engine: int, kind: str, text: str) -> None:
        self._recover(self._recovery.after_failure(engine, kind, text))

    def _fail_relay(self, relay: int, why: str) -> None:
        if self._recovery.gives_up_relays():
            self.wanted_relays = 0
            self._report("no relays", f"too many failed; the last, relay {relay}: {why}")
        self.lost(relay, why)

    def _lose_replica(self, node: int, why: str) -> None:
        holders = self.membership.holders
        shard = holders.shard_of(node)
        streamed = holders.shards[shard][0] == node
        self.membership.lose(node)
        self._detector.forget(node)
        left = holders.shards[shard]
        if not left:
            self._epochs.is_quiescent = False
            self._report("shard lost", f"shard {shard}: {why}", node)
            self._end(StepResult(self._step, error=UnrecoverableError(node, "StorageError", why)))
            return
        others = " and ".join(f"node {other}" for other in left)
        text = f"shard {shard}: node {node}: {why}; the shard continues on {others}"
        self._report("replica lost", text, node)
        if self._transaction is not None:
            self._transaction.remove_replica(node)
        if self.phase is Phase.COMMITTING:
            self._end_if_committed()
        elif self.phase is Phase.RUNNING and not streamed:
            self._decide_if_complete()  # no node needs the gradients sent to this replica
        elif self.phase in _OPEN:
            self._form()

    @property
    def _status(self) -> StepStatus:
        return StepStatus(self.phase, self._epochs, self._present, self._detector)

    def _recover(self, action: RecoveryAction) -> None:
        match action:
            case EvictNode(node, why):
                self.lost(node, why)
            case AbortStep(error):
                self._end(StepResult(self._step, error=error))
            case ResendDecision():
                self._present.commit()
            case RetryStep(why, rotates_engines):
                self._report("retry", f"{why}; the step is retried in a new epoch")
                # The streaming replica may be unreachable.
                self.membership.holders.rotate_primary()
                if rotates_engines:
                    self.membership.rotate_engines()
                self._form()

    def _end(self, result: StepResult) -> None:
        if self.phase is Phase.IDLE:
            return
        if self.phase is Phase.COMMITTING and result.error is not None:
            self._epochs.is_agreed = False  # some shards may have committed
        on_result, self._on_result = self._on_result, lambda result: None
        self._phase(Phase.IDLE)
        self._transaction = None
        on_result(result)

    def _phase(self, phase: Phase) -> None:
        self.phase = phase
        self._stall_timer.begin(self._detector.now)

    def _send(
        self,
        to: int,
        kind: MessageType,
        body: Mapping[str, Any] | None = None,
        payload: np.ndarray | None = None,
        step: int | None = None,
    ) -> None:
        step, epoch = self._step if step is None else step, self.epoch
        fields = {"epoch": epoch, "sender": COORDINATOR, "step": step, "body": body or {}}
        self._context.send(to, message_with(payload, kind=kind, **fields))
