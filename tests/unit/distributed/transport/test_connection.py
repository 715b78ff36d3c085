"""When a connection closes its descriptor, and how large the messages are that it carries."""

from __future__ import annotations

import socket
import threading

import pytest
from recording_endpoints import greet
from waiting import SECONDS, wait_until

from penstock.distributed.protocol import messages
from penstock.distributed.protocol.messages import Message, MessageType, lengths, pack
from penstock.distributed.rpc import body_of_report
from penstock.distributed.transport import new_token
from penstock.distributed.transport.connection import Connection
from penstock.distributed.transport.stream import PlainStream
from penstock.errors import CorruptionError
from penstock.store import GradientReport

HEARTBEAT = Message(MessageType.HEARTBEAT, 0, 1)


class HeldStream(PlainStream):
    """Holds a thread just before it uses the descriptor: the one that reads or the one that writes.

    `descriptors` are those that it then found.
    """

    def __init__(self, connection: socket.socket, holds: str) -> None:
        super().__init__(connection)
        self._holds, self.descriptors = holds, []
        self.is_held, self.may_go_on = threading.Event(), threading.Event()

    def _hold(self, what: str) -> None:
        if what == self._holds:
            self.is_held.set()
            self.may_go_on.wait(SECONDS)
            self.descriptors.append(self.socket.fileno())

    def read_into(self, buffer, on_bytes=lambda: None) -> None:
        self._hold("read")
        super().read_into(buffer, on_bytes)

    def send(self, parts) -> None:
        self._hold("write")
        super().send(parts)


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.parametrize("holds", ["read", "write"])
def test_descriptor_of_closed_connection_stays_open_while_a_thread_uses_it(pair, holds):
    """Else the thread would use a descriptor that by then may be another connection's or file's."""
    stream = HeldStream(pair[0], holds)
    descriptor, ended = stream.socket.fileno(), threading.Event()
    connection = Connection(stream, lambda *_: None, lambda *_: ended.set())
    connection.start()
    connection.send(HEARTBEAT)
    assert stream.is_held.wait(SECONDS)
    connection.close()
    assert ended.wait(SECONDS)
    assert not connection.is_heard(0.0)
    stream.may_go_on.set()
    wait_until(lambda: stream.socket.fileno() == -1, "the descriptor is closed")
    assert stream.descriptors[0] == descriptor


def test_connection_without_threads_closes_its_descriptor(pair, monkeypatch):
    started = threading.Thread.start

    def start(thread):
        if thread.name == "penstock connection writes":
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    connection = Connection(PlainStream(pair[0]), lambda *_: None, lambda *_: None)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        connection.start()
    wait_until(lambda: pair[0].fileno() == -1, "the descriptor is closed")


def test_connection_that_the_peer_has_reset_closes_its_descriptor(pair, monkeypatch):
    def refuse(stream):
        raise OSError("the peer has closed the connection")

    monkeypatch.setattr("penstock.distributed.transport.connection._set_options", refuse)
    with pytest.raises(OSError, match="the peer has closed"):
        Connection(PlainStream(pair[0]), lambda *_: None, lambda *_: None)
    assert pair[0].fileno() == -1


def expert_weights() -> list[str]:
    """Return the names of the experts' weights of a model of 61 layers of 256 experts."""
    return [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(61)
        for expert in range(256)
        for part in ("gate", "up", "down")
    ]


def test_report_that_names_every_weight_arrives(endpoints):
    """Of experts that got no token: their gradients are zero. The body has 2.7 MB."""
    zero = dict.fromkeys(expert_weights(), 1 << 22)
    body = body_of_report(GradientReport((1.0,), (), (), {}, zero))
    token = new_token()
    one, two = endpoints(token, 1), endpoints(token, 2)
    connection = greet(one, 1, two)
    connection.send(Message(MessageType.PREPARED, 0, 1, to=2, body=body))
    wait_until(lambda: two.node.messages or one.ended or two.ended)
    (message,) = two.node.messages
    assert message.body == body


def test_lengths_above_the_limits_are_refused_before_a_byte_is_read(monkeypatch):
    with monkeypatch.context() as patched:  # what a defective sender would send
        patched.setattr(messages, "MAX_BODY_BYTES", 1 << 40)
        head, _ = pack(Message(MessageType.HEARTBEAT, 0, 1, body={"": "x" * (64 << 20)}))
    with pytest.raises(CorruptionError, match="bytes of body"):
        lengths(head)
