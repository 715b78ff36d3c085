"""The rendezvous: a process joins, is assigned a role, and reports that it is ready.

A process that joins gets a vacant replica slot of a shard; without a vacant slot it becomes an
engine, or a relay if no more engines are wanted and relays are. A process that was started for one
role gets only that role. A process started as a shard waits until a slot is vacant. A process that
cannot fill its role is refused; another process of its kind would be refused too. A process that
stops sending heartbeats before it is ready is ended, and so is one that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.distributed.control.hang_detector import HangDetector
from penstock.distributed.control_messages import Join, Opens, ReplicaSlot, Role
from penstock.distributed.event_queue import EventQueue
from penstock.distributed.protocol import (
    COORDINATOR,
    Coordinator,
    FailureDetector,
    Message,
    MessageType,
)
from penstock.distributed.replication import ReplicaManager
from penstock.distributed.rpc import error_class
from penstock.distributed.run_spec import RunSpec
from penstock.distributed.transport import Address, Connection
from penstock.errors import ClusterError, PenstockError, UnfitHostError

FIRST_ENGINE = 1000


class Rendezvous:
    """Admits processes; runs in the endpoint's thread.

    Args:
        spec: the specification that processes receive and must agree on.
        registry: the processes that have joined.
        coordinator: is notified of new nodes.
        replicas: assigns replica slots of shards.
        event_queue: receives an event per refused process.
        on_admitted: attaches a member's connection to its node.
        on_silent: ends the process of a member that was silent or hung before it was ready.
        silence: the seconds without a heartbeat after which such a member is ended.
        hang: the seconds without work of its main thread after which such a member is ended.
        engines_wanted: returns the wanted number of engines, spares included.
    """

    def __init__(
        self,
        spec: RunSpec,
        registry: WorkerRegistry,
        coordinator: Coordinator,
        replicas: ReplicaManager,
        event_queue: EventQueue,
        *,
        on_admitted: Callable[[ClusterMember], None],
        on_silent: Callable[[ClusterMember], None],
        silence: float,
        hang: float,
        engines_wanted: Callable[[], int],
    ) -> None:
        self._spec, self._registry, self._coordinator = spec, registry, coordinator
        self._replicas, self._assignment = replicas, replicas.assignment
        self._event_queue = event_queue
        self._on_admitted, self._on_silent = on_admitted, on_silent
        self._silence, self._engines_wanted = silence, engines_wanted
        self._detector = FailureDetector()  # of the processes that are joining
        self._hang_detector = HangDetector(hang)
        self._next = FIRST_ENGINE
        self._waiting: dict[Connection, Join] = {}  # for a replica slot

    def take(self, connection: Connection, message: Message) -> None:
        """Handle a message of a peer that has not joined yet.

        **Raises:** `ProtocolError` if the message is malformed.
        """
        joining = self._registry.joining
        if message.kind is MessageType.JOIN:
            self._join(connection, Join.read(message))
        elif message.kind is MessageType.READY and connection in joining:
            self._admit(self._remove(connection), message.body)
        elif message.kind is MessageType.FAILURE and connection in joining:
            member, kind = self._remove(connection), str(message.body.get("error"))
            text = f"{member} could not be created: {message.body.get('text')}"
            self._reject(member, text, error_class(kind))
        elif message.kind is MessageType.HEARTBEAT and connection in joining:
            self._detector.hear(joining[connection].number)
            self._hang_detector.hear(joining[connection].number, message)

    def tick(self, now: float) -> None:
        """End the processes that are silent or hang before they are ready; assign vacant slots."""
        paused = self._detector.pass_time(now, self._silence / 4)
        joining = {member.number: member for member in self._registry.joining.values()}
        for number, silent in self._detector.silent(joining, self._silence):
            text = f"was silent for {silent:.1f} s before it was ready"
            self._end(joining.pop(number), "worker silent", text)
        for number, idle in self._hang_detector.hung(now, paused):
            text = f"used no processor for {idle:.0f} s before it was ready, longer than "
            text += "cluster.longest_job; if it may wait that long, raise cluster.longest_job"
            self._end(joining.pop(number), "worker hangs", text)
        self.assign_waiting()

    def assign_waiting(self) -> None:
        """Assign vacant replica slots to the processes that wait for a slot."""
        for others_expected in (True, False):
            if not others_expected and len(self._free()) > len(self._waiting):
                return  # wait: processes still to come may run on other hosts
            for connection, join in list(self._waiting.items()):
                if (slot := self._slot_for(join, others_expected)) is not None:
                    del self._waiting[connection]
                    self._assign(connection, join, slot)

    def connection_ended(self, connection: Connection) -> None:
        """Remove a process whose connection ended before it was ready."""
        if connection in self._registry.joining:
            self._remove(connection)
        self._waiting.pop(connection, None)

    def _end(self, member: ClusterMember, kind: str, text: str) -> None:
        """End a process that is not ready."""
        self._remove(member.connection)
        self._event_queue.emit(kind, f"{member} {text}", member.number)
        self._on_silent(member)

    def _remove(self, connection: Connection) -> ClusterMember:
        """Remove a process from those that are joining; return the process."""
        member = self._registry.joining.pop(connection)
        self._detector.forget(member.number)
        self._hang_detector.forget(member.number)
        return member

    def _join(self, connection: Connection, join: Join) -> None:
        """Assign a role to a process that joins, or queue the process for a replica slot."""
        if join.role == "shard" and join.shard is None:
            self._waiting[connection] = join
            self.assign_waiting()
            return
        is_shard = join.role in (None, "shard")
        slot = self._slot_for(join, self._wants_engines()) if is_shard else None
        if slot is None and join.shard is not None:
            text = f"shard {join.shard} of the store needs no other process: all its replicas run"
            self._refuse(connection, text)
            return
        self._assign(connection, join, slot)

    def _assign(self, connection: Connection, join: Join, slot: ReplicaSlot | None) -> None:
        """Send a process its assignment."""
        opens: Opens = "when asked"
        number, spec, role = self._next, self._spec, self._role_for(join, slot)
        if slot is not None and not self._assignment.was_complete:
            number = spec.first_nodes[slot.shard][slot.replica]
        else:
            self._next += 1
        if slot is not None and self._assignment.was_complete:
            opens = "empty" if self._assignment.is_held(slot.shard) else "what was left"
        member = ClusterMember(number, connection, join.worker, join.address, role, slot, opens)
        self._registry.joining[connection] = member
        self._detector.watch(number)
        local_shards = [nodes[0] for nodes in spec.first_nodes]
        if spec.has_shard_processes:
            local_shards = []
        body = {
            "node": number,
            "role": role,
            "place": None if slot is None else list(slot),
            "opens": opens,
            "run": spec.terms,
            "shards_there": local_shards,
        }
        connection.send(Message(MessageType.ASSIGN, 0, COORDINATOR, body=body))

    def _role_for(self, join: Join, slot: ReplicaSlot | None) -> Role:
        """Return the role of a process that joins, given its replica slot."""
        if slot is not None:
            return "shard"
        if join.role is not None:
            return join.role
        coordinator = self._coordinator
        relays = self._count("relay", coordinator.membership.relays)
        is_relay = not self._wants_engines() and relays < coordinator.wanted_relays
        return "relay" if is_relay else "engine"

    def _count(self, role: Role, ready: Sequence[int]) -> int:
        """Return how many processes of a role are ready or joining."""
        return len(ready) + sum(m.role == role for m in self._registry.joining.values())

    def _slot_for(self, join: Join, others_expected: bool) -> ReplicaSlot | None:
        """Return the replica slot for a process that joins; None if it gets no slot."""
        members = [(m.slot, m.address[0]) for m in self._registry.all if m.slot is not None]
        return self._replicas.slot_for(
            join.role, join.shard, join.address[0], members, others_expected
        )

    def _free(self) -> Sequence[ReplicaSlot]:
        return self._assignment.free({member.slot for member in self._registry.all})

    def _wants_engines(self) -> bool:
        return self._count("engine", self._coordinator.ready) < self._engines_wanted()

    def _admit(self, member: ClusterMember, body: Mapping[str, Any]) -> None:
        """Admit a process that is ready to the run."""
        number, slot = member.number, member.slot
        spec, is_engine = self._spec, member.role == "engine"
        if body.get("digest") != (spec.engine_digest if is_engine else spec.shard_digest):
            text = (
                f"{member} compiled another program than this process; install the same versions "
                "of Penstock, PyTorch and transformers on all hosts"
            )
            self._reject(member, text, ClusterError)
            return
        self._on_admitted(member)
        self._registry.admit(member)
        if slot is None:
            join = self._coordinator.joined if is_engine else self._coordinator.relay_joined
            join(number)
            return
        if member.waits_for_copy:
            self._assignment.add_learner(slot, number)
            self._coordinator.learner_joined(slot.shard, number)
            return
        self._assignment.take(slot, number)
        if member.opens == "what was left":
            self._coordinator.shard_joined(slot.shard, number)
        else:
            self._coordinator.watch(number)
            self._event_queue.emit("joined", f"{member} is ready", number)

    def _reject(self, member: ClusterMember, text: str, kind: type[PenstockError]) -> None:
        """Refuse a process that cannot fill its role.

        The run ends if it needs the role and the error would recur with another process.
        """
        is_needed = member.is_shard and not member.waits_for_copy
        is_needed |= member.role == "engine" and not self._coordinator.ready
        if is_needed and kind is not UnfitHostError:
            self._event_queue.fail(kind(text))
        self._refuse(member.connection, text, member.number)

    def _refuse(self, connection: Connection, text: str, number: int | None = None) -> None:
        """Refuse a worker permanently: another attempt would fail in the same way."""
        self._event_queue.emit("refused", text, number)
        connection.send(Message(MessageType.ADMIN_REPLY, 0, COORDINATOR, body={"error": text}))


@dataclass(frozen=True)
class ClusterMember:
    """A process that has joined: its node number, connection, worker name and role."""

    number: int
    connection: Connection
    worker: str
    address: Address
    role: Role
    slot: ReplicaSlot | None  # replica slot of a shard; else None
    opens: Opens  # how a shard opens its store

    @property
    def is_shard(self) -> bool:
        """Whether the process holds a shard or will hold one."""
        return self.slot is not None

    @property
    def waits_for_copy(self) -> bool:
        """Whether the process is a learner: it holds its shard only after a state transfer."""
        return self.opens == "empty"

    def __str__(self) -> str:
        if self.slot is None:
            return f"{self.role} {self.number}"
        which = f"replica {self.slot.replica} of " if self.slot.replica else ""
        return f"{which}shard {self.slot.shard}"


class WorkerRegistry:
    """The members of a run; changed only in the endpoint's thread."""

    def __init__(self) -> None:
        self.joining: dict[Connection, ClusterMember] = {}  # assigned a role, not ready yet
        self.addresses: dict[int, Address] = {}  # listening address of each member, by node
        self._members: dict[int, ClusterMember] = {}

    @property
    def members(self) -> Sequence[ClusterMember]:
        """The processes that have joined."""
        return list(self._members.values())

    @property
    def all(self) -> Sequence[ClusterMember]:
        """The processes that have joined or are joining."""
        return [*self.members, *self.joining.values()]

    @property
    def carried_bytes(self) -> int:
        """Bytes that this process has exchanged with all members, without frame headers."""
        connections = [member.connection for member in self.members]
        return sum(each.sent_bytes + each.taken_bytes for each in connections)

    def admit(self, member: ClusterMember) -> None:
        """Add a member that is ready."""
        self._members[member.number] = member
        self.addresses[member.number] = member.address

    def find(self, node: int) -> ClusterMember | None:
        """Return the member of a node; None if the node is not a member."""
        return self._members.get(node)

    def member_of(self, connection: Connection) -> ClusterMember | None:
        """Return the member at the other end of a connection."""
        member = None if connection.peer is None else self.find(connection.peer)
        return member if member is not None and member.connection is connection else None

    def lose(self, node: int) -> ClusterMember | None:
        """Remove the member of a node; return the member."""
        self.addresses.pop(node, None)
        return self._members.pop(node, None)
