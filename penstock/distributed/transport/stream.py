"""Bytes of one connection, in order: as they are within a host, encrypted between hosts.

Within a host the kernel carries a connection and no network does: only a process with the rights of
root could read or change its bytes. So there TLS would cost time and protect nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

_PART_BYTES = 256 << 10  # of what is read, after which it counts as heard


class Stream(Protocol):
    """What a link reads from and writes to; one thread reads and another one writes."""

    socket: socket.socket
    is_local: bool  # whether the other end is on this host

    def read_into(self, buffer: memoryview, came: Callable[[], None] = ...) -> None:
        """Fill a buffer with what comes next; `came` is called for every part of it.

        Raises:
            EOFError: the peer closes before.
            CorruptionError: the bytes are not those that the peer has sent.
        """

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all of the parts, one after the other."""


def read_exactly(stream: Stream, size: int) -> bytes:
    """Return the next `size` bytes; raises as `Stream.read_into` does."""
    buffer = bytearray(size)
    stream.read_into(memoryview(buffer))
    return bytes(buffer)


class PlainStream:
    """A connection within a host."""

    is_local = True

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def read_into(self, buffer: memoryview, came: Callable[[], None] = lambda: None) -> None:
        """Fill a buffer with what comes next."""
        while buffer.nbytes:
            # A large part at once: every call that brings less is one more to wake up for.
            got = self.socket.recv_into(buffer[:_PART_BYTES], 0, socket.MSG_WAITALL)
            if got == 0:
                raise EOFError("the connection was closed")
            came()
            buffer = buffer[got:]

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all of the parts."""
        views = [memoryview(part) for part in parts]
        while views:
            sent = self.socket.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]


def is_within_host(connection: socket.socket) -> bool:
    """Whether both ends are on this host: one address is at both of them, or both are loopback.

    No packet from a network has such a source: the kernel drops it.
    """
    with contextlib.suppress(OSError):  # it has ended already, as who reads from it will find out
        own, peer = connection.getsockname()[0], connection.getpeername()[0]
        return bool(own == peer or (is_loopback(own) and is_loopback(peer)))
    return False


def is_loopback(host: str) -> bool:
    """Whether an address is one of those that never leave a host; a name is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
