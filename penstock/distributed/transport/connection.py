"""One connection between two processes of a run: frames in, frames out.

One thread reads and another thread writes, so neither direction waits for the other. A corrupt
frame is reported and ends the connection, because the start of the next frame is unknown.

Between processes of one host large payloads do not go over the socket. The sender puts them into
shared memory (`shared_memory.py`), and the frame names the slot. Frames arrive in the order in
which they were sent, whichever way their payloads go.

The end of a connection shuts the socket down, which wakes both threads. The last of them closes the
descriptor: another file may get the number of a closed descriptor at once.
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
_BUFFER_BYTES_LOCAL = 1 << 20  # within a host: kernel buffers of this size stay in the cache
_TIMEOUT_SECONDS = 10.0  # without an acknowledgement of sent data; then the connection ends
_LIMITS = {
    "TCP_USER_TIMEOUT": int(1000 * _TIMEOUT_SECONDS),
    # Keepalive probes find out on an idle connection whether the peer is alive.
    "TCP_KEEPIDLE": int(_TIMEOUT_SECONDS),
    "TCP_KEEPINTVL": int(_TIMEOUT_SECONDS / 2),
    "TCP_KEEPCNT": 2,
}
_POLL_SECONDS = 1.0  # the longest counted wait: in a longer wait this process was not scheduled
_LARGE_BODY_BYTES = 1 << 12  # smaller ones, such as those of heartbeats, are no progress of a step


@dataclass(frozen=True)
class _SlotsToReturn:
    """Slots of the peer's shared memory to return; empty if this end cannot map the memory."""

    slots: tuple[int, ...]


@dataclass(frozen=True)
class _SlotsReturned:
    """Slots of this end's shared memory that the peer has returned; empty if it cannot map it."""

    slots: tuple[int, ...]


class Connection:
    """Sends and receives messages over an authenticated connection, from `start` on.

    Args:
        stream: the bytes of an authenticated peer; the connection closes its socket, also if the
            constructor fails.
        take: receives every message, in the reader's thread.
        ended: is called once with the reason when the connection has ended.
        shares: whether payloads may go through shared memory.

    Raises:
        OSError: the peer has closed the connection.
    """

    def __init__(
        self,
        stream: Stream,
        take: Callable[[Connection, Message], None],
        ended: Callable[[Connection, Exception], None],
        shares: Callable[[], bool] = lambda: True,
    ) -> None:
        self.peer: int | None = None  # the node at the other end, once it is known
        self.nodes: set[int] = set()  # all nodes known at the other end
        self.epoch = 0  # the latest epoch in a message of the other end
        self.sent_bytes = self.taken_bytes = 0
        self.received_bytes = 0  # of payloads and large bodies, also of messages in progress
        self.shared_bytes = 0  # the part of sent_bytes that went through shared memory
        self._stream, self._socket = stream, stream.socket
        self._take, self._ended, self._shares = take, ended, shares
        self._queue: queue.SimpleQueue[Message | _SlotsToReturn | _SlotsReturned | None] = (
            queue.SimpleQueue()
        )
        self._buffers = BufferPool()
        self._end_lock = threading.Lock()
        self._has_ended = False
        self._users = 0  # of the descriptor: threads that have not ended
        # Owned by the writer: waiting messages, slots to return, and the offered shared memory.
        self._waiting: deque[Message] = deque()
        self._to_return: list[int] = []
        self._shm_sender: ShmSender | None = None
        self._blocked_seconds = 0.0  # since a slot was returned
        self._may_offer = stream.is_local  # else the peer cannot map shared memory
        self._shm_receiver: ShmReceiver | None = None  # owned by the reader
        self._heard_at = time.monotonic()
        try:
            _set_options(stream)
        except OSError:
            self._socket.close()
            raise

    def start(self) -> None:
        """Start the threads; from now on messages are received.

        **Raises:** `RuntimeError` if the system gives this process no more threads; the connection
        has ended then.
        """
        self._start("reads", self._read)
        self._start("writes", self._write)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def use_descriptor() -> None:
            try:
                work()
            finally:
                self._leave()

        with self._end_lock:
            self._users += 1
        try:
            name = f"penstock connection {name}"
            threading.Thread(target=use_descriptor, name=name, daemon=True).start()
        except RuntimeError as error:
            self.close(error)
            self._leave()
            raise

    def _leave(self) -> None:
        """Record that a thread uses the descriptor no more; the last one closes it."""
        with self._end_lock:
            self._users -= 1
            if not self._users and self._has_ended:
                self._socket.close()

    def send(self, message: Message) -> None:
        """Queue a message after all earlier messages; returns at once.

        A connection that has ended sends nothing. The payload must not change until its receiver
        has answered.
        """
        self._queue.put(message)

    def close(self, why: Exception | None = None) -> None:
        """End the connection at once; unwritten messages are not sent."""
        self._end(why or ConnectionError("this process closed it"))

    @property
    def is_open(self) -> bool:
        """Whether the connection still carries messages."""
        return not self._has_ended

    def is_heard(self, seconds: float) -> bool:
        """Tell whether bytes have arrived within so many seconds, or wait to be read.

        Heartbeats may wait behind a large message, and the reader may wait for a processor.
        """
        if time.monotonic() - self._heard_at < seconds:
            return True
        with self._end_lock:  # meanwhile the descriptor is not closed
            if self._has_ended:
                return False
            unread = select.poll()  # unlike select(), for descriptors of any number
            unread.register(self._socket, select.POLLIN)
            return bool(unread.poll(0))

    def _hear(self, progress_bytes: int = 0) -> None:
        self._heard_at = time.monotonic()
        self.received_bytes += progress_bytes

    # The reader thread

    def _read(self) -> None:
        try:
            while True:
                header = read_exactly(self._stream, HEADER_BYTES, lambda _: self._hear())
                body_bytes, size = lengths(header)
                body, payload = self._body(body_bytes), None
                if size or slot_of(header) is not None:
                    payload = self._payload(slot_of(header), size)
                self._dispatch(unpack(header, body, payload))
                self.taken_bytes += size
                del payload  # a slot is returned after its last view has ended
        except Exception as error:  # after any error the connection has ended
            payload = self._shm_receiver = None  # else the error's traceback keeps the slot
            self._end(error)

    def _body(self, size: int) -> bytes:
        if size < _LARGE_BODY_BYTES:
            return read_exactly(self._stream, size, lambda _: self._hear())
        return read_exactly(self._stream, size, self._hear)

    def _payload(self, slot: int | None, size: int) -> np.ndarray:
        """Return the payload of a frame, from the socket or from a slot."""
        if slot is None:
            payload = self._buffers.take(size)
            self._stream.read_into(payload.data, self._hear)
            return payload
        if self._shm_receiver is None:
            raise ProtocolError(f"the peer announced {size} bytes in slot {slot}, but no memory")
        payload = self._shm_receiver.take(slot, size)
        self.received_bytes += size
        if not self._shm_receiver.is_exhausted:
            return payload
        # The holders of the other slots may wait for the next message. So this slot is returned at
        # once.
        copy = self._buffers.take(size)
        copy[:] = payload
        return copy

    def _dispatch(self, message: Message) -> None:
        if message.kind is MessageType.SHM_OFFER:
            self._open_shared_memory(message)
        elif message.kind is MessageType.BUFFER_CREDIT:
            slots = message.body.get("slots")
            if not isinstance(slots, list) or not all(type(slot) is int for slot in slots):
                raise ProtocolError(
                    f"expected a list of slot numbers to return, got {str(slots)[:80]}"
                )
            self._queue.put(_SlotsReturned(tuple(slots)))
        else:
            self._take(self, message)

    def _open_shared_memory(self, message: Message) -> None:
        if self._shm_receiver is not None:
            raise ProtocolError("the peer offered shared memory twice on one connection")
        queued = self._queue  # the callback keeps no reference to the connection
        if self._shares():
            self._shm_receiver = ShmReceiver.open(
                message.body, lambda slot: queued.put(_SlotsToReturn((slot,)))
            )
        slots = 0 if self._shm_receiver is None else self._shm_receiver.slots
        queued.put(_SlotsToReturn(tuple(range(slots))))

    # The writer thread

    def _write(self) -> None:
        try:
            while self._collect():
                if self._to_return:
                    slots, self._to_return = self._to_return, []
                    self._put(Message(MessageType.BUFFER_CREDIT, 0, 0, body={"slots": slots}))
                if self._waiting and self._has_free_slot(self._waiting[0]):
                    self._put(self._waiting.popleft())
        except Exception as error:  # an invalid frame ends the connection, too
            self._end(error)
        finally:
            if self._shm_sender is not None:
                self._shm_sender.close()

    def _collect(self) -> bool:
        """Take the queued work, after a wait if needed; False: the connection has ended."""
        is_blocked = bool(self._waiting) and not self._has_free_slot(self._waiting[0])
        must_wait = is_blocked or not self._waiting
        while must_wait or not self._queue.empty():
            must_wait = False
            match self._next_item(is_blocked):
                case None:
                    return False
                case _SlotsToReturn(slots) if slots:
                    self._to_return.extend(slots)
                case _SlotsToReturn():
                    self._put(Message(MessageType.BUFFER_CREDIT, 0, 0, body={"slots": []}))
                case _SlotsReturned(slots):
                    self._take_returned(slots)
                case Message() as message:
                    self._waiting.append(message)
        return True

    def _next_item(self, is_blocked: bool) -> Message | _SlotsToReturn | _SlotsReturned | None:
        """Return the next queued item; limits the wait for a peer that returns no slots."""
        if not is_blocked:
            return self._queue.get()
        while self._blocked_seconds < _TIMEOUT_SECONDS:
            began = time.monotonic()
            try:
                return self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            finally:
                self._blocked_seconds += min(_POLL_SECONDS, time.monotonic() - began)
        raise ProtocolError(f"the peer has returned no slot for {_TIMEOUT_SECONDS:.0f} s")

    def _take_returned(self, slots: tuple[int, ...]) -> None:
        if self._shm_sender is None:
            raise ProtocolError(f"the peer returned slots {slots} of memory that was not offered")
        self._blocked_seconds = 0.0
        if slots:
            self._shm_sender.take_back(slots)
        else:
            self._shm_sender.close()

    def _has_free_slot(self, message: Message) -> bool:
        """Whether a message can be sent now; only shared memory can be full."""
        sender = self._shm_sender
        return sender is None or not sender.accepts(message.size) or sender.has_free_slot

    def _put(self, message: Message) -> None:
        """Send one message, with its payload through shared memory if possible."""
        payload, sender = message.payload if message.size else None, self._shm_sender
        if payload is not None and sender is not None and sender.accepts(message.size):
            slot = sender.claim()
            head = b"".join(pack(message, slot))
            sender.put(slot, payload)
            self._stream.send([head])
            self.shared_bytes += message.size
        else:
            if message.size >= LEAST_BYTES and self._may_offer and self._shares():
                self._offer_shared_memory()
            head = b"".join(pack(message))
            self._stream.send([head] if payload is None else [head, payload.data])
        self.sent_bytes += message.size

    def _offer_shared_memory(self) -> None:
        """Offer shared memory, once; until the peer answers, payloads go over the socket."""
        self._may_offer = False
        self._shm_sender = ShmSender.make()
        if self._shm_sender is not None:
            offer = Message(MessageType.SHM_OFFER, 0, 0, body=self._shm_sender.offer())
            self._stream.send([b"".join(pack(offer))])

    def _end(self, error: Exception) -> None:
        with self._end_lock:
            if self._has_ended:
                return
            self._has_ended = True
            with contextlib.suppress(OSError):  # the peer may have closed it already
                self._socket.shutdown(socket.SHUT_RDWR)
        self._queue.put(None)
        self._ended(self, error)


def _set_options(stream: Stream) -> None:
    connection = stream.socket
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _LIMITS.items():
        if hasattr(socket, name):  # else the loss of a peer is detected only after minutes
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        size = _BUFFER_BYTES_LOCAL if stream.is_local else _BUFFER_BYTES
        connection.setsockopt(socket.SOL_SOCKET, option, size)
