"""Who is let in, and that strangers keep nobody out."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from recording_endpoints import greet, raw
from waiting import SECONDS, wait_until

from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.transport import (
    connection as connection_module,
    handshake,
    new_token,
)
from penstock.distributed.transport.certificates import Credentials
from penstock.distributed.transport.tls import TlsStream
from penstock.errors import ClusterError

QUESTION_BYTES = 16 + handshake.HELLO_BYTES


@pytest.mark.long
def test_peer_without_token_is_refused_before_parsing(endpoints, caplog):
    caplog.set_level(logging.WARNING, "penstock.distributed")
    here, other = endpoints(new_token(), 1), endpoints(new_token(), 2)
    with pytest.raises(ClusterError, match="the listener refused the token"):
        other.endpoint.connect(here.endpoint.address)
    # A stranger who says something else, and one who pretends to speak the protocol.
    for first_words in (b"GET / HTTP/1.1\r\n\r\n" + bytes(100), bytes(64), os.urandom(4096)):
        with raw(here) as connection:
            connection.sendall(first_words)
            wait_until(lambda connection=connection: closed(connection))
    wait_until(lambda: here.endpoint.refused["127.0.0.1"] == 4)
    assert not here.node.messages
    assert not here.from_new_peers
    lines = [record.message for record in caplog.records]
    assert len(lines) == 4
    assert all("refused a connection from 127.0.0.1" in line for line in lines)
    # Nothing is disturbed: who has the token still gets in.
    friend = endpoints(here.endpoint._credentials.token, 3)
    greet(friend, 3, here).send(Message(MessageType.HEARTBEAT, 0, 3, to=1))
    wait_until(lambda: here.node.messages)


def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed, having greeted, and said at most that it refuses."""
    connection.settimeout(SECONDS)
    said = b""
    try:
        while part := connection.recv(4096):
            said += part
    except ConnectionResetError:
        pass
    assert len(said) <= QUESTION_BYTES or said[QUESTION_BYTES:] == handshake.REFUSAL
    return True


def test_slow_authentication_is_dropped_after_timeout(endpoints, monkeypatch):
    """A byte now and then buys no more time, however many come."""
    monkeypatch.setattr(handshake, "SECONDS", 0.3)
    here = endpoints(new_token(), 1)
    sent = 0
    with raw(here) as connection:
        while not here.endpoint.refused:
            with contextlib.suppress(OSError):
                connection.sendall(b"x")
            sent += 1
            assert sent < 64, "it is refused for its time, not for its words"
            time.sleep(0.05)


def test_silent_connections_block_no_node(endpoints):
    """As many as may come: it is those who have been there longest that go."""
    token = new_token()
    here = endpoints(token, 1)
    unauthenticated = [raw(here) for _ in range(300)]
    try:
        for _ in range(5):
            with raw(here) as friend:
                handshake.connect(friend, Credentials(token))  # the first time
        assert closed(unauthenticated[0])
        unauthenticated[-1].settimeout(SECONDS)
        assert len(unauthenticated[-1].recv(4096)) == QUESTION_BYTES
        unauthenticated[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            unauthenticated[-1].recv(1)
    finally:
        for connection in unauthenticated:
            connection.close()


def test_flood_from_another_address_drops_only_its_own_connections(endpoints):
    """One who takes long to answer stays, as long as it is not from where most come."""
    token = new_token()
    here = endpoints(token, 1)
    with raw(here) as friend:
        friend.settimeout(SECONDS)
        theirs, hello = friend.recv(QUESTION_BYTES)[16:], bytes(handshake.HELLO_BYTES)
        unauthenticated = [
            socket.create_connection(here.endpoint.address, source_address=("127.0.0.2", 0))
            for _ in range(400)
        ]
        wait_until(lambda: here.endpoint.refused["127.0.0.2"] >= 400 - 256)
        assert "127.0.0.1" not in here.endpoint.refused
        friend.sendall(hello + handshake._proof(token, b"connects", theirs, hello))
        assert friend.recv(32) == handshake._proof(token, b"accepts", theirs, hello)
        for connection in unauthenticated:
            connection.close()


def test_listener_continues_when_a_connection_gets_no_threads(endpoints, monkeypatch, caplog):
    """A limit of threads may be reached for a moment; later nodes must get in."""
    token = new_token()
    here, friend = endpoints(token, 1), endpoints(token, 2)

    class NoThread(threading.Thread):
        def start(self) -> None:
            if self.name == "penstock connection writes":
                raise RuntimeError("can't start new thread")
            super().start()

    limited = SimpleNamespace(Thread=NoThread, Lock=threading.Lock)
    with monkeypatch.context() as patched, raw(here) as first:
        patched.setattr(connection_module, "threading", limited)
        stream = handshake.connect(first, Credentials(token))
        first.settimeout(SECONDS)
        with pytest.raises((EOFError, ConnectionError)):
            stream.read_into(memoryview(bytearray(1)))
        wait_until(lambda: caplog.records)
    assert "the connection cannot be served: can't start new thread" in caplog.messages[0]
    friend.endpoint.connect(here.endpoint.address)


def test_nodes_connect_during_connection_flood(endpoints):
    token = new_token()
    here, friend = endpoints(token, 1), endpoints(token, 2)
    is_over, unauthenticated = threading.Event(), []

    def flood() -> None:
        while not is_over.wait(0.002):
            with contextlib.suppress(OSError):
                unauthenticated.append(raw(here))
            if len(unauthenticated) > 400:  # in this process they are open twice
                unauthenticated.pop(0).close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        wait_until(lambda: len(unauthenticated) > 300)
        for _ in range(10):
            connection = greet(friend, 2, here)
            connection.send(Message(MessageType.HEARTBEAT, 0, 2, to=1))
            assert connection.is_open
    finally:
        is_over.set()
        thread.join()
        for connection in unauthenticated:
            connection.close()
    wait_until(lambda: len(here.node.messages) == 10)


def test_refused_connections_are_logged_at_limited_rate(endpoints, caplog):
    caplog.set_level(logging.WARNING, "penstock.distributed")
    here = endpoints(new_token(), 1)
    for _ in range(50):
        raw(here).close()
    wait_until(lambda: here.endpoint.refused["127.0.0.1"] == 50)
    assert len(caplog.records) == 10


@contextlib.contextmanager
def turning_away(times: int, token: str):
    """Listen, and close so many connections before they are answered; yield the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for number in range(times + 1):
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the peer gave up before
                return
            with connection:
                challenge = handshake.Challenge(token, wants_tls=False)
                connection.sendall(challenge.question)
                if number % 2:  # what it says is not read: the connection is reset
                    connection.recv(1)
                if number == times:
                    while challenge.missing_bytes:
                        challenge.take(connection.recv(challenge.missing_bytes))
                    connection.sendall(challenge.reply)
                    if challenge.needs_tls:
                        context = Credentials(token).tls.server
                        TlsStream(connection, context, server_side=True).handshake(
                            time.monotonic() + 5
                        )

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.close()


def test_rejected_connection_is_retried(endpoints):
    token = new_token()
    here = endpoints(token, 1)
    with turning_away(4, token) as address:
        here.endpoint.connect(address)


def test_permanent_rejection_is_not_reported_as_wrong_token(endpoints, monkeypatch):
    monkeypatch.setattr("penstock.distributed.transport.endpoint._TRY_SECONDS", 0.1)
    token = new_token()
    here = endpoints(token, 1)
    with (
        turning_away(1000, token) as address,
        pytest.raises(ClusterError, match="closed the connection before it replied: the run may"),
    ):
        here.endpoint.connect(address)


def test_listener_must_prove_token(endpoints):
    """Who only repeats what it is told does not pass for a node of the run."""
    listener = socket.create_server(("127.0.0.1", 0))

    def mirror() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"penstock-fabric6" + bytes(handshake.HELLO_BYTES))
            answer = connection.recv(handshake.HELLO_BYTES + handshake.PROOF_BYTES)
            connection.sendall(answer[handshake.HELLO_BYTES :])

    thread = threading.Thread(target=mirror)
    thread.start()
    here = endpoints(new_token(), 1)
    with pytest.raises(ClusterError, match="does not have this run's token"):
        here.endpoint.connect(listener.getsockname())
    thread.join()
    listener.close()


def test_replayed_proof_is_refused(endpoints):
    """What was recorded of one handshake does not open another."""
    token = new_token()
    here = endpoints(token, 1)
    recorded = bytearray()

    class Recorder:
        def __init__(self, connection) -> None:
            self.connection = connection

        def sendall(self, data) -> None:
            recorded.extend(data)
            self.connection.sendall(data)

        def __getattr__(self, name):
            return getattr(self.connection, name)

    with raw(here) as connection:
        handshake.connect(Recorder(connection), Credentials(token))
    with raw(here) as connection:
        connection.sendall(recorded)
        closed(connection)
    wait_until(lambda: here.endpoint.refused["127.0.0.1"] == 1)
