"""Calls between processes: a method by its name, plain arguments, arrays; an answer or an error.

Arrays go in pieces of the size that shared memory takes, where there is some. A method is looked up
by whoever answers in a table of its own (`store_server.py`); nothing else can be named.
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
"""The most values that one call overwrites."""
_LOOK = 0.1  # seconds between two looks at what else has happened
_SILENCE = 60.0  # seconds without a word from a node that is to answer

_ERRORS: Mapping[str, type[PenstockError]] = {
    kind.__name__: kind
    for kind in (*vars(errors).values(), OtherStoreError)
    if isinstance(kind, type) and issubclass(kind, PenstockError)
}


class ShardLostError(StorageError):
    """A shard of the store was lost before it answered."""


class InvalidResponseError(ProtocolError):
    """What a node has answered is no answer to what it was asked."""


@dataclass(frozen=True)
class RpcMessage:
    """What a call or its answer says: plain data, and arrays."""

    body: Mapping[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


def error_class(name: str) -> type[PenstockError]:
    """Return the class of an error that another process has named; `ClusterError` for others'."""
    return _ERRORS.get(name, ClusterError)


def frames(kind: MessageType, sender: int, number: int, said: RpcMessage) -> Iterator[Message]:
    """Yield the messages in which a call, or its answer, goes: what it says, then its bytes."""
    described, payload = pack_arrays(said.arrays)
    count = -(-payload.nbytes // PIECE_BYTES)
    body = {"says": dict(said.body), "arrays": described, "bytes": payload.nbytes}
    yield Message(kind, 0, sender, op=number, index=count, body=body)
    for place in range(count):
        piece = payload[place * PIECE_BYTES : (place + 1) * PIECE_BYTES]
        yield Message(kind, 0, sender, op=number, chunk=place, payload=piece, size=piece.nbytes)


class FrameAssembler:
    """Puts the frames from one node together; they come in the order in which they were sent.

    Args:
        most: returns the most bytes of arrays that may come with a call or an answer, by its
            number.
    """

    def __init__(self, most: Callable[[int], int]) -> None:
        self._most = most
        self._first: Message | None = None
        self._refused: int | None = None  # of what is refused, the rest may come yet
        self._payload = np.zeros(0, np.uint8)
        self._came = 0

    @property
    def number(self) -> int | None:
        """The number of the call or answer that has come in part."""
        return None if self._first is None else self._first.op

    def take(self, message: Message) -> tuple[int, RpcMessage] | None:
        """Take a frame; return a call's number and what it says once it is whole.

        Raises:
            CorruptionError: the frames do not make up what the first has announced, or that is more
                than can be. What comes next is taken as if nothing had been.
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
            self._first, self._came = message, 0
        else:
            end = self._came + message.size
            if message.op != self._first.op or message.payload is None or end > self._payload.size:
                raise CorruptionError(f"{message.kind.name} has come in pieces that do not fit")
            self._payload[self._came : end] = message.payload
            self._came = end
        if self._came < self._payload.size:
            return None
        first, payload = self._first, self._payload
        self._first, self._payload = None, np.zeros(0, np.uint8)
        arrays = unpack_arrays(first.body.get("arrays", ()), payload)
        says = first.body.get("says")
        return first.op, RpcMessage(says if isinstance(says, dict) else {}, arrays)

    def _announced(self, message: Message) -> int:
        size, most = message.body.get("bytes"), self._most(message.op)
        if type(size) is not int or size < 0 or message.index != -(-size // PIECE_BYTES):
            raise CorruptionError(f"{message.kind.name} announces {str(size)[:40]} bytes")
        if size > most:
            raise CorruptionError(
                f"{message.kind.name} from node {message.sender} announces {size:,} bytes where "
                f"{most:,} at most are expected; do all nodes run the same version of Penstock?"
            )
        return size


class PendingCall:
    """A call that is on its way, and who waits for its answer."""

    def __init__(self, calls: RpcClient, node: int, method: str, most: int) -> None:
        self.node, self.method, self.most = node, method, most
        self.answers: queue.SimpleQueue[RpcMessage | Exception] = queue.SimpleQueue()
        self._calls = calls

    def answer(self, meanwhile: Callable[[], None] = lambda: None) -> RpcMessage:
        """Wait for the answer, and return it; as `RpcClient.ask`.

        `meanwhile` is called again and again; it may raise, which ends the waiting.
        """
        answer = self._calls._await(self, meanwhile)
        if isinstance(answer, Exception):
            raise answer
        if "error" in answer.body:
            raise error_class(str(answer.body["error"]))(str(answer.body.get("text")))
        return answer


class RpcClient:
    """Has other processes do something and waits for it.

    Args:
        send: sends to a node; from any thread.
        broken: raises if nobody will ever answer any more.
    """

    def __init__(self, send: Callable[[int, Message], None], broken: Callable[[], None]) -> None:
        self._send, self._broken = send, broken
        self._guard = threading.Lock()
        self._number = 0
        self._waiting: dict[int, PendingCall] = {}  # until their answers are whole
        self._gathered: dict[int, FrameAssembler] = {}
        self._heard: dict[int, float] = {}
        self._lost: dict[int, str] = {}

    def ask(
        self,
        node: int,
        method: str,
        arguments: Mapping[str, Any],
        arrays: Arrays,
        most: int = 0,
    ) -> RpcMessage:
        """Have a node do something; return its answer.

        Args:
            most: the most bytes of arrays that can be in the answer.

        Raises:
            ShardLostError: it was lost before it had answered.
            InvalidResponseError: its answer makes no sense.
            PenstockError: whatever it met.
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
        """Have a node begin to do something, whose answer can be waited for; as `ask`."""
        asked = PendingCall(self, node, method, most)
        with self._guard:
            if node in self._lost:
                asked.answers.put(ShardLostError(self._lost[node]))
                return asked
            number = self._number = self._number + 1
            self._waiting[number] = asked
        said = RpcMessage({"method": method, "with": dict(arguments)}, arrays)
        for message in frames(MessageType.RPC_REQUEST, 0, number, said):
            self._send(node, message)
        return asked

    def _await(self, asked: PendingCall, meanwhile: Callable[[], None]) -> RpcMessage | Exception:
        began = time.monotonic()
        while True:
            try:
                return asked.answers.get(timeout=_LOOK)
            except queue.Empty:
                meanwhile()
                self._broken()
                silent = time.monotonic() - max(began, self._heard.get(asked.node, began))
                if silent > _SILENCE:
                    raise ShardLostError(
                        f"node {asked.node} has been silent for {silent:.0f} s, asked for "
                        f"{asked.method}"
                    ) from None

    def heard(self, node: int) -> None:
        """Take note that a node is alive; in the endpoint's thread."""
        self._heard[node] = time.monotonic()

    def take(self, message: Message) -> None:
        """Take a frame of an answer; in the endpoint's thread."""
        self.heard(message.sender)
        gathered = self._gathered.setdefault(message.sender, FrameAssembler(self._most))
        under_way = gathered.number
        try:
            whole = gathered.take(message)
        except CorruptionError as error:
            for number in {message.op, under_way or message.op}:
                self._answer(number, InvalidResponseError(str(error)))
            return
        if whole is not None:
            self._answer(*whole)

    def _most(self, number: int) -> int:
        with self._guard:
            return self._waiting[number].most if number in self._waiting else 0

    def _answer(self, number: int, answer: RpcMessage | Exception) -> None:
        with self._guard:
            asked = self._waiting.pop(number, None)
        if asked is not None:
            asked.answers.put(answer)

    def lost(self, node: int, why: str) -> None:
        """Let nobody wait for a node that is gone."""
        with self._guard:
            self._lost[node] = why
            numbers = [number for number, asked in self._waiting.items() if asked.node == node]
            waiting = [self._waiting.pop(number) for number in numbers]
        self._gathered.pop(node, None)
        for asked in waiting:
            asked.answers.put(ShardLostError(why))
