"""Whoever sits between two hosts reads and changes nothing of what they say."""

from __future__ import annotations

import numpy as np
import pytest
from tls_peers import (
    ANSWER_BYTES,
    APPLICATION_DATA,
    QUESTION_BYTES,
    Relay,
    contexts_with,
    receive,
    refused_with,
)
from waiting import wait_until

from penstock.distributed.protocol.messages import Message, MessageType, message_with, pack
from penstock.distributed.transport import certificates, handshake, new_token
from penstock.errors import ClusterError, CorruptionError


@pytest.fixture
def between(hosts):
    """Two nodes that have a link, with somebody between them; the link, the other, and who."""
    token = new_token()
    one, two = hosts(token, 1), hosts(token, 2)
    relay = Relay(two.endpoint.address)
    connection = one.endpoint.connect(relay.address)
    connection.send(Message(MessageType.HELLO, 0, 1, body={"node": 1}))
    connection.send(Message(MessageType.HEARTBEAT, 0, 1, to=2))
    wait_until(lambda: len(two.node.messages) == 1)
    yield connection, two, relay
    relay.close()


def hold(between, count: int) -> list[bytes]:
    """Have messages sent, and return their records instead of passing them on."""
    connection, _, relay = between
    relay.holds.set()
    for number in range(count):
        connection.send(Message(MessageType.HEARTBEAT, 0, 1, op=number, to=2))
        wait_until(lambda number=number: len(relay.held) == number + 1)
    assert all(record[0] == APPLICATION_DATA for record in relay.held)
    return relay.held


def test_unchanged_relayed_records_are_accepted(between):
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
def test_repeated_dropped_or_reordered_records_end_connection(between, order):
    records = hold(between, 3)
    require_damaged(between, b"".join(records[number] for number in order))


@pytest.mark.parametrize("place", [5, 20, -1])
def test_changed_record_ends_connection_with_readable_error(between, place):
    (record,) = hold(between, 1)
    changed = bytearray(record)
    changed[place] ^= 1
    require_damaged(between, bytes(changed))


def test_plain_text_between_records_ends_connection(between):
    hold(between, 1)
    require_damaged(between, b"".join(pack(Message(MessageType.HEARTBEAT, 0, 1, to=2))))


def require_damaged(between, said: bytes) -> None:
    _, two, relay = between
    before = len(two.node.messages)
    relay.far.sendall(said)
    wait_until(lambda: two.ended)
    assert isinstance(two.ended[0], CorruptionError)
    assert "an encrypted record was damaged or changed in transit: " in str(two.ended[0])
    assert len(two.node.messages) - before <= 1  # what was whole and in its place


def test_records_of_another_connection_are_refused(hosts, between):
    (record,) = hold(between, 1)
    _, two, _ = between
    token = two.endpoint._credentials.token
    other = Relay(two.endpoint.address)
    three = hosts(token, 3)
    three.endpoint.connect(other.address).send(Message(MessageType.HELLO, 0, 3, body={"node": 3}))
    wait_until(lambda: len(two.endpoint._all_connections) == 2)
    other.far.sendall(record)
    wait_until(lambda: two.ended)
    assert isinstance(two.ended[0], CorruptionError)
    other.close()


def test_relay_cannot_read_frames(between):
    connection, two, relay = between
    payload = np.frombuffer(b"reservoir" * 100_000, np.uint8)
    body = {"secret": "turbine"}
    connection.send(
        message_with(payload, kind=MessageType.RPC_REQUEST, epoch=0, sender=1, to=2, body=body)
    )
    wait_until(lambda: len(two.node.messages) == 2)
    assert two.node.messages[1].payload.tobytes() == payload.tobytes()
    assert two.node.messages[1].body == body
    assert len(relay.seen) > payload.nbytes
    for readable in (b"secret", b"turbine", b"reservoir"):
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


def test_relay_that_terminates_tls_is_refused_by_both_sides(hosts, caplog):
    token = new_token()
    one, two = hosts(token, 1), hosts(token, 2)
    impostor = Impostor(two.endpoint.address, contexts_with(token, "of another run"))
    with pytest.raises(ClusterError, match="its certificate does not belong to this run"):
        one.endpoint.connect(impostor.address)
    said = refused_with(two, caplog)
    assert "it has the token, but its certificate does not belong to this run" in said
    wait_until(lambda: len(impostor.told) == 2)
    assert all("alert unknown ca" in told for told in impostor.told), impostor.told
    assert not two.from_new_peers
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


def test_relay_cannot_downgrade_to_plain_text(hosts, caplog):
    token = new_token()
    one, two = hosts(token, 1), hosts(token, 2)
    relay = Downgrade(two.endpoint.address)
    with pytest.raises(ClusterError, match="the listener refused the token"):
        one.endpoint.connect(relay.address)
    assert "it does not have this run's token" in refused_with(two, caplog)
    relay.close()


def test_closed_peer_ends_connection_at_once(between):
    connection, two, relay = between
    relay.close()
    wait_until(lambda: two.ended and not connection.is_open)
    assert isinstance(two.ended[0], (EOFError, ConnectionError))
