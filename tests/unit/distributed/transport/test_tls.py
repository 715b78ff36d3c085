"""Connections between hosts: nobody without the token reads, changes or joins what is said."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from recording_endpoints import RecordingEndpoint, greet, raw
from tls_peers import (
    QUESTION_BYTES,
    contexts_with,
    receive,
    refused_with,
)
from waiting import SECONDS, wait_until

from penstock.distributed.protocol.messages import Message, MessageType, message_with, pack
from penstock.distributed.transport import certificates, handshake, new_token, stream
from penstock.distributed.transport.certificates import Credentials, tls_contexts
from penstock.distributed.transport.tls import TlsStream
from penstock.errors import ClusterError

# What the standard library's own client and server say of a run's connections


def answer_challenge(
    place: RecordingEndpoint, token: str, *, wants_tls: bool = True
) -> socket.socket:
    """Connect as one who has the token; return the connection when both have proved it."""
    connection = raw(place)
    theirs = receive(connection, QUESTION_BYTES)[16:]
    hello = bytes([wants_tls]) + os.urandom(32)
    connection.sendall(hello + handshake._proof(token, b"connects", theirs, hello))
    proof = receive(connection, 32)
    assert proof == handshake._proof(token, b"accepts", theirs, hello)
    return connection


def client_context(token: str) -> ssl.SSLContext:
    return tls_contexts(token).client


def test_connection_between_hosts_uses_tls_1_3_with_ephemeral_keys(hosts):
    token = new_token()
    here = hosts(token, 1)
    with client_context(token).wrap_socket(answer_challenge(here, token)) as secure:
        assert secure.version() == "TLSv1.3"
        assert "GCM" in secure.cipher()[0] or "POLY1305" in secure.cipher()[0]
        header, body = pack(Message(MessageType.HELLO, 0, 2, body={"node": 2}))
        secure.sendall(header + body)
        header, body = pack(Message(MessageType.HEARTBEAT, 0, 2, to=1))
        secure.sendall(header + body)
        wait_until(lambda: here.node.messages)
        assert not secure.session_reused


def test_client_with_older_tls_is_refused(hosts, caplog):
    token = new_token()
    here = hosts(token, 1)
    context = client_context(token)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with answer_challenge(here, token) as connection, pytest.raises(ssl.SSLError):
        context.wrap_socket(connection)
    assert "no TLS 1.3 connection with it: unsupported protocol" in refused_with(here, caplog)


def test_client_without_tls_is_refused(hosts, caplog):
    """It has the token and says that it wants no TLS: who sees it on another host insists."""
    token = new_token()
    here = hosts(token, 1)
    with answer_challenge(here, token, wants_tls=False) as connection:
        header, body = pack(Message(MessageType.HELLO, 0, 2, body={"node": 2}))
        connection.sendall(header + body)
        said = refused_with(here, caplog)
    assert "it has the token, but no TLS 1.3 connection with it: wrong version number" in said


def test_tls_is_used_when_either_side_sees_another_host(hosts, monkeypatch):
    """As with a port that is passed on: only one of the two sees a foreign address."""
    token = new_token()
    for sees in (0, 1):  # who accepts, who connects
        here = hosts(token, 1)
        ports = {here.endpoint.address[1]}

        def is_within(connection, sees=sees, ports=ports) -> bool:
            accepts = connection.getsockname()[1] in ports
            return accepts == bool(sees)

        monkeypatch.setattr(stream, "is_within_host", is_within)
        connection = greet(hosts(token, 2), 2, here)
        assert isinstance(connection._stream, TlsStream)
        connection.send(Message(MessageType.HEARTBEAT, 0, 2, to=1))
        wait_until(lambda here=here: here.node.messages)


SAYS = {
    "of another run": "its certificate does not belong to this run",
    "expired": "its certificate does not belong to this run: certificate has expired",
    "self-signed": "its certificate does not belong to this run",
}


@pytest.mark.parametrize("kind", SAYS)
def test_client_with_foreign_certificate_is_refused(hosts, caplog, kind):
    token = new_token()
    here = hosts(token, 1)
    bad = contexts_with(token, kind).client
    with answer_challenge(here, token) as connection, bad.wrap_socket(connection) as secure:
        with pytest.raises((ssl.SSLError, ConnectionError)):  # its own part is done by then
            secure.recv(1)
        assert SAYS[kind] in refused_with(here, caplog)


def test_client_without_certificate_is_refused(hosts, caplog):
    token = new_token()
    here = hosts(token, 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with answer_challenge(here, token) as connection, context.wrap_socket(connection):
        assert "peer did not return a certificate" in refused_with(here, caplog)


@pytest.mark.parametrize("kind", SAYS)
def test_server_with_foreign_certificate_is_refused(hosts, kind):
    token = new_token()
    bad = contexts_with(token, kind).server
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            challenge = handshake.Challenge(token, wants_tls=True)
            with connection:
                connection.sendall(challenge.question)
                challenge.take(receive(connection, challenge.missing_bytes))
                connection.sendall(challenge.reply)
                with pytest.raises(ssl.SSLError):
                    bad.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(ClusterError, match=SAYS[kind]):
            hosts(token, 2).endpoint.connect(listener.getsockname())
        thread.join()


# Who has the token and does not go on


def test_missing_tls_handshake_times_out_and_blocks_no_node(hosts, monkeypatch, caplog):
    monkeypatch.setattr(handshake, "SECONDS", 3.0)
    token = new_token()
    here, friend = hosts(token, 1), hosts(token, 2)
    for place in (here, friend):
        _ = place.endpoint._credentials.tls  # as if they listened beyond their host
    silent = [answer_challenge(here, token) for _ in range(20)]
    try:
        greet(friend, 2, here).send(Message(MessageType.HEARTBEAT, 0, 2, to=1))
        wait_until(lambda: here.node.messages)
        wait_until(lambda: here.endpoint.refused["127.0.0.1"] == 20)
        assert "it did not begin TLS within " in caplog.records[-1].message
    finally:
        for connection in silent:
            connection.close()


def test_flood_does_not_drop_authenticated_connection(hosts):
    token = new_token()
    here = hosts(token, 1)
    friend = answer_challenge(here, token)
    unauthenticated = [raw(here) for _ in range(300)]
    try:
        wait_until(lambda: here.endpoint.refused["127.0.0.1"] >= 300 - 256)
        with client_context(token).wrap_socket(friend) as secure:
            secure.sendall(b"".join(pack(Message(MessageType.HELLO, 0, 2, body={"node": 2}))))
            secure.sendall(b"".join(pack(Message(MessageType.HEARTBEAT, 0, 2, to=1))))
            wait_until(lambda: here.node.messages)
    finally:
        for connection in unauthenticated:
            connection.close()


def test_handshake_may_arrive_byte_by_byte(hosts):
    """Whatever the network cuts it into; what follows at once is not lost."""
    token = new_token()
    here = hosts(token, 1)
    connection = answer_challenge(here, token)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    secure = client_context(token).wrap_bio(incoming, outgoing)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        try:
            secure.do_handshake()
            break
        except ssl.SSLWantReadError:
            for byte in outgoing.read():
                connection.sendall(bytes([byte]))
            incoming.write(connection.recv(4096))
    secure.write(b"".join(pack(Message(MessageType.HELLO, 0, 2, body={"node": 2}))))
    secure.write(b"".join(pack(Message(MessageType.HEARTBEAT, 0, 2, to=1))))
    connection.sendall(outgoing.read())  # with the last of the handshake
    wait_until(lambda: here.node.messages)
    connection.close()


# The stream


def only_connection(host):
    """Return the connection of a host to which one peer has sent a message.

    A connection receives as soon as it is made, a moment before the endpoint has added it.
    """
    wait_until(lambda: host.node.messages and host.endpoint._all_connections)
    (connection,) = host.endpoint._all_connections
    return connection


@pytest.mark.parametrize("seed", [0, 1])
def test_payloads_of_all_sizes_arrive_in_order_both_ways_at_once(hosts, seed):
    token = new_token()
    one, two = hosts(token, 1), hosts(token, 2)
    there = greet(one, 1, two)
    there.send(Message(MessageType.HEARTBEAT, 0, 1, to=2))
    back = only_connection(two)
    one.endpoint.call(lambda: one.endpoint.attach(2, there))
    random = np.random.default_rng(seed)
    sizes = [1, 16_384, 16_385, 65_536, 1 << 20, 5_000_000, *random.integers(1, 300_000, 40)]
    payloads = [random.integers(0, 256, size, np.uint8) for size in sizes]
    for number, payload in enumerate(payloads):
        for connection, sender, to in ((there, 1, 2), (back, 2, 1)):
            connection.send(
                message_with(
                    payload, kind=MessageType.WEIGHTS, epoch=0, sender=sender, to=to, op=number
                )
            )
    for place, skipped in ((one, 0), (two, 1)):
        wait_until(lambda place=place, n=skipped: len(place.node.messages) == n + len(sizes))
        for number, message in enumerate(place.node.messages[skipped:]):
            assert message.op == number, f"seed {seed}"
            np.testing.assert_array_equal(message.payload, payloads[number])
    assert there.shared_bytes == back.shared_bytes == 0


def test_slow_receiver_blocks_sender(hosts):
    token = new_token()
    one, two = hosts(token, 1), hosts(token, 2)
    connection = greet(one, 1, two)
    connection.send(Message(MessageType.HEARTBEAT, 0, 1, to=2))
    back = only_connection(two)
    is_held, may_go, take = threading.Event(), threading.Event(), back._take

    def slow(connection, message: Message) -> None:
        is_held.set()
        may_go.wait(SECONDS)
        take(connection, message)

    back._take = slow
    payload = np.zeros(4 << 20, np.uint8)
    for number in range(50):  # 200 MiB
        message = message_with(
            payload, kind=MessageType.WEIGHTS, epoch=0, sender=1, to=2, op=number
        )
        connection.send(message)
    assert is_held.wait(SECONDS)
    sent = -1
    while sent != connection.sent_bytes:
        sent = connection.sent_bytes
        time.sleep(0.5)
    assert sent <= 15 * payload.nbytes  # the system's buffers of both sides
    may_go.set()
    wait_until(lambda: len(two.node.messages) == 51)


# Certificates


def test_private_key_is_on_disk_only_encrypted_and_briefly(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[tuple[int, str]] = []
    load = ssl.SSLContext.load_cert_chain

    def look(self, certfile, keyfile=None, password=None) -> None:
        mode = stat.S_IMODE(os.stat(certfile).st_mode)
        seen.append((mode, Path(certfile).read_text()))
        load(self, certfile, keyfile, password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", look)
    tls_contexts(new_token())
    assert len(seen) == 2
    for mode, text in seen:
        assert mode == 0o600
        assert text.startswith("-----BEGIN ENCRYPTED PRIVATE KEY-----")
        assert text.count("PRIVATE KEY") == 2  # the begin and the end of the one
    assert not list(tmp_path.iterdir())


def test_unwritable_temporary_folder_is_one_line_error(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ClusterError) as refusal:
        tls_contexts(new_token())
    text = str(refusal.value)
    assert text.startswith(
        "connections to other hosts need TLS, whose certificate is written to the "
        "temporary folder: [Errno 2] No such file or directory: "
    )
    assert text.endswith("; free some kilobytes there, or set TMPDIR to another folder")


def test_process_on_loopback_makes_no_certificate(monkeypatch):
    def never(token: str) -> None:
        raise AssertionError("a certificate was made")

    monkeypatch.setattr(certificates, "tls_contexts", never)
    token = new_token()
    one, two = RecordingEndpoint(token, 1), RecordingEndpoint(token, 2)
    try:
        greet(one, 1, two).send(Message(MessageType.HEARTBEAT, 0, 1, to=2))
        wait_until(lambda: two.node.messages)
    finally:
        for place in (one, two):
            place.endpoint.close()


def test_processes_have_own_keys_and_one_authority():
    """Two that have never met accept each other; the authority's key is the token's alone."""
    token = new_token()
    mine, theirs = Credentials(token).tls, Credentials(token).tls
    mine_ca, theirs_ca = (
        x509.load_der_x509_certificate(tls.client.get_ca_certs(binary_form=True)[0])
        for tls in (mine, theirs)
    )
    assert mine_ca.public_key() == theirs_ca.public_key()
    other = Credentials(new_token()).tls.client.get_ca_certs(binary_form=True)[0]
    assert x509.load_der_x509_certificate(other).public_key() != mine_ca.public_key()
    own = [peer_key(token, tls) for tls in (mine, theirs)]
    assert own[0] != own[1]


def peer_key(token: str, tls: certificates.TlsContexts) -> bytes:
    """The public key that a server with these contexts shows."""
    near, far = socket.socketpair()

    def serve() -> None:
        TlsStream(far, tls.server, server_side=True).handshake(time.monotonic() + 5)

    thread = threading.Thread(target=serve)
    thread.start()
    with client_context(token).wrap_socket(near) as secure:
        shown = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True))
        thread.join()
    far.close()
    der = serialization.Encoding.DER
    return shown.public_key().public_bytes(der, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize(
    ("own", "peer", "within"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", True),
        ("::1", "::1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "127.0.0.1", False),
        ("fe80::1%eth0", "fe80::2%eth0", False),
    ],
)
def test_same_address_at_both_ends_is_within_host(own, peer, within):
    class Connection:
        def getsockname(self):
            return own, 1

        def getpeername(self):
            return peer, 2

    assert stream.is_within_host(Connection()) is within
