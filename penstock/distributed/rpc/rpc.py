"""RPC between processes: a method name, plain arguments and arrays; a response or an error.

Arrays travel in pieces that fit into a slot of shared memory. The responder looks up a method in a
fixed table (`store_server.py`); no other function can be called.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock import errors
from penstock.distributed.protocol import (
    CHUNK_BYTES,
    Message,
    MessageType,
    pack_arrays,
    unpack_arrays,
)
from penstock.errors import (
    ClusterError,
    CorruptionError,
    PenstockError,
    ProtocolError,
    StorageError,
)
from penstock.store.flash import OtherStoreError

Arrays = Mapping[str, np.ndarray]

PIECE_BYTES = CHUNK_BYTES
WRITE_BYTES = 64 << 20
"""The most bytes of values that one call overwrites."""
_POLL_SECONDS = 0.1  # seconds between two checks for other events
_SILENCE_SECONDS = 60.0  # seconds without any message from the node that is to respond

_ERRORS: Mapping[str, type[PenstockError]] = {
    kind.__name__: kind
    for kind in (*vars(errors).values(), OtherStoreError)
    if isinstance(kind, type) and issubclass(kind, PenstockError)
}


class ShardLostError(StorageError):
    """A shard of the store was lost before it answered."""


class InvalidResponseError(ProtocolError):
    """A node's response does not match the request."""


@dataclass(frozen=True)
class RpcMessage:
    """The content of a call or a response: plain data, and arrays."""

    body: Mapping[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


def error_class(name: str) -> type[PenstockError]:
    """Return the class of an error's name; `ClusterError` for an unknown name."""
    return _ERRORS.get(name, ClusterError)


def frames(kind: MessageType, sender: int, number: int, content: RpcMessage) -> Iterator[Message]:
    """Yield the messages of a call or a response: first the body, then the bytes of the arrays."""
    described, payload = pack_arrays(content.arrays)
    count = -(-payload.nbytes // PIECE_BYTES)
    body = {"says": dict(content.body), "arrays": described, "bytes": payload.nbytes}
    yield Message(kind, 0, sender, op=number, index=count, body=body)
    for part in range(count):
        piece = payload[part * PIECE_BYTES : (part + 1) * PIECE_BYTES]
        yield Message(kind, 0, sender, op=number, chunk=part, payload=piece, size=piece.nbytes)


class FrameAssembler:
    """Assembles the frames of one node; frames arrive in the order in which they were sent.

    Args:
        most: returns the most bytes of arrays in a call or response, given its number.
    """

    def __init__(self, most: Callable[[int], int]) -> None:
        self._most = most
        self._first: Message | None = None
        self._refused: int | None = None  # the refused number, of which more frames may arrive
        self._payload = np.zeros(0, np.uint8)
        self._received = 0

    @property
    def number(self) -> int | None:
        """The number of the incomplete call or response."""
        return None if self._first is None else self._first.op

    def take(self, message: Message) -> tuple[int, RpcMessage] | None:
        """Add a frame; return the number and the content of a call once it is complete.

        Raises:
            CorruptionError: the frames do not match the announcement in the first frame, or the
                announcement is over the limit. The next frame begins a new call.
        """
        if self._first is None and self._refused == message.op and not message.body:
            return None
        try:
            return self._take(message)
        except CorruptionError:
            self._first, self._payload = None, np.zeros(0, np.uint8)
            self._refused = message.op
            raise

    def _take(self, message: Message) -> tuple[int, RpcMessage] | None:
        if self._first is None:
            self._payload = np.empty(self._announced(message), np.uint8)
            self._first, self._received = message, 0
        else:
            end = self._received + message.size
            if message.op != self._first.op or message.payload is None or end > self._payload.size:
                raise CorruptionError(
                    f"the frames of a {message.kind.name} message do not match its first frame"
                )
            self._payload[self._received : end] = message.payload
            self._received = end
        if self._received < self._payload.size:
            return None
        first, payload = self._first, self._payload
        self._first, self._payload = None, np.zeros(0, np.uint8)
        arrays = unpack_arrays(first.body.get("arrays", ()), payload)
        says = first.body.get("says")
        return first.op, RpcMessage(says if isinstance(says, dict) else {}, arrays)

    def _announced(self, message: Message) -> int:
        size, most = message.body.get("bytes"), self._most(message.op)
        if type(size) is not int or size < 0 or message.index != -(-size // PIECE_BYTES):
            raise CorruptionError(
                f"{message.kind.name} announces {str(size)[:40]} bytes in {message.index} frames"
            )
        if size > most:
            raise CorruptionError(
                f"{message.kind.name} from node {message.sender} announces {size:,} bytes, "
                f"expected at most {most:,}; do all nodes run the same version of Penstock?"
            )
        return size


class PendingCall:
    """A call without a response yet, and the queue for its response."""

    def __init__(self, calls: RpcClient, node: int, method: str, most: int) -> None:
        self.node, self.method, self.most = node, method, most
        self.answers: queue.SimpleQueue[RpcMessage | Exception] = queue.SimpleQueue()
        self._calls = calls

    def answer(self, meanwhile: Callable[[], None] = lambda: None) -> RpcMessage:
        """Wait for the response, and return it; raises as `RpcClient.ask` does.

        `meanwhile` is called repeatedly; an error that it raises ends the wait.
        """
        answer = self._calls._await(self, meanwhile)
        if isinstance(answer, Exception):
            raise answer
        if "error" in answer.body:
            raise error_class(str(answer.body["error"]))(str(answer.body.get("text")))
        return answer


class RpcClient:
    """Calls methods of other processes.

    Args:
        send: sends to a node; from any thread.
        broken: raises if no node will ever respond.
    """

    def __init__(self, send: Callable[[int, Message], None], broken: Callable[[], None]) -> None:
        self._send, self._broken = send, broken
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, PendingCall] = {}  # until their responses are complete
        self._assemblers: dict[int, FrameAssembler] = {}
        self._heard_at: dict[int, float] = {}
        self._lost: dict[int, str] = {}

    def ask(
        self,
        node: int,
        method: str,
        arguments: Mapping[str, Any],
        arrays: Arrays,
        most: int = 0,
    ) -> RpcMessage:
        """Call a method of a node; return the response.

        Args:
            most: the most bytes of arrays in the response.

        Raises:
            ShardLostError: the node was lost before it responded.
            InvalidResponseError: the response is invalid.
            PenstockError: the error of the method.
        """
        return self.begin(node, method, arguments, arrays, most).answer()

    def begin(
        self,
        node: int,
        method: str,
        arguments: Mapping[str, Any],
        arrays: Arrays,
        most: int = 0,
    ) -> PendingCall:
        """Call a method of a node without waiting for the response; arguments as in `ask`."""
        call = PendingCall(self, node, method, most)
        with self._lock:
            if node in self._lost:
                call.answers.put(ShardLostError(self._lost[node]))
                return call
            number = self._number = self._number + 1
            self._waiting[number] = call
        content = RpcMessage({"method": method, "with": dict(arguments)}, arrays)
        for message in frames(MessageType.RPC_REQUEST, 0, number, content):
            self._send(node, message)
        return call

    def _await(self, call: PendingCall, meanwhile: Callable[[], None]) -> RpcMessage | Exception:
        began = time.monotonic()
        while True:
            try:
                return call.answers.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                meanwhile()
                self._broken()
                silent = time.monotonic() - max(began, self._heard_at.get(call.node, began))
                if silent > _SILENCE_SECONDS:
                    raise ShardLostError(
                        f"node {call.node} has not responded to {call.method} for {silent:.0f} s"
                    ) from None

    def heard(self, node: int) -> None:
        """Record that a node is alive; in the endpoint's thread."""
        self._heard_at[node] = time.monotonic()

    def take(self, message: Message) -> None:
        """Handle a frame of a response; in the endpoint's thread."""
        self.heard(message.sender)
        sender = message.sender
        assembler = self._assemblers.setdefault(
            sender, FrameAssembler(lambda number: self._most(sender, number))
        )
        incomplete = assembler.number
        try:
            complete = assembler.take(message)
        except CorruptionError as error:
            for number in {message.op, incomplete or message.op}:
                self._answer(sender, number, InvalidResponseError(str(error)))
            return
        if complete is not None:
            self._answer(sender, *complete)

    def _most(self, node: int, number: int) -> int:
        with self._lock:
            call = self._waiting.get(number)
        return call.most if call is not None and call.node == node else 0

    def _answer(self, node: int, number: int, answer: RpcMessage | Exception) -> None:
        """Complete a call of this node; a response to the call of another node is ignored."""
        with self._lock:
            call = self._waiting.get(number)
            if call is None or call.node != node:
                return
            del self._waiting[number]
        call.answers.put(answer)

    def lost(self, node: int, why: str) -> None:
        """Fail all pending calls of a lost node."""
        with self._lock:
            self._lost[node] = why
            numbers = [number for number, call in self._waiting.items() if call.node == node]
            waiting = [self._waiting.pop(number) for number in numbers]
        self._assemblers.pop(node, None)
        for call in waiting:
            call.answers.put(ShardLostError(why))
