"""The epoch in which a step is made: its nodes, and whether all of them may begin.

No node begins before all nodes have acknowledged the epoch's view and all shards are at one step.
Each replica reports the steps that it holds, and all replicas roll back to the newest step in
common.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.membership import Membership
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.errors import StorageError


class EpochManager:
    """The current epoch and its acknowledgements.

    Args:
        membership: the nodes of the run.
        addresses: the listening addresses by node number; a view is sent with its nodes' addresses.
        send: sends a message type and a body to a node, in the current epoch.
    """

    def __init__(
        self,
        membership: Membership,
        addresses: Mapping[int, Any],
        send: Callable[[int, MessageType, Mapping[str, Any]], None],
    ) -> None:
        self._membership, self._addresses, self._send = membership, addresses, send
        self.epoch = 0
        self.view = MembershipView(membership.holders.shards, ())
        self.is_quiescent = False  # all nodes have acknowledged the view, none is in a step
        self.is_agreed = False  # whether all shards are known to be at one step
        self.agreement = RollbackPoint(())
        self._acknowledged: set[int] = set()

    def is_ready(self, view: MembershipView) -> bool:
        """Tell whether the nodes of a view may begin a step at once, in the current epoch."""
        return self.is_quiescent and self.is_agreed and self.view == view

    def form(self, view: MembershipView) -> None:
        """Advance the epoch and send the view to all nodes; spare engines drop their step state."""
        self.view = view
        self._acknowledged.clear()
        listening = {str(n): self._addresses[n] for n in view.nodes if n in self._addresses}
        self._enter_epoch({**view.as_body(), "addresses": listening})

    def advance_epoch(self) -> None:
        """Advance the epoch without a step: the new epoch fences the last step."""
        self._enter_epoch(self.view.as_body())

    def _enter_epoch(self, body: Mapping[str, Any]) -> None:
        self.epoch += 1
        self.is_quiescent = False
        for node in self._membership.participants:
            self._send(node, MessageType.VIEW, body)

    def acknowledge(self, node: int) -> bool:
        """Record that a node has acknowledged the view; return whether all nodes have."""
        self._acknowledged.add(node)
        self.is_quiescent = not self.unacknowledged
        return self.is_quiescent

    @property
    def unacknowledged(self) -> list[int]:
        """The nodes that have not acknowledged the view, engines first."""
        return [node for node in self.view.nodes if node not in self._acknowledged]

    @property
    def acknowledged(self) -> int:
        """How many nodes have acknowledged the view."""
        return len(self._acknowledged)

    def request_held_steps(self) -> None:
        """Ask all replicas which steps they hold."""
        self.agreement = RollbackPoint(self._membership.holders.shards)
        for node in self._membership.holders.nodes:
            self._send(node, MessageType.HELD_STEPS, {})

    def record_held_steps(self, message: Message, before: int) -> list[tuple[int, str]]:
        """Record the steps that a replica holds; when all have answered, order the rollback.

        Args:
            before: the number of the step to make.

        Returns:
            The nodes to evict first, with reasons: they lack the step that other replicas hold.

        Raises:
            ProtocolError: the message has no list of steps.
            StorageError: no step is held by all shards.
        """
        steps = message.body.get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, int) for step in steps):
            raise message_validation.refuse(
                message, f"has {str(steps)[:80]!r} as 'steps', expected a list of step numbers"
            )
        if not self.agreement.record_held_steps(message.sender, steps):
            return []
        to = self.agreement.newest(before)
        without = self.agreement.without(to)
        if not without:
            for node in self._membership.holders.nodes:
                self._send(node, MessageType.ROLLBACK, {"to": to})
        why = f"it does not hold step {to}, to which all shards roll back"
        return [(node, why) for node in without]

    def record_rollback(self, node: int) -> bool:
        """Record that a replica has rolled back; return whether all have."""
        self.is_agreed = self.agreement.record_rollback(node)
        return self.is_agreed


class RollbackPoint:
    """The steps that the shards hold, and the replicas that have rolled back.

    Args:
        shards: the replicas of each shard, in order. A shard holds a step if a replica does.
    """

    def __init__(self, shards: Sequence[Sequence[int]]) -> None:
        self._shards = [tuple(nodes) for nodes in shards]
        self._nodes = tuple(itertools.chain.from_iterable(shards))
        self._held: dict[int, set[int]] = {}
        self._rolled_back: set[int] = set()

    def record_held_steps(self, node: int, steps: Sequence[int]) -> bool:
        """Record the steps that a replica holds; return whether all replicas have answered."""
        self._held[node] = {*steps}
        return len(self._held) == len(self._nodes)

    def newest(self, before: int) -> int:
        """Return the newest step that all shards hold, preferably before the step to make.

        Raises:
            StorageError: no step is held by all shards.
        """
        by_shard = [set().union(*(self._held[node] for node in nodes)) for nodes in self._shards]
        common = set.intersection(*by_shard)
        if not common:
            held = ", ".join(f"shard {n} has {sorted(steps)}" for n, steps in enumerate(by_shard))
            raise StorageError(f"no step is held by all shards ({held}); resume from a checkpoint")
        # All shards may hold the step in flight; but its losses were never reported.
        return max([step for step in common if step < before] or common)

    def without(self, step: int) -> list[int]:
        """Return the replicas that do not hold a step."""
        return [node for node in self._nodes if step not in self._held[node]]

    def record_rollback(self, node: int) -> bool:
        """Record that a replica has rolled back; return whether all have."""
        self._rolled_back.add(node)
        return len(self._rolled_back) == len(self._nodes)

    @property
    def missing(self) -> list[int]:
        """The replicas that have not answered the last question."""
        replied = self._rolled_back if len(self._held) == len(self._nodes) else {*self._held}
        return [node for node in self._nodes if node not in replied]
