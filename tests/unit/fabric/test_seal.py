"""What one who sits between two nodes, and has not the token, can do to what they say."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from socket_places import Place
from waiting import SECONDS, wait_until

from penstock.errors import CorruptionError
from penstock.fabric.messages import HEADER_BYTES, Kind, Message, message_with, pack
from penstock.fabric.sockets import handshake, new_token
from penstock.fabric.sockets.seal import MOST_BYTES, SEAL_BYTES


class Between:
    """Passes on the handshake of two, as one who has the address of another can; then keeps all."""

    def __init__(self, there: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._there = there
        self.connected = threading.Event()
        threading.Thread(target=self._begin, daemon=True).start()

    def _begin(self) -> None:
        self.near, _ = self._listener.accept()
        self.far = socket.create_connection(self._there)
        self.near.sendall(handshake.read_exactly(self.far, 48))
        self.far.sendall(handshake.read_exactly(self.near, 64))
        self.near.sendall(handshake.read_exactly(self.far, 32))
        self.connected.set()

    def take(self, message: Message) -> bytes:
        """Take the frame of a message off the wire, payload and all."""
        header, body = pack(message)
        size = len(header) + SEAL_BYTES + len(body) + message.size
        return handshake.read_exactly(self.near, size)

    def close(self) -> None:
        for each in (self._listener, self.near, self.far):
            each.close()


@pytest.fixture
def between(places):
    """One who connects to another through somebody; its link, the other, and who is between."""
    token = new_token()
    one, two = places(token, 1), places(token, 2)
    middle = Between(two.endpoint.address)
    link = one.endpoint.connect(middle.address)
    assert middle.connected.wait(SECONDS)
    yield link, two, middle
    middle.close()


SAID = [
    Message(Kind.HELLO, 0, 1, body={"node": 1}),
    Message(Kind.BEAT, 0, 1, op=1, to=2, body={"progress": 1}),
    Message(Kind.BEAT, 0, 1, op=2, to=2, body={"progress": 2}),
    message_with(np.arange(MOST_BYTES, dtype=np.uint8), kind=Kind.CALL, epoch=0, sender=1, to=2),
]


def say_all(between) -> tuple[list[bytes], Place, Between]:
    link, two, middle = between
    for message in SAID:
        link.send(message)
    return [middle.take(message) for message in SAID], two, middle


def test_what_is_passed_on_as_it_is_comes(between):
    frames, two, middle = say_all(between)
    middle.far.sendall(b"".join(frames))
    wait_until(lambda: len(two.node.messages) == 3)
    assert not two.ended


def require_ended(two: Place, came: int) -> None:
    wait_until(lambda: two.ended)
    assert isinstance(two.ended[0], CorruptionError)
    assert "wrong seal" in str(two.ended[0])
    assert len(two.node.messages) == came


@pytest.mark.parametrize(
    ("order", "came"),
    [
        pytest.param([0, 1, 1], 1, id="said again"),
        pytest.param([0, 2], 0, id="left out"),
        pytest.param([0, 2, 1], 0, id="in another order"),
        pytest.param([1], 0, id="without the first"),
    ],
)
def test_frames_said_again_left_out_or_moved_are_noticed(between, order, came):
    frames, two, middle = say_all(between)
    middle.far.sendall(b"".join(frames[number] for number in order))
    require_ended(two, came)


def test_what_is_said_cannot_be_said_in_another_connection(between, places):
    frames, two, _ = say_all(between)
    other = Between(two.endpoint.address)
    places(two.endpoint._token, 3).endpoint.connect(other.address)
    assert other.connected.wait(SECONDS)
    other.far.sendall(frames[0])
    require_ended(two, 0)
    other.close()


def test_what_one_says_cannot_be_sent_back_to_him(between):
    link, two, middle = between
    link.send(SAID[1])
    middle.near.sendall(middle.take(SAID[1]))
    wait_until(lambda: not link.is_open)
    assert not two.node.messages


@pytest.mark.parametrize("number", [1, 3])
def test_a_frame_that_was_changed_with_its_checksum_is_noticed(between, number):
    """Such as the name of what is to be imported and called, in what a worker is told."""
    frames, two, middle = say_all(between)
    if number == 1:
        other = Message(Kind.BEAT, 0, 1, op=1, to=2, body={"progress": 9})
    else:
        payload = np.zeros(MOST_BYTES, np.uint8)
        other = message_with(payload, kind=Kind.CALL, epoch=0, sender=1, to=2)
    header, body = pack(other)
    seal = frames[number][HEADER_BYTES : HEADER_BYTES + SEAL_BYTES]
    payload_bytes = b"" if other.payload is None else other.payload.tobytes()
    middle.far.sendall(b"".join(frames[:number]) + header + seal + body + payload_bytes)
    require_ended(two, number - 1)


def test_no_memory_is_taken_for_a_large_payload_that_was_not_sealed(between):
    frames, two, middle = say_all(between)
    header, body = pack(message_with(np.zeros(1 << 20), kind=Kind.CALL, epoch=0, sender=1, to=2))
    middle.far.sendall(frames[0] + header + bytes(SEAL_BYTES) + body)  # none of it follows
    require_ended(two, 0)


def test_both_ends_have_the_same_keys_the_other_way_round_and_others_the_next_time():
    token, all_keys = new_token(), []
    for _ in range(2):
        near, far = socket.socketpair()
        challenge, found = handshake.Challenge(token), []
        thread = threading.Thread(
            target=lambda near=near, found=found: found.append(handshake.connect(near, token))
        )
        thread.start()
        far.sendall(challenge.question)
        challenge.take(handshake.read_exactly(far, challenge.missing_bytes))
        assert challenge.is_met
        far.sendall(challenge.reply)
        thread.join()
        assert (found[0].sends, found[0].takes) == (challenge.keys.takes, challenge.keys.sends)
        all_keys += [found[0].sends, found[0].takes]
        near.close()
        far.close()
    assert len(set(all_keys)) == 4
