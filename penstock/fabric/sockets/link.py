"""One connection between two processes of a run: frames in, frames out.

A thread reads and a thread writes, so that neither waits for the other and both wait for the
network, not for Python. What comes damaged is reported and ends the link: after it, nobody knows
where the next frame begins.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.fabric.messages import HEADER_BYTES, Message, lengths, pack, unpack
from penstock.fabric.sockets.handshake import read_exactly, read_into
from penstock.fabric.transfers import CHUNK_BYTES

_BUFFER_BYTES = 4 << 20
_MOST_BUFFERS, _LEAST_KEPT, _UNUSED = 8, 1 << 16, 3
_CUT_MILLISECONDS = 10_000  # without an answer to what was sent; then the link is no more


class Link:
    """Sends and receives messages over an authenticated connection.

    Args:
        connection: the socket; the link closes it.
        take: is given every message, in the reader's thread.
        ended: is called once, when the connection is no more, with the reason.
    """

    def __init__(
        self,
        connection: socket.socket,
        take: Callable[[Link, Message], None],
        ended: Callable[[Link, Exception], None],
    ) -> None:
        self.peer: int | None = None  # the node at the other end, once it has said so
        self.nodes: set[int] = set()  # all that are known to be there
        self.sent_bytes = self.taken_bytes = 0
        self._socket = connection
        self._take, self._ended = take, ended
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._buffers = _Buffers()
        self._once = threading.Lock()
        self._has_ended = False
        self._heard_at = time.monotonic()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # else a cut cable is noticed after minutes
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _CUT_MILLISECONDS)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        for name, work in (("reads", self._read), ("writes", self._write)):
            threading.Thread(target=work, name=f"penstock link {name}", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send, behind what was sent before; returns at once. A link that has ended sends nothing.

        The payload must stay as it is until its receiver has answered to it.
        """
        self._outgoing.put(message)

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
            return bool(select.select([self._socket], [], [], 0)[0]) and not self._has_ended
        except (OSError, ValueError):  # it has just been closed
            return False

    def _hear(self) -> None:
        self._heard_at = time.monotonic()

    def _read(self) -> None:
        try:
            while True:
                header = read_exactly(self._socket, HEADER_BYTES)
                self._hear()
                body_bytes, payload_bytes = lengths(header)
                body = read_exactly(self._socket, body_bytes)
                payload = None
                if payload_bytes:
                    payload = self._buffers.take(payload_bytes)
                    read_into(self._socket, payload.data, self._hear)
                self.taken_bytes += payload_bytes
                self._take(self, unpack(header, body, payload))
        except Exception as error:  # whatever it is, nothing more is read: the link has ended
            self._end(error)

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                header, body = pack(message)
                parts: list[Any] = [header + body]
                if message.payload is not None and message.size:
                    parts.append(message.payload.data)
                self._send_all(parts)
                self.sent_bytes += message.size
        except Exception as error:  # a frame that cannot be made is no better than a cut cable
            self._end(error)

    def _send_all(self, parts: list[Any]) -> None:
        views = [memoryview(part) for part in parts]
        while views:
            sent = self._socket.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def _end(self, error: Exception) -> None:
        with self._once:
            if self._has_ended:
                return
            self._has_ended = True
        self._outgoing.put(None)
        with contextlib.suppress(OSError):  # the peer may have closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._ended(self, error)


class _Buffers:
    """Memory for what comes, used again when nobody has it any more: new pages take longer to
    come by than to fill."""

    def __init__(self) -> None:
        self._all: list[np.ndarray] = []

    def take(self, size: int) -> np.ndarray:
        """Return so many bytes that nobody else sees."""
        for buffer in self._all:
            # Held by the list, the loop, and the call: a view of it would hold it too.
            if buffer.nbytes >= size and sys.getrefcount(buffer) == _UNUSED:
                return buffer[:size]
        if len(self._all) >= _MOST_BUFFERS or size < _LEAST_KEPT:
            return np.empty(size, np.uint8)
        # It owns its memory: of a view's views, numpy would hold what that is a view of.
        self._all.append(np.empty(max(size, CHUNK_BYTES), np.uint8))
        return self._all[-1][:size]
