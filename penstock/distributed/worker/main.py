"""A worker process: joins a run, becomes an engine, a shard or a relay, ends with the run.

    python -m penstock.cluster.worker HOST PORT [--port NUMBER]
    python -m penstock.cluster.worker RUN/cluster.json [--shard NUMBER | --relay]
        [--port NUMBER]

The run's token comes from the environment variable `PENSTOCK_TOKEN` or from the rendezvous file of
the run. The coordinator assigns everything else: the role (engine, relay, or which shard), the
model, the cut into stages, the memory. An engine or a relay keeps no state of the run: after a lost
connection it joins again as a new node, as long as the coordinator's process listens. A shard whose
connection is lost ends, so that another process can open its files on flash.
"""

import argparse
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.distributed.control_messages import Assignment, Role
from penstock.distributed.protocol import (
    COORDINATOR,
    EngineNode,
    Job,
    Message,
    MessageType,
    RelayNode,
    ShardNode,
)
from penstock.distributed.rendezvous_file import read_record
from penstock.distributed.transport import Connection, Endpoint, own_host
from penstock.distributed.worker.node_adapters import WorkerNode, WorkerShard
from penstock.distributed.worker.roles import (
    BuiltRole,
    EngineRole,
    RelayRole,
    ShardRole,
    build_engine,
    build_relay,
    build_shard,
)
from penstock.engine import share_one_heap
from penstock.errors import (
    ClusterError,
    ConfigError,
    CorruptionError,
    PenstockError,
    ProtocolError,
)

log = logging.getLogger("penstock.distributed")

TOKEN = "PENSTOCK_TOKEN"
NAME = "PENSTOCK_WORKER"
_RECONNECT_SECONDS = 10.0  # seconds in which a lost coordinator may come back
_CLOSE_SECONDS = 60.0  # seconds in which a shard should close its files


class RefusedError(ClusterError):
    """The run refuses this worker; the text is the reason."""


class OwnWorkError(ClusterError):
    """This worker's computation failed; a repeat in another process may succeed."""


class Worker:
    """One process of a run.

    Args:
        address: where the coordinator's process listens.
        token: of the run.
        name: the worker's name, given by the launcher or user that started it.
        role: the role that the worker takes; None lets the run decide.
        shard: the number of the shard, if the user has chosen one.
        port: the port on which the worker listens for other workers; 0 for any free port.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        name: str | None = None,
        role: Role | None = None,
        shard: int | None = None,
        port: int = 0,
    ) -> None:
        self._address = address
        self._name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._role: Role | None = role if shard is None else "shard"
        self._shard = shard
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._node: EngineNode | ShardNode | RelayNode | None = None
        self._adapter: WorkerNode | None = None
        self._number = 0
        self._connection: Connection | None = None
        self._built: BuiltRole | None = None
        self._clock: int | None = None  # of the processor time of the thread that builds roles
        self._endpoint = Endpoint(
            token,
            own_host(address),
            on_connection_end=self._connection_ended,
            on_new_peer=lambda *received: self._events.put(("message", received)),
            on_failure=lambda error: self._events.put(("failed", error)),
            every=self._send_heartbeat,
            port=port,
        )

    def serve(self) -> None:
        """Take part in the run until it ends.

        Raises:
            ClusterError: the coordinator's process does not listen, or has another token.
        """
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        share_one_heap()  # an engine computes in a thread of the endpoint
        self._endpoint.start()
        try:
            lost_since = None
            while True:
                try:
                    self._join()
                    lost_since = None
                except (RefusedError, OwnWorkError):
                    raise  # a retry would fail in the same way
                except ClusterError:
                    # Before the first join this is an error; afterwards, the run may have ended.
                    if self._built is None:
                        raise
                    lost_since = lost_since or time.monotonic()
                    if time.monotonic() - lost_since > _RECONNECT_SECONDS:
                        host, port = self._address
                        log.info("the run has ended: nothing listens at %s:%s", host, port)
                        return
                    time.sleep(0.2)
                if self._built is not None and isinstance(self._built.role, ShardRole):
                    log.info("the run has ended, or another process holds this shard now")
                    return
        finally:
            self._endpoint.close()

    def _join(self) -> None:
        """Join, and serve until the connection ends."""
        connection = self._connection = self._endpoint.connect(self._address)
        body: dict[str, Any] = {"listens": list(self._endpoint.address), "worker": self._name}
        if self._role is not None:
            body |= {"role": self._role, "shard": self._shard}
        connection.send(Message(MessageType.JOIN, 0, 0, body=body))
        while True:
            what, content = self._events.get()
            if what == "ended" and content is connection:
                break
            if what == "failed":
                raise content
            if what != "message" or content[0] is not connection:
                continue  # an event of an earlier connection
            message = content[1]
            if message.kind is MessageType.ASSIGN:
                self._take_role(connection, Assignment.read(message))
            elif message.kind is MessageType.ADMIN_REPLY:
                raise RefusedError(str(message.body.get("error")))
        if self._built is None:
            raise ClusterError(
                f"{self._address[0]}:{self._address[1]}: the run closed the connection before it "
                "assigned a role to this worker; do both run the same version of Penstock?"
            )
        if self._node is not None:
            self._close_store()
            self._endpoint.remove(self._number)
            node, self._node = self._node, None
            # The worker joins again as another node, so peers must drop the messages of the old
            # node.
            self._endpoint.call(lambda: self._endpoint.set_addresses({}, node.epoch + 1))
            if node.failure is not None:
                raise OwnWorkError(
                    f"the work of {self._name} failed, and the run continues without it: "
                    f"{type(node.failure).__name__}: {node.failure}"
                )

    def _close_store(self) -> None:
        """Close the store of a shard after its queued jobs."""
        assert self._built is not None
        role = self._built.role
        if not isinstance(role, ShardRole):
            return
        closed = threading.Event()

        def close() -> None:
            role.storage.close()
            closed.set()

        def failed(error: Exception) -> None:
            log.error("the store was not closed cleanly: %s", error)
            closed.set()

        self._endpoint.context(self._number).work(Job(close, lambda _: None, failed))
        if not closed.wait(timeout=_CLOSE_SECONDS):
            log.error("the store was not closed within %.0f s", _CLOSE_SECONDS)

    def _take_role(self, connection: Connection, assignment: Assignment) -> None:
        number, spec, slot = assignment.node, assignment.run, assignment.slot
        what = assignment.role if slot is None else f"shard {slot.shard}"
        log.info("joined the run at %s:%s as %s, node %d", *self._address, what, number)
        self._endpoint.shares_memory = spec["config"]["cluster"]["shared_memory"] == "auto"
        try:
            if slot is not None:
                self._built = build_shard(spec, slot, assignment.opens)
            else:
                self._built = self._built_without_state(assignment.role, spec)
        except PenstockError as error:
            body = {"error": type(error).__name__, "text": str(error)}
            connection.send(Message(MessageType.FAILURE, 0, number, body=body))
            return
        built = self._built

        def add() -> None:
            node = built.role.node(number, self._endpoint.context(number))
            self._number, self._node = number, node
            self._endpoint.attach(COORDINATOR, connection)
            for shard_node in assignment.shards_there:
                self._endpoint.attach(shard_node, connection)
            self._adapter = WorkerNode(node, self._endpoint)
            if isinstance(built.role, ShardRole):
                self._adapter = WorkerShard(node, self._endpoint, built.role.storage)
            self._endpoint.add(number, self._adapter)
            connection.send(Message(MessageType.READY, 0, number, body={"digest": built.digest}))

        self._endpoint.call(add)

    def _built_without_state(self, role: Role, spec: Mapping[str, Any]) -> BuiltRole:
        """Return an engine or a relay, the present one if it is of this run."""
        kind, build = (RelayRole, build_relay) if role == "relay" else (EngineRole, build_engine)
        built = self._built
        if built is not None and isinstance(built.role, kind) and built.spec == spec:
            return built
        return build(spec)

    def _connection_ended(self, connection: Connection, error: Exception) -> None:
        if connection is self._connection:
            self._events.put(("ended", connection))
        elif isinstance(error, (CorruptionError, ProtocolError)) and self._node is not None:
            # The frame is lost and is not sent again: the step is retried over new connections.
            body, node = {"text": str(error), "peer": connection.peer}, self._node
            message = Message(MessageType.CORRUPT_FRAME, node.epoch, node.number, body=body)
            self._endpoint.send(node.number, COORDINATOR, message)
        if self._adapter is not None:
            self._adapter.connection_ended(connection.peer, str(error))

    def _send_heartbeat(self, now: float) -> None:
        node, connection, built = self._node, self._connection, self._built
        if connection is None:
            return
        if node is None or built is None:  # the role is not ready, or not assigned
            used = None if self._clock is None else time.clock_gettime(self._clock)
            body: dict[str, Any] = {"processor_seconds": used}
            connection.send(Message(MessageType.HEARTBEAT, 0, 0, body=body))
            return
        if self._adapter is not None:
            self._adapter.tick(now)
        body = {
            "progress": node.progress,
            "busy": node.is_busy,
            "received": self._endpoint.received_bytes,
            **built.role.metrics(),
        }
        connection.send(Message(MessageType.HEARTBEAT, node.epoch, self._number, body=body))


def main() -> None:
    """Run a worker as the command line and the environment specify."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    token, name = os.environ.pop(TOKEN, None), os.environ.pop(NAME, None)
    try:
        options = _arguments(sys.argv[1:])
        if options.port is None:
            address, token = read_record(Path(options.where))
        elif token:
            address = options.where, options.port
        else:
            raise ConfigError(
                f"{TOKEN}: expected the run's token in this environment variable, which is not "
                "set; set it, or give the path of the run's cluster.json"
            )
        role: Role | None = "relay" if options.relay else None
        Worker(address, token, name, role, options.shard, options.listen).serve()
    except PenstockError as error:
        print(f"worker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("worker: stopped by Ctrl-C; the run continues without it", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m penstock.cluster.worker",
        description="Join a run as an engine, a shard or a relay, until the run ends.",
    )
    parser.add_argument("where", metavar="HOST|RUN/cluster.json", help="host or file of the run")
    parser.add_argument(
        "port", metavar="PORT", type=_port, nargs="?", help="port of the run at HOST"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--shard", type=int, help="number of the shard that this worker holds")
    only.add_argument("--relay", action="store_true", help="be a relay (fabric.relays)")
    parser.add_argument(
        "--port",
        type=_port,
        default=0,
        dest="listen",
        help="port on which this worker listens for other workers; by default any free port",
    )
    return parser.parse_args(arguments)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


if __name__ == "__main__":
    main()
