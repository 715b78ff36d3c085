"""The trainer's side of a distributed run: listens, starts workers, replaces lost workers.

The cluster manager is created before the store: shards in their own processes must join before
weights can be loaded into them. `rendezvous.py` admits processes and keeps the registry of members.
The coordinator runs in this process and decides which nodes take part in which step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.config import MOST_RELAYS, Config
from penstock.distributed import rendezvous_file
from penstock.distributed.control.rendezvous import ClusterMember, Rendezvous, WorkerRegistry
from penstock.distributed.control.span_collector import SpanCollector
from penstock.distributed.control.worker_replacement import WorkerSupervisor
from penstock.distributed.control.worker_stats import HeartbeatStats
from penstock.distributed.control_messages import Role
from penstock.distributed.event_queue import EventQueue
from penstock.distributed.launchers import Launcher, make_launcher
from penstock.distributed.protocol import (
    COORDINATOR,
    Coordinator,
    Message,
    MessageType,
    ProtocolEvent,
    ShardNode,
    Timeouts,
)
from penstock.distributed.rendezvous_file import remove_record, write_record
from penstock.distributed.replication import ReplicaManager
from penstock.distributed.rpc import InProcessShard, RpcClient, StoreClient
from penstock.distributed.run_spec import RunSpec
from penstock.distributed.transport import Address, Connection, Endpoint, new_token
from penstock.distributed.worker import LocalShardExecutor
from penstock.errors import (
    ClusterError,
    CorruptionError,
    PenstockError,
    ProtocolError,
    numbered,
)
from penstock.planning import ExecutionPlan, relay_count
from penstock.store import Store
from penstock.telemetry import ClusterEvent

if TYPE_CHECKING:
    from penstock.models import ModelSource

log = logging.getLogger("penstock.distributed")

_HEARTBEAT_SECONDS = 0.1
_LEAST_START_SECONDS = 120.0  # a worker may take to join, or to wait, however short its jobs are
_STARVED_LEASES = 10  # leases for which a worker may wait for a processor, or load libraries
_ENGINES_SECONDS = 120.0  # seconds to wait for all engines before the first step


class ClusterManager:
    """The processes of one run.

    Args:
        model: as this process has read it.
        host: the interface to listen on.
        launch: creates the launcher from the endpoint.
        tell: called with one line per event, by the thread that requests steps.
        should_stop: returns whether waiting for other processes should end.
    """

    def __init__(
        self,
        config: Config,
        layout: ExecutionPlan,
        model: ModelSource,
        *,
        host: str,
        token: str,
        launch: Callable[[Endpoint], Launcher],
        tell: Callable[[ClusterEvent], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._config, self._layout, self._token = config, layout, token
        self.event_queue, self.heartbeat_stats = EventQueue(tell, should_stop), HeartbeatStats()
        self.spec, self.registry = RunSpec.of(config, layout, model), WorkerRegistry()
        self._local: list[ShardNode] = []
        with contextlib.ExitStack() as cleanup:
            self._open(host, launch, cleanup)
            cleanup.pop_all()  # from here on `close` releases what was opened

    def _open(
        self, host: str, launch: Callable[[Endpoint], Launcher], cleanup: contextlib.ExitStack
    ) -> None:
        """Listen, write the rendezvous file, and start workers."""
        config, layout, token = self._config, self._layout, self._token
        self._endpoint = Endpoint(
            token,
            host,
            on_connection_end=self._connection_ended,
            on_new_peer=self._take_from_new_peer,
            on_failure=self._endpoint_failed,
            every=self._every,
            heartbeat_seconds=_HEARTBEAT_SECONDS,
            port=config.cluster.port,
        )
        cleanup.callback(self._endpoint.close)
        self._endpoint.shares_memory = config.cluster.shared_memory == "auto"
        self.coordinator = Coordinator(
            self._endpoint.context(COORDINATOR),
            self.spec.first_nodes,
            config.engines,
            Timeouts(config.cluster.lease, config.cluster.stall, config.cluster.longest_job),
            self._on_protocol_event,
            least=layout.least_engines,
            addresses=self.registry.addresses,
            can_replace_engine=self._can_replace_engine,
            is_alive=self._is_alive,
        )
        self._endpoint.add(COORDINATOR, _CoordinatorAdapter(self._take))
        self._calls = RpcClient(self._send, self.event_queue.require_sound)
        self.span_collector = SpanCollector(self._send)
        self.replicas = ReplicaManager(
            config,
            self.spec.parts if self.spec.has_shard_processes else [],
            self._calls,
            self.coordinator,
            self.event_queue,
            self._run_in_endpoint,
            self.registry.addresses,
        )
        self._assignment = self.replicas.assignment
        self._rendezvous = Rendezvous(
            self.spec,
            self.registry,
            self.coordinator,
            self.replicas,
            self.event_queue,
            on_admitted=self._admit,
            on_silent=self._end_process,
            silence=_STARVED_LEASES * config.cluster.lease,
            hang=max(config.cluster.longest_job, _LEAST_START_SECONDS),
            engines_wanted=lambda: self._wanted_engines,
        )
        self._rendezvous_path = write_record(config.run.dir, self._endpoint.address, token)
        cleanup.callback(remove_record, self._rendezvous_path, token)
        self.launcher = launch(self._endpoint)
        cleanup.callback(self.launcher.close)
        self.coordinator.wanted_relays = self._usual_relays(config.engines)
        is_ours = config.cluster.start != "listen"
        self._supervisor = WorkerSupervisor(
            self.launcher,
            self.event_queue.emit,
            join_seconds=max(config.cluster.longest_job, _LEAST_START_SECONDS)
            if is_ours
            else math.inf,
        )
        self._supervisor.fill(self._wanted_workers)
        self._endpoint.start()

    @property
    def _wanted_workers(self) -> Mapping[Role, int]:
        """The number of workers that should run: separate shards, engines with spares, relays."""
        shards = 0
        if self.spec.has_shard_processes:
            shards = self._config.store.holders - self._assignment.retired
        relays = self.coordinator.wanted_relays
        return {"shard": shards, "engine": self._wanted_engines, "relay": relays}

    @property
    def _wanted_engines(self) -> int:
        return self.coordinator.wanted + self._config.cluster.spare

    @property
    def address(self) -> Address:
        """The address on which the run listens."""
        return self._endpoint.address

    def call(self, action: Callable[[], None]) -> None:
        """Run an action in the endpoint's thread."""
        self._endpoint.call(action)

    # The store's shards

    def remote_shards(self) -> list[StoreClient] | None:
        """Return the clients of separate shards once all have joined; None without separate shards.

        Raises:
            PenstockError: a shard cannot be created.
        """
        return self.replicas.remote() if self.spec.has_shard_processes else None

    def add_local_shards(self, stores: Sequence[Store]) -> None:
        """Add the shards of a store in this process to the run."""

        def add() -> None:
            for shard, store in enumerate(stores):
                number = self.spec.first_nodes[shard][0]
                work = LocalShardExecutor(InProcessShard(store), shard, self._layout.schedule_of)
                context = self._endpoint.context(number)
                node = ShardNode(number, shard, context, self.spec.transfers, work)
                self._endpoint.add(number, node)
                self._local.append(node)

        self._run_in_endpoint(add)

    def is_quiescent(self) -> bool:
        """Tell whether no shard still works on a step of an earlier epoch."""
        if not self.spec.has_shard_processes:
            return not any(node.is_busy for node in self._local)
        # Another node has joined since, and is told of an epoch with the next step only.
        nodes = {*self._assignment.all_nodes} & {*self.coordinator.shard_nodes}
        return self.heartbeat_stats.are_idle(nodes, self.coordinator.epoch)

    # Engines

    def await_engines(self) -> None:
        """Before the first step, wait for all engines and relays, up to a time limit.

        Raises:
            InterruptedError: a stop was requested.
        """
        wanted, deadline = self._config.engines, time.monotonic() + _ENGINES_SECONDS
        coordinator, membership = self.coordinator, self.coordinator.membership
        while len(coordinator.ready) < wanted or len(membership.relays) < coordinator.wanted_relays:
            self.event_queue.poll()
            if self.event_queue.should_stop():
                raise InterruptedError("stopped while waiting for engines")
            if time.monotonic() > deadline:
                text = f"{len(coordinator.ready)} of {wanted} engines have joined within "
                text += f"{_ENGINES_SECONDS:.0f} s; the run starts with these engines"
                if relays := coordinator.wanted_relays:
                    text += f" and {len(membership.relays)} of {relays} relays"
                self.event_queue.emit("waiting", text)
                return
            time.sleep(0.02)

    def _can_replace_engine(self) -> bool:
        """Tell whether a replacement for a lost engine is joining or can be started."""
        is_ours = self._config.cluster.start != "listen"
        return bool(self.registry.joining) or (is_ours and self._supervisor.given_up is None)

    def _is_alive(self, node: int, silent: float) -> bool:
        """Tell whether a silent node is alive: it is sending, or it waits for a processor."""
        member, lease = self.registry.find(node), self._config.cluster.lease
        if member is None:
            return False
        if member.connection.is_heard(lease):
            return True
        return silent < _STARVED_LEASES * lease and self.launcher.starves(member.worker)

    def scale(self, engines: int, relays: int | None = None) -> None:
        """Use this many engines, and relays, from the next step after they have joined.

        Without a number of relays it follows from `fabric.relays`.

        **Raises:** `ClusterError` if a number is out of range or the endpoint is closed;
        `BudgetError` if this machine lacks the memory.
        """
        self._require_engines(engines)
        relays = self._require_relays(relays, engines)
        self._run_in_endpoint(lambda: self._scale(engines, relays))

    def _require_engines(self, wanted: object) -> int:
        least, most = self._layout.least_engines, self._layout.micro_batches
        if type(wanted) is not int or not least <= wanted <= most:
            why = " (with fewer, a step does not fit engine.memory)" if least > 1 else ""
            raise ClusterError(
                f"engines: expected {least}{why} to {most} (one micro-batch each), got {wanted!r}"
            )
        if self._layout.room is not None and wanted > self.coordinator.wanted:
            self._layout.room.require(wanted)
        return wanted

    def _usual_relays(self, engines: int) -> int:
        return relay_count(self._config, engines, hosts=self.launcher.hosts)

    def _require_relays(self, relays: object, engines: int) -> int:
        if relays is None:
            if self._config.fabric.relays != "auto":
                return self.coordinator.wanted_relays
            return self._usual_relays(engines)
        if type(relays) is not int or not 0 <= relays <= MOST_RELAYS:
            raise ClusterError(f"relays: expected 0 to {MOST_RELAYS}, got {relays!r}")
        return relays

    def _scale(self, engines: int, relays: int) -> dict[str, int]:
        coordinator = self.coordinator
        before = {"before": coordinator.wanted, "relays_before": coordinator.wanted_relays}
        coordinator.wanted, coordinator.wanted_relays = engines, relays
        self._supervisor.fill(self._wanted_workers)
        text = f"{numbered(before['before'], 'engine')} so far, {engines} from the next step on"
        if relays or before["relays_before"]:
            text += f"; {numbered(before['relays_before'], 'relay')} so far, {relays} from then on"
        self.event_queue.emit("scaled", text, engines=engines)
        return before

    def close(self) -> None:
        """Stop the workers and stop listening."""
        if self.event_queue.is_closed:
            return
        self.event_queue.is_closed = True
        remove_record(self._rendezvous_path, self._token)
        self._endpoint.close()
        self.launcher.close()
        self.event_queue.report_all()

    def _run_in_endpoint(self, action: Callable[[], object]) -> None:
        """Run an action in the endpoint's thread, and wait for its end."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._endpoint.call(act)
        while not done.wait(timeout=0.5):
            self.event_queue.require_sound()

    def _send(self, node: int, message: Message) -> None:
        self._endpoint.call(lambda: self._endpoint.send(COORDINATOR, node, message))

    # In the endpoint's thread

    def _every(self, now: float) -> None:
        for node in self._local:  # the coordinator counts the bytes of this process once
            body = {"progress": node.progress, "busy": node.is_busy, "received": 0}
            self.coordinator.handle(Message(MessageType.HEARTBEAT, 0, node.number, body=body))
        self.coordinator.tick(now, self._endpoint.received_bytes)
        self._rendezvous.tick(now)
        self._supervisor.replace(self._wanted_workers)
        few = len(self.coordinator.ready) < self._layout.least_engines
        given_up, joining = self._supervisor.given_up, self.registry.joining
        if given_up is not None and (few or self._assignment.is_incomplete) and not joining:
            self.event_queue.fail(ClusterError(given_up))

    def _endpoint_failed(self, error: Exception) -> None:
        text = f"the run's network failed: {type(error).__name__}: {error}"
        self.event_queue.fail(ClusterError(text))
        log.error("the endpoint failed", exc_info=error)

    def _take_from_new_peer(self, connection: Connection, message: Message) -> None:
        """Handle a message of a peer that has not joined yet."""
        if message.kind is MessageType.ADMIN_REQUEST:
            reply = self._handle_admin_request(message.body)
            connection.send(Message(MessageType.ADMIN_REPLY, 0, COORDINATOR, body=reply))
        else:
            self._rendezvous.take(connection, message)
            if message.kind is MessageType.JOIN:
                self._supervisor.mark_joined(str(message.body.get("worker")))

    def _handle_admin_request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change the numbers of an admin request; one without any only asks. Return the reply."""
        if body.get("engines") is None and body.get("relays") is None:
            coordinator, relays = self.coordinator, self.coordinator.wanted_relays
            return {
                "before": coordinator.wanted,
                "engines": coordinator.wanted,
                "engines_ready": len(coordinator.ready),
                "relays_before": relays,
                "relays": relays,
                "relays_ready": len(coordinator.membership.relays),
            }
        try:
            wanted = self.coordinator.wanted
            if body.get("engines") is not None:
                wanted = self._require_engines(body.get("engines"))
            relays = self._require_relays(body.get("relays"), wanted)
        except PenstockError as error:
            return {"error": str(error)}
        return {"engines": wanted, "relays": relays, **self._scale(wanted, relays)}

    def _admit(self, member: ClusterMember) -> None:
        self._endpoint.attach(member.number, member.connection)
        self._supervisor.mark_ready(member.worker)

    def _connection_ended(self, connection: Connection, error: Exception) -> None:
        self._rendezvous.connection_ended(connection)
        member = self.registry.member_of(connection)
        if member is None:
            return
        number = member.number
        if isinstance(error, CorruptionError):
            self.coordinator.report_corruption(f"node {number}: {error}", [number])
        self.coordinator.lost(number, f"its connection ended ({error})")

    def _on_protocol_event(self, event: ProtocolEvent) -> None:
        is_loss = event.kind in (
            "engine lost",
            "relay lost",
            "shard lost",
            "replica lost",
        )
        self.event_queue.emit(event.kind, event.text, event.node)
        if is_loss and event.node is not None:
            self._lose(event.node)

    def _lose(self, number: int) -> None:
        """Remove a lost node, so that no message of it is accepted."""
        member = self.registry.lose(number)
        self.heartbeat_stats.forget(number)
        if member is None:
            return
        self._end_process(member)
        if member.slot is not None:
            self.replicas.lost(member.slot, number)

    def _end_process(self, member: ClusterMember) -> None:
        member.connection.close()
        self.launcher.end(member.worker)

    def _take(self, message: Message) -> None:
        """Dispatch a message of a node: to the coordinator, or as a reply to an RPC."""
        if message.kind is MessageType.RPC_REPLY:
            self._calls.take(message)
            return
        if message.kind is MessageType.SPANS:
            try:
                self.span_collector.take(message)
            except ProtocolError as error:
                self.coordinator.lost(message.sender, str(error))
            return
        if message.kind is MessageType.HEARTBEAT and self.registry.find(message.sender) is not None:
            self._calls.heard(message.sender)
            self.heartbeat_stats.take(message)
        self.coordinator.handle(message)


@dataclass(frozen=True)
class _CoordinatorAdapter:
    """The coordinator as a node of its process."""

    handle: Callable[[Message], None]
    progress: int = 0


def open_cluster(
    config: Config,
    layout: ExecutionPlan,
    model: ModelSource,
    *,
    tell: Callable[[ClusterEvent], None],
    should_stop: Callable[[], bool],
) -> ClusterManager:
    """Listen for the processes of a run and start its workers, which join asynchronously."""
    token = new_token()
    with contextlib.ExitStack() as cleanup:
        host, launch = make_launcher(config, layout.device, token, cleanup)
        manager = ClusterManager(
            config,
            layout,
            model,
            host=host,
            token=token,
            launch=launch,
            tell=tell,
            should_stop=should_stop,
        )
        cleanup.pop_all()  # from here on the launcher closes the connection
    if config.cluster.start == "listen":
        _report_address(config, manager, tell)
    return manager


def _report_address(
    config: Config, manager: ClusterManager, tell: Callable[[ClusterEvent], None]
) -> None:
    """Report how to start workers where a user starts them."""
    command = (
        f"python -m penstock.cluster.worker {config.run.dir.absolute() / rendezvous_file.NAME}"
    )
    text = "at {}:{}; on the host of each engine, run: ".format(*manager.address) + command
    if config.cluster.shards == "apart":
        text += "; before that, run it on the host of each shard with "
        text += f"--shard 0 to {config.store.shards - 1}"
        if config.store.replicas > 1:
            text += f", each shard on {config.store.replicas} hosts"
    tell(ClusterEvent("listening", text))
