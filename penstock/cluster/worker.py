"""A process that computes: it joins a run, becomes one of its engines, and ends with it.

    python -m penstock.cluster.worker HOST PORT
    python -m penstock.cluster.worker RUN/cluster.json

The run's token comes in the environment, as `PENSTOCK_TOKEN`, or from the record that the run
wrote. All that the process is to be is told
by the conductor's: which model, cut how, with which memory. It keeps no state of the run: when it
is cut off it joins again, as a new engine, as long as the conductor's process is there.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cluster.engine_work import EngineOfProcess
from penstock.cluster.plan import digest_of, holdings_of, transfers_of
from penstock.cluster.record import read_record
from penstock.errors import ClusterError, CorruptionError, PenstockError
from penstock.fabric.messages import Kind, Message
from penstock.fabric.nodes import CONDUCTOR, EngineNode
from penstock.fabric.sockets import Endpoint, Link, own_host

log = logging.getLogger("penstock.cluster")

TOKEN = "PENSTOCK_TOKEN"
NAME = "PENSTOCK_WORKER"
_PATIENCE = 10.0  # seconds in which a conductor that went away may come back


@dataclass(frozen=True)
class _Built:
    """What was made for a run: its work, and what that takes to be the same for all."""

    told: Mapping[str, Any]
    work: EngineOfProcess
    transfers: Any
    digest: str


class RefusedError(ClusterError):
    """The run does not want this worker, and says why."""


class Worker:
    """One engine's process.

    Args:
        address: where the conductor's process listens.
        token: of the run.
        name: what the worker is known by to whoever started it.
    """

    def __init__(self, address: tuple[str, int], token: str, name: str | None = None) -> None:
        self._address = address
        self._name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._node: EngineNode | None = None
        self._number = 0
        self._link: Link | None = None
        self._built: _Built | None = None
        self._endpoint = Endpoint(
            token,
            own_host(address),
            on_link_end=self._link_ended,
            on_stranger=lambda link, message: self._events.put(("message", (link, message))),
            on_failure=lambda error: self._events.put(("failed", error)),
            every=self._beat,
        )

    def serve(self) -> None:
        """Be an engine of the run until it ends.

        Raises:
            ClusterError: the conductor's process is not there, or does not have the token.
        """
        self._endpoint.start()
        try:
            since = None
            while True:
                try:
                    self._join()
                    since = None
                except RefusedError:
                    raise  # it would be refused again
                except ClusterError as error:
                    # The first time it is an error; later, the run may have ended.
                    if self._built is None:
                        raise
                    since = since or time.monotonic()
                    if time.monotonic() - since > _PATIENCE:
                        log.info("the run has ended: %s", error)
                        return
                    time.sleep(0.2)
        finally:
            self._endpoint.close()

    def _join(self) -> None:
        """Join, and stay until the link ends."""
        link = self._link = self._endpoint.connect(self._address)
        body = {"listens": list(self._endpoint.address), "worker": self._name}
        link.send(Message(Kind.JOIN, 0, 0, body=body))
        while True:
            what, content = self._events.get()
            if what == "ended" and content is link:
                break
            if what == "failed":
                raise content
            if what != "message" or content[0] is not link:
                continue  # of a link before this one
            message = content[1]
            if message.kind is Kind.WELCOME:
                self._become(link, message.body)
            elif message.kind is Kind.ANSWER:
                raise RefusedError(str(message.body.get("error")))
        if self._node is not None:
            self._endpoint.remove(self._number)
            self._node = None

    def _become(self, link: Link, told: Mapping[str, Any]) -> None:
        number = int(told["node"])
        try:
            if self._built is None or self._built.told != told["run"]:
                self._built = build(told["run"])
        except PenstockError as error:
            body = {"error": type(error).__name__, "text": str(error)}
            link.send(Message(Kind.TROUBLE, 0, number, body=body))
            return
        built = self._built

        def add() -> None:
            runtime = self._endpoint.runtime(number)
            node = EngineNode(number, runtime, built.transfers, built.work)
            self._number, self._node = number, node
            self._endpoint.attach(CONDUCTOR, link)
            for shard in told["shards_there"]:
                self._endpoint.attach(int(shard), link)
            self._endpoint.add(number, _Member(node, self._endpoint))
            link.send(Message(Kind.READY, 0, number, body={"digest": built.digest}))

        self._endpoint.call(add)

    def _link_ended(self, link: Link, error: Exception) -> None:
        if link is self._link:
            self._events.put(("ended", link))
        elif isinstance(error, CorruptionError) and self._node is not None:
            # What was in the frame will not come again: the step begins anew, over new links.
            body, node = {"text": str(error)}, self._node
            message = Message(Kind.DAMAGED, node.epoch, node.number, body=body)
            self._endpoint.send(node.number, CONDUCTOR, message)

    def _beat(self, now: float) -> None:
        node, link, built = self._node, self._link, self._built
        if node is None or link is None or built is None:
            return
        body = {
            "progress": node.progress,
            "busy": node.is_busy,
            "peak_bytes": built.work.peak_bytes,
            "computed": list(built.work.computed),
        }
        link.send(Message(Kind.BEAT, node.epoch, self._number, body=body))


class _Member:
    """An engine's node that also learns from every view where the others listen."""

    def __init__(self, node: EngineNode, endpoint: Endpoint) -> None:
        self._node, self._endpoint = node, endpoint

    @property
    def progress(self) -> int:
        """How far the node has got."""
        return self._node.progress

    def handle(self, message: Message) -> None:
        """Take a message."""
        if message.kind is Kind.VIEW and message.epoch > self._node.epoch:
            listening = message.body.get("addresses", {})
            self._endpoint.meet(
                {
                    int(number): (str(address[0]), int(address[1]))
                    for number, address in listening.items()
                    if int(number) != self._node.number
                }
            )
        self._node.handle(message)


def build(told: Mapping[str, Any]) -> _Built:
    """Compile the run's model and make an engine, as the conductor's process said.

    Raises:
        PenstockError: this machine cannot be such an engine.
    """
    from penstock import assembly
    from penstock.config import Config
    from penstock.engine import EnginePlan, TorchEngine
    from penstock.models import ModelSource

    config = Config.from_mapping(told["config"])
    assembly.set_threads(told["threads"])
    assert config.model is not None
    kept = None if told["kept"] is None else Path(told["kept"])
    source = assembly.model_source(config.model, kept)
    model: ModelSource = assembly.with_adapters(source, config.lora)
    device = assembly.choose_device(config.engine.device)
    program = assembly.compile_source(
        model,
        micro_batch=told["micro_batch"],
        length=told["length"],
        precision=config.precision,
        device=device,
        train=config.train,
        freeze=config.freeze,
        slot_bytes=told["slot_bytes"],
    )
    recompute = frozenset(told["recompute"])
    transfers = transfers_of(
        program, recompute, holdings_of(program, told["shards"]), told["shards"]
    )
    engine = TorchEngine(
        program, EnginePlan(recompute), device=device, budget_bytes=told["engine_bytes"]
    )
    work = EngineOfProcess(engine, program, transfers, recompute, device)
    return _Built(dict(told), work, transfers, digest_of(program, transfers))


def main() -> None:
    """Be a worker, as the command line and the environment say."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    token, name = os.environ.pop(TOKEN, None), os.environ.pop(NAME, None)
    try:
        match sys.argv[1:]:
            case [host, port] if port.isdigit() and token:
                address = (host, int(port))
            case [record]:
                address, token = read_record(Path(record))
            case _:
                command = "python -m penstock.cluster.worker"
                print(
                    f"usage: {TOKEN}=... {command} HOST PORT, or {command} RUN/cluster.json",
                    file=sys.stderr,
                )
                sys.exit(2)
        Worker(address, token, name).serve()
    except PenstockError as error:
        print(f"worker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
