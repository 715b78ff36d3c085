"""A process's endpoint in the network of a run: its nodes, its listening port, its connections.

One thread, the endpoint's, calls all nodes of the process. Connections and workers only queue
actions for this thread. A peer is accepted after it has proved that it has the run's token
(`handshake.py`); its first message names its node.
"""

import contextlib
import functools
import logging
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.distributed.protocol import COORDINATOR, BoundContext, Job, Message, MessageType
from penstock.distributed.transport import handshake
from penstock.distributed.transport.certificates import Credentials
from penstock.distributed.transport.connection import Connection
from penstock.distributed.transport.handshake import ConnectionRejectedError
from penstock.distributed.transport.listener import ConnectionListener
from penstock.distributed.transport.stream import Stream, is_loopback
from penstock.errors import ClusterError, CorruptionError, ProtocolError

log = logging.getLogger("penstock.distributed")
Address = tuple[str, int]
_BACKLOG = 1024  # connections that the kernel queues until they are accepted
_TRY_SECONDS = 10.0  # in which a rejected connection is retried
_PAUSE_SECONDS = 0.02, 0.3  # between two tries: random, so that retries do not come all at once


class EndpointNode(Protocol):
    """A node that receives messages from an endpoint."""

    @property
    def progress(self) -> int: ...

    def handle(self, message: Message) -> None: ...


@dataclass
class _LocalNode:
    """A node of this process, and the thread that runs its jobs."""

    node: EndpointNode
    jobs: queue.SimpleQueue[Job | None]
    is_removed: bool = False  # jobs that have not begun are dropped
    thread: threading.Thread | None = None


class Endpoint:
    """Carries the messages of this process's nodes.

    Args:
        token: the token of the run.
        host: the interface on which to listen.
        port: the listening port; 0: any free port.
        on_connection_end: is called in the endpoint's thread when a peer's connection has ended.
        on_new_peer: receives the messages of a peer whose node is not known yet.
        on_failure: receives an error that no node handles; the endpoint has then ended.
        every: is called every `heartbeat_seconds` seconds in the endpoint's thread, with the time.
        heartbeat_seconds: seconds between two calls of `every`.

    `shares_memory` says whether connections within this host may carry payloads in shared memory.
    It may be set before the first payload.

    Raises:
        ClusterError: this machine has no such interface, the host name is impossible, the port is
            taken, or no certificate for TLS can be made.
    """

    def __init__(
        self,
        token: str,
        host: str,
        *,
        on_connection_end: Callable[[Connection, Exception], None],
        on_new_peer: Callable[[Connection, Message], None],
        on_failure: Callable[[Exception], None],
        every: Callable[[float], None] = lambda now: None,
        heartbeat_seconds: float = 0.1,
        port: int = 0,
    ) -> None:
        self.shares_memory = True
        self._credentials = Credentials(token)
        self._on_connection_end, self._on_new_peer = on_connection_end, on_new_peer
        self._on_failure = on_failure
        self._every, self._heartbeat_seconds = every, heartbeat_seconds
        self._local_nodes: dict[int, _LocalNode] = {}
        self._connections: dict[int, Connection] = {}
        self._all_connections: set[Connection] = set()
        self._received_before = 0  # by connections that have ended
        self._addresses: dict[int, Address] = {}
        self._outside_epoch: dict[int, Address] = {}  # the addresses of nodes outside the epoch
        self._opening: dict[int, list[Message]] = {}
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        _require_host(host)
        try:
            server_socket = socket.create_server(
                (host, port), family=_family(host), backlog=_BACKLOG
            )
        except OSError as error:
            wanted = "an address of this machine"
            if port:
                wanted += f" and a free port that this user may use, got port {port}"
            raise ClusterError(
                f"cannot listen on {host!r}, expected {wanted}: {error.strerror}"
            ) from None
        self.address: Address = server_socket.getsockname()[:2]
        if not is_loopback(self.address[0]):
            try:
                _ = self._credentials.tls  # now, so that no connection waits for it
            except ClusterError:
                server_socket.close()
                raise
        self._listener = ConnectionListener(server_socket, self._credentials, self._accept)
        self._thread = threading.Thread(target=self._loop, name="penstock endpoint", daemon=True)

    def start(self) -> None:
        """Start the listener and the endpoint's thread."""
        self._thread.start()
        self._listener.open()

    @property
    def refused(self) -> Mapping[str, int]:
        """How many connections were refused, by address."""
        return self._listener.refused

    @property
    def received_bytes(self) -> int:
        """Bytes of payloads and large bodies that have arrived, also of messages in progress.

        The number never falls: bytes of ended connections count. To be read in the endpoint's
        thread. Encrypted bytes are counted as they arrive, with what TLS adds to them.
        """
        connections = list(self._all_connections)  # other threads may add connections
        return self._received_before + sum(each.received_bytes for each in connections)

    def add(self, number: int, node: EndpointNode) -> None:
        """Add a node of this process; in the endpoint's thread, or before `start`."""
        local = self._local_nodes[number] = _LocalNode(node, queue.SimpleQueue())
        local.thread = threading.Thread(
            target=self._do_jobs, args=(local,), name=f"penstock node {number}", daemon=True
        )
        local.thread.start()

    def remove(self, number: int) -> None:
        """Remove a node of this process; returns after its worker has finished the current job."""
        local = self._local_nodes.pop(number, None)
        if local is None:
            return
        local.is_removed = True
        local.jobs.put(None)
        if local.thread is not None and local.thread is not threading.current_thread():
            local.thread.join()

    def context(self, number: int) -> BoundContext:
        """Return the context of a node of this process."""
        return BoundContext(self, number)

    def set_addresses(self, addresses: Mapping[int, Address], epoch: int) -> None:
        """Set the addresses of the nodes in other processes that take part from an epoch on.

        The addresses of all other nodes are removed, and connections with them are closed: a lost
        host does not close its connections. A connection stays open if the peer has already
        sent a message of this epoch or a later one.
        """
        outside = self._outside_epoch.items()
        self._outside_epoch = {n: where for n, where in outside if n not in addresses}
        self._addresses = {**self._outside_epoch, **addresses}
        members = {COORDINATOR, *self._addresses}
        for connection in list(self._all_connections):  # other threads may add connections
            is_known = connection.peer is not None
            if is_known and members.isdisjoint(connection.nodes) and connection.epoch < epoch:
                connection.close()
                self._forget(connection)

    def add_address(self, number: int, address: Address) -> None:
        """Set the address of a node in another process that takes no part yet.

        The address stays known across changes of the epoch, until the node takes part.
        """
        self._outside_epoch[number] = self._addresses[number] = address

    def attach(self, number: int, connection: Connection) -> None:
        """Record that a node is at the other end of a connection; messages to the node use it.

        The first recorded node names the connection.
        """
        connection.peer = number if connection.peer is None else connection.peer
        connection.nodes.add(number)
        self._connections[number] = connection

    def call(self, action: Callable[[], None]) -> None:
        """Queue an action for the endpoint's thread."""
        self._actions.put(action)

    def connect(self, address: Address, seconds: float = 5.0) -> Connection:
        """Return a connection to a listener that has the run's token.

        A connection that the listener closes before it answers is retried for a while, because the
        listener's limit of pending connections may have been reached; so is one that the listener
        answers too late.

        Raises:
            ClusterError: no listener with the run's token answers at the address.
        """
        deadline = time.monotonic() + _TRY_SECONDS
        while True:
            try:
                return self._add_connection(self._authenticated(address, seconds))
            except ConnectionRejectedError as error:
                if time.monotonic() > deadline or self._closing:
                    raise ClusterError(f"{address[0]}:{address[1]}: {error}") from None
                time.sleep(random.uniform(*_PAUSE_SECONDS))
            except (OSError, ClusterError) as error:
                raise ClusterError(f"{address[0]}:{address[1]}: {error}") from None

    def _authenticated(self, address: Address, seconds: float) -> Stream:
        """Return a mutually authenticated connection."""
        _require_host(address[0])
        connection = socket.create_connection(address, timeout=seconds)
        try:
            return handshake.connect(connection, self._credentials)
        except BaseException:
            connection.close()
            raise

    def send(self, sender: int, to: int, message: Message) -> None:
        """Send to a node of any process; a message to a lost node is dropped."""
        local = self._local_nodes.get(to)
        if local is not None:
            self.call(lambda: self._deliver(to, message))
            return
        addressed = replace(message, to=to)
        if (connection := self._connections.get(to)) is not None:
            connection.send(addressed)
        elif to in self._opening:
            self._opening[to].append(addressed)
        elif to in self._addresses:
            self._opening[to] = [addressed]
            arguments = (sender, to, self._addresses[to], message.epoch)
            try:
                threading.Thread(target=self._open, args=arguments, daemon=True).start()
            except RuntimeError as error:  # the system gives this process no more threads
                log.warning("node %d cannot connect to node %d: %s", sender, to, error)
                self._drop_waiting(to)

    def clock(self) -> float:
        """Return the time by this host's clock."""
        return time.perf_counter()

    def work(self, number: int, job: Job) -> None:
        """Run a job of a local node after its earlier jobs."""
        local = self._local_nodes.get(number)
        if local is not None:
            local.jobs.put(job)

    def _open(self, sender: int, to: int, address: Address, epoch: int) -> None:
        """Open a connection to a node; messages to the node wait meanwhile."""
        try:
            connection = self.connect(address)
        except ClusterError as error:
            log.warning("node %d cannot connect to node %d: %s", sender, to, error)
            self.call(lambda: self._drop_waiting(to))
            return
        connection.send(Message(MessageType.HELLO, epoch, sender, body={"node": sender}))

        def opened() -> None:
            waiting = self._opening.pop(to, [])
            if self._addresses.get(to) != address or not connection.is_open:
                connection.close()  # the node left while the connection was opened
                return
            self.attach(to, connection)
            for message in waiting:
                connection.send(message)

        self.call(opened)

    def _drop_waiting(self, to: int) -> None:
        self._opening.pop(to, None)

    def close(self) -> None:
        """Stop listening, close all connections, and stop the threads."""
        self._closing = True
        self._listener.close()
        for connection in list(self._all_connections):
            connection.close()
        for number in list(self._local_nodes):
            self.remove(number)
        self._actions.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    # The threads

    def _add_connection(self, stream: Stream) -> Connection:
        try:
            connection = Connection(
                stream, self._received, self._connection_ended, lambda: self.shares_memory
            )
            # Before its first message and its end, which removes it.
            self._all_connections.add(connection)
            connection.start()
        except (OSError, RuntimeError) as error:
            raise ClusterError(f"the connection cannot be served: {error}") from None
        if self._closing:  # `close` may have run before it was added
            connection.close()
        return connection

    def _received(self, connection: Connection, message: Message) -> None:
        self.call(lambda: self._route(connection, message))

    def _connection_ended(self, connection: Connection, error: Exception) -> None:
        def ended() -> None:
            self._forget(connection)
            if not self._closing:
                self._on_connection_end(connection, error)

        self.call(ended)

    def _forget(self, connection: Connection) -> None:
        if connection in self._all_connections:
            self._all_connections.remove(connection)
            self._received_before += connection.received_bytes
        for number in [n for n, other in self._connections.items() if other is connection]:
            del self._connections[number]

    def _route(self, connection: Connection, message: Message) -> None:
        """Deliver a message; an invalid message closes its connection, and nothing else."""
        connection.epoch = max(connection.epoch, message.epoch)
        try:
            if connection.peer is None:
                self._take_from_new_peer(connection, message)
            elif message.sender not in connection.nodes:
                raise ProtocolError(
                    f"node {connection.peer} sent a {message.kind.name} message in the name of "
                    f"node {message.sender}"
                )
            else:
                self._deliver(message.to, message)
        except (ProtocolError, CorruptionError) as error:
            log.warning("closed the connection to a peer: %s", error)
            connection.close(ProtocolError(str(error)))

    def _take_from_new_peer(self, connection: Connection, message: Message) -> None:
        if message.kind is not MessageType.HELLO:
            self._on_new_peer(connection, message)
            return
        node = message.body.get("node")
        if type(node) is not int or node < 0:
            raise ProtocolError(f"expected the node number of a peer, got {str(node)[:40]!r}")
        connection.peer = node
        connection.nodes.add(node)

    def _deliver(self, to: int, message: Message) -> None:
        local = self._local_nodes.get(to)
        if local is not None:
            local.node.handle(message)

    def _loop(self) -> None:
        try:
            self._run()
        except Exception as error:  # a defect: the endpoint's owner must know
            self._on_failure(error)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                action = self._actions.get(timeout=max(0.0, due - time.monotonic()))
                if action is None:
                    return
                action()
            if time.monotonic() < due:
                continue
            # Messages that have arrived by now count before a node is declared silent.
            for _ in range(self._actions.qsize()):
                action = self._actions.get_nowait()
                if action is None:
                    return
                action()
            now = time.monotonic()
            due = now + self._heartbeat_seconds
            self._every(now)

    def _accept(self, stream: Stream) -> None:
        if self._closing:
            stream.socket.close()
        else:
            self._add_connection(stream)

    def _do_jobs(self, local: _LocalNode) -> None:
        while (job := local.jobs.get()) is not None:
            if local.is_removed:
                return
            try:
                with job.span:
                    result = job.run()
            except Exception as error:  # the node reports the error
                self.call(functools.partial(job.failed, error))
            else:
                self.call(functools.partial(job.then, result))


def own_host(address: Address) -> str:
    """Return this machine's address on the route to another machine.

    Raises:
        ClusterError: there is no route, or the host name is impossible.
    """
    try:
        _require_host(address[0])
        (family, _, _, _, remote), *_ = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)
        with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect(remote)
            return str(probe.getsockname()[0])
    except (OSError, ClusterError) as error:
        raise ClusterError(f"{address[0]}:{address[1]}: {error}") from None


def _require_host(host: str) -> None:
    """Refuse a name for which the socket functions raise other errors than `OSError`."""
    try:
        is_possible = b"\0" not in host.encode("idna")
    except UnicodeError:
        is_possible = False
    if not is_possible:
        raise ClusterError(
            "expected a host name or an address, in which each part between dots has 1 to 63 "
            f"characters, got {host[:80]!r}"
        )


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
