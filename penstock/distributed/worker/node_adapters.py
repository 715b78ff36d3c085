"""Adapters from a worker's process to its protocol node: route step messages and other messages.

A shard's adapter also serves RPCs on the store and sends and receives snapshots.
"""

from penstock.distributed.control_messages import addresses_of
from penstock.distributed.protocol import (
    COORDINATOR,
    EngineNode,
    Job,
    Message,
    MessageType,
    RelayNode,
    ShardNode,
)
from penstock.distributed.replication import SnapshotReceiver, SnapshotSender
from penstock.distributed.rpc import FrameAssembler, OwnedShard, RpcMessage, frames, store_server
from penstock.distributed.transport import Endpoint
from penstock.errors import ClusterError, CorruptionError, PenstockError


class WorkerNode:
    """A protocol node whose peer addresses are updated from every view."""

    def __init__(self, node: EngineNode | ShardNode | RelayNode, endpoint: Endpoint) -> None:
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

    def __init__(
        self, node: EngineNode | ShardNode | RelayNode, endpoint: Endpoint, storage: OwnedShard
    ) -> None:
        super().__init__(node, endpoint)
        self._storage, self._assembler = storage, FrameAssembler(lambda number: storage.most_bytes)
        self._context = endpoint.context(node.number)
        self._snapshot_sender = SnapshotSender(node.number, storage, self._context, endpoint)
        self._snapshot_receiver = SnapshotReceiver(
            node.number, storage, self._context, endpoint, self._answer
        )

    def handle(self, message: Message) -> None:
        """Handle a message; an RPC runs after the jobs that are queued already."""
        if message.kind is MessageType.RPC_REQUEST:
            self._take_request(message)
        elif message.kind is MessageType.SNAPSHOT_REQUEST:
            self._snapshot_sender.take(message)
        elif message.kind is MessageType.SNAPSHOT_CHUNK:
            self._snapshot_receiver.take(message)
        else:
            super().handle(message)

    def tick(self, now: float) -> None:
        """Check a running state transfer for a timeout."""
        self._snapshot_receiver.tick(now)

    def connection_ended(self, peer: int | None, why: str) -> None:
        """Fail a state transfer whose connection has ended."""
        self._snapshot_receiver.connection_ended(peer, why)

    def _take_request(self, message: Message) -> None:
        try:
            complete = self._assembler.take(message)
        except CorruptionError as error:
            self._answer_error(message.op, error)
            return
        if complete is None:
            return
        number, content = complete
        if content.body.get("method") == "take_copy":
            try:
                self._snapshot_receiver.begin(number, content.body.get("with"))
            except PenstockError as error:
                self._answer_error(number, error)
        elif content.body.get("method") == "give_up_copy":
            self._snapshot_receiver.cancel("the trainer's process cancelled it")
            self._answer(number, RpcMessage())
        else:
            self._run_method(number, content)

    def _run_method(self, number: int, content: RpcMessage) -> None:
        """Run the store method that an RPC requests."""

        def pack() -> list[Message]:
            response = store_server.respond(self._storage, content)
            return list(frames(MessageType.RPC_REPLY, self._node.number, number, response))

        def send(messages: list[Message]) -> None:
            for each in messages:
                self._context.send(COORDINATOR, each)

        def failed(error: Exception) -> None:
            text = f"{type(error).__name__}: {error}"
            self._answer_error(number, ClusterError(text))

        self._context.work(Job(pack, send, failed))

    def _answer_error(self, number: int, error: PenstockError) -> None:
        self._answer(number, RpcMessage({"error": type(error).__name__, "text": str(error)}))

    def _answer(self, call: int, content: RpcMessage) -> None:
        for each in frames(MessageType.RPC_REPLY, self._node.number, call, content):
            self._context.send(COORDINATOR, each)
