"""A connection between hosts: TLS 1.3, by `ssl` over two buffers in memory.

Two threads may not use Python's TLS connection at once. So the encryption works on buffers. A lock
is held only while a piece is encrypted or decrypted. The socket is read and written without the
lock, so neither direction waits for the other's network.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from penstock.errors import ClusterError, CorruptionError

_PIECE_BYTES = 64 << 10  # encrypted or received at once: this size stays in the processor's cache


class TlsStream:
    """One end of an encrypted connection, for use after the handshake.

    Args:
        connection: the socket.
        context: this process's certificate, and the authority that must have signed the peer's.
        server_side: whether this end has accepted the connection.
    """

    is_local = False

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool
    ) -> None:
        self.socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._lock = threading.Lock()  # of the three above
        self._received = memoryview(bytearray(_PIECE_BYTES))

    # The handshake

    def handshake(self, deadline: float) -> None:
        """Complete the TLS handshake.

        Raises:
            ClusterError: the peer has no certificate of this run, or does not support TLS 1.3.
            EOFError: the peer has closed the connection.
            OSError: the peer has not answered by the deadline.
        """
        is_complete = self.advance(b"")
        while not is_complete:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            is_complete = self.advance_from_socket()

    def advance_from_socket(self) -> bool:
        """Receive bytes and continue the handshake; return whether it is complete.

        Raises as `handshake` does.
        """
        received = self.socket.recv_into(self._received)
        if not received:
            raise EOFError("the connection was closed")
        return self.advance(self._received[:received])

    def advance(self, received: bytes | memoryview) -> bool:
        """Continue the handshake with received bytes; return whether it is complete."""
        self._incoming.write(received)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):  # the alert is optional: the peer may be gone
                self._flush()
            raise ClusterError(_why_refused(error)) from None
        self._flush()
        return True

    # The stream

    def read_into(
        self, buffer: memoryview, on_bytes: Callable[[int], None] = lambda count: None
    ) -> None:
        """Fill a buffer with the next bytes."""
        while buffer.nbytes:
            if got := self._decrypt_into(buffer):
                buffer = buffer[got:]
                continue
            received = self.socket.recv_into(self._received)
            if not received:
                raise EOFError("the connection was closed")
            on_bytes(received)
            with self._lock:
                self._incoming.write(self._received[:received])

    def _decrypt_into(self, buffer: memoryview) -> int:
        """Decrypt at most one record into a buffer; return its size, 0 if no record is complete."""
        try:
            with self._lock:
                got = self._tls.read(buffer.nbytes, buffer)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                raise ClusterError(f"the peer refused the connection: {_reason(error)}") from None
            raise CorruptionError(
                f"an encrypted record was damaged or changed in transit: {_reason(error)}"
            ) from None
        if not got:
            raise EOFError("the peer has ended the connection")
        return int(got)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all parts."""
        for part in parts:
            view = memoryview(part)
            while view.nbytes:
                with self._lock:
                    written = self._tls.write(view[:_PIECE_BYTES])
                view = view[written:]
                if self._outgoing.pending >= _PIECE_BYTES:
                    self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            records = self._outgoing.read()
        if records:
            self.socket.sendall(records)


def _why_refused(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate does not belong to this run: {error.verify_message}"
    return f"no TLS 1.3 connection with it: {_reason(error)}"


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason of an error as text: `wrong version number`."""
    return (error.reason or str(error)).replace("_", " ").lower()
