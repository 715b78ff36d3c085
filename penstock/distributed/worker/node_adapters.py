"""Adapters from a worker's process to its protocol node: route step messages and other messages.

A shard's adapter also serves RPCs on the store and sends and receives snapshots.
"""

from __future__ import annotations

from penstock.distributed.control_messages import addresses_of
from penstock.distributed.protocol import COORDINATOR, EngineNode, Message, MessageType, ShardNode
from penstock.distributed.replication import SnapshotReceiver, SnapshotSender
from penstock.distributed.rpc import FrameAssembler, RpcMessage, frames, store_server
from penstock.distributed.transport import Endpoint
from penstock.distributed.worker.shard_storage import OwnedShard
from penstock.errors import ClusterError, CorruptionError, PenstockError


class WorkerNode:
    """A protocol node whose peer addresses are updated from every view."""

    def __init__(self, node: EngineNode | ShardNode, endpoint: Endpoint) -> None:
        self._node, self._endpoint = node, endpoint

    @property
    def progress(self) -> int:
        """The node's progress counter."""
        return self._node.progress

    def handle(self, message: Message) -> None:
        """Handle a message."""
        if message.kind is MessageType.VIEW and message.epoch > self._node.epoch:
            listening = addresses_of(message)
            listening.pop(self._node.number, None)
            self._endpoint.set_addresses(listening, message.epoch)
        self._node.handle(message)

    def tick(self, now: float) -> None:
        """Advance timeouts to the time `now`."""

    def connection_ended(self, peer: int | None, why: str) -> None:
        """Handle the end of a connection to another node."""


class WorkerShard(WorkerNode):
    """A shard's node that also serves RPCs on its store."""

    def __init__(self, node: EngineNode | ShardNode, endpoint: Endpoint, place: OwnedShard) -> None:
        super().__init__(node, endpoint)
        self._place, self._gathered = place, FrameAssembler(lambda number: place.most_bytes)
        self._context = endpoint.context(node.number)
        self._giver = SnapshotSender(node.number, place, self._context, endpoint)
        self._taker = SnapshotReceiver(node.number, place, self._context, endpoint, self._answer)

    def handle(self, message: Message) -> None:
        """Handle a message; an RPC runs after the jobs that are queued already."""
        if message.kind is MessageType.RPC_REQUEST:
            self._take_call(message)
        elif message.kind is MessageType.SNAPSHOT_REQUEST:
            self._giver.take(message)
        elif message.kind is MessageType.SNAPSHOT_CHUNK:
            self._taker.take(message)
        else:
            super().handle(message)

    def tick(self, now: float) -> None:
        """Check a running state transfer for a timeout."""
        self._taker.tick(now)

    def connection_ended(self, peer: int | None, why: str) -> None:
        """Fail a state transfer whose connection has ended."""
        self._taker.connection_ended(peer, why)

    def _take_call(self, message: Message) -> None:
        try:
            whole = self._gathered.take(message)
        except CorruptionError as error:
            self._answer_error(message.op, error)
            return
        if whole is None:
            return
        number, said = whole
        if said.body.get("method") == "take_copy":
            try:
                self._taker.begin(number, said.body.get("with"))
            except PenstockError as error:
                self._answer_error(number, error)
        elif said.body.get("method") == "give_up_copy":
            self._taker.cancel("the trainer's process cancelled it")
            self._answer(number, RpcMessage())
        else:
            self._have_done(number, said)

    def _have_done(self, number: int, said: RpcMessage) -> None:
        """Run the store method that an RPC requests."""

        def pack() -> list[Message]:
            answer = store_server.answer(self._place, said)
            return list(frames(MessageType.RPC_REPLY, self._node.number, number, answer))

        def send(messages: list[Message]) -> None:
            for each in messages:
                self._context.send(COORDINATOR, each)

        def failed(error: Exception) -> None:
            text = f"{type(error).__name__}: {error}"
            self._answer_error(number, ClusterError(text))

        self._context.work(pack, send, failed)

    def _answer_error(self, number: int, error: PenstockError) -> None:
        self._answer(number, RpcMessage({"error": type(error).__name__, "text": str(error)}))

    def _answer(self, call: int, said: RpcMessage) -> None:
        for each in frames(MessageType.RPC_REPLY, self._node.number, call, said):
            self._context.send(COORDINATOR, each)
