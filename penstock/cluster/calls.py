"""Calls between processes: a method by its name, plain arguments, arrays; an answer or an error.

Arrays go in pieces, so that no frame is larger than a link takes at once. A method is looked up by
whoever answers in a table of its own (`store_calls.py`); nothing else can be named.
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
from penstock.errors import ClusterError, CorruptionError, PenstockError, StorageError
from penstock.fabric.messages import Kind, Message, pack_arrays, unpack_arrays
from penstock.store.flash import OtherStoreError

Arrays = Mapping[str, np.ndarray]

PIECE_BYTES = 64 << 20
_SILENCE = 60.0  # seconds without a word from a node that is to answer

_ERRORS: Mapping[str, type[PenstockError]] = {
    kind.__name__: kind
    for kind in (*vars(errors).values(), OtherStoreError)
    if isinstance(kind, type) and issubclass(kind, PenstockError)
}


class ShardLostError(StorageError):
    """A shard of the store was lost before it answered."""


@dataclass(frozen=True)
class Said:
    """What a call or its answer says: plain data, and arrays."""

    body: Mapping[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


def error_class(name: str) -> type[PenstockError]:
    """Return the class of an error that another process has named; `ClusterError` for others'."""
    return _ERRORS.get(name, ClusterError)


def frames(kind: Kind, sender: int, number: int, said: Said) -> Iterator[Message]:
    """Yield the messages in which a call, or its answer, goes: what it says, then its bytes."""
    described, payload = pack_arrays(said.arrays)
    count = -(-payload.nbytes // PIECE_BYTES)
    body = {"says": dict(said.body), "arrays": described, "bytes": payload.nbytes}
    yield Message(kind, 0, sender, op=number, index=count, body=body)
    for place in range(count):
        piece = payload[place * PIECE_BYTES : (place + 1) * PIECE_BYTES]
        yield Message(kind, 0, sender, op=number, chunk=place, payload=piece, size=piece.nbytes)


class Gathered:
    """Puts the frames from one node together; they come in the order in which they were sent."""

    def __init__(self) -> None:
        self._first: Message | None = None
        self._payload = np.zeros(0, np.uint8)
        self._came = 0

    def take(self, message: Message) -> tuple[int, Said] | None:
        """Take a frame; return a call's number and what it says once it is whole.

        Raises:
            CorruptionError: the frames do not make up what the first has announced.
        """
        if self._first is None:
            size = message.body.get("bytes")
            if not isinstance(size, int) or size < 0 or message.index != -(-size // PIECE_BYTES):
                raise CorruptionError(f"a {message.kind.name} announces {str(size)[:40]} bytes")
            try:
                self._payload = np.empty(size, np.uint8)
            except (MemoryError, ValueError, OverflowError):
                text = f"a {message.kind.name} announces {size} bytes, more than there is room for"
                raise CorruptionError(text) from None
            self._first, self._came = message, 0
        else:
            end = self._came + message.size
            if message.op != self._first.op or message.payload is None or end > self._payload.size:
                raise CorruptionError(f"a {message.kind.name} has come in pieces that do not fit")
            self._payload[self._came : end] = message.payload
            self._came = end
        if self._came < self._payload.size:
            return None
        first, payload = self._first, self._payload
        self._first, self._payload = None, np.zeros(0, np.uint8)
        arrays = unpack_arrays(first.body.get("arrays", ()), payload)
        says = first.body.get("says")
        return first.op, Said(says if isinstance(says, dict) else {}, arrays)


class Calls:
    """Has other processes do something and waits for it.

    Args:
        send: sends to a node; from any thread.
        broken: raises if nobody will ever answer any more.
    """

    def __init__(self, send: Callable[[int, Message], None], broken: Callable[[], None]) -> None:
        self._send, self._broken = send, broken
        self._guard = threading.Lock()
        self._number = 0
        self._waiting: dict[int, tuple[int, queue.SimpleQueue[Said | Exception]]] = {}
        self._gathered: dict[int, Gathered] = {}
        self._heard: dict[int, float] = {}
        self._lost: dict[int, str] = {}

    def ask(self, node: int, method: str, arguments: Mapping[str, Any], arrays: Arrays) -> Said:
        """Have a node do something; return its answer.

        Raises:
            ShardLostError: it was lost before it had answered.
            PenstockError: whatever it met.
        """
        answers: queue.SimpleQueue[Said | Exception] = queue.SimpleQueue()
        with self._guard:
            if node in self._lost:
                raise ShardLostError(self._lost[node])
            number = self._number = self._number + 1
            self._waiting[number] = node, answers
        try:
            said = Said({"method": method, "with": dict(arguments)}, arrays)
            for message in frames(Kind.CALL, 0, number, said):
                self._send(node, message)
            answer = self._await(node, method, answers)
        finally:
            with self._guard:
                del self._waiting[number]
        if isinstance(answer, Exception):
            raise answer
        if "error" in answer.body:
            raise error_class(str(answer.body["error"]))(str(answer.body.get("text")))
        return answer

    def _await(
        self, node: int, method: str, answers: queue.SimpleQueue[Said | Exception]
    ) -> Said | Exception:
        began = time.monotonic()
        while True:
            try:
                return answers.get(timeout=0.5)
            except queue.Empty:
                self._broken()
                silent = time.monotonic() - max(began, self._heard.get(node, began))
                if silent > _SILENCE:
                    text = f"node {node} has been silent for {silent:.0f} s, asked for {method}"
                    raise ShardLostError(text) from None

    def heard(self, node: int) -> None:
        """Take note that a node is alive; in the endpoint's thread."""
        self._heard[node] = time.monotonic()

    def take(self, message: Message) -> None:
        """Take a frame of an answer; in the endpoint's thread."""
        self.heard(message.sender)
        gathered = self._gathered.setdefault(message.sender, Gathered())
        whole = gathered.take(message)
        if whole is None:
            return
        with self._guard:
            waiting = self._waiting.get(whole[0])
        if waiting is not None:
            waiting[1].put(whole[1])

    def lost(self, node: int, why: str) -> None:
        """Let nobody wait for a node that is gone."""
        with self._guard:
            self._lost[node] = why
            waiting = [answers for other, answers in self._waiting.values() if other == node]
        self._gathered.pop(node, None)
        for answers in waiting:
            answers.put(ShardLostError(why))
