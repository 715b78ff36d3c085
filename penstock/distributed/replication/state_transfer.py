"""Sender and receiver of a snapshot, which goes directly from one node of a shard to another.

The learner requests portions of the source's state one by one, at most `WINDOW` ahead of the last
written portion. This back-pressure bounds the memory of both nodes, whichever is slower. The
connection verifies that a portion is intact. No function here blocks: reads and writes are jobs of
the nodes' workers, so a cancellation is handled at once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.distributed.control_messages import address_of
from penstock.distributed.protocol import (
    Job,
    Message,
    MessageType,
    NodeContext,
    message_validation,
    message_with,
)
from penstock.distributed.rpc import OwnedShard, RpcMessage
from penstock.distributed.transport import Address
from penstock.errors import ClusterError
from penstock.store import Portions, portions_of

WINDOW = 4  # portions that are requested and not written yet
SILENCE = 60.0  # seconds in which a requested portion must arrive


class PeerDirectory(Protocol):
    """Sets the addresses of peers and returns this node's own address."""

    @property
    def address(self) -> Address: ...

    def add_address(self, number: int, address: Address) -> None: ...


class SnapshotSender:
    """Sends this node's state to another node, portion by portion."""

    def __init__(
        self, number: int, storage: OwnedShard, context: NodeContext, network: PeerDirectory
    ) -> None:
        self._number, self._storage, self._context = number, storage, context
        self._network = network
        self._portions: Portions | None = None

    def take(self, message: Message) -> None:
        """Answer a `SNAPSHOT_REQUEST` after the jobs that are queued already.

        **Raises:** `ProtocolError` if the request is malformed.
        """
        to, wanted = message.sender, message.op
        if "listens" in message.body:
            self._network.add_address(to, address_of(message, message.body["listens"]))

        def answer(data: np.ndarray | None, step: int = 0, **fields: Any) -> None:
            numbers = {"epoch": 0, "step": step, "op": wanted, "index": message.index}
            portion = message_with(
                data, kind=MessageType.SNAPSHOT_CHUNK, sender=self._number, **numbers, **fields
            )
            self._context.send(to, portion)

        def read() -> tuple[np.ndarray, int]:
            return self._read(wanted), self._storage.store.step

        def failed(error: Exception) -> None:
            answer(None, body={"error": type(error).__name__, "text": str(error)})

        self._context.work(Job(read, lambda found: answer(*found), failed))

    def _read(self, number: int) -> np.ndarray:
        if self._portions is None or number == 0:
            self._portions = portions_of(self._storage.store)
        portions = self._portions
        if number + 1 >= len(portions.sizes):
            self._portions = None
        return portions.read(number)


@dataclass
class _Copy:
    """A running copy, started by the RPC `call`; `number` distinguishes it from earlier copies."""

    call: int
    number: int
    source: int
    step: int  # the step of the source
    received_at: float
    portions: Portions | None = None
    count: int = 0
    requested: int = 0
    received: int = 0
    written: int = 0


class SnapshotReceiver:
    """Requests the state of another node and writes it to this node's store.

    Args:
        answer: reports the result of a copy by the RPC's number: `copied` bytes, or the side on
            which the copy `failed`.
    """

    def __init__(
        self,
        number: int,
        storage: OwnedShard,
        context: NodeContext,
        network: PeerDirectory,
        answer: Callable[[int, RpcMessage], None],
    ) -> None:
        self._number, self._storage, self._context = number, storage, context
        self._network, self._answer = network, answer
        self._copy: _Copy | None = None
        self._copies = 0

    def begin(self, call: int, arguments: Any) -> None:
        """Begin to copy the state of node `source`, whose address is `listens`, at `step`.

        **Raises:** `ClusterError` if `arguments` lacks these fields or has malformed ones.
        """
        self.cancel("another copy was started")
        match arguments:
            case {
                "source": int(source),
                "step": int(step),
                "listens": [str(host), int(port)],
            } if 0 < port < 1 << 16:
                self._network.add_address(source, (host, port))
            case _:
                raise ClusterError(
                    f"expected the source, step and address of a copy, got {str(arguments)[:80]!r}"
                )
        self._copies += 1
        copy = self._copy = _Copy(call, self._copies, source, step, time.monotonic())

        def open_portions() -> Portions:
            self._storage.store.begin_restore()
            return portions_of(self._storage.store)

        def opened(portions: Portions) -> None:
            if copy is not self._copy:
                return
            copy.portions, copy.count = portions, len(portions.sizes)
            copy.received_at = time.monotonic()
            self._request_more(copy)

        self._work(copy, open_portions, opened)

    def cancel(self, why: str) -> None:
        """Cancel the running copy, if any."""
        if self._copy is not None:
            self._fail(self._copy, "target", ClusterError(f"the copy was cancelled: {why}"))

    def _request_more(self, copy: _Copy) -> None:
        if copy.written == copy.count:
            self._copy = None
            assert copy.portions is not None
            self._answer(copy.call, RpcMessage({"copied": sum(copy.portions.sizes)}))
            return
        while copy.requested < min(copy.count, copy.written + WINDOW):
            body = {} if copy.requested else {"listens": list(self._network.address)}
            request = Message(
                MessageType.SNAPSHOT_REQUEST,
                0,
                self._number,
                op=copy.requested,
                index=copy.number,
                body=body,
            )
            self._context.send(copy.source, request)
            copy.requested += 1

    def take(self, message: Message) -> None:
        """Handle a `SNAPSHOT_CHUNK`; ignore a chunk of a cancelled copy.

        **Raises:** `ProtocolError` if the chunk is not the next one.
        """
        copy = self._copy
        if copy is None or (message.sender, message.index) != (copy.source, copy.number):
            return
        if "error" in message.body:
            error = ClusterError(str(message.body.get("text")))
            self._fail(copy, "source", error, str(message.body["error"]))
            return
        if copy.portions is None or message.op != copy.received or message.op >= copy.requested:
            raise message_validation.refuse(
                message, f"has portion {message.op}, expected portion {copy.received}"
            )
        if message.step != copy.step:
            text = f"its step changed from {copy.step} to {message.step} during the copy"
            self._fail(copy, "source", ClusterError(text))
            return
        copy.received += 1
        copy.received_at = time.monotonic()
        self._write(copy, copy.portions, message)

    def _write(self, copy: _Copy, portions: Portions, message: Message) -> None:
        number = message.op
        data = np.zeros(0, np.uint8) if message.payload is None else message.payload
        # A reference to the job must not keep the data alive: the sender reuses this memory.
        held = [data]

        def write() -> None:
            portions.write(number, held.pop())

        def written(_: object) -> None:
            if copy is self._copy:
                copy.written += 1
                copy.count = len(portions.sizes)  # the first portion may announce the others
                self._request_more(copy)

        self._work(copy, write, written)

    def _work(self, copy: _Copy, run: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run a job of a copy, which fails if the job fails."""
        self._context.work(Job(run, then, lambda error: self._fail(copy, "target", error)))

    def tick(self, now: float) -> None:
        """Fail the copy if a requested portion is overdue."""
        copy = self._copy
        if copy is not None and copy.received < copy.requested and now - copy.received_at > SILENCE:
            self._fail(copy, "link", ClusterError(f"no data arrived for {SILENCE:.0f} s"))

    def connection_ended(self, node: int | None, why: str) -> None:
        """Fail the copy if the connection to its source has ended."""
        if self._copy is not None and node == self._copy.source:
            self._fail(self._copy, "link", ClusterError(f"the connection ended ({why})"))

    def _fail(self, copy: _Copy, side: str, error: Exception, kind: str | None = None) -> None:
        if copy is not self._copy:
            return
        self._copy = None
        fields = {"failed": side, "kind": kind or type(error).__name__, "text": str(error)}
        self._answer(copy.call, RpcMessage(fields))
