"""Nodes of shards with replicas, as the trainer's process sees them.

They are real stores that answer calls in this process; who is lost when, the test says.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace

import torch
from store_programs import (
    LAYERS,
    make_program,
    random_weights,
    train,
)

from penstock.config import Config
from penstock.distributed.control_messages import ReplicaSlot
from penstock.distributed.event_queue import EventQueue
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.replication.replica_manager import ReplicaManager
from penstock.distributed.replication.state_transfer import SnapshotReceiver, SnapshotSender
from penstock.distributed.rpc import store_server
from penstock.distributed.rpc.rpc import RpcMessage, ShardLostError, error_class
from penstock.store import AdamW
from penstock.telemetry import ClusterEvent

EIGHT_BIT = AdamW(0.9, 0.95, 1e-8, moments="8bit")
PROGRAM = make_program(
    LAYERS, frozen=("position",), stream_dtype=torch.bfloat16, narrow=("position",)
)


class Kept:
    """Where a node's store is: it is open already."""

    def __init__(self, stores: dict[int, object], node: int) -> None:
        self._stores, self._node = stores, node

    @property
    def store(self):
        return self._stores[self._node]

    def open(self, must_hold: bool = False):
        return self.store

    def close(self) -> None:
        self.store.close()


class Nodes:
    """Nodes that answer calls, and send each other what they copy, one thing after the other.

    Something may happen before the so-many-th call of a method, or message of a kind, at a node.
    """

    address = ("127.0.0.1", 9)

    def __init__(self, stores: dict[int, object]) -> None:
        self.stores = stores
        self.came: Counter[tuple[int, str]] = Counter()
        self.says: dict[tuple[int, str], RpcMessage] = {}
        self.before: dict[tuple[int, str, int], Callable[[], object]] = {}
        self.gone: set[int] = set()
        self.todo: deque[Callable[[], object]] = deque()
        self.answers: dict[int, RpcMessage] = {}
        self.called_with_arrays = 0
        self.ends: dict[int, tuple[SnapshotSender, SnapshotReceiver]] = {}
        self.reached: set[tuple[int, int]] = set()
        self.most_waiting = 0

    def address_of(self, node: int):
        return None if node in self.gone else self.address

    def of(self, node: int) -> tuple[SnapshotSender, SnapshotReceiver]:
        """The two ends of copies at a node."""
        if node not in self.ends:
            place, network = Kept(self.stores, node), _NetworkOf(self, node)
            self.ends[node] = (
                SnapshotSender(node, place, network, network),
                SnapshotReceiver(node, place, network, network, self.answers.__setitem__),
            )
        return self.ends[node]

    def comes(self, node: int, what: str) -> None:
        self.came[node, what] += 1
        self.before.pop((node, what, self.came[node, what]), lambda: None)()

    def deliver(self, sender: int, to: int, message: Message) -> None:
        if self.gone & {sender, to}:
            return
        self.comes(to, message.kind.name)
        if self.gone & {sender, to}:
            return
        giver, taker = self.of(to)
        (giver if message.kind is MessageType.SNAPSHOT_REQUEST else taker).take(message)
        asked = sum(n for (_, what), n in self.came.items() if what == "SNAPSHOT_REQUEST")
        written = sum(n for (_, what), n in self.came.items() if what == "written")
        self.most_waiting = max(self.most_waiting, asked - written)

    def ask(self, node, method, arguments, arrays, most=0) -> RpcMessage:
        return self.begin(node, method, arguments, arrays, most).answer()

    def begin(self, node, method, arguments, arrays, most=0):
        self.comes(node, method)
        self.called_with_arrays += bool(arrays)
        number = sum(self.came.values())
        said = RpcMessage({"method": method, "with": arguments}, arrays)
        if node in self.gone:
            pass
        elif (node, method) in self.says:
            self.answers[number] = self.says[node, method]
        elif method == "take_copy":
            self.of(node)[1].begin(number, arguments)
        elif method == "give_up_copy":
            self.of(node)[1].cancel("the run's process said so")
            self.answers[number] = RpcMessage()

        def answer(meanwhile=lambda: None) -> RpcMessage:
            while number not in self.answers:
                if node in self.gone:
                    raise ShardLostError(f"node {node} was lost")
                if method != "take_copy":
                    self.answers[number] = store_server.respond(Kept(self.stores, node), said)
                elif self.todo:
                    self.todo.popleft()()
                    meanwhile()
                else:
                    meanwhile()
                    assert node in self.gone or number in self.answers, "nothing moves"
            done = self.answers[number]
            if "error" in done.body:
                raise error_class(done.body["error"])(done.body["text"])
            assert sum(array.nbytes for array in done.arrays.values()) <= most
            return done

        return SimpleNamespace(node=node, method=method, answer=answer)

    def lost(self, node, why) -> None:
        self.gone.add(node)


class _NetworkOf:
    """What carries a node's messages and does its work: both in turn, when somebody waits."""

    address = Nodes.address

    def __init__(self, nodes: Nodes, node: int) -> None:
        self._nodes, self._node = nodes, node

    def add_address(self, number: int, address) -> None:
        assert address == self.address
        self._nodes.reached.add((self._node, number))

    def send(self, to: int, message: Message) -> None:
        assert (self._node, to) in self._nodes.reached
        self._nodes.todo.append(lambda: self._nodes.deliver(self._node, to, message))

    def work(self, job) -> None:
        def do() -> None:
            if self._node in self._nodes.gone:
                return
            try:
                found = job.run()
            except Exception as error:
                job.failed(error)
            else:
                if "write" in getattr(job.run, "__qualname__", ""):
                    self._nodes.came[self._node, "written"] += 1
                job.then(found)

        self._nodes.todo.append(do)


class Coordinator:
    """Says who is whole; all who were asked for are."""

    is_agreed = True

    def __init__(self) -> None:
        self.lost_nodes: list[int] = []

    def promote(self, node) -> bool:
        return node not in self.lost_nodes

    def lost(self, node, why) -> None:
        self.lost_nodes.append(node)


class Run:
    """The one shard of a run, held by nodes 1 and 2; node 3 comes when one of them is lost."""

    def __init__(self, make, **store) -> None:
        self.stores = {1: make(1), 2: make(2)}
        self.make = make
        self._events: list[ClusterEvent] = []
        self.event_queue = EventQueue(self._events.append, lambda: self.is_stopped)
        self.is_stopped = False
        self.coordinator = Coordinator()
        self.calls = Nodes(self.stores)
        config = Config.from_mapping(
            {
                "model": "gpt2",
                "cluster": {"start": "local", "shards": "apart"},
                "store": {"replicas": 2, **store},
            }
        )
        self.apart = ReplicaManager(
            config,
            [PROGRAM],
            self.calls,
            self.coordinator,
            self.event_queue,
            lambda action: action(),
            SimpleNamespace(get=self.calls.address_of),
        )
        for node in (1, 2):
            self.apart.assignment.take(ReplicaSlot(0, node - 1), node)
        (self.shard,) = self.apart.remote()
        self.shard.open()

    @property
    def said(self) -> list[tuple[str, str]]:
        self.event_queue.report_all()
        return [(event.kind, event.text) for event in self._events]

    @property
    def failed(self) -> bool:
        return self.event_queue.has_failed

    def lose(self, node: int) -> None:
        place = ReplicaSlot(0, self.stores[node].number)
        self.coordinator.lost_nodes.append(node)
        self.apart.lost(place, node)

    def come(self, node: int, replica: int) -> None:
        """A learner takes a place, with nothing."""
        self.stores[node] = self.make(node, replica)
        self.apart.assignment.add_learner(ReplicaSlot(0, replica), node)

    def copy(self, on_flash=None) -> None:
        self.apart.copy_to_learners(on_flash)

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.apart.assignment.nodes(0)


def trained(run: Run, steps: int = 2) -> Run:
    """Fill the shard, and have each node do what it would do in a step."""
    run.shard.load(random_weights(PROGRAM, 0).items())
    for store in run.stores.values():
        train(store, steps, seed=3)
    return run
