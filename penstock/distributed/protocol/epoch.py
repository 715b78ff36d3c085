"""The epoch in which a step is made: which nodes take part, and whether all of them may begin.

No node begins before all have acknowledged the epoch's view and all shards stand at one step. Each
shard says which steps it holds, and all roll back to the newest step in common.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.membership import Membership
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.errors import StorageError


class EpochManager:
    """The present epoch, and who has answered to it.

    Args:
        membership: the nodes of the run.
        addresses: where nodes listen, by number; those of a view's nodes are sent with it.
        send: sends a node a kind of message with a body, in the present epoch.
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
        self.is_quiescent = False  # whether the view's members have seen it, and none is in a step
        self.is_agreed = False  # whether all shards are known to stand at one step
        self.agreement = RollbackPoint(())
        self._seen: set[int] = set()

    def is_ready(self, view: MembershipView) -> bool:
        """Tell whether those of a view may begin a step at once, in the present epoch."""
        return self.is_quiescent and self.is_agreed and self.view == view

    def form(self, view: MembershipView) -> None:
        """Raise the epoch and tell everybody who takes part; spare ones forget what they held."""
        self.view = view
        self._seen.clear()
        nodes = (*view.shard_nodes, *view.engines)
        listening = {str(n): self._addresses[n] for n in nodes if n in self._addresses}
        self._raise_epoch({**view.as_body(), "addresses": listening})

    def advance_epoch(self) -> None:
        """Raise the epoch without a step, so that nobody goes on with the last one."""
        self._raise_epoch(self.view.as_body())

    def _raise_epoch(self, body: Mapping[str, Any]) -> None:
        self.epoch += 1
        self.is_quiescent = False
        for node in self._membership.here:
            self._send(node, MessageType.VIEW, body)

    def see(self, node: int) -> bool:
        """Take note that a node has seen the view; return whether all have."""
        self._seen.add(node)
        self.is_quiescent = not self.unseen
        return self.is_quiescent

    @property
    def unseen(self) -> list[int]:
        """Who has not seen the view; engines first."""
        nodes = (*self.view.engines, *self.view.shard_nodes)
        return [node for node in nodes if node not in self._seen]

    @property
    def seen(self) -> int:
        """How many have seen it."""
        return len(self._seen)

    def ask_what_is_held(self) -> None:
        """Ask all nodes of shards which steps they hold."""
        self.agreement = RollbackPoint(self._membership.holders.shards)
        for node in self._membership.holders.nodes:
            self._send(node, MessageType.HELD_STEPS, {})

    def hold(self, message: Message, before: int) -> list[tuple[int, str]]:
        """Take which steps a node of a shard holds; once all have said so, have them go back.

        Args:
            before: the number of the step that is to be made.

        Returns:
            Who has to be lost first, and why: others of its shard hold that step, it does not.

        Raises:
            ProtocolError: it says no steps.
            StorageError: there is no step that all shards hold.
        """
        steps = message.body.get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, int) for step in steps):
            raise message_validation.refuse(message, f"holds {str(steps)[:80]!r}")
        if not self.agreement.hold(message.sender, steps):
            return []
        to = self.agreement.newest(before)
        without = self.agreement.without(to)
        if not without:
            for node in self._membership.holders.nodes:
                self._send(node, MessageType.ROLLBACK, {"to": to})
        return [(node, f"it does not hold step {to}, to which all go back") for node in without]

    def go_back(self, node: int) -> bool:
        """Take note that a node stands there; return whether all do."""
        self.is_agreed = self.agreement.go_back(node)
        return self.is_agreed


class RollbackPoint:
    """What shards have said of the steps that they hold.

    Args:
        shards: the nodes of each, in the order of the shards. A shard holds what any of them holds.
    """

    def __init__(self, shards: Sequence[Sequence[int]]) -> None:
        self._shards = [tuple(nodes) for nodes in shards]
        self._nodes = tuple(itertools.chain.from_iterable(shards))
        self._held: dict[int, set[int]] = {}
        self._gone_back: set[int] = set()

    def hold(self, node: int, steps: Sequence[int]) -> bool:
        """Take which steps a node holds; return whether all have said so by now."""
        self._held[node] = {*steps}
        return len(self._held) == len(self._nodes)

    def newest(self, before: int) -> int:
        """Return the newest step that all shards hold, best before the one to be made.

        Raises:
            StorageError: there is none.
        """
        by_shard = [set().union(*(self._held[node] for node in nodes)) for nodes in self._shards]
        common = set.intersection(*by_shard)
        if not common:
            held = ", ".join(f"shard {n} has {sorted(steps)}" for n, steps in enumerate(by_shard))
            raise StorageError(f"no step is held by all shards ({held}); resume from a checkpoint")
        # The step in flight may be stored everywhere; but its losses were never reported.
        return max([step for step in common if step < before] or common)

    def without(self, step: int) -> list[int]:
        """Return the nodes that do not hold a step which another of their shard holds."""
        return [node for node in self._nodes if step not in self._held[node]]

    def go_back(self, node: int) -> bool:
        """Take note that a node stands there; return whether all do."""
        self._gone_back.add(node)
        return len(self._gone_back) == len(self._nodes)

    @property
    def missing(self) -> list[int]:
        """Who has not answered to what was asked last."""
        said = self._gone_back if len(self._held) == len(self._nodes) else {*self._held}
        return [node for node in self._nodes if node not in said]
