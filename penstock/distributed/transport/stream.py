"""The bytes of one connection, in order: plain within a host, encrypted between hosts.

Within a host the bytes of a connection stay in the kernel and cross no network. Only a process with
root rights could read or change them, so TLS would cost time and protect nothing.
"""

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

_PART_BYTES = 256 << 10  # bytes per read, after which the peer counts as heard


class Stream(Protocol):
    """The byte stream of a connection; one thread reads and another thread writes."""

    socket: socket.socket
    is_local: bool  # whether the other end is on this host

    def read_into(self, buffer: memoryview, on_bytes: Callable[[int], None] = ...) -> None:
        """Fill a buffer with the next bytes.

        `on_bytes` is called after every part with the bytes that have arrived, encrypted or not.

        Raises:
            EOFError: the peer has closed the connection.
            CorruptionError: the bytes were changed after the peer sent them.
        """

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all parts in order."""


def read_exactly(
    stream: Stream, size: int, on_bytes: Callable[[int], None] = lambda count: None
) -> bytes:
    """Return the next `size` bytes; calls `on_bytes` and raises as `Stream.read_into` does."""
    buffer = bytearray(size)
    stream.read_into(memoryview(buffer), on_bytes)
    return bytes(buffer)


class PlainStream:
    """A connection within a host."""

    is_local = True

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def read_into(
        self, buffer: memoryview, on_bytes: Callable[[int], None] = lambda count: None
    ) -> None:
        """Fill a buffer with the next bytes."""
        while buffer.nbytes:
            # Large parts: every call costs a wake-up.
            got = self.socket.recv_into(buffer[:_PART_BYTES], 0, socket.MSG_WAITALL)
            if got == 0:
                raise EOFError("the connection was closed")
            on_bytes(got)
            buffer = buffer[got:]

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all parts."""
        views = [memoryview(part) for part in parts]
        while views:
            sent = self.socket.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]


def is_within_host(connection: socket.socket) -> bool:
    """Whether both ends are on this host: they have the same address, or both are loopback.

    The kernel drops packets from a network whose source address is one of these.
    """
    with contextlib.suppress(OSError):  # the connection has ended, which its reader will detect
        own, peer = connection.getsockname()[0], connection.getpeername()[0]
        return bool(own == peer or (is_loopback(own) and is_loopback(peer)))
    return False


def is_loopback(host: str) -> bool:
    """Whether an address never leaves the host; a host name is no address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
