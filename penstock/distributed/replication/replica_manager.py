"""Management of shards in processes of their own: holders, losses and rebuilds.

A replicated shard continues with its other replica when one is lost. The replacement receives a
copy between two steps. A shard without any holder is reopened from its state on flash; without such
a state the run ends.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.config import Config, size_above
from penstock.distributed.control_messages import ReplicaSlot, Role
from penstock.distributed.event_queue import EventQueue
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
from penstock.errors import StorageError
from penstock.planning import store_factory
from penstock.store import Holding
from penstock.store.flash import DurableStore

_POLL_SECONDS = 0.05  # seconds between two checks for events
_ATTEMPTS = 3  # attempts at a copy whose failure is not due to either node
_RESUME = "give the same command again; the run resumes from the last saved step"


class ReplicaManager:
    """The shards of one run.

    Args:
        parts: the part of the program that each shard holds.
        calls: sends RPCs to shards.
        coordinator: decides which nodes take part.
        event_queue: receives events and the error that ends the run.
        run_in_endpoint: runs an action in the endpoint's thread, and waits for its end.
        addresses: those of the nodes that are not lost.
    """

    def __init__(
        self,
        config: Config,
        parts: Sequence[Holding],
        calls: RpcClient,
        coordinator: Coordinator,
        event_queue: EventQueue,
        run_in_endpoint: Callable[[Callable[[], object]], None],
        addresses: Mapping[int, Address],
    ) -> None:
        self._config, self._parts, self._calls = config, parts, calls
        self._coordinator, self._event_queue = coordinator, event_queue
        self._run_in_endpoint, self._addresses = run_in_endpoint, addresses
        self.assignment = ReplicaAssignment(len(parts), config.store.replicas)

    # In the trainer's thread

    def remote(self) -> list[StoreClient]:
        """Return the shards' clients once all shards have joined."""
        while not self.assignment.wait(_POLL_SECONDS):
            self._event_queue.poll()
        return [
            StoreClient(
                part,
                self._calls,
                nodes=functools.partial(self.assignment.nodes, shard),
                await_node=functools.partial(self._await_holder, shard),
                refuse=self._evict,
                copy=functools.partial(self._copy, shard),
                rule=store_factory.commit_rule(self._config),
                replicas=self._config.store.replicas,
            )
            for shard, part in enumerate(self._parts)
        ]

    def _evict(self, node: int, error: InvalidResponseError) -> None:
        """Remove a node that has sent a malformed reply."""
        self._run_in_endpoint(lambda: self._coordinator.lost(node, str(error)))

    def _await_holder(self, shard: int) -> None:
        """Wait until a node holds a shard. Raises `StorageError` if a stop is requested."""
        while not self.assignment.nodes(shard):
            self._event_queue.poll()
            if self._event_queue.should_stop():
                raise StorageError(f"stopped while a shard of the store was lost; {_RESUME}")
            self.assignment.wait_for_holder(shard, _POLL_SECONDS)

    def copy_to_learners(self, on_flash: DurableStore | None) -> None:
        """Between two steps, copy to each learner the state of a holder of its shard.

        Args:
            on_flash: the whole store, if it is on flash. The copied step is made durable first:
                a learner holds no earlier step to which all nodes could roll back.

        Raises:
            InterruptedError: a stop was requested.
        """
        learners = self.assignment.learners
        if not learners or not self._coordinator.is_agreed:
            return
        try:
            if on_flash is not None:
                on_flash.make_durable()
        except ShardLostError:
            return  # the loss is handled first
        for shard, node in learners:
            if not (nodes := self.assignment.nodes(shard)):
                continue
            try:
                self._copy(shard, nodes[0], node)
            except ShardLostError:
                continue  # the next step retries, with another node
            except ReplicaRejectedError as error:
                self._refuse(shard, node, str(error))
                continue
            except InvalidResponseError as error:
                self._evict(nodes[0], error)
                continue
            self._run_in_endpoint(functools.partial(self._admit, node))

    def _copy(self, shard: int, source: int, target: int) -> None:
        """Copy the state of a shard from one node to another.

        **Raises:** the errors of `copy_shard`; `ReplicaRejectedError` after repeated broken copies.
        """
        began = time.monotonic()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                copied = self._copy_once(shard, source, target)
                break
            except BrokenCopyError as error:
                if attempt == _ATTEMPTS:
                    text = f"{attempt} copies in a row failed; the last error: {error}"
                    raise ReplicaRejectedError(text) from error
                text = f"shard {shard}: a copy failed, and is started again: {error}"
                self._event_queue.emit("replica copied again", text, target)
        self._event_queue.emit(
            "replica copied",
            f"shard {shard}: node {target} received {size_above(copied)} from node {source} in "
            f"{time.monotonic() - began:.1f} s, and is a replica now",
            target,
        )

    def _copy_once(self, shard: int, source: int, target: int) -> int:
        lost = f"node {source} was lost during the copy of its state"

        def meanwhile() -> None:
            if source not in self.assignment.nodes(shard):
                raise ShardLostError(lost)
            self._raise_if_stopped()

        address = self._addresses.get(source)
        if address is None:
            raise ShardLostError(lost)
        return copy_shard(self._calls, source, address, target, meanwhile)

    def _raise_if_stopped(self) -> None:
        self._event_queue.poll()
        if self._event_queue.should_stop():
            raise InterruptedError("stopped while a shard of the store was copied")

    def _refuse(self, shard: int, node: int, why: str) -> None:
        """Continue without a replica that could not be built: another attempt would fail too."""

        def refuse() -> None:
            self.assignment.retire(node)
            text = f"shard {shard} continues without node {node} as a replica: {why}"
            self._event_queue.emit("replica refused", text, node)
            self._coordinator.lost(node, why)

        self._run_in_endpoint(refuse)

    # In the endpoint's thread

    def _admit(self, node: int) -> None:
        if self._coordinator.promote(node):
            self.assignment.promote(node)

    def lost(self, slot: ReplicaSlot, number: int) -> None:
        """Make a lost node's slot vacant; end the run if no state of the shard is left."""
        shard, why = slot.shard, f"shard {slot.shard} of the store was lost"
        was_complete = self.assignment.was_complete
        is_vacant = self.assignment.lose(number)
        if not was_complete:
            self._event_queue.fail(
                StorageError(f"{why} before all shards had joined; give the same command again")
            )
        elif not self.assignment.is_held(shard) and self._config.store.flash.path is None:
            self._event_queue.fail(
                StorageError(
                    f"{why}, and the state in its memory; give the same command again; the run "
                    "resumes from the last checkpoint"
                )
            )
        elif is_vacant and self._config.cluster.start == "listen":
            self._event_queue.emit("shard wanted", self._how_to_start(shard), number)
        self._calls.lost(number, f"{why}; {_RESUME}")

    def _how_to_start(self, shard: int) -> str:
        record = self._config.run.dir.absolute() / NAME
        where = f"the host with shard {shard} of the store"
        if self._config.store.replicas > 1:
            where = f"the host that held shard {shard} of the store, or on another host"
        return f"on {where}: python -m penstock.cluster.worker {record} --shard {shard}"

    def slot_for(
        self,
        role: Role | None,
        shard_number: int | None,
        host: str,
        taken: Iterable[tuple[ReplicaSlot, str]],
        others_expected: bool,
    ) -> ReplicaSlot | None:
        """Return the replica slot for a process that joins; None if it gets no slot.

        Two processes of one host hold the same shard only if no other process is expected.

        Args:
            role: the role for which it was started; None for either.
            shard_number: the shard that it requests, if any.
            host: the host of the process.
            taken: slots and hosts of the processes that have joined or are joining.
            others_expected: whether other processes may still come and take a slot.
        """
        others = list(taken)
        free = self.assignment.free({slot for slot, _ in others})
        if shard_number is not None:
            return next((slot for slot in free if slot.shard == shard_number), None)
        if role is None and self._config.cluster.start == "listen":
            return None  # the user who starts workers knows which host has which shard's flash
        shards_here = {slot.shard for slot, where in others if where == host}
        elsewhere = [slot for slot in free if slot.shard not in shards_here]
        if elsewhere or others_expected:
            return next(iter(elsewhere), None)
        return next(iter(free), None)
