"""A connection between hosts: TLS 1.3, by `ssl` over two buffers in memory.

Python's TLS connection may not be used by two threads at once. So the encryption works on buffers,
under a lock that is held for as long as a piece is encrypted or decrypted, and the socket is read
and written outside of the lock: who waits for the network keeps nobody from the other direction.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from penstock.errors import ClusterError, CorruptionError

_PIECE_BYTES = 64 << 10  # encrypted or received at once: it stays in the processor's cache


class TlsStream:
    """One end of an encrypted connection; it may be used once the handshake is complete.

    Args:
        connection: the socket.
        context: with this process's certificate and the authority that the peer's must be from.
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
        """Shake hands with a peer that does so too.

        Raises:
            ClusterError: the peer has no certificate of this run, or speaks no TLS 1.3.
            EOFError: it has closed the connection.
            OSError: it has not answered by the deadline.
        """
        is_complete = self.advance(b"")
        while not is_complete:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            is_complete = self.advance_by_what_came()

    def advance_by_what_came(self) -> bool:
        """Receive, and go on with the handshake; return whether it is complete.

        Raises as `handshake` does.
        """
        received = self.socket.recv_into(self._received)
        if not received:
            raise EOFError("the connection was closed")
        return self.advance(self._received[:received])

    def advance(self, came: bytes | memoryview) -> bool:
        """Go on with the handshake by what has come; return whether it is complete."""
        self._incoming.write(came)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):  # the alert is a courtesy to a peer that may be gone
                self._flush()
            raise ClusterError(_why_refused(error)) from None
        self._flush()
        return True

    # The stream

    def read_into(self, buffer: memoryview, came: Callable[[], None] = lambda: None) -> None:
        """Fill a buffer with what comes next."""
        while buffer.nbytes:
            if got := self._decrypt_into(buffer):
                buffer = buffer[got:]
                continue
            received = self.socket.recv_into(self._received)
            if not received:
                raise EOFError("the connection was closed")
            came()
            with self._lock:
                self._incoming.write(self._received[:received])

    def _decrypt_into(self, buffer: memoryview) -> int:
        """Decrypt into a buffer at most one record; return its bytes, 0 if none has come whole."""
        try:
            with self._lock:
                got = self._tls.read(buffer.nbytes, buffer)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                raise ClusterError(f"the peer refused the connection: {_reason(error)}") from None
            raise CorruptionError(
                f"an encrypted record was damaged or changed on the way: {_reason(error)}"
            ) from None
        if not got:
            raise EOFError("the peer has ended the connection")
        return int(got)

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all of the parts."""
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
        return f"its certificate is not one of this run: {error.verify_message}"
    return f"no TLS 1.3 connection with it: {_reason(error)}"


def _reason(error: ssl.SSLError) -> str:
    """Return what OpenSSL says of an error, in words: `wrong version number`."""
    return (error.reason or str(error)).replace("_", " ").lower()
