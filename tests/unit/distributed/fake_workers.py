"""A cluster manager without worker processes, and fake workers that join it."""

from __future__ import annotations

import functools
import queue
import threading
from pathlib import Path

from waiting import SECONDS

from penstock.config import Config
from penstock.distributed.control.cluster_manager import ClusterManager
from penstock.distributed.control_messages import Role
from penstock.distributed.launchers.base import WorkerExit
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.transport import Connection, Endpoint
from penstock.models import ModelSource
from penstock.planning.execution_plan import ExecutionPlan

MODEL = {
    "preset": "gpt2",
    "overrides": {"n_layer": 1, "n_embd": 32, "n_head": 1, "vocab_size": 96, "n_positions": 16},
}


TOKEN = "a token"


@functools.cache
def model_source() -> ModelSource:
    return ModelSource.from_preset(MODEL["preset"], MODEL["overrides"])


class FakeLauncher:
    """Starts no process; with `always_fails` every started worker has ended."""

    lacks: str | None = None
    starving: tuple[str, ...] = ()
    hosts: int | None = None

    def __init__(self, always_fails: bool) -> None:
        self.always_fails, self.started = always_fails, 0
        self.roles: list[str] = []
        self.ended: list[WorkerExit] = []
        self.killed: list[str] = []

    def start(self, role: Role) -> str:
        self.started += 1
        self.roles.append(role)
        worker = f"worker-{self.started}"
        if self.always_fails:
            self.ended.append(WorkerExit(worker, f"{worker} fell"))
        return worker

    def poll(self) -> list[WorkerExit]:
        ended, self.ended = self.ended, []
        return ended

    def starves(self, worker: str) -> bool:
        return worker in self.starving

    def waits_for(self) -> str | None:
        return self.lacks

    def end(self, worker: str) -> None:
        """Record that the worker was to be killed."""
        self.killed.append(worker)

    def close(self) -> None:
        """Do nothing: there are no processes."""


def config(folder: Path, replicas: int = 1, relays: int | str = "auto", **cluster) -> Config:
    return Config.from_mapping(
        {
            "model": MODEL,
            "batch": {"size": 4, "micro": 1},
            "engine": {"device": "cpu", "threads": 1},
            "engines": 2,
            "store": {"shards": 2, "replicas": replicas},
            "run": {"dir": str(folder)},
            "cluster": {"start": "local", "spare": 1, **cluster},
            "fabric": {"relays": relays},
        }
    )


class OpenedManager:
    """A cluster manager, the kinds of its events, and the threads that reported them."""

    def __init__(self, folder: Path, layout: ExecutionPlan, always_fails: bool, **cluster) -> None:
        self.event_kinds: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.is_stopped = False
        self.launcher = FakeLauncher(always_fails)
        self.manager = ClusterManager(
            config(folder, **cluster),
            layout,
            model_source(),
            host="127.0.0.1",
            token=TOKEN,
            launch=lambda endpoint: self.launcher,
            tell=self.hear,
            should_stop=lambda: self.is_stopped,
        )

    def hear(self, event) -> None:
        self.event_kinds.append(event.kind)
        self.threads.add(threading.current_thread())


class FakeWorker:
    """A worker that joins, and the messages that it receives."""

    def __init__(self, manager: ClusterManager) -> None:
        self.said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.failures: list[Exception] = []
        self.endpoint = Endpoint(
            TOKEN,
            "127.0.0.1",
            on_connection_end=lambda connection, error: None,
            on_new_peer=lambda connection, message: self.said.put(message),
            on_failure=self.failures.append,
        )
        self.endpoint.start()
        self.connection: Connection = self.endpoint.connect(manager.address)

    def say(self, kind: MessageType, number: int = 0, **body) -> None:
        self.connection.send(Message(kind, 0, number, body=body))

    def hear(self) -> Message:
        return self.said.get(timeout=SECONDS)

    def report_ready(self, manager: ClusterManager, assignment: Message) -> None:
        """Report the assigned role as ready."""
        spec, is_engine = manager.spec, assignment.body["role"] == "engine"
        digest = spec.engine_digest if is_engine else spec.shard_digest
        self.say(MessageType.READY, assignment.body["node"], digest=digest)
