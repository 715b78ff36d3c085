"""The shards of a run that are processes of their own: who holds each, who is lost, who is copied.

A shard with a replica goes on with the other when one is lost; who comes instead is given a copy
between two steps. A shard that nobody holds any more comes back from what it has on flash, or the
run ends.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.config import Config, size_above
from penstock.distributed.control_messages import ReplicaSlot, Role
from penstock.distributed.protocol import Coordinator
from penstock.distributed.rendezvous_file import NAME
from penstock.distributed.replication.rebuild import (
    BrokenCopyError,
    ReplicaRejectedError,
    copy_shard,
)
from penstock.distributed.replication.replica_assignment import ReplicaAssignment
from penstock.distributed.rpc import InvalidResponseError, RpcClient, ShardLostError, StoreClient
from penstock.distributed.transport import Address
from penstock.errors import PenstockError, StorageError
from penstock.planning import store_factory
from penstock.store import Holding
from penstock.store.flash import DurableStore

_LOOK = 0.05  # seconds between two looks at what has happened
_TRIES = 3  # to give a learner a copy, if what breaks is neither of the two nodes
_AGAIN = "give the same command again, the run goes on from the last step that is safe"


@dataclass(frozen=True)
class ManagerHooks:
    """What the replica manager needs of the cluster manager.

    `say` tells of what has happened, by its kind; `fail` ends the run; `look` tells what has
    happened, in the trainer's thread, and raises what ends the run; `do` has something done in the
    endpoint's thread; `address` says where a node listens, None once it is lost.
    """

    coordinator: Coordinator
    say: Callable[[str, str, int | None], None]
    fail: Callable[[PenstockError], None]
    look: Callable[[], None]
    do: Callable[[Callable[[], object]], None]
    should_stop: Callable[[], bool]
    address: Callable[[int], Address | None]


class ReplicaManager:
    """The shards of one run.

    Args:
        parts: what each holds.
        calls: asks them.
        hooks: where they are.
    """

    def __init__(
        self, config: Config, parts: Sequence[Holding], calls: RpcClient, hooks: ManagerHooks
    ) -> None:
        self._config, self._parts, self._calls, self._hooks = config, parts, calls, hooks
        self.places = ReplicaAssignment(len(parts), config.store.replicas)

    # In the trainer's thread

    def remote(self) -> list[StoreClient]:
        """Return the shards, once all have come."""
        while not self.places.wait(_LOOK):
            self._hooks.look()
        return [
            StoreClient(
                part,
                self._calls,
                nodes=functools.partial(self.places.nodes, shard),
                await_node=functools.partial(self._await_holder, shard),
                refuse=self._cut_off,
                copy=functools.partial(self._copy, shard),
                rule=store_factory.commit_rule(self._config),
                replicas=self._config.store.replicas,
            )
            for shard, part in enumerate(self._parts)
        ]

    def _cut_off(self, node: int, error: InvalidResponseError) -> None:
        """Take a node its place, and its link, that has answered what makes no sense."""
        self._hooks.do(lambda: self._hooks.coordinator.lost(node, str(error)))

    def _await_holder(self, shard: int) -> None:
        """Wait until somebody holds a shard. Raises `StorageError` if a stop is asked for."""
        while not self.places.nodes(shard):
            self._hooks.look()
            if self._hooks.should_stop():
                raise StorageError(f"stopped while a shard of the store was lost; {_AGAIN}")
            self.places.wait_for_holder(shard, _LOOK)

    def copy_to_learners(self, on_flash: DurableStore | None) -> None:
        """Give learners, between two steps, what is held by those beside whom they have come.

        Args:
            on_flash: the whole store, if it is on flash. The step that is copied is made durable
                first: a learner holds none before it, to which all could go back.

        Raises:
            InterruptedError: a stop was asked for.
        """
        learners = self.places.learners
        if not learners or not self._hooks.coordinator.is_agreed:
            return
        try:
            if on_flash is not None:
                on_flash.make_durable()
        except ShardLostError:
            return  # this comes first
        for shard, node in learners:
            if not (nodes := self.places.nodes(shard)):
                continue
            try:
                self._copy(shard, nodes[0], node)
            except ShardLostError:
                continue  # who is left, or comes next, is tried before the next step
            except ReplicaRejectedError as error:
                self._refuse(shard, node, str(error))
                continue
            except InvalidResponseError as error:
                self._cut_off(nodes[0], error)
                continue
            self._hooks.do(functools.partial(self._admit, node))

    def _copy(self, shard: int, source: int, target: int) -> None:
        """Give a node what another holds of a shard.

        **Raises:** what `copy_shard` raises; `ReplicaRejectedError` if it has broken again and
        again.
        """
        began = time.monotonic()
        for tries in range(1, _TRIES + 1):
            try:
                copied = self._try_to_copy(shard, source, target)
                break
            except BrokenCopyError as error:
                if tries == _TRIES:
                    text = f"{tries} copies in a row broke, the last one: {error}"
                    raise ReplicaRejectedError(text) from error
                text = f"shard {shard}: a copy broke, another one is begun: {error}"
                self._hooks.say("replica copied again", text, target)
        self._hooks.say(
            "replica copied",
            f"the replica of shard {shard} is whole: node {target} was given the "
            f"{size_above(copied)} of node {source} in {time.monotonic() - began:.1f} s",
            target,
        )

    def _try_to_copy(self, shard: int, source: int, target: int) -> int:
        lost = f"node {source} was lost while it was copied"

        def meanwhile() -> None:
            if source not in self.places.nodes(shard):
                raise ShardLostError(lost)
            self._require_no_stop()

        listens = self._hooks.address(source)
        if listens is None:
            raise ShardLostError(lost)
        return copy_shard(self._calls, source, listens, target, meanwhile)

    def _require_no_stop(self) -> None:
        self._hooks.look()
        if self._hooks.should_stop():
            raise InterruptedError("stopped while a shard of the store was copied")

    def _refuse(self, shard: int, node: int, why: str) -> None:
        """Go on without a replica that could not be made: the next would be no better."""
        hooks = self._hooks

        def refuse() -> None:
            self.places.give_up(node)
            text = f"shard {shard} goes on without a replica, node {node} cannot be one: {why}"
            hooks.say("replica refused", text, node)
            hooks.coordinator.lost(node, why)

        hooks.do(refuse)

    # In the endpoint's thread

    def _admit(self, node: int) -> None:
        if self._hooks.coordinator.promote(node):
            self.places.promote(node)

    def lost(self, place: ReplicaSlot, number: int) -> None:
        """Make room for another; end the run if nobody else has what was lost."""
        hooks, shard, why = self._hooks, place.shard, f"shard {place.shard} of the store was lost"
        had_come = self.places.have_come
        self.places.lose(number)
        if not had_come:
            hooks.fail(StorageError(f"{why} before all had come; give the same command again"))
        elif not self.places.is_held(shard) and self._config.store.flash.path is None:
            hooks.fail(
                StorageError(
                    f"{why}, and with it what it had in memory; give the same command again, it "
                    "goes on from the last checkpoint"
                )
            )
        elif self._config.cluster.start == "listen":
            hooks.say("shard wanted", self._how_to_start(shard), number)
        self._calls.lost(number, f"{why}; {_AGAIN}")

    def _how_to_start(self, shard: int) -> str:
        record = self._config.run.dir.absolute() / NAME
        where = f"the host with shard {shard} of the store"
        if self._config.store.replicas > 1:
            where = f"the host that had shard {shard} of the store, or another"
        return f"on {where}: python -m penstock.cluster.worker {record} --shard {shard}"

    def place_for(
        self,
        role: Role | None,
        asked: int | None,
        host: str,
        here: Iterable[tuple[ReplicaSlot, str]],
        others_expected: bool,
    ) -> ReplicaSlot | None:
        """Return the place that a process gets which joins, None if it gets none.

        Two processes of one host hold the same shard only where nobody else is to come.

        Args:
            role: what it was started as, None if it may be either.
            asked: the shard that it wants to be, if it wants any.
            host: where it is.
            here: the places of the others that have come, or are about to, and their hosts.
            others_expected: whether others are to come who could take a place.
        """
        others = list(here)
        free = self.places.free({place for place, _ in others})
        if asked is not None:
            return next((place for place in free if place.shard == asked), None)
        if role is None and self._config.cluster.start == "listen":
            return None  # people who start workers know which host has which shard's flash
        shards_here = {place.shard for place, where in others if where == host}
        elsewhere = [place for place in free if place.shard not in shards_here]
        if elsewhere or others_expected:
            return next(iter(elsewhere), None)
        return next(iter(free), None)
