"""Connections between hosts: nobody without the token reads, changes or joins what is said."""

from __future__ import annotations

import contextlib
import datetime
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
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from socket_places import Place, greet, raw
from waiting import SECONDS, wait_until

from penstock.errors import ClusterError, CorruptionError
from penstock.fabric.messages import Kind, Message, message_with, pack
from penstock.fabric.sockets import certificates, handshake, new_token, stream
from penstock.fabric.sockets.certificates import Credentials, tls_contexts
from penstock.fabric.sockets.tls import TlsStream

QUESTION_BYTES = 16 + handshake.HELLO_BYTES
ANSWER_BYTES = handshake.HELLO_BYTES + handshake.PROOF_BYTES
APPLICATION_DATA = 23  # the type of an encrypted record (RFC 8446, 5.1)


@pytest.fixture
def hosts(monkeypatch):
    """What makes endpoints as if each were on a host of its own."""
    monkeypatch.setattr(stream, "is_within_host", lambda connection: False)
    made: list[Place] = []

    def make(token: str, number: int) -> Place:
        made.append(Place(token, number))
        return made[-1]

    yield make
    for place in made:
        place.endpoint.close()
        assert not place.failed


def receive(connection: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size:
        part = connection.recv(size - len(said))
        if not part:
            raise EOFError("the connection was closed")
        said += part
    return said


# What the standard library's own client and server say of a run's connections


def answer_challenge(place: Place, token: str, *, wants_tls: bool = True) -> socket.socket:
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


def test_a_connection_between_hosts_is_tls_1_3_with_a_fresh_key_exchange(hosts):
    token = new_token()
    here = hosts(token, 1)
    with client_context(token).wrap_socket(answer_challenge(here, token)) as secure:
        assert secure.version() == "TLSv1.3"
        assert "GCM" in secure.cipher()[0] or "POLY1305" in secure.cipher()[0]
        header, body = pack(Message(Kind.HELLO, 0, 2, body={"node": 2}))
        secure.sendall(header + body)
        header, body = pack(Message(Kind.BEAT, 0, 2, to=1))
        secure.sendall(header + body)
        wait_until(lambda: here.node.messages)
        assert not secure.session_reused


def refused_with(place: Place, caplog) -> str:
    wait_until(lambda: place.endpoint.refused["127.0.0.1"])
    assert not place.node.messages
    return caplog.records[-1].message


def test_a_client_of_an_older_tls_is_refused(hosts, caplog):
    token = new_token()
    here = hosts(token, 1)
    context = client_context(token)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with answer_challenge(here, token) as connection, pytest.raises(ssl.SSLError):
        context.wrap_socket(connection)
    assert "no TLS 1.3 connection with it: unsupported protocol" in refused_with(here, caplog)


def test_a_client_that_goes_on_in_plain_text_is_refused(hosts, caplog):
    """It has the token and says that it wants no TLS: who sees it on another host insists."""
    token = new_token()
    here = hosts(token, 1)
    with answer_challenge(here, token, wants_tls=False) as connection:
        header, body = pack(Message(Kind.HELLO, 0, 2, body={"node": 2}))
        connection.sendall(header + body)
        said = refused_with(here, caplog)
    assert "it has the token, but no TLS 1.3 connection with it: wrong version number" in said


def test_tls_is_used_when_either_side_sees_the_other_on_another_host(hosts, monkeypatch):
    """As with a port that is passed on: only one of the two sees a foreign address."""
    token = new_token()
    for sees in (0, 1):  # who accepts, who connects
        here = hosts(token, 1)
        ports = {here.endpoint.address[1]}

        def is_within(connection, sees=sees, ports=ports) -> bool:
            accepts = connection.getsockname()[1] in ports
            return accepts == bool(sees)

        monkeypatch.setattr(stream, "is_within_host", is_within)
        link = greet(hosts(token, 2), 2, here)
        assert isinstance(link._stream, TlsStream)
        link.send(Message(Kind.BEAT, 0, 2, to=1))
        wait_until(lambda here=here: here.node.messages)


def contexts_with(token: str, kind: str) -> certificates.TlsContexts:
    """Contexts whose peers are those of the run, and whose own certificate is not good."""
    good = tls_contexts(token)
    if kind == "of another run":
        bad = tls_contexts(new_token())
    elif kind == "expired":
        ended = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=1)
        bad = tls_contexts(token, not_after=ended.replace(tzinfo=None))
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        own = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "penstock run")])
        made = (
            x509.CertificateBuilder()
            .subject_name(own)
            .issuer_name(own)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(datetime.datetime(2020, 1, 1))
            .not_valid_after(datetime.datetime(2050, 1, 1))
            .sign(key, hashes.SHA256())
        )
        with tempfile.NamedTemporaryFile() as file:
            pem = serialization.Encoding.PEM
            form = serialization.PrivateFormat.PKCS8
            file.write(key.private_bytes(pem, form, serialization.NoEncryption()))
            file.write(made.public_bytes(pem))
            file.flush()
            for context in (good.server, good.client):
                context.load_cert_chain(file.name)
        return good
    for context in (bad.server, bad.client):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return bad


SAYS = {
    "of another run": "its certificate is not one of this run",
    "expired": "its certificate is not one of this run: certificate has expired",
    "self-signed": "its certificate is not one of this run",
}


@pytest.mark.parametrize("kind", SAYS)
def test_a_client_whose_certificate_is_not_one_of_the_run_is_refused(hosts, caplog, kind):
    token = new_token()
    here = hosts(token, 1)
    bad = contexts_with(token, kind).client
    with answer_challenge(here, token) as connection, bad.wrap_socket(connection) as secure:
        with pytest.raises((ssl.SSLError, ConnectionError)):  # its own part is done by then
            secure.recv(1)
        assert SAYS[kind] in refused_with(here, caplog)


def test_a_client_without_a_certificate_is_refused(hosts, caplog):
    token = new_token()
    here = hosts(token, 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with answer_challenge(here, token) as connection, context.wrap_socket(connection):
        assert "peer did not return a certificate" in refused_with(here, caplog)


@pytest.mark.parametrize("kind", SAYS)
def test_a_server_whose_certificate_is_not_one_of_the_run_is_refused(hosts, kind):
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


# Who sits between the two


class Relay:
    """Passes bytes on between a node and the one it wants to reach, as a host on the way can.

    Args:
        there: where the second listens.
    """

    def __init__(self, there: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._there = there
        self.seen = bytearray()  # all that was passed on
        self.holds = threading.Event()  # whether records that come from the near end are kept
        self.held: list[bytes] = []
        self.failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._begin, daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        try:
            self.near, _ = self._listener.accept()
            self.far = socket.create_connection(self._there)
            self.prove()
            self.after()
        except (OSError, EOFError):
            return  # an end has closed
        except BaseException as error:
            self.failure.append(error)

    def prove(self) -> None:
        """Pass on the challenge and the response."""
        self._pass(self.far, self.near, QUESTION_BYTES)
        self._pass(self.near, self.far, ANSWER_BYTES)
        self._pass(self.far, self.near, handshake.PROOF_BYTES)

    def _pass(self, source: socket.socket, target: socket.socket, size: int) -> None:
        said = receive(source, size)
        self.seen += said
        target.sendall(said)

    def after(self) -> None:
        """Pass on records, both ways, until an end closes."""
        threading.Thread(target=self._back, daemon=True).start()
        while True:
            record = self.record(self.near)
            if self.holds.is_set():
                self.held.append(record)
            else:
                self.far.sendall(record)

    def _back(self) -> None:
        try:
            while True:
                self.near.sendall(self.record(self.far))
        except (OSError, EOFError):
            return

    def record(self, source: socket.socket) -> bytes:
        """Take the next record of TLS: type, version, length, and as many bytes."""
        header = receive(source, 5)
        record = header + receive(source, int.from_bytes(header[3:], "big"))
        self.seen += record
        return record

    def close(self) -> None:
        for each in (self.near, self.far):
            with contextlib.suppress(OSError):  # it wakes who reads from it
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._listener.close()
        self._thread.join(timeout=5)


@pytest.fixture
def between(hosts):
    """Two nodes that have a link, with somebody between them; the link, the other, and who."""
    token = new_token()
    one, two = hosts(token, 1), hosts(token, 2)
    relay = Relay(two.endpoint.address)
    link = one.endpoint.connect(relay.address)
    link.send(Message(Kind.HELLO, 0, 1, body={"node": 1}))
    link.send(Message(Kind.BEAT, 0, 1, to=2))
    wait_until(lambda: len(two.node.messages) == 1)
    yield link, two, relay
    relay.close()


def hold(between, count: int) -> list[bytes]:
    """Have messages sent, and return their records instead of passing them on."""
    link, _, relay = between
    relay.holds.set()
    for number in range(count):
        link.send(Message(Kind.BEAT, 0, 1, op=number, to=2))
        wait_until(lambda number=number: len(relay.held) == number + 1)
    assert all(record[0] == APPLICATION_DATA for record in relay.held)
    return relay.held


def test_records_that_are_passed_on_as_they_are_come(between):
    _, two, relay = between
    relay.far.sendall(b"".join(hold(between, 3)))
    wait_until(lambda: len(two.node.messages) == 4)
    assert not two.ended


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([0, 0], id="sent again"),
        pytest.param([1, 2], id="left out"),
        pytest.param([1, 0, 2], id="in another order"),
    ],
)
def test_records_sent_again_left_out_or_moved_end_the_link(between, order):
    records = hold(between, 3)
    require_damaged(between, b"".join(records[number] for number in order))


@pytest.mark.parametrize("place", [5, 20, -1])
def test_a_changed_record_ends_the_link_with_a_readable_error(between, place):
    (record,) = hold(between, 1)
    changed = bytearray(record)
    changed[place] ^= 1
    require_damaged(between, bytes(changed))


def test_plain_text_between_records_ends_the_link(between):
    hold(between, 1)
    require_damaged(between, b"".join(pack(Message(Kind.BEAT, 0, 1, to=2))))


def require_damaged(between, said: bytes) -> None:
    _, two, relay = between
    before = len(two.node.messages)
    relay.far.sendall(said)
    wait_until(lambda: two.ended)
    assert isinstance(two.ended[0], CorruptionError)
    assert "an encrypted record was damaged or changed on the way: " in str(two.ended[0])
    assert len(two.node.messages) - before <= 1  # what was whole and in its place


def test_records_of_one_connection_mean_nothing_in_another(hosts, between):
    (record,) = hold(between, 1)
    _, two, _ = between
    token = two.endpoint._credentials.token
    other = Relay(two.endpoint.address)
    three = hosts(token, 3)
    three.endpoint.connect(other.address).send(Message(Kind.HELLO, 0, 3, body={"node": 3}))
    wait_until(lambda: len(two.endpoint._all_links) == 2)
    other.far.sendall(record)
    wait_until(lambda: two.ended)
    assert isinstance(two.ended[0], CorruptionError)
    other.close()


def test_nothing_of_a_frame_can_be_read_on_the_way(between):
    link, two, relay = between
    payload = np.frombuffer(b"reservoir" * 100_000, np.uint8)
    body = {"secret": "turbine"}
    link.send(message_with(payload, kind=Kind.CALL, epoch=0, sender=1, to=2, body=body))
    wait_until(lambda: len(two.node.messages) == 2)
    assert two.node.messages[1].payload.tobytes() == payload.tobytes()
    assert two.node.messages[1].body == body
    assert len(relay.seen) > payload.nbytes
    for readable in (b"PNSK", b"secret", b"turbine", b"reservoir"):
        assert readable not in relay.seen


class Impostor(Relay):
    """Passes the challenge and the response on, and shakes hands with both ends itself.

    Args:
        contexts: with the certificates that it has.
    """

    def __init__(self, there: tuple[str, int], contexts: certificates.TlsContexts) -> None:
        self._contexts = contexts
        self.told: list[str] = []  # what the handshakes with both came to
        super().__init__(there)

    def after(self) -> None:
        ends = ((self.far, self._contexts.client, False), (self.near, self._contexts.server, True))
        for connection, context, serves in ends:
            try:
                with context.wrap_socket(connection, server_side=serves) as secure:
                    secure.settimeout(5)
                    self.told.append("let in" if secure.recv(1) else "closed")
            except OSError as error:
                self.told.append(str(error).lower())


def test_a_relay_that_ends_tls_on_both_sides_is_refused_by_both(hosts, caplog):
    token = new_token()
    one, two = hosts(token, 1), hosts(token, 2)
    impostor = Impostor(two.endpoint.address, contexts_with(token, "of another run"))
    with pytest.raises(ClusterError, match="its certificate is not one of this run"):
        one.endpoint.connect(impostor.address)
    said = refused_with(two, caplog)
    assert "it has the token, but its certificate is not one of this run" in said
    wait_until(lambda: len(impostor.told) == 2)
    assert all("alert unknown ca" in told for told in impostor.told), impostor.told
    assert not two.strangers
    impostor.close()


class Downgrade(Relay):
    """Says to both ends that the other wants no TLS."""

    def prove(self) -> None:
        question = bytearray(receive(self.far, QUESTION_BYTES))
        assert question[16] == 1
        question[16] = 0
        self.near.sendall(question)
        answer = bytearray(receive(self.near, ANSWER_BYTES))
        assert answer[0] == 1
        answer[0] = 0
        self.far.sendall(answer)
        self.near.sendall(receive(self.far, handshake.PROOF_BYTES))


def test_nobody_can_talk_two_nodes_out_of_tls(hosts, caplog):
    token = new_token()
    one, two = hosts(token, 1), hosts(token, 2)
    relay = Downgrade(two.endpoint.address)
    with pytest.raises(ClusterError, match="refused this node's token"):
        one.endpoint.connect(relay.address)
    assert "it does not have this run's token" in refused_with(two, caplog)
    relay.close()


# Who has the token and does not go on


def test_who_begins_no_tls_is_not_waited_for_and_keeps_nobody_out(hosts, monkeypatch, caplog):
    monkeypatch.setattr(handshake, "SECONDS", 3.0)
    token = new_token()
    here, friend = hosts(token, 1), hosts(token, 2)
    for place in (here, friend):
        _ = place.endpoint._credentials.tls  # as if they listened beyond their host
    silent = [answer_challenge(here, token) for _ in range(20)]
    try:
        greet(friend, 2, here).send(Message(Kind.BEAT, 0, 2, to=1))
        wait_until(lambda: here.node.messages)
        wait_until(lambda: here.endpoint.refused["127.0.0.1"] == 20)
        assert "it did not begin TLS: it took too long" in caplog.records[-1].message
    finally:
        for connection in silent:
            connection.close()


def test_strangers_take_no_place_of_one_who_has_proved_the_token(hosts):
    token = new_token()
    here = hosts(token, 1)
    friend = answer_challenge(here, token)
    strangers = [raw(here) for _ in range(300)]
    try:
        wait_until(lambda: here.endpoint.refused["127.0.0.1"] >= 300 - 256)
        with client_context(token).wrap_socket(friend) as secure:
            secure.sendall(b"".join(pack(Message(Kind.HELLO, 0, 2, body={"node": 2}))))
            secure.sendall(b"".join(pack(Message(Kind.BEAT, 0, 2, to=1))))
            wait_until(lambda: here.node.messages)
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_handshake_that_comes_a_byte_at_a_time_is_complete(hosts):
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
    secure.write(b"".join(pack(Message(Kind.HELLO, 0, 2, body={"node": 2}))))
    secure.write(b"".join(pack(Message(Kind.BEAT, 0, 2, to=1))))
    connection.sendall(outgoing.read())  # with the last of the handshake
    wait_until(lambda: here.node.messages)
    connection.close()


# The stream


@pytest.mark.parametrize("seed", [0, 1])
def test_payloads_of_all_sizes_come_whole_in_order_and_both_ways_at_once(hosts, seed):
    token = new_token()
    one, two = hosts(token, 1), hosts(token, 2)
    there = greet(one, 1, two)
    there.send(Message(Kind.BEAT, 0, 1, to=2))
    wait_until(lambda: two.node.messages)
    (back,) = two.endpoint._all_links
    one.endpoint.call(lambda: one.endpoint.attach(2, there))
    random = np.random.default_rng(seed)
    sizes = [1, 16_384, 16_385, 65_536, 1 << 20, 5_000_000, *random.integers(1, 300_000, 40)]
    payloads = [random.integers(0, 256, size, np.uint8) for size in sizes]
    for number, payload in enumerate(payloads):
        for link, sender, to in ((there, 1, 2), (back, 2, 1)):
            link.send(
                message_with(payload, kind=Kind.WEIGHTS, epoch=0, sender=sender, to=to, op=number)
            )
    for place, skipped in ((one, 0), (two, 1)):
        wait_until(lambda place=place, n=skipped: len(place.node.messages) == n + len(sizes))
        for number, message in enumerate(place.node.messages[skipped:]):
            assert message.op == number, f"seed {seed}"
            np.testing.assert_array_equal(message.payload, payloads[number])
    assert there.shared_bytes == back.shared_bytes == 0


def test_who_takes_slowly_holds_the_sender_up(hosts):
    token = new_token()
    one, two = hosts(token, 1), hosts(token, 2)
    link = greet(one, 1, two)
    link.send(Message(Kind.BEAT, 0, 1, to=2))
    wait_until(lambda: two.node.messages)
    (back,) = two.endpoint._all_links
    is_held, may_go, take = threading.Event(), threading.Event(), back._take

    def slow(link, message: Message) -> None:
        is_held.set()
        may_go.wait(SECONDS)
        take(link, message)

    back._take = slow
    payload = np.zeros(4 << 20, np.uint8)
    for number in range(50):  # 200 MiB
        message = message_with(payload, kind=Kind.WEIGHTS, epoch=0, sender=1, to=2, op=number)
        link.send(message)
    assert is_held.wait(SECONDS)
    sent = -1
    while sent != link.sent_bytes:
        sent = link.sent_bytes
        time.sleep(0.5)
    assert sent <= 15 * payload.nbytes  # the system's buffers of both sides
    may_go.set()
    wait_until(lambda: len(two.node.messages) == 51)


def test_a_peer_that_closes_ends_the_link_at_once(between):
    link, two, relay = between
    relay.close()
    wait_until(lambda: two.ended and not link.is_open)
    assert isinstance(two.ended[0], (EOFError, ConnectionError))


# Certificates


def test_the_private_key_is_on_disk_only_encrypted_and_only_for_a_moment(monkeypatch, tmp_path):
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


def test_a_temporary_folder_that_cannot_be_written_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ClusterError) as refusal:
        tls_contexts(new_token())
    text = str(refusal.value)
    assert text.startswith(
        "connections to other hosts need TLS, and its certificate a file of some kilobytes in the "
        "temporary folder: [Errno 2] No such file or directory: "
    )
    assert text.endswith("; make room there, or set TMPDIR to another folder")


def test_a_process_that_stays_within_its_host_makes_no_certificate(monkeypatch):
    def never(token: str) -> None:
        raise AssertionError("a certificate was made")

    monkeypatch.setattr(certificates, "tls_contexts", never)
    token = new_token()
    one, two = Place(token, 1), Place(token, 2)
    try:
        greet(one, 1, two).send(Message(Kind.BEAT, 0, 1, to=2))
        wait_until(lambda: two.node.messages)
    finally:
        for place in (one, two):
            place.endpoint.close()


def test_every_process_of_a_run_has_a_key_of_its_own_and_trusts_the_same_authority():
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
def test_within_a_host_is_what_has_one_address_at_both_ends(own, peer, within):
    class Connection:
        def getsockname(self):
            return own, 1

        def getpeername(self):
            return peer, 2

    assert stream.is_within_host(Connection()) is within
