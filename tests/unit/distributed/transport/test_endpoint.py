"""What endpoints read of whom, which connections end, and that to read what comes runs no code."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import random
import resource
import socket
import threading
import time

import numpy as np
import pytest
from recording_endpoints import greet
from waiting import SECONDS, wait_until

from penstock.distributed.protocol import Job
from penstock.distributed.protocol.messages import (
    MAX_BODY_BYTES,
    Message,
    MessageType,
    message_with,
    pack,
)
from penstock.distributed.transport import (
    Connection,
    Endpoint,
    endpoint as endpoint_module,
    handshake,
    new_token,
)
from penstock.distributed.transport.listener import ConnectionListener
from penstock.distributed.transport.stream import PlainStream
from penstock.errors import ClusterError, CorruptionError


def test_messages_arrive_in_order_with_payload(endpoints):
    token = new_token()
    one, two = endpoints(token, 1), endpoints(token, 2)
    connection = greet(one, 1, two)
    payload = np.arange(3_000_000, dtype=np.float32)
    for op in range(5):
        message = message_with(
            payload + op, kind=MessageType.WEIGHTS, epoch=7, sender=1, op=op, to=2
        )
        connection.send(message)
    wait_until(lambda: len(two.node.messages) == 5)
    for op, message in enumerate(two.node.messages):
        assert (message.op, message.epoch) == (op, 7)
        np.testing.assert_array_equal(message.payload.view(np.float32), payload + op)


def test_connections_to_removed_nodes_close(endpoints):
    """Their hosts may be gone without a word; who knows of the next epoch before us stays."""
    token = new_token()
    here = endpoints(token, 1)
    others = {number: endpoints(token, number) for number in (0, 2, 3, 4)}
    epochs = {0: 0, 2: 6, 3: 6, 4: 8}
    links = {}
    for number, other in others.items():
        links[number] = other.endpoint.connect(here.endpoint.address)
        links[number].send(
            Message(MessageType.HELLO, epochs[number], number, body={"node": number})
        )
        links[number].send(Message(MessageType.HEARTBEAT, 0, number, to=1))
    wait_until(lambda: len(here.node.messages) == 4)
    met = {3: others[3].endpoint.address}
    here.endpoint.call(lambda: here.endpoint.set_addresses(met, 7))
    wait_until(lambda: not links[2].is_open)
    for number in (0, 3, 4):
        links[number].send(Message(MessageType.HEARTBEAT, 0, number, to=1))
    wait_until(lambda: len(here.node.messages) == 7)
    assert [connection.is_open for connection in links.values()] == [True, False, True, True]
    wait_until(lambda: here.ended)
    assert len(here.ended) == 1
    here.endpoint.call(lambda: here.endpoint.set_addresses({}, 9))
    wait_until(lambda: not links[3].is_open and not links[4].is_open)
    assert links[0].is_open


def test_connection_to_learner_survives_new_epochs(endpoints):
    """A learner is given a copy of a shard before it is in any view."""
    token = new_token()
    here, learner = endpoints(token, 1), endpoints(token, 2)
    connection = learner.endpoint.connect(here.endpoint.address)
    connection.send(Message(MessageType.HELLO, 0, 2, body={"node": 2}))
    connection.send(Message(MessageType.HEARTBEAT, 0, 2, to=1))
    wait_until(lambda: here.node.messages)
    address = learner.endpoint.address
    here.endpoint.call(lambda: here.endpoint.add_address(2, address))
    here.endpoint.call(lambda: here.endpoint.set_addresses({}, 5))
    connection.send(Message(MessageType.HEARTBEAT, 0, 2, to=1))
    wait_until(lambda: len(here.node.messages) == 2)
    here.endpoint.call(lambda: here.endpoint.set_addresses({2: address}, 6))
    here.endpoint.call(lambda: here.endpoint.set_addresses({}, 7))
    wait_until(lambda: not connection.is_open)


def test_connection_stays_open_after_message_of_new_epoch(endpoints):
    token = new_token()
    here, other = endpoints(token, 1), endpoints(token, 2)
    address = other.endpoint.address
    here.endpoint.call(lambda: here.endpoint.set_addresses({2: address}, 5))
    context = here.endpoint.context(1)
    here.endpoint.call(lambda: context.send(2, Message(MessageType.WEIGHT_CREDIT, 5, 1)))
    wait_until(lambda: other.node.messages)
    other.endpoint.call(lambda: other.endpoint.set_addresses({}, 5))
    here.endpoint.call(lambda: context.send(2, Message(MessageType.WEIGHT_CREDIT, 5, 1)))
    wait_until(lambda: len(other.node.messages) == 2)
    assert not other.ended


def test_connection_that_ends_while_it_is_opened_is_not_used(endpoints, monkeypatch):
    """Else every later message to that node would go into it, and be lost."""
    token = new_token()
    here, other = endpoints(token, 1), endpoints(token, 2)
    connect = here.endpoint.connect

    def connect_and_lose(address):
        connection = connect(address)
        connection.close()
        wait_until(lambda: here.ended)
        return connection

    with monkeypatch.context() as patched:
        patched.setattr(here.endpoint, "connect", connect_and_lose)
        send_from(here, other)
        wait_until(lambda: here.ended)
    wait_until(lambda: send_from(here, other) or other.node.messages)


def test_node_is_reached_after_connection_could_not_be_served(endpoints, monkeypatch, caplog):
    token = new_token()
    here, other = endpoints(token, 1), endpoints(token, 2)
    make = endpoint_module.Connection

    def refuse(stream, *arguments):
        if threading.current_thread().name == "penstock listener":
            return make(stream, *arguments)
        stream.socket.close()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(endpoint_module, "Connection", refuse)
        send_from(here, other)
        wait_until(lambda: caplog.records)
    wait_until(lambda: send_from(here, other) or other.node.messages)
    told = "node 1 cannot connect to node 2: {}:{}: the connection cannot be served: "
    assert caplog.messages[0].startswith(told.format(*other.endpoint.address))


def test_endpoint_survives_a_connection_for_which_there_is_no_thread(
    endpoints, monkeypatch, caplog
):
    token = new_token()
    here, other = endpoints(token, 1), endpoints(token, 2)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if threading.current_thread() is here.endpoint._thread:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        send_from(here, other)
        wait_until(lambda: here.failed or caplog.messages)
    assert not here.failed
    assert caplog.messages == ["node 1 cannot connect to node 2: can't start new thread"]
    send_from(here, other)
    wait_until(lambda: other.node.messages)


def test_message_to_a_node_whose_listener_is_slow_arrives(endpoints, monkeypatch):
    """A process without a processor for a while; the message is sent once."""
    monkeypatch.setattr(handshake, "SECONDS", 0.5)
    token = new_token()
    here = endpoints(token, 1)
    with monkeypatch.context() as patched:
        patched.setattr(ConnectionListener, "open", lambda listener: None)
        other = endpoints(token, 2)
    send_from(here, other)
    time.sleep(0.8)
    other.endpoint._listener.open()
    wait_until(lambda: other.node.messages)


def send_from(here, other) -> None:
    """Send a message of node 1 to node 2, over a connection that is opened if there is none."""

    def send() -> None:
        here.endpoint.set_addresses({2: other.endpoint.address}, 5)
        here.endpoint.send(1, 2, Message(MessageType.WEIGHT_CREDIT, 5, 1))

    here.endpoint.call(send)


def test_idle_connection_uses_keepalive(endpoints):
    """Else the memory and the threads of links from a host that is gone would stay."""
    token = new_token()
    connection = greet(endpoints(token, 1), 1, endpoints(token, 2))
    assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_KEEPIDLE"):
        idle, between, count = (
            connection._socket.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + between * count <= 30


def test_removed_node_runs_no_more_jobs(endpoints):
    """The job that it is at ends before another node is put in; those behind it are dropped."""
    here = endpoints(new_token(), 1)
    context = here.endpoint.context(1)
    began, may_end, done = threading.Event(), threading.Event(), []

    def long() -> None:
        began.set()
        may_end.wait(SECONDS)
        done.append("long")

    for run in (long, lambda: done.append("next")):
        context.work(Job(run, lambda _: None, lambda _: None))
    assert began.wait(SECONDS)
    threading.Timer(0.1, may_end.set).start()
    here.endpoint.remove(1)
    assert done == ["long"]


def test_oversized_frame_ends_connection(endpoints):
    token = new_token()
    one, two = endpoints(token, 1), endpoints(token, 2)
    connection, too_large = greet(one, 1, two), {"": "x" * MAX_BODY_BYTES}
    connection.send(Message(MessageType.HEARTBEAT, 0, 1, to=2, body=too_large))
    wait_until(lambda: one.ended and two.ended)
    assert not connection.is_open


@pytest.mark.parametrize("size", [100, 5000])
def test_corrupt_frame_ends_connection_and_is_named(size, endpoints):
    token = new_token()
    one, two = endpoints(token, 1), endpoints(token, 2)
    connection = greet(one, 1, two)
    connection.send(Message(MessageType.HEARTBEAT, 0, 1, to=2))
    wait_until(lambda: two.node.messages)
    message = message_with(np.zeros(size), kind=MessageType.WEIGHTS, epoch=1, sender=1, to=2)
    payload = bytearray(8 * size)
    payload[17] ^= 4
    connection._stream.send([*pack(message), payload])
    wait_until(lambda: two.ended)
    assert isinstance(two.ended[0], CorruptionError)
    assert "has checksum" in str(two.ended[0])
    assert len(two.node.messages) == 1


class Bomb:
    """What unpickling would run."""

    def __reduce__(self):
        return (os._exit, (66,))


def test_received_pickle_is_only_bytes(endpoints):
    token = new_token()
    one, two = endpoints(token, 1), endpoints(token, 2)
    bomb = np.frombuffer(pickle.dumps(Bomb()), np.uint8)
    connection = greet(one, 1, two)
    connection.send(message_with(bomb, kind=MessageType.WEIGHTS, epoch=0, sender=1, to=2))
    wait_until(lambda: two.node.messages)
    assert two.node.messages[0].payload.tobytes() == bomb.tobytes()


def test_requested_port_is_used_or_refused():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        taken = probe.getsockname()[1]
        with pytest.raises(
            ClusterError, match=rf"a free port that this user may use, got port {taken}"
        ):
            listening(taken)
    port = free_port()
    endpoint = listening(port)
    try:
        assert endpoint.address == ("127.0.0.1", port)
    finally:
        endpoint.close()


def free_port() -> int:
    """Return a port that nobody has, below those that the system gives to whoever asks for any."""
    for port in random.sample(range(10_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("none of 100 ports is free")


def listening(port: int) -> Endpoint:
    return Endpoint(
        "token",
        "127.0.0.1",
        on_connection_end=lambda connection, error: None,
        on_new_peer=lambda connection, message: None,
        on_failure=lambda error: None,
        port=port,
    )


def test_arrived_messages_count_before_timeouts():
    """A process that was held up takes what waited for it before it calls anybody silent."""
    seen: list[str] = []
    endpoint = Endpoint(
        "token",
        "127.0.0.1",
        on_connection_end=lambda connection, error: None,
        on_new_peer=lambda connection, message: None,
        on_failure=lambda error: seen.append(str(error)),
        every=lambda now: seen.append("time"),
        heartbeat_seconds=0.05,
    )
    is_held_up, may_go_on = threading.Event(), threading.Event()

    def hold_up() -> None:
        is_held_up.set()
        may_go_on.wait(SECONDS)

    endpoint.start()
    try:
        endpoint.call(hold_up)
        assert is_held_up.wait(SECONDS)
        seen.clear()
        for number in range(50):
            endpoint.call(lambda number=number: seen.append(str(number)))
        time.sleep(0.1)  # it is time by now
        may_go_on.set()
        wait_until(lambda: "time" in seen)
    finally:
        endpoint.close()
    assert seen[:51] == [*map(str, range(50)), "time"]


def test_every_byte_of_long_message_counts_as_heard_and_received():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    took: list[Message] = []
    connection = Connection(
        PlainStream(ours),
        lambda connection, message: took.append(message),
        lambda connection, error: None,
    )
    connection.start()
    try:
        message = message_with(
            np.zeros(1 << 20, np.uint8), kind=MessageType.WEIGHTS, epoch=0, sender=1
        )
        head = b"".join(pack(message))
        wait_until(lambda: not connection.is_heard(0.1))
        theirs.sendall(head)
        for part in range(4):  # a message that takes longer than anybody may be silent
            wait_until(lambda: not connection.is_heard(0.05))
            sent_at = time.monotonic()
            theirs.sendall(message.payload[part << 18 : (part + 1) << 18].data)
            wait_until(lambda since=sent_at: connection.is_heard(time.monotonic() - since))
            wait_until(lambda part=part: connection.received_bytes == (part + 1) << 18)
        wait_until(lambda: took)
    finally:
        connection.close()
        theirs.close()
    assert not connection.is_heard(0.0)


def test_received_bytes_of_ended_connections_are_counted(endpoints):
    token = new_token()
    one, two = endpoints(token, 1), endpoints(token, 2)
    for times in (1, 2):
        connection = greet(one, 1, two)
        payload = np.zeros(1 << 20, np.uint8)
        connection.send(message_with(payload, kind=MessageType.WEIGHTS, epoch=0, sender=1, to=2))
        wait_until(lambda times=times: len(two.node.messages) == times)
        connection.close()
        wait_until(lambda times=times: len(two.ended) == times)
        assert two.endpoint.received_bytes > times << 19  # TLS: without those read with a header


def test_connection_is_known_before_its_first_message(endpoints, monkeypatch):
    """Else the bytes of the message are missing, and a change of the epoch does not close it."""
    token = new_token()
    one, two = endpoints(token, 1), endpoints(token, 2)
    accepted, start = threading.Event(), threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        """Hold the thread that starts both threads of a connection until it has a message."""
        start(thread)
        if thread.name == "penstock connection writes" and "listener" in (
            threading.current_thread().name
        ):
            wait_until(lambda: two.from_new_peers)
            accepted.set()

    counts: list[int] = []
    receive = two.endpoint._on_new_peer

    def on_new_peer(connection, message) -> None:
        counts.append(two.endpoint.received_bytes)
        receive(connection, message)

    monkeypatch.setattr(two.endpoint, "_on_new_peer", on_new_peer)
    monkeypatch.setattr(threading.Thread, "start", start_late)
    connection = one.endpoint.connect(two.endpoint.address)
    payload = np.zeros(1 << 20, np.uint8)
    connection.send(message_with(payload, kind=MessageType.WEIGHTS, epoch=0, sender=1))
    assert accepted.wait(SECONDS)
    assert counts[0] > 1 << 19


def test_unread_bytes_count_as_heard_for_descriptors_above_1024():
    """`select.select` refuses such descriptors, and a process with many connections has them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with accepted:
        ours = socket.socket(fileno=fcntl.fcntl(accepted.fileno(), fcntl.F_DUPFD_CLOEXEC, 2000))
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold(connection, message):
        is_held.set()
        may_go_on.wait(SECONDS)

    connection = Connection(PlainStream(ours), hold, lambda connection, error: None)
    connection.start()
    try:
        frames = b"".join(pack(Message(MessageType.HEARTBEAT, 0, 1))) * 2
        theirs.sendall(frames)
        assert is_held.wait(SECONDS)
        wait_until(lambda: connection.is_heard(0.0))
    finally:
        may_go_on.set()
        connection.close()
        theirs.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
