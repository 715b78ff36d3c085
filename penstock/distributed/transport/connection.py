"""One connection between two processes of a run: frames in, frames out.

A thread reads and a thread writes, so that neither waits for the other and both wait for the
network, not for Python. What comes damaged is reported and ends the link: after it, nobody knows
where the next frame begins.

Between processes of one host large payloads do not go over the socket: the sender puts them into
memory that both see (`shared_memory.py`), and the frame says where. Frames stay in the order in
which they were sent, whichever way their payloads go.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.distributed.protocol import (
    HEADER_BYTES,
    Message,
    MessageType,
    lengths,
    pack,
    slot_of,
    unpack,
)
from penstock.distributed.transport.buffer_pool import BufferPool
from penstock.distributed.transport.shared_memory import LEAST_BYTES, ShmReceiver, ShmSender
from penstock.distributed.transport.stream import Stream, read_exactly
from penstock.errors import ProtocolError

_BUFFER_BYTES = 4 << 20
_BUFFER_BYTES_HERE = 1 << 20  # within a host: what waits in the kernel stays in the cache
_CUT_SECONDS = 10.0  # without an answer to what was sent; then the link is no more
_LIMITS = {
    "TCP_USER_TIMEOUT": int(1000 * _CUT_SECONDS),
    # A link on which nothing is sent is asked now and then whether its other end is still there.
    "TCP_KEEPIDLE": int(_CUT_SECONDS),
    "TCP_KEEPINTVL": int(_CUT_SECONDS / 2),
    "TCP_KEEPCNT": 2,
}
_LOOK_SECONDS = 1.0  # the longest wait that counts: in a longer one this process stood still


@dataclass(frozen=True)
class _SlotsToReturn:
    """Slots of the peer's ring that nobody here has any more; none: its ring is not seen here."""

    slots: tuple[int, ...]


@dataclass(frozen=True)
class _SlotsReturned:
    """Slots of this end's ring that the peer gives back; none: it does not see the ring."""

    slots: tuple[int, ...]


class Connection:
    """Sends and receives messages over an authenticated connection.

    Args:
        stream: of its bytes, whose other end has proved itself; the link closes its socket.
        take: is given every message, in the reader's thread.
        ended: is called once, when the connection is no more, with the reason.
        shares: whether payloads may go through memory that both ends see.
    """

    def __init__(
        self,
        stream: Stream,
        take: Callable[[Connection, Message], None],
        ended: Callable[[Connection, Exception], None],
        shares: Callable[[], bool] = lambda: True,
    ) -> None:
        self.peer: int | None = None  # the node at the other end, once it has said so
        self.nodes: set[int] = set()  # all that are known to be there
        self.epoch = 0  # the latest of which the other end has said something
        self.sent_bytes = self.taken_bytes = 0
        self.shared_bytes = 0  # of those that were sent, what went through shared memory
        self._stream, self._socket = stream, stream.socket
        self._take, self._ended, self._shares = take, ended, shares
        self._todo: queue.SimpleQueue[Message | _SlotsToReturn | _SlotsReturned | None] = (
            queue.SimpleQueue()
        )
        self._buffers = BufferPool()
        self._once = threading.Lock()
        self._has_ended = False
        # The writer's: what waits, slots to be given back, and its own ring once it is offered.
        self._waiting: deque[Message] = deque()
        self._used_up: list[int] = []
        self._ring: ShmSender | None = None
        self._held_up_seconds = 0.0  # since a slot has come back
        self._may_offer = stream.is_local  # else there is nothing to look for
        self._peer_ring: ShmReceiver | None = None  # the reader's
        self._heard_at = time.monotonic()
        _set_options(stream)
        for name, work in (("reads", self._read), ("writes", self._write)):
            threading.Thread(target=work, name=f"penstock link {name}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send, behind what was sent before; returns at once. A link that has ended sends nothing.

        The payload must stay as it is until its receiver has answered to it.
        """
        self._todo.put(message)

    def close(self, why: Exception | None = None) -> None:
        """End the link at once; what has not been written is not sent."""
        self._end(why or ConnectionError("it was closed here"))

    @property
    def is_open(self) -> bool:
        """Whether messages still pass."""
        return not self._has_ended

    def is_heard(self, seconds: float) -> bool:
        """Tell whether anything has come within so many seconds, or waits to be read.

        A large message holds up those behind it, and a busy machine holds up who reads.
        """
        if time.monotonic() - self._heard_at < seconds:
            return True
        try:
            unread = select.poll()  # unlike select(), for descriptors of any number
            unread.register(self._socket, select.POLLIN)
            return bool(unread.poll(0)) and not self._has_ended
        except (OSError, ValueError):  # it has just been closed
            return False

    def _hear(self) -> None:
        self._heard_at = time.monotonic()

    # The reader

    def _read(self) -> None:
        try:
            while True:
                header = read_exactly(self._stream, HEADER_BYTES)
                self._hear()
                body_bytes, size = lengths(header)
                body, payload = read_exactly(self._stream, body_bytes), None
                if size or slot_of(header) is not None:
                    payload = self._payload(slot_of(header), size)
                self._heed(unpack(header, body, payload))
                self.taken_bytes += size
                del payload  # a slot is given back when nobody has it any more
        except Exception as error:  # whatever it is, nothing more is read: the link has ended
            payload = self._peer_ring = None  # an error remembers the frames that it came through
            self._end(error)

    def _payload(self, slot: int | None, size: int) -> np.ndarray:
        """Return the bytes of a frame: those that follow, or those in a slot."""
        if slot is None:
            payload = self._buffers.take(size)
            self._stream.read_into(payload.data, self._hear)
            return payload
        if self._peer_ring is None:
            raise ProtocolError(f"{size} bytes were announced in slot {slot} of no ring")
        payload = self._peer_ring.take(slot, size)
        if not self._peer_ring.is_short:
            return payload
        # Who holds the others may wait for what comes next: this one must go back at once.
        copy = self._buffers.take(size)
        copy[:] = payload
        return copy

    def _heed(self, message: Message) -> None:
        if message.kind is MessageType.SHM_OFFER:
            self._find_ring(message)
        elif message.kind is MessageType.BUFFER_CREDIT:
            slots = message.body.get("slots")
            if not isinstance(slots, list) or not all(type(slot) is int for slot in slots):
                raise ProtocolError(f"slots {str(slots)[:80]} were given back")
            self._todo.put(_SlotsReturned(tuple(slots)))
        else:
            self._take(self, message)

    def _find_ring(self, message: Message) -> None:
        if self._peer_ring is not None:
            raise ProtocolError("shared memory was offered twice over one link")
        todo = self._todo  # the link itself is not held by what it has handed out
        if self._shares():
            self._peer_ring = ShmReceiver.open(
                message.body, lambda slot: todo.put(_SlotsToReturn((slot,)))
            )
        slots = 0 if self._peer_ring is None else self._peer_ring.slots
        todo.put(_SlotsToReturn(tuple(range(slots))))

    # The writer

    def _write(self) -> None:
        try:
            while self._gather():
                if self._used_up:
                    slots, self._used_up = self._used_up, []
                    self._put(Message(MessageType.BUFFER_CREDIT, 0, 0, body={"slots": slots}))
                if self._waiting and self._has_room(self._waiting[0]):
                    self._put(self._waiting.popleft())
        except Exception as error:  # a frame that cannot be made is no better than a cut cable
            self._end(error)
        finally:
            if self._ring is not None:
                self._ring.close()

    def _gather(self) -> bool:
        """Take what is to be done, and wait for it if nothing is; False once the link has ended."""
        is_held_up = bool(self._waiting) and not self._has_room(self._waiting[0])
        must_wait = is_held_up or not self._waiting
        while must_wait or not self._todo.empty():
            must_wait = False
            match self._next_thing(is_held_up):
                case None:
                    return False
                case _SlotsToReturn(slots) if slots:
                    self._used_up.extend(slots)
                case _SlotsToReturn():
                    self._put(Message(MessageType.BUFFER_CREDIT, 0, 0, body={"slots": []}))
                case _SlotsReturned(slots):
                    self._take_room(slots)
                case Message() as message:
                    self._waiting.append(message)
        return True

    def _next_thing(self, is_held_up: bool) -> Message | _SlotsToReturn | _SlotsReturned | None:
        """Return the next thing to do; not for ever, if the peer keeps all slots."""
        if not is_held_up:
            return self._todo.get()
        while self._held_up_seconds < _CUT_SECONDS:
            began = time.monotonic()
            try:
                return self._todo.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            finally:
                self._held_up_seconds += min(_LOOK_SECONDS, time.monotonic() - began)
        raise ProtocolError(f"the peer has given no slot back in {_CUT_SECONDS:.0f} s")

    def _take_room(self, slots: tuple[int, ...]) -> None:
        if self._ring is None:
            raise ProtocolError(f"slots {slots} were given back of a ring that there is not")
        self._held_up_seconds = 0.0
        if slots:
            self._ring.come_back(slots)
        else:
            self._ring.close()

    def _has_room(self, message: Message) -> bool:
        """Whether a message can go: over the socket it always can."""
        return self._ring is None or not self._ring.takes(message.size) or self._ring.has_room

    def _put(self, message: Message) -> None:
        """Send one message; its payload through the ring if there is one that takes it."""
        payload = message.payload if message.size else None
        if payload is not None and self._ring is not None and self._ring.takes(message.size):
            slot = self._ring.claim()
            head = b"".join(pack(message, slot))
            self._ring.put(slot, payload)
            self._stream.send([head])
            self.shared_bytes += message.size
        else:
            if message.size >= LEAST_BYTES and self._may_offer and self._shares():
                self._offer()
            head = b"".join(pack(message))
            self._stream.send([head] if payload is None else [head, payload.data])
        self.sent_bytes += message.size

    def _offer(self) -> None:
        """Offer a ring, once; what is sent before the peer has answered goes over the socket."""
        self._may_offer = False
        self._ring = ShmSender.make()
        if self._ring is not None:
            offer = Message(MessageType.SHM_OFFER, 0, 0, body=self._ring.offer())
            self._stream.send([b"".join(pack(offer))])

    def _end(self, error: Exception) -> None:
        with self._once:
            if self._has_ended:
                return
            self._has_ended = True
        self._todo.put(None)
        with contextlib.suppress(OSError):  # the peer may have closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._ended(self, error)


def _set_options(stream: Stream) -> None:
    connection = stream.socket
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LIMITS.items():
        if hasattr(socket, name):  # else a cut cable is noticed after minutes
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        size = _BUFFER_BYTES_HERE if stream.is_local else _BUFFER_BYTES
        connection.setsockopt(socket.SOL_SOCKET, option, size)
