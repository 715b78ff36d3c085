"""What the trainer's process asks of a coordinator and sets: the nodes, and how many are wanted.

New nodes are admitted here. What the admission of a node changes in the step in flight, and what
its loss does, is the coordinator's (`coordinator.py`).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.distributed.protocol.epoch import EpochManager
from penstock.distributed.protocol.failure_detector import FailureDetector
from penstock.distributed.protocol.membership import Membership
from penstock.distributed.protocol.step_request import ProtocolEvent
from penstock.distributed.protocol.step_transaction import Phase


class CoordinatorState(ABC):
    """The nodes of a run and its epoch.

    Args:
        membership: the nodes.
        epochs: the epoch.
        on_event: receives the protocol's events.
    """

    def __init__(
        self,
        membership: Membership,
        epochs: EpochManager,
        on_event: Callable[[ProtocolEvent], None],
    ) -> None:
        self.membership, self._epochs, self._on_event = membership, epochs, on_event
        self.phase = Phase.IDLE  # of the step in flight
        self.counts: Counter[str] = Counter()  # of events
        self._detector = FailureDetector()

    @property
    def ready(self) -> Sequence[int]:
        """The engines that may take part, including spare engines."""
        return self.membership.engines

    @property
    def engines(self) -> tuple[int, ...]:
        """The engines of the current view."""
        return self._epochs.view.engines

    @property
    def shard_nodes(self) -> tuple[int, ...]:
        """The replicas of the current view."""
        return self._epochs.view.shard_nodes

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._epochs.epoch

    @property
    def wanted(self) -> int:
        """How many engines are to take part, from the next step on."""
        return self.membership.wanted

    @wanted.setter
    def wanted(self, engines: int) -> None:
        self.membership.wanted = engines

    @property
    def wanted_relays(self) -> int:
        """How many relays are to take part, from the next step on."""
        return self.membership.wanted_relays

    @wanted_relays.setter
    def wanted_relays(self, relays: int) -> None:
        self.membership.wanted_relays = relays

    @property
    def holders(self) -> Sequence[Sequence[int]]:
        """The replicas of every shard, the streaming replica first."""
        return self.membership.holders.shards

    @property
    def learners(self) -> Sequence[int]:
        """The nodes that wait for a copy of a shard."""
        return tuple(self.membership.holders.learners)

    @property
    def is_agreed(self) -> bool:
        """Whether all replicas of all shards are known to be at one step."""
        return self._epochs.is_agreed

    # Admission

    def joined(self, engine: int) -> None:
        """Add an engine that is ready; it takes part from the next step on, if it is wanted."""
        self.membership.join(engine)
        is_spare = self.membership.engines.index(engine) >= self.membership.wanted
        spare = f", as a spare: {self.membership.wanted} take part" if is_spare else ""
        self._admit(engine, "joined", f"engine {engine} is ready{spare}")

    def watch(self, node: int) -> None:
        """Start the timeout of a first replica, which is ready: now its silence counts."""
        self._detector.watch(node)

    def relay_joined(self, relay: int) -> None:
        """Add a relay that is ready; it takes part from the next step on, if it is wanted."""
        self.membership.join_relay(relay)
        self._admit(relay, "relay joined", f"relay {relay} is ready")

    def shard_joined(self, shard: int, node: int) -> None:
        """Assign a lost shard to a new node, which has the stored state of the lost node."""
        self.membership.assign_shard(shard, node)
        self._epochs.is_agreed = False
        self._admit(node, "shard joined", f"node {node} holds shard {shard} now")

    def learner_joined(self, shard: int, node: int) -> None:
        """Add a new node as a learner; it becomes a replica of the shard when it has a copy."""
        self.membership.add_learner(shard, node)
        text = f"shard {shard}: node {node} waits for a copy of the shard"
        self._admit(node, "replica joined", text)

    def promote(self, node: int) -> bool:
        """Make a learner a replica, between two steps; it has the whole state of its shard.

        Returns whether it is a replica now: it is not if it or all replicas of its shard were lost.
        """
        holders = self.membership.holders
        shard = holders.learners.get(node)
        if shard is None or not holders.shards[shard]:
            return False
        if self.phase is not Phase.IDLE:
            raise RuntimeError(f"node {node} cannot be promoted during a step ({self.phase.value})")
        holders.add(shard, node)
        return True

    def _admit(self, node: int, kind: str, text: str) -> None:
        self._detector.watch(node)
        self._report(kind, text, node)
        self._admitted()

    @abstractmethod
    def _admitted(self) -> None:
        """Handle that a node was added."""

    def _report(self, kind: str, text: str, node: int | None = None) -> None:
        self.counts[kind] += 1
        self._on_event(ProtocolEvent(kind, text, node))
