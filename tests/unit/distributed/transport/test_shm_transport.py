"""Payloads through memory that both ends of a link see: whole, in order, never overwritten."""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from grids import quick_first
from hypothesis import given, settings, strategies as st
from own_process import fork, in_a_process_of_its_own
from process_files import mapped_files, open_files
from waiting import SECONDS, wait_until

from penstock.distributed.protocol.messages import Message, MessageType, message_with, pack
from penstock.distributed.transport import shared_memory
from penstock.distributed.transport.connection import Connection
from penstock.distributed.transport.shared_memory import SHM_BYTES, SLOTS, ShmReceiver, ShmSender
from penstock.distributed.transport.stream import PlainStream
from penstock.errors import CorruptionError, PenstockError, ProtocolError
from penstock.telemetry import process_memory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd_create here")

CHUNK = 1 << 20
RING = "/memfd:penstock-"  # in the name of a ring's memory


class End:
    """One end of a link, and what came out of it."""

    def __init__(self, connection: socket.socket, shares: bool = True, take=None) -> None:
        self.came: queue.Queue[Message] = queue.Queue()
        self.ended: queue.Queue[Exception] = queue.Queue()
        self.connection = Connection(
            PlainStream(connection),
            take or (lambda connection, message: self.came.put(message)),
            lambda connection, error: self.ended.put(error),
            lambda: shares,
        )
        self.connection.start()

    def send(self, number: int, payload: np.ndarray) -> None:
        self.connection.send(
            message_with(payload, kind=MessageType.WEIGHTS, epoch=1, sender=1, op=number)
        )

    def next(self) -> Message:
        return self.came.get(timeout=SECONDS)

    def share(self, other: End) -> None:
        """Send until payloads go through the ring."""
        while not self.connection.shared_bytes:
            self.send(0, filled(0))
            other.next()


def filled(number: int, size: int = CHUNK) -> np.ndarray:
    return np.full(size, number % 251, np.uint8)


def connections() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@pytest.fixture
def ends():
    made: list[End] = []

    def make(**changes) -> tuple[End, End]:
        one, two = connections()
        made.extend((End(one, changes.pop("one_shares", True)), End(two, **changes)))
        return made[-2], made[-1]

    yield make
    for end in made:
        end.connection.close()


def rings_of_this_process() -> list[str]:
    gc.collect()  # a link that has ended is held by what it has ended with
    return mapped_files(RING) + open_files(RING)


def is_steady(count: Callable[[], int], seconds: float = 0.3) -> Callable[[], bool]:
    """Return what tells whether a count has stood still for some time."""
    before, since = count(), time.monotonic()

    def has_stood_still() -> bool:
        nonlocal before, since
        if (now := count()) != before:
            before, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    return has_stood_still


@pytest.mark.parametrize("seed", [0, 1])
def test_payloads_of_all_sizes_arrive_in_order_both_ways(ends, seed):
    one, two = ends()
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 999, 1 << 16, CHUNK, 4 << 20, 5 << 20]) for _ in range(40)]
    for number, size in enumerate(sizes):
        one.send(number, filled(number, size))
        two.send(number, filled(number + 7, size))
    for end, shift in ((two, 0), (one, 7)):
        for number, size in enumerate(sizes):
            message = end.next()
            assert message.op == number, f"seed {seed}"
            payload = np.zeros(0, np.uint8) if message.payload is None else message.payload
            np.testing.assert_array_equal(payload, filled(number + shift, size))
            del message, payload
    for end in (one, two):
        assert 0 < end.connection.shared_bytes < end.connection.sent_bytes == sum(sizes)


def test_held_payload_is_never_overwritten_and_blocks_nothing(ends):
    one, two = ends()
    one.share(two)
    before = one.connection.shared_bytes
    for number in range(3 * SLOTS):
        one.send(number, filled(number))
    held = [two.next().payload for _ in range(3 * SLOTS)]  # all come, though no slot comes back
    assert one.connection.shared_bytes > before
    forms = [
        torch.frombuffer(held[0], dtype=torch.float32),
        held[1].view(np.float32)[3:9],
        held[2].data,
    ]
    held[:3] = [None] * 3
    for number in range(100, 110):
        one.send(number, filled(number))
        two.next()
    assert (forms[0].view(torch.uint8) == 0).all()
    assert (forms[1].view(np.uint8) == 1).all()
    assert set(bytes(forms[2])) == {2}
    for number, payload in enumerate(held[3:], start=3):
        assert (payload == number).all()
    # What came may be added to in place, as gradients are.
    torch.frombuffer(held[3], dtype=torch.uint8).add_(1)
    assert (held[3] == 4).all()


def test_two_slow_receivers_do_not_deadlock(ends):
    one, two = ends()
    for number in range(60):
        one.send(number, filled(number))
        two.send(number, filled(number))
    held: dict[int, list[Message]] = {1: [], 2: []}
    for _ in range(60):
        for name, end in ((1, one), (2, two)):
            held[name].append(end.next())
            del held[name][:-5]


def test_slow_receiver_blocks_sender_without_memory_growth():
    in_a_process_of_its_own(take_slowly)


def take_slowly() -> None:
    began, may_go = threading.Event(), threading.Event()
    came: list[int] = []

    def take(connection: Connection, message: Message) -> None:
        came.append(message.op)
        if len(came) > 20:
            began.set()
            may_go.wait(SECONDS)

    connection, other = connections()
    one, two = End(connection), End(other, take=take)
    try:
        payload = filled(1, 4 << 20)
        for number in range(20):
            one.send(number, payload)
        wait_until(lambda: len(came) == 20)
        resident = process_memory.resident_bytes()
        for number in range(20, 120):  # 400 MiB, of which the sender has one copy
            one.send(number, payload)
        assert began.wait(SECONDS)
        wait_until(is_steady(lambda: one.connection.sent_bytes))
        assert one.connection.sent_bytes < 40 * payload.nbytes
        assert process_memory.resident_bytes() - resident < SHM_BYTES + (8 << 20)
        may_go.set()
        wait_until(lambda: len(came) == 120)
        assert came == list(range(120))
    finally:
        may_go.set()
        one.connection.close()
        two.connection.close()


@pytest.mark.parametrize("changes", [{"one_shares": False}, {"shares": False}])
def test_either_end_may_disable_shared_memory(ends, changes):
    one, two = ends(**changes)
    for number in range(30):
        one.send(number, filled(number))
        assert (two.next().payload == number).all()
    assert one.connection.shared_bytes == 0
    wait_until(lambda: not rings_of_this_process())


def test_socket_is_used_when_peer_cannot_map_shared_memory(ends, monkeypatch):
    """As one on another host that has the same address, or in another container."""
    offer = ShmSender.offer
    monkeypatch.setattr(
        ShmSender, "offer", lambda self: offer(self) | {"name": "penstock-" + 32 * "0"}
    )
    one, two = ends()
    for number in range(30):
        one.send(number, filled(number))
        assert (two.next().payload == number).all()
    assert one.connection.shared_bytes == 0
    wait_until(lambda: not rings_of_this_process())


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_socket_is_used_when_shared_memory_cannot_be_allocated(ends, monkeypatch, call):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = open_files(RING)  # of links that are about to end
    monkeypatch.setattr(shared_memory.os, call, refuse)
    assert ShmSender.make() is None
    assert set(open_files(RING)) <= set(before)
    one, two = ends()
    for number in range(10):
        one.send(number, filled(number))
        assert (two.next().payload == number).all()
    assert one.connection.shared_bytes == 0


# Damage, and peers that have the token but are broken


@pytest.mark.parametrize("at", [0, 12345, CHUNK - 1])
def test_corrupt_slot_ends_connection_and_is_named(ends, monkeypatch, at):
    one, two = ends()
    one.share(two)
    put = ShmSender.put

    def damage(self: ShmSender, slot: int, payload: np.ndarray) -> None:
        put(self, slot, payload)
        self._memory[slot * self._slot_bytes + at] ^= 16

    monkeypatch.setattr(ShmSender, "put", damage)
    one.send(5, filled(5))
    error = two.ended.get(timeout=SECONDS)
    assert isinstance(error, CorruptionError)
    assert "operation 5" in str(error)
    assert "has checksum" in str(error)
    assert two.came.empty()
    one.ended.get(timeout=SECONDS)


def frame(slot: int, size: int = CHUNK) -> bytes:
    """A frame whose payload is said to be in a slot."""
    message = message_with(filled(9, size), kind=MessageType.WEIGHTS, epoch=1, sender=1)
    return b"".join(pack(message, slot))


@pytest.mark.parametrize(
    ("slot", "size"), [(SLOTS, CHUNK), (254, CHUNK), (0, (4 << 20) + 1), (1, 1 << 29), (2, 0)]
)
def test_invalid_slots_end_connection(ends, slot, size):
    one, two = ends()
    one.share(two)
    message = Message(MessageType.WEIGHTS, 1, 1, size=size)
    one.connection._socket.sendall(b"".join(pack(message, slot)))
    error = two.ended.get(timeout=SECONDS)
    assert isinstance(error, ProtocolError)
    assert f"got {size} bytes in slot {slot}" in str(error)


def test_held_slot_cannot_be_reused(ends):
    one, two = ends()
    one.share(two)
    one.send(1, filled(1))
    held = two.next().payload
    taken = next(iter(two.connection._shm_receiver._held))
    one.connection._socket.sendall(frame(taken))
    error = two.ended.get(timeout=SECONDS)
    assert isinstance(error, ProtocolError)
    assert "in a free slot of" in str(error)
    assert (held == 1).all()


def test_slot_without_shared_memory_ends_connection(ends):
    one, two = ends(shares=False)
    one.connection._socket.sendall(frame(0))
    assert isinstance(two.ended.get(timeout=SECONDS), ProtocolError)


@pytest.mark.parametrize(
    "slots", [[SLOTS], [-1], [0, 0], ["0"], [True], {"0": 1}, None, [10**30]], ids=str
)
def test_invalid_returned_slots_end_connection(ends, slots):
    one, two = ends()
    one.share(two)
    wait_until(lambda: len(one.connection._shm_sender._free) == SLOTS)
    two.connection.send(Message(MessageType.BUFFER_CREDIT, 0, 0, body={"slots": slots}))
    assert isinstance(one.ended.get(timeout=SECONDS), PenstockError)


def test_peer_that_returns_no_slots_is_dropped_after_timeout(ends, monkeypatch):
    monkeypatch.setattr("penstock.distributed.transport.connection._TIMEOUT_SECONDS", 0.5)
    one, two = ends()
    one.share(two)
    wait_until(lambda: len(one.connection._shm_sender._free) == SLOTS)
    monkeypatch.setattr(one.connection._shm_sender, "_free", [])
    for number in range(3):
        one.send(number, filled(number))

    def has_ended() -> bool:
        one.connection.send(Message(MessageType.HEARTBEAT, 0, 1))  # a message returns no slot
        return not one.ended.empty()

    wait_until(has_ended)
    error = one.ended.get()
    assert isinstance(error, ProtocolError)
    assert "has returned no slot" in str(error)


def test_second_shared_memory_offer_ends_connection(ends):
    one, two = ends()
    one.share(two)
    second = ShmSender.make()
    one.connection.send(Message(MessageType.SHM_OFFER, 0, 0, body=second.offer()))
    assert isinstance(two.ended.get(timeout=SECONDS), ProtocolError)
    second.close()


VALUES = st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(max_size=40) | st.floats()


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["process", "file", "name", "slots", "bytes"]), VALUES))
def test_random_offers_open_nothing(words):
    good = {"process": os.getpid(), "file": 1, "name": "x", "slots": 2, "bytes": 4096}
    try:
        assert ShmReceiver.open(good | words, lambda slot: None) is None
    except ProtocolError:
        return


@pytest.mark.parametrize("what", ["not sealed", "shorter", "longer"])
def test_unsealed_or_resized_memory_is_refused(what):
    """Who reads behind the end of a file that was cut is ended by the system."""
    name = "penstock-test"
    file = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(file, {"not sealed": 8192, "shorter": 4096, "longer": 1 << 20}[what])
    if what != "not sealed":
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    offer = {"process": os.getpid(), "file": file, "name": name, "slots": 2, "bytes": 4096}
    with pytest.raises(ProtocolError, match="expected a valid offer of shared memory"):
        ShmReceiver.open(offer, lambda slot: None)
    os.close(file)


# Ends that die


def be_peer(connection: socket.socket) -> NoReturn:
    """Send and take for ever, in a process that was forked for it."""
    try:
        end = End(connection)
        for number in itertools.count():
            end.send(number, filled(number))
            end.next()
    finally:
        os._exit(1)


@pytest.mark.long
@pytest.mark.parametrize("seed", quick_first(range(2), [0]))
def test_killed_peer_ends_connection_and_leaves_no_memory(seed):
    chance = random.Random(seed)
    connection, other = connections()
    if (peer := fork()) == 0:
        connection.close()
        be_peer(other)
    other.close()
    end = End(connection)
    held = []
    try:
        while not end.connection.shared_bytes:
            message = end.next()
            assert (message.payload == message.op % 251).all()
            end.send(message.op, filled(message.op))
        for number in range(1000):  # so that the peer is at something, whatever the moment
            end.send(number, filled(number))
        time.sleep(chance.uniform(0, 0.05))
        names = {Path(file).name.split()[0] for file in mapped_files(RING)}
        assert len(names) >= 2, f"seed {seed}"  # its own and the peer's
        os.kill(peer, signal.SIGKILL)
        # The end of the connection, not of anybody's patience.
        error = end.ended.get(timeout=SECONDS)
        assert isinstance(error, (OSError, EOFError)), f"seed {seed}: {error}"
        while not end.came.empty():
            held.append(end.came.get())
        # What had come stays as it was, though the one who wrote it is gone.
        assert all((message.payload == message.op % 251).all() for message in held)
    finally:
        os.kill(peer, signal.SIGKILL)
        os.waitpid(peer, 0)
        end.connection.close()
    del held, end, message
    wait_until(lambda: not rings_of_this_process())
    assert not names & {f"memfd:{name}" for name in os.listdir("/dev/shm")}
