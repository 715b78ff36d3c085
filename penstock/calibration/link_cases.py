"""Messages between two processes of this host as cases, over the connections of a run.

A sample is a number of messages one after the other, answered once when the last has arrived. Each
end copies what it sends into the connection, checks what it receives, and copies it to memory of
its own, as the store and an engine do.
"""

import contextlib
import os
import queue
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator

import numpy as np

from penstock.calibration import link_peer
from penstock.calibration.link_peer import WAYS
from penstock.calibration.repetitions import Case, Prepared, Quantity
from penstock.distributed.protocol import CHUNK_BYTES, Message, MessageType, message_with
from penstock.distributed.transport import (
    Connection,
    ConnectionListener,
    Credentials,
    Stream,
    new_token,
)
from penstock.errors import ClusterError

BOTH, MESSAGE = "shared memory both ways", "message"

MESSAGE_BYTES = (256 << 10, CHUNK_BYTES)
_SAMPLE_BYTES = 32 << 20
_START_SECONDS = 30.0  # a process connects within this time
_ANSWER_SECONDS = 30.0


class ProcessLinks:
    """Connections with another process of this host, one for each of `WAYS`."""

    def __init__(self) -> None:
        self._connections: list[Connection] = []
        self._opened = threading.Semaphore(0)
        self._missing: dict[Connection, int] = {}  # messages that are to come back
        self._done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._sent = np.ones(CHUNK_BYTES, np.uint8)
        self._kept = np.zeros(CHUNK_BYTES, np.uint8)

    def admit(self, stream: Stream) -> None:
        """Take the next of the two connections."""
        way = WAYS[len(self._connections)]
        connection = Connection(stream, self._take, self._ended, lambda: way == WAYS[0])
        self._connections.append(connection)
        connection.start()
        self._opened.release()

    def await_peer(self, process: int) -> None:
        """Wait until the other process has opened all connections.

        Raises:
            ClusterError: the process has ended, or is too slow.
        """
        deadline = time.monotonic() + _START_SECONDS
        while len(self._connections) < len(WAYS):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                raise ClusterError(f"the other process ended with exit code {code}")
            if time.monotonic() > deadline:
                raise ClusterError(f"the other process did not connect in {_START_SECONDS:g} s")
            self._opened.acquire(timeout=0.1)

    def close(self) -> None:
        """Close the connections, which ends the other process."""
        for connection in self._connections:
            connection.close()

    def cases(self) -> Iterator[Case]:
        """Yield each way alone, both directions together, and a short message."""
        for number, way in enumerate(WAYS):
            for size in MESSAGE_BYTES:
                yield self._case(way, number, size)
        yield self._case(BOTH, 0, MESSAGE_BYTES[-1], is_both=True)
        message = Prepared(lambda: self._exchange(0, 0, 0, 0), 2)  # one each way
        yield Case(Quantity("processes", MESSAGE), lambda: message)

    def _case(self, work: str, number: int, size: int, is_both: bool = False) -> Case:
        count = _SAMPLE_BYTES // size
        back = count if is_both else 0
        moved = _SAMPLE_BYTES * (2 if is_both else 1)
        prepared = Prepared(lambda: self._exchange(number, count, back, size), moved, size)
        return Case(Quantity("processes", work), lambda: prepared)

    def _exchange(self, number: int, out: int, back: int, size: int) -> None:
        """Send so many messages, have so many sent back, and wait for all of them.

        Raises:
            ClusterError: the connection has ended, or no answer came.
        """
        connection = self._connections[number]
        self._missing[connection] = back + 1
        if back:
            body = {"pieces": back, "bytes": size}
            connection.send(Message(MessageType.BEGIN, 0, 0, body=body))
        for _ in range(out):
            payload = self._sent[:size]
            connection.send(message_with(payload, kind=MessageType.WEIGHTS, epoch=0, sender=0))
        connection.send(Message(MessageType.HEARTBEAT, 0, 0))
        try:
            error = self._done.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            error = ClusterError(f"no answer in {_ANSWER_SECONDS:g} s")
        if error is not None:
            raise ClusterError(f"messages between processes cannot be measured: {error}")

    def _take(self, connection: Connection, message: Message) -> None:
        if message.payload is not None:
            self._kept[: message.size] = message.payload
        self._missing[connection] -= 1
        if not self._missing[connection]:
            self._done.put(None)

    def _ended(self, connection: Connection, error: Exception) -> None:
        self._done.put(error)


@contextlib.contextmanager
def process_links() -> Iterator[ProcessLinks]:
    """Yield connections with a process that ends with them.

    Raises:
        ClusterError: there is no such process or connection on this host.
    """
    token, links = new_token(), ProcessLinks()
    try:
        server = socket.create_server(("127.0.0.1", 0))
    except OSError as error:
        raise ClusterError(f"cannot listen on 127.0.0.1: {error.strerror}") from error
    listener = ConnectionListener(server, Credentials(token), links.admit)
    process = _forked(server, token)
    try:
        listener.open()
        links.await_peer(process)
        yield links
    finally:
        links.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
        listener.close()


def _forked(server: socket.socket, token: str) -> int:
    """Fork the other process, which uses no library but those of its connections; return its id."""
    address = server.getsockname()
    try:
        with warnings.catch_warnings():  # of newer Pythons: other threads are not in the fork
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
    except OSError as error:
        server.close()
        raise ClusterError(f"cannot start another process: {error.strerror}") from error
    if process:
        return process
    status = 1
    try:
        server.close()
        link_peer.serve(address, token)
        status = 0
    finally:
        os._exit(status)
