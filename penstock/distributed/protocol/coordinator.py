"""The coordinator of the step protocol: a two-phase commit decides when a step counts.

A step is a transaction in an epoch. Every node acknowledges the epoch's view, begins, and reports.
When all losses and the gradients of all shards are in, the step is decided, and the shards are sent
the decision until each has acknowledged it. A loss before the decision aborts the transaction: the
epoch advances, and the step is retried with the nodes that are left. After the decision the engines
are not needed. `membership.py` knows the nodes, `epoch.py` who has acknowledged an epoch.

A shard may have several replicas, which do the same work and hold the same bits. While one is left,
the others lose nothing. When the last is lost, the step ends with an error. A new node may take its
place with what the lost one had stored; before the next step all shards roll back to the newest
step that all of them hold. `recovery_policy.py` chooses what to do about corrupt frames and stalls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.epoch import EpochManager
from penstock.distributed.protocol.failure_detector import FailureDetector, Heartbeat, StallTimer
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

# The attempt can be given up and made again in these.
_OPEN = (Phase.FORMING, Phase.AGREEING, Phase.RUNNING)


class Coordinator:
    """Drives one step at a time.

    Args:
        runtime: carries its messages.
        shards: the numbers of each shard's nodes, in the order of the shards.
        engines: how many engines are wanted; `wanted` may be set at any time.
        timeouts: when silence counts as a loss, and a stall as a failure.
        tell: is told what happens.
        least: with fewer engines than this no step is made: they would not have the memory.
        addresses: where nodes listen, by number; those of a view's nodes are sent with it.
        can_replace_engine: whether another engine may come where none is left.
        is_there: whether a node that has been silent for so long is alive all the same.
    """

    def __init__(
        self,
        runtime: NodeContext,
        shards: Sequence[Sequence[int]],
        engines: int,
        timeouts: Timeouts,
        tell: Callable[[ProtocolEvent], None],
        least: int = 1,
        addresses: Mapping[int, Any] | None = None,
        can_replace_engine: Callable[[], bool] = lambda: True,
        is_there: Callable[[int, float], bool] = lambda node, silent: False,
    ) -> None:
        self.membership = Membership(shards, engines, least)
        self.phase = Phase.IDLE
        self.counts: Counter[str] = Counter()
        self._runtime, self._timeouts, self._tell = runtime, timeouts, tell
        self._is_there = is_there
        addresses = addresses if addresses is not None else {}
        self._epochs = EpochManager(self.membership, addresses, self._send)
        self._recovery = RecoveryPolicy(self.membership, timeouts.attempts, can_replace_engine)
        self._transaction: StepTransaction | None = None  # at the step in flight
        self._done: Callable[[StepResult], None] = lambda outcome: None
        self._detector, self._stall_timer = FailureDetector(), StallTimer()

    # What the run's process says

    @property
    def ready(self) -> Sequence[int]:
        """The engines that may take part, spare ones too."""
        return self.membership.engines

    @property
    def engines(self) -> tuple[int, ...]:
        """The engines of the present view."""
        return self._epochs.view.engines

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return self._epochs.epoch

    @property
    def wanted(self) -> int:
        """How many engines are to take part, from the next step on."""
        return self.membership.wanted

    @wanted.setter
    def wanted(self, engines: int) -> None:
        self.membership.wanted = engines

    def joined(self, engine: int) -> None:
        """An engine is ready; it takes part from the next step on, if it is wanted."""
        self.membership.join(engine)
        self._detector.watch(engine)
        self._happened("joined", f"engine {engine} is ready", engine)
        if self.phase is Phase.GATHERING:
            self._form()

    @property
    def holders(self) -> Sequence[Sequence[int]]:
        """The nodes of every shard, the one that streams first."""
        return self.membership.holders.shards

    @property
    def learners(self) -> Sequence[int]:
        """The nodes that wait for a copy of a shard."""
        return tuple(self.membership.holders.learners)

    @property
    def is_agreed(self) -> bool:
        """Whether all nodes of all shards are known to stand at one step."""
        return self._epochs.is_agreed

    def shard_joined(self, shard: int, node: int) -> None:
        """A new node has taken the place of a shard that was lost, with what that had stored."""
        self.membership.assign_shard(shard, node)
        self._detector.watch(node)
        self._epochs.is_agreed = False
        self._happened("shard joined", f"shard {shard} is node {node} now", node)
        if self.phase is Phase.GATHERING:
            self._form()

    def learner_joined(self, shard: int, node: int) -> None:
        """A new node has come to hold a shard beside others, as soon as it has a copy of it."""
        self.membership.come(shard, node)
        self._detector.watch(node)
        self._happened("replica joined", f"shard {shard}: node {node} waits for a copy of it", node)

    def promote(self, node: int) -> bool:
        """A learner has been given, between two steps, all that the nodes of its shard hold.

        Returns whether it is one of them now: it is not if it was lost, or they all were.
        """
        holders = self.membership.holders
        shard = holders.learners.get(node)
        if shard is None or not holders.shards[shard]:
            return False
        if self.phase is not Phase.IDLE:
            raise RuntimeError(f"node {node} has a copy of a step before: {self.phase.value}")
        holders.add(shard, node)
        return True

    def lost(self, node: int, why: str) -> None:
        """A node is gone, or counts as gone."""
        if node not in self.membership:
            return
        if node in self._shards:
            self._lose_holder(node, why)
            return
        shard = self.membership.holders.learners.get(node)
        self.membership.lose(node)
        self._detector.forget(node)
        if shard is not None:
            self._happened("replica lost", f"shard {shard}: node {node}, no copy yet: {why}", node)
            return
        self._happened("engine lost", f"engine {node}: {why}", node)
        if node in self.engines and self.phase in _OPEN:
            self._form()

    def start(self, request: StepRequest, done: Callable[[StepResult], None]) -> None:
        """Have a step made; `done` is called once, with how it ended."""
        if self.phase is not Phase.IDLE:
            raise RuntimeError(f"a step is in flight: {self.phase.value}")
        view = self.membership.view(request.micro_batches)
        self._transaction, self._done = StepTransaction(view, request, self._send), done
        self._recovery.begin(request.step)
        if self._epochs.is_ready(view):
            self._begin()
        else:
            self._form()

    def cancel(self) -> None:
        """Give the step in flight up, unless it is decided: then it ends by itself."""
        if self.phase in (Phase.GATHERING, *_OPEN):
            self._epochs.is_quiescent = False
            self._end(StepResult(self._step, error=InterruptedError("the step was given up")))

    def advance_epoch(self) -> None:
        """After a step that ended with an error: let nobody go on with it."""
        if self.phase is Phase.IDLE and self.engines:  # else nobody has begun anything
            self._epochs.advance_epoch()

    # What nodes say

    def handle(self, message: Message) -> None:
        """Take a message; one that makes no sense costs its sender its place."""
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
        if kind is MessageType.CORRUPT_FRAME:
            self._take_damaged(message)
        elif kind is MessageType.VIEW_ACK and self.phase is Phase.FORMING:
            self._take_seen(sender)
        elif (
            kind is MessageType.HELD_STEPS
            and self.phase is Phase.AGREEING
            and sender in self._shards
        ):
            self._take_held(message)
        elif (
            kind is MessageType.ROLLBACK and self.phase is Phase.AGREEING and sender in self._shards
        ):
            self._take_gone_back(message)
        elif kind is MessageType.FAILURE and message.step in (0, self._step):
            self._take_trouble(message)
        elif message.step != self._step:
            self.counts["stale messages"] += 1
        elif kind is MessageType.LOSSES and self.phase is Phase.RUNNING:
            self._take_losses(message)
        elif (
            kind is MessageType.PREPARED and self.phase is Phase.RUNNING and sender in self._shards
        ):
            self._take_prepared(message)
        elif (
            kind is MessageType.COMMITTED
            and self.phase is Phase.COMMITTING
            and sender in self._shards
        ):
            self._take_committed(message)

    def _hear(self, sender: int, beat: Heartbeat | None = None) -> None:
        if sender in self.membership:  # a node that was lost does not count
            self._detector.hear(sender, beat)

    def damaged(self, text: str, ends: Collection[int] = ()) -> None:
        """Something came whose checksum is wrong: nobody knows what it was to say.

        Args:
            ends: the nodes at the ends of the link, as far as they are known.
        """
        self.counts["damaged"] += 1
        if self.phase in (Phase.COMMITTING, *_OPEN):
            self._recover(self._recovery.of_damage(self._status, text, ends))

    def tick(self, now: float) -> None:
        """Look whether somebody has been silent, or nothing has moved, for too long."""
        detector = self._detector
        self._stall_timer.pause(detector.pass_time(now, self._timeouts.silence / 4))
        for node, silent in detector.silent(self.membership.all, self._timeouts.silence):
            if not self._is_there(node, silent):
                self.lost(node, f"silent for {silent:.1f} s")
        transaction = self._transaction
        if transaction is None or self.phase is Phase.GATHERING:
            self._stall_timer.begin(now)
            return
        members = (*self.engines, *self._epochs.view.shard_nodes)
        busy, far = detector.busy(members), tuple(detector.progress(members).values())
        come = (self._epochs.seen, *transaction.counts)
        stalled = self._stall_timer.stalled_seconds(now, (self.phase, self.epoch, come, far))
        if stalled > self._timeouts.job and busy:
            self._stall_timer.begin(now)
            self._blame(busy[0], ClusterError.__name__, took_too_long(stalled))
        elif stalled > self._timeouts.stall and not busy:
            self._stall_timer.begin(now)
            self._recover(self._recovery.of_standstill(self._status))

    # The epoch

    @property
    def _step(self) -> int:
        return self._transaction.request.step if self._transaction is not None else 0

    @property
    def _shards(self) -> tuple[int, ...]:
        return self.membership.holders.nodes

    def _form(self) -> None:
        """Raise the epoch and tell everybody who takes part."""
        request = self._present.request
        view = self.membership.view(request.micro_batches)
        self._epochs.is_quiescent = False
        lacks = self.membership.lacks(view)
        if lacks is not None:
            self._phase(Phase.GATHERING)
            self._happened("waiting", f"{lacks}; waiting")
            return
        self._transaction = StepTransaction(view, request, self._send)
        self._phase(Phase.FORMING)
        self._epochs.form(view)

    def _take_seen(self, sender: int) -> None:
        if not self._epochs.see(sender):
            return
        if self.is_agreed:
            self._begin()
            return
        self._phase(Phase.AGREEING)
        self._epochs.ask_what_is_held()

    def _take_held(self, message: Message) -> None:
        try:
            without = self._epochs.hold(message, self._step)
        except StorageError as error:
            self._end(StepResult(self._step, error=error))
            return
        for node, why in without:
            self.lost(node, why)

    def _take_gone_back(self, message: Message) -> None:
        to = message_validation.integer(message, "to", 0)
        if not self._epochs.go_back(message.sender):
            return
        if to + 1 == self._step:
            self._begin()
            return
        self._happened("went back", f"all shards stand at step {to}")
        self._end(StepResult(self._step, error=RolledBackError(to)))

    # The attempt

    @property
    def _present(self) -> StepTransaction:
        assert self._transaction is not None
        return self._transaction

    def _begin(self) -> None:
        # Until this step has come to its end, nobody may begin another.
        self._epochs.is_quiescent = False
        self._phase(Phase.RUNNING)
        try:
            self._present.begin()
        except Exception as error:  # the data's: it ends the step, not the coordinator
            self._end(StepResult(self._step, error=error))

    def _take_losses(self, message: Message) -> None:
        self._present.lose(message)
        self._decide_if_whole()

    def _take_prepared(self, message: Message) -> None:
        self._present.prepare(message)
        self._decide_if_whole()

    def _decide_if_whole(self) -> None:
        transaction = self._present
        if not transaction.is_whole:
            return
        try:
            transaction.decide()
        except Exception as error:  # not committed, for a reason that the caller is told
            self._end(StepResult(self._step, error=error))
            return
        self._phase(Phase.COMMITTING)
        transaction.commit()

    def _take_committed(self, message: Message) -> None:
        self._present.answer(message)
        self._end_if_committed()

    def _end_if_committed(self) -> None:
        if not self._present.unanswered:
            self._epochs.is_quiescent = True
            self._end(self._present.outcome)

    # What goes wrong

    def _take_damaged(self, message: Message) -> None:
        sender, peer = message.sender, message.body.get("peer")
        if sender not in self.membership:
            return
        ends = [sender, peer] if type(peer) is int else [sender]
        self.damaged(f"node {sender}: {str(message.body.get('text'))[:200]}", ends)

    def _take_trouble(self, message: Message) -> None:
        sender, about = message.sender, message.body.get("about")
        if sender not in (*self.engines, *self._shards):
            return
        if self.phase is Phase.COMMITTING:
            if sender not in self._shards:
                return  # the step needs no engine any more
        elif self.phase not in _OPEN:
            return  # it was about an attempt that is given up
        kind, text = str(message.body.get("error")), str(message.body.get("text"))
        if about in self.engines:
            self._fail(about, kind, text)  # it has sent what makes no sense
        elif sender in self.engines:
            self._fail(sender, kind, text)
        elif self.membership.holders.is_last_replica(sender):
            self._end(StepResult(self._step, error=UnrecoverableError(sender, kind, text)))
        else:
            self.lost(sender, f"it cannot go on: {text}")

    def _blame(self, node: int, kind: str, text: str) -> None:
        """What a node has done costs it its place; to the run it is no node any more."""
        if node in self.engines and self.phase in _OPEN:
            self._fail(node, kind, text)
        else:
            self.lost(node, text)

    def _fail(self, engine: int, kind: str, text: str) -> None:
        self._recover(self._recovery.of_failure(engine, kind, text))

    def _lose_holder(self, node: int, why: str) -> None:
        holders = self.membership.holders
        shard = holders.shard_of(node)
        streamed = holders.shards[shard][0] == node
        self.membership.lose(node)
        self._detector.forget(node)
        left = holders.shards[shard]
        if not left:
            self._epochs.is_quiescent = False
            self._happened("shard lost", f"shard {shard}: {why}", node)
            self._end(StepResult(self._step, error=UnrecoverableError(node, "StorageError", why)))
            return
        others = " and ".join(f"node {other}" for other in left)
        text = f"shard {shard}: node {node}: {why}; {others} goes on with it"
        self._happened("replica lost", text, node)
        if self._transaction is not None:
            self._transaction.leave(node)
        if self.phase is Phase.COMMITTING:
            self._end_if_committed()
        elif self.phase is Phase.RUNNING and not streamed:
            self._decide_if_whole()  # what the others send it, nobody needs
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
            case RetryStep(why):
                self._happened("retry", f"{why}: the step begins anew in a new epoch")
                # The replica that streams may be unreachable.
                self.membership.holders.rotate_primary()
                self._form()

    def _end(self, outcome: StepResult) -> None:
        if self.phase is Phase.IDLE:
            return
        if self.phase is Phase.COMMITTING and outcome.error is not None:
            self._epochs.is_agreed = False  # some shards may have committed
        done, self._done = self._done, lambda outcome: None
        self._phase(Phase.IDLE)
        self._transaction = None
        done(outcome)

    def _phase(self, phase: Phase) -> None:
        self.phase = phase
        self._stall_timer.begin(self._detector.now)

    def _happened(self, kind: str, text: str, node: int | None = None) -> None:
        self.counts[kind] += 1
        self._tell(ProtocolEvent(kind, text, node))

    def _send(
        self,
        to: int,
        kind: MessageType,
        body: Mapping[str, Any] | None = None,
        payload: np.ndarray | None = None,
    ) -> None:
        said = {"epoch": self.epoch, "sender": COORDINATOR, "step": self._step, "body": body or {}}
        self._runtime.send(to, message_with(payload, kind=kind, **said))
