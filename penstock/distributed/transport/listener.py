"""Accepts connections: each peer must prove the run's token, and no peer can block another.

One thread serves all pending connections, so each costs only a socket. Their number is limited.
When the limit is reached, a new connection replaces another: the oldest of the address with the
most pending connections. A node answers its challenge at once. So it is accepted if fewer
connections than the limit arrive while the answer is in flight, and a flood from another address
does not affect it. A dropped node connects again (`Endpoint.connect`).

A connection from another host that has proved the token no longer counts towards the limit. It is
accepted when the TLS handshake is complete, for which it has the same time again.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.distributed.transport import handshake, stream as streams
from penstock.distributed.transport.certificates import Credentials
from penstock.distributed.transport.stream import PlainStream, Stream
from penstock.distributed.transport.tls import TlsStream
from penstock.errors import ClusterError

log = logging.getLogger("penstock.distributed")

_MOST_PENDING = 256  # pending connections
_AT_ONCE = 16  # connections accepted in a row before pending connections are read again
_MOST_ADDRESSES = 1000  # addresses of refused connections that are counted
_POLL_SECONDS = 0.5  # the longest wait for bytes
_LINES, _LINES_SECONDS = 10, 10.0  # the most warnings in so many seconds


@dataclass(eq=False)
class _PendingConnection:
    """A connection that is not accepted yet.

    `encrypted` is set during the TLS handshake, after the peer has proved the token.
    """

    connection: socket.socket
    address: tuple[str, int]
    challenge: handshake.Challenge
    deadline: float
    encrypted: TlsStream | None = None


class ConnectionListener:
    """Accepts the peers that have the run's token.

    Args:
        listener: the listening socket; the listener closes it.
        credentials: of the run.
        accept: receives the stream of an authenticated peer, in the listener's thread; it closes
            the socket and raises `ClusterError` if this process cannot serve the connection.
    """

    def __init__(
        self, listener: socket.socket, credentials: Credentials, accept: Callable[[Stream], None]
    ) -> None:
        self.refused: Counter[str] = Counter()  # refused connections by address
        self._listener, self._credentials, self._accept = listener, credentials, accept
        self._pending: dict[socket.socket, _PendingConnection] = {}  # by deadline, first to last
        self._selector = selectors.DefaultSelector()
        self._warnings = _Warnings()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="penstock listener", daemon=True)

    def open(self) -> None:
        """Start to accept connections."""
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections; pending connections are closed."""
        self._closing = True
        with contextlib.suppress(OSError):  # it wakes the thread
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        self._listener.close()
        self._selector.close()

    # The thread

    def _serve(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._closing:
            ready = {key.fileobj for key, _ in self._selector.select(self._select_seconds())}
            # Answers are read before new connections could drop a pending connection.
            for pending in [s for s in self._pending.values() if s.connection in ready]:
                self._receive(pending)
            if self._listener in ready:
                self._accept_new()
            self._refuse_late()
        for pending in list(self._pending.values()):
            self._forget(pending)
            pending.connection.close()

    def _select_seconds(self) -> float:
        first = next(iter(self._pending.values()), None)
        if first is None:
            return _POLL_SECONDS
        return min(_POLL_SECONDS, max(0.0, first.deadline - time.monotonic()))

    def _accept_new(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._closing:
                    return
                # Such as too many open files; the thread continues.
                self._warnings.log_limited(f"a connection could not be accepted: {error}")
                if not self._drop_one():
                    time.sleep(0.1)
                return
            if len(self._unauthenticated()) >= _MOST_PENDING:
                self._drop_one()
            self._send_challenge(connection, peer)

    def _send_challenge(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        wants_tls = not streams.is_within_host(connection)
        challenge = handshake.Challenge(self._credentials.token, wants_tls=wants_tls)
        deadline = time.monotonic() + handshake.SECONDS
        pending = _PendingConnection(connection, (peer[0], peer[1]), challenge, deadline)
        self._pending[connection] = pending
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.sendall(challenge.question)  # fits into a new socket's buffer
        except OSError as error:
            self._refuse(pending, f"it did not prove that it has the token: {error}")

    def _receive(self, pending: _PendingConnection) -> None:
        if pending.encrypted is None:
            self._receive_answer(pending)
        else:
            self._advance_handshake(pending, pending.encrypted)

    def _receive_answer(self, pending: _PendingConnection) -> None:
        connection, challenge = pending.connection, pending.challenge
        try:
            part = connection.recv(challenge.missing_bytes)
        except OSError as error:
            self._refuse(pending, f"it did not prove that it has the token: {error}")
            return
        if not part:
            self._refuse(pending, "it closed the connection before it proved that it has the token")
            return
        challenge.take(part)
        if challenge.missing_bytes:
            return
        with contextlib.suppress(OSError):  # then the connection ends as it begins
            connection.sendall(challenge.reply if challenge.is_met else handshake.REFUSAL)
        if not challenge.is_met:
            self._refuse(pending, "it does not have this run's token")
        elif challenge.needs_tls:
            self._begin_tls(pending)
        else:
            self._admit(pending, PlainStream(connection))

    def _begin_tls(self, pending: _PendingConnection) -> None:
        connection = pending.connection
        try:
            context = self._credentials.tls.server
        except ClusterError as error:
            self._refuse(pending, str(error))
            return
        pending.encrypted = TlsStream(connection, context, server_side=True)
        pending.deadline = time.monotonic() + handshake.SECONDS
        self._pending[connection] = self._pending.pop(connection)  # now its deadline is the last

    def _advance_handshake(self, pending: _PendingConnection, stream: TlsStream) -> None:
        try:
            is_complete = stream.advance_from_socket()
        except (OSError, EOFError, ClusterError) as error:
            self._refuse(pending, f"it has the token, but {error}")
            return
        if is_complete:
            self._admit(pending, stream)

    def _admit(self, pending: _PendingConnection, stream: Stream) -> None:
        self._forget(pending)
        pending.connection.setblocking(True)
        try:
            self._accept(stream)
        except ClusterError as error:
            host, port = pending.address
            self._warnings.log_limited(f"closed a connection from {host}:{port}: {error}")

    def _unauthenticated(self) -> list[_PendingConnection]:
        return [each for each in self._pending.values() if each.encrypted is None]

    def _drop_one(self) -> bool:
        """Drop the oldest connection of the address with the most pending ones, if there is any."""
        unauthenticated = self._unauthenticated()
        if not unauthenticated:
            return False
        counts = Counter(pending.address[0] for pending in unauthenticated)
        most = max(counts.values())
        first = next(each for each in unauthenticated if counts[each.address[0]] == most)
        self._refuse(first, f"{len(unauthenticated)} connections were waiting for authentication")
        return True

    def _refuse_late(self) -> None:
        now = time.monotonic()
        late = [pending for pending in self._pending.values() if pending.deadline <= now]
        for pending in late:
            missing = "prove that it has the token" if pending.encrypted is None else "begin TLS"
            self._refuse(pending, f"it did not {missing} within {handshake.SECONDS:g} s")

    def _refuse(self, pending: _PendingConnection, why: str) -> None:
        self._forget(pending)
        pending.connection.close()
        host, port = pending.address
        self._warnings.log_limited(f"refused a connection from {host}:{port}: {why}")
        if len(self.refused) < _MOST_ADDRESSES or host in self.refused:
            self.refused[host] += 1

    def _forget(self, pending: _PendingConnection) -> None:
        del self._pending[pending.connection]
        self._selector.unregister(pending.connection)


class _Warnings:
    """Warnings with a limited rate, so that unauthenticated peers cannot flood the log."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._logged = self._suppressed = 0

    def log_limited(self, line: str) -> None:
        """Log a line, or only count it above the limit."""
        now = time.monotonic()
        if now - self._since > _LINES_SECONDS:
            if self._suppressed:
                log.warning("%d more connections were refused", self._suppressed)
            self._since, self._logged, self._suppressed = now, 0, 0
        if self._logged < _LINES:
            self._logged += 1
            log.warning("%s", line)
        else:
            self._suppressed += 1
