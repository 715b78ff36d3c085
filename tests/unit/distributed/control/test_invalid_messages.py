"""Messages that no process of a run would send cost their sender its link, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator

import pytest
from any_message import messages
from fake_workers import FakeWorker, OpenedManager
from hypothesis import HealthCheck, given, settings, strategies as st
from waiting import wait_until

from penstock.distributed.control.cluster_manager import ClusterManager
from penstock.distributed.control_messages import Assignment, addresses_of
from penstock.distributed.protocol import EngineNode, Job, ShardNode
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.protocol.node_context import BoundContext
from penstock.distributed.worker.node_adapters import WorkerNode, WorkerShard
from penstock.errors import CorruptionError, ProtocolError


class FakeConnection:
    """A link that leads nowhere."""

    def __init__(self, *nodes: int) -> None:
        self.peer = nodes[0] if nodes else None
        self.nodes, self.epoch = set(nodes), 0
        self.sent_bytes = self.taken_bytes = 0
        self.refused: list[Exception | None] = []

    def send(self, message: Message) -> None:
        """Nobody is there."""

    def close(self, why: Exception | None = None) -> None:
        self.refused.append(why)


def hand_in(manager: ClusterManager, connection: FakeConnection, *messages: Message) -> None:
    """Have messages taken as if they had come over a link that then ends."""

    def take() -> None:
        for message in messages:
            manager._endpoint._route(connection, message)
        manager._connection_ended(connection, ConnectionError())

    manager._run_in_endpoint(take)


@pytest.fixture(scope="module")
def open_for_all(tmp_path_factory, layout) -> Iterator[ClusterManager]:
    opened = OpenedManager(
        tmp_path_factory.mktemp("all"), layout, False, start="listen", shards="apart", lease=3600.0
    )
    registry = [FakeWorker(opened.manager) for _ in range(4)]
    for number, member in enumerate(registry):  # two shards and an engine that stay; one that joins
        says = {"shard": number} if number < 2 else {}
        member.say(MessageType.JOIN, worker=f"guest-{number}", listens=["127.0.0.1", 1], **says)
        assignment = member.hear()
        if number < 3:
            member.report_ready(opened.manager, assignment)
    wait_until(
        lambda: opened.manager.coordinator.ready and not opened.manager._assignment.is_incomplete
    )
    yield opened.manager
    for member in registry:
        member.endpoint.close()
    opened.manager.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(messages([0, 1, 2, 1000, 7]), max_size=5), st.sampled_from([None, 1, 1000, 7]))
def test_random_messages_do_not_end_endpoint_of_trainer(open_for_all, received, peer):
    """Of strangers, of those who are about to join, and of nodes of the run."""
    connection = FakeConnection() if peer is None else FakeConnection(peer)
    join = Message(MessageType.JOIN, 0, 0, body={"worker": "w", "listens": ["127.0.0.1", 1]})
    also = [dataclasses.replace(message, sender=peer or 0) for message in received]
    hand_in(open_for_all, connection, *([] if peer else [join]), *received, *also)
    # Whoever lost its place by it may have been one that the run cannot do without.
    event_queue = open_for_all.event_queue
    failed, event_queue._error = event_queue._error, None
    assert "network failed" not in str(failed)
    assert open_for_all._endpoint._thread.is_alive()
    assert all(isinstance(why, ProtocolError) for why in connection.refused)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message(MessageType.JOIN, 0, 0), "has 'None' as 'worker'"),
        (Message(MessageType.JOIN, 0, 0, body={"worker": "w"}), "has 'None' as 'address'"),
        (
            Message(MessageType.JOIN, 0, 0, body={"worker": "w", "listens": ["h", 70000]}),
            "has .* as 'address'",
        ),
        (
            Message(
                MessageType.JOIN, 0, 0, body={"worker": "w", "listens": ["h", 1], "role": "king"}
            ),
            "has 'king' as 'role'",
        ),
        (
            Message(
                MessageType.JOIN, 0, 0, body={"worker": "w", "listens": ["h", 1], "shard": "0"}
            ),
            "has '0' as 'shard'",
        ),
        (Message(MessageType.HELLO, 0, 0, body={"node": "1"}), "number of a peer, got '1'"),
    ],
)
def test_invalid_message_of_new_peer_closes_connection(open_for_all, message, text):
    connection = FakeConnection()
    hand_in(open_for_all, connection, message)
    (why,) = connection.refused
    assert isinstance(why, ProtocolError)
    assert re.search(text, str(why))


def test_message_in_name_of_another_node_closes_connection(open_for_all):
    connection = FakeConnection(7)
    trouble = {"error": "StorageError", "text": "I am shard 0, and broken"}
    hand_in(open_for_all, connection, Message(MessageType.FAILURE, 0, 1, body=trouble))
    assert "node 7 sent a FAILURE message in the name of node 1" in str(connection.refused[0])
    open_for_all.event_queue.require_sound()


@pytest.mark.parametrize(
    "body",
    [{"peak_bytes": 1, "computed": [10**400, 1]}, {"peak_bytes": 10**400, "computed": [1.0, 1]}],
)
def test_number_that_no_float_can_hold_costs_its_sender_the_connection(open_for_all, body):
    """Python's JSON has integers of any size, and a comparison with a float then raises."""
    worker = FakeWorker(open_for_all)
    try:
        worker.say(MessageType.JOIN, worker="w", listens=["127.0.0.1", 1], role="engine")
        assignment = worker.hear()
        worker.report_ready(open_for_all, assignment)
        node = assignment.body["node"]
        wait_until(lambda: node in open_for_all.coordinator.ready)
        worker.say(MessageType.HEARTBEAT, node, progress=0, received=0, **body)
        wait_until(lambda: not worker.connection.is_open)
        wait_until(lambda: node not in open_for_all.coordinator.ready)
        assert open_for_all._endpoint._thread.is_alive()
    finally:
        worker.endpoint.close()


def test_view_with_impossible_node_number_is_refused():
    body = {"addresses": {"9" * 5000: ["127.0.0.1", 9]}}
    with pytest.raises(ProtocolError, match="as 'addresses', expected addresses by node number"):
        addresses_of(Message(MessageType.VIEW, 1, 0, body=body))


class PretendWork:
    """Nothing is computed and nothing kept."""

    store = None
    most_bytes = 100

    def __getattr__(self, name: str) -> Callable:
        return lambda *arguments: None


class PretendEndpoint:
    """Carries nothing and does all work at once."""

    address = ("127.0.0.1", 9)

    def send(self, sender: int, to: int, message: Message) -> None:
        """Nobody is there."""

    clock = staticmethod(time.perf_counter)

    def work(self, number: int, job: Job) -> None:
        try:
            result = job.run()
        except Exception as error:
            job.failed(error)
        else:
            job.then(result)

    def context(self, number: int) -> BoundContext:
        return BoundContext(self, number)

    def set_addresses(self, addresses: dict, epoch: int) -> None:
        assert all(isinstance(number, int) for number in addresses)

    def add_address(self, number: int, address: tuple[str, int]) -> None:
        host, port = address
        assert isinstance(host, str)
        assert 0 < port < 1 << 16


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(messages([0, 1, 1000, 7]), max_size=6), st.booleans())
def test_random_messages_do_not_end_endpoint_of_worker(open_for_all, received, is_shard):
    plan, work = open_for_all.spec.transfers, PretendWork()
    endpoint = PretendEndpoint()
    context = BoundContext(endpoint, 1)
    if is_shard:
        member = WorkerShard(ShardNode(1, 0, context, plan, work), endpoint, work)
    else:
        member = WorkerNode(EngineNode(1000, context, plan, work), endpoint)
    for message in received:
        with contextlib.suppress(ProtocolError, CorruptionError):  # the endpoint cuts these off
            member.handle(message)
        with contextlib.suppress(ProtocolError):
            Assignment.read(message)
