"""The recovery after a failure: which node is evicted, and how the step is retried.

`penstock/distributed/control/worker_replacement.py` starts a worker in the place of a lost one.

The policy changes nothing: the coordinator carries out the returned action. The suspect of a stall
may be healthy, because the connection itself may be broken. The eviction of a shard's last replica
could lose the shard's state. So the last replica becomes a suspect only after several stalls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from penstock.distributed.protocol.epoch import EpochManager
from penstock.distributed.protocol.failure_detector import FailureDetector
from penstock.distributed.protocol.invalid_messages import InvalidMessages
from penstock.distributed.protocol.membership import Membership
from penstock.distributed.protocol.retry_budget import RetryBudget
from penstock.distributed.protocol.routes import relays_in_trees
from penstock.distributed.protocol.step_request import UnrecoverableError
from penstock.distributed.protocol.step_transaction import Phase, StepTransaction
from penstock.errors import ClusterError

_MOST_RELAY_FAILURES = 3  # at one step: no step needs a relay, so none is worth more
_INVALID_MESSAGE = "invalid message"  # a reason of a retry (`RetryBudget.count_retry`)
_MOST_COMMITS = 4  # times a decision is sent to a replica that does not acknowledge it


@dataclass(frozen=True)
class EvictNode:
    """Remove a node from the run."""

    node: int
    why: str


@dataclass(frozen=True)
class AbortStep:
    """End the step with an error that a retry would not repair."""

    error: Exception


@dataclass(frozen=True)
class RetryStep:
    """Retry the step in a new epoch, with the engines in another order if it is asked for."""

    why: str
    rotates_engines: bool = False


@dataclass(frozen=True)
class ResendDecision:
    """Send the decision again."""


RecoveryAction = EvictNode | AbortStep | RetryStep | ResendDecision


class RecoveryPolicy:
    """Counts the failures of a step and chooses the recovery action.

    Args:
        membership: the nodes of the run.
        attempts: how often a step may be retried after corrupt frames, invalid messages and stalls.
        can_replace_engine: whether a new engine may join when no engine is left.
    """

    def __init__(
        self, membership: Membership, attempts: int, can_replace_engine: Callable[[], bool]
    ) -> None:
        self._membership, self._attempts, self._can_replace_engine = (
            membership,
            attempts,
            can_replace_engine,
        )
        self._retry_budget = RetryBudget(0, attempts)
        self._relay_failures = 0  # at the step
        self._invalid_messages = InvalidMessages(membership)  # of the run: no step causes them

    def begin(self, step: int) -> None:
        """Start a new retry budget for a step, unless the step is a retry."""
        if step > self._retry_budget.step:
            self._retry_budget = RetryBudget(step, self._attempts)
            self._relay_failures = 0

    def after_failure(self, engine: int, kind: str, text: str) -> RecoveryAction:
        """Choose the action after an engine failed: evict it, unless the error would occur on other
        engines as well.

        Args:
            kind: the name of the error's class.
        """
        final_error = self._retry_budget.count_failure(engine, kind, text)
        if final_error is None and not self._has_another(engine):
            final_error = f"engine {engine}, the only engine: {kind}: {text}"
        if final_error is None:
            return EvictNode(engine, f"its work failed: {kind}: {text}")
        return self._abort(UnrecoverableError(engine, kind, final_error))

    def gives_up_relays(self) -> bool:
        """Record that a relay failed; return whether so many did at this step that the run should
        go on without relays."""
        self._relay_failures += 1
        return self._relay_failures > _MOST_RELAY_FAILURES

    def _has_another(self, engine: int) -> bool:
        left = [other for other in self._membership.engines if other != engine]
        return len(left) >= self._membership.least or self._can_replace_engine()

    def find_defective(self, receiver: int, sender: int) -> int | None:
        """Record that a node has received an invalid message of another; return the defective one,
        None if the step should be retried first.

        The last replica of a shard may hold the only copy of the state. So the other node is
        evicted instead; if that does not help, `after_failure` ends the run.
        """
        accused = self._invalid_messages.record(receiver, sender)
        if accused is None or not self._membership.holders.is_last_replica(accused):
            return accused
        return receiver if accused == sender else sender

    def after_invalid_message(self, status: StepStatus, text: str) -> RecoveryAction:
        """Choose the action after an invalid message that accuses no node yet."""
        return self._retry(status, _INVALID_MESSAGE, text, None)

    def after_corruption(
        self, status: StepStatus, text: str, ends: Collection[int]
    ) -> RecoveryAction:
        """Choose the action after a frame with a wrong checksum, whose content is unknown.

        Args:
            ends: the nodes at the two ends of the connection, as far as they are known.
        """
        # A shard's last replica is not evicted: it may hold the only copy of the state.
        is_last_replica = self._membership.holders.is_last_replica
        known = [node for node in ends if node in self._membership and not is_last_replica(node)]
        worst = self._retry_budget.count_corruption(known, status.epochs.view.engines)
        why = f"frames on its connections were damaged repeatedly; {text}"
        suspect = None if worst is None or is_last_replica(worst) else EvictNode(worst, why)
        return self._retry(status, "corruption", text, suspect)

    def after_stall(self, status: StepStatus) -> RecoveryAction:
        """Choose the action after a stall: no node computes or receives, so a message was lost."""
        suspect = self._suspect(status) if self._retry_budget.stalls else None
        text = "the step makes no progress"
        if suspect is not None:
            text = f"the step waits for node {suspect.node}"
        if status.phase is Phase.COMMITTING:
            suspect = self._suspect(status)
        return self._retry(status, "stall", text, suspect)

    def _retry(
        self, status: StepStatus, why: str, text: str, suspect: EvictNode | None
    ) -> RecoveryAction:
        """Retry the step or resend the decision; evict the suspect if there is one."""
        is_decided, transaction = status.phase is Phase.COMMITTING, status.transaction
        transaction.commits += is_decided
        try:
            self._retry_budget.count_retry(why, text)
        except ClusterError as error:
            if not is_decided:
                return self._abort(error)
            suspect = self._suspect(status)  # a decided step needs the commit of every shard
        if suspect is not None and (not is_decided or transaction.commits > _MOST_COMMITS):
            return suspect
        if is_decided:
            return ResendDecision()
        return RetryStep(text, rotates_engines=why == _INVALID_MESSAGE)

    def _suspect(self, status: StepStatus) -> EvictNode | None:
        found = find_suspect(status, self._membership, self._retry_budget.stalls)
        return None if found is None else EvictNode(*found)

    def _abort(self, error: Exception) -> AbortStep:
        """Abort the step; a later attempt has a new retry budget."""
        self._retry_budget = RetryBudget(0, self._attempts)
        return AbortStep(error)


_MOST_STALLS = 5


@dataclass(frozen=True)
class StepStatus:
    """The state of the step in flight."""

    phase: Phase
    epochs: EpochManager
    transaction: StepTransaction
    detector: FailureDetector


def find_suspect(status: StepStatus, membership: Membership, stalls: int) -> tuple[int, str] | None:
    """Return the suspect of a stall and the reason; None if it is too early for a suspect."""
    phase, epochs, transaction = status.phase, status.epochs, status.transaction
    if phase is Phase.COMMITTING:
        return transaction.unacknowledged[0], "it has not acknowledged the commit"
    if phase is Phase.RUNNING:
        missing, why = transaction.without_histograms, "it has not answered with its histograms"
    elif phase is Phase.AGREEING:
        missing, why = epochs.agreement.missing, "it has not reported its step"
    else:
        missing, why = epochs.unacknowledged, "it has not acknowledged a new epoch"
    if missing or phase is not Phase.RUNNING:
        if stalls <= _MOST_STALLS:
            missing = [node for node in missing if not membership.holders.is_last_replica(node)]
        return (missing[0], why) if missing else None
    if incomplete := transaction.behind:
        return incomplete[0], "the other replica of its shard has all gradients, it has not"
    # The node with the least progress is behind the broken connection. A tie goes to the node
    # nearest the root. Relays, which no step needs, and engines are suspects in turn.
    relays = relays_in_trees(epochs.view)
    suspects = relays if stalls % 2 == 1 and relays else epochs.view.engines
    progress = status.detector.progress(suspects)
    return min(progress, key=lambda n: progress[n]), "the step waits for it"


def took_too_long(seconds: float) -> str:
    """Return the reason for the eviction of a node whose single job has taken so long."""
    return (
        f"one of its jobs has taken {seconds:.0f} s, longer than cluster.longest_job; if a stage "
        "or the update of a shard may take that long, raise cluster.longest_job"
    )
