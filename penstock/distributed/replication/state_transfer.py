"""The two ends of a copy that goes straight from one node of a shard to another.

The learner asks for one portion after the other of what the node holds beside which it has come,
a few ahead of what it has written: so that neither has more of them in memory, whatever is slower.
That a portion is whole is seen to by the link. Nothing here waits: what is read and written are
jobs of the two nodes' workers, so that whoever gives up a copy is heard at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.distributed.control_messages import address_of
from penstock.distributed.protocol import (
    Message,
    MessageType,
    NodeContext,
    message_validation,
    message_with,
)
from penstock.distributed.rpc import RpcMessage
from penstock.distributed.transport import Address
from penstock.errors import ClusterError
from penstock.store import Portions, Store, portions_of

WINDOW = 4  # portions that are asked for and not written yet
SILENCE = 60.0  # seconds in which a portion that was asked for must come


class HeldStore(Protocol):
    """Where a node's store is."""

    @property
    def store(self) -> Store: ...


class PeerDirectory(Protocol):
    """What a node learns others' addresses by, and says its own."""

    @property
    def address(self) -> Address: ...

    def reach(self, number: int, address: Address) -> None: ...


class SnapshotSender:
    """Gives another node what this one holds, portion by portion."""

    def __init__(
        self, number: int, place: HeldStore, runtime: NodeContext, network: PeerDirectory
    ) -> None:
        self._number, self._place, self._runtime = number, place, runtime
        self._network = network
        self._portions: Portions | None = None

    def take(self, message: Message) -> None:
        """Answer to a `SNAPSHOT_REQUEST`, behind what this node's worker is at.

        **Raises:** `ProtocolError` if it makes no sense.
        """
        to, wanted = message.sender, message.op
        if "listens" in message.body:
            self._network.reach(to, address_of(message, message.body["listens"]))

        def answer(data: np.ndarray | None, step: int = 0, **said: Any) -> None:
            numbers = {"epoch": 0, "step": step, "op": wanted, "index": message.index}
            portion = message_with(
                data, kind=MessageType.SNAPSHOT_CHUNK, sender=self._number, **numbers, **said
            )
            self._runtime.send(to, portion)

        def read() -> tuple[np.ndarray, int]:
            return self._read(wanted), self._place.store.step

        def failed(error: Exception) -> None:
            answer(None, body={"error": type(error).__name__, "text": str(error)})

        self._runtime.work(read, lambda found: answer(*found), failed)

    def _read(self, number: int) -> np.ndarray:
        if self._portions is None or number == 0:
            self._portions = portions_of(self._place.store)
        portions = self._portions
        if number + 1 >= len(portions.sizes):
            self._portions = None
        return portions.read(number)


@dataclass
class _Copy:
    """A copy that is under way. `call` asked for it, `number` tells it from those before."""

    call: int
    number: int
    source: int
    step: int  # at which the source stands
    heard_at: float
    portions: Portions | None = None
    count: int = 0
    asked: int = 0
    came: int = 0
    written: int = 0


class SnapshotReceiver:
    """Has another node give this one all that it holds, and writes it.

    Args:
        answer: says what has come of a call to copy, by its number: `copied` bytes, or on which
            side it `failed`.
    """

    def __init__(
        self,
        number: int,
        place: HeldStore,
        runtime: NodeContext,
        network: PeerDirectory,
        answer: Callable[[int, RpcMessage], None],
    ) -> None:
        self._number, self._place, self._runtime = number, place, runtime
        self._network, self._answer = network, answer
        self._copy: _Copy | None = None
        self._copies = 0

    def begin(self, call: int, given: Any) -> None:
        """Begin to copy what node `source`, which `listens` there, holds at `step`.

        **Raises:** `ClusterError` if that is not what is `given`.
        """
        self.give_up("another one was begun")
        match given:
            case {
                "source": int(source),
                "step": int(step),
                "listens": [str(host), int(port)],
            } if 0 < port < 1 << 16:
                self._network.reach(source, (host, port))
            case _:
                raise ClusterError(f"asked for a copy of {str(given)[:80]!r}, which is no node")
        self._copies += 1
        copy = self._copy = _Copy(call, self._copies, source, step, time.monotonic())

        def open_portions() -> Portions:
            self._place.store.begin_restore()
            return portions_of(self._place.store)

        def opened(portions: Portions) -> None:
            if copy is not self._copy:
                return
            copy.portions, copy.count = portions, len(portions.sizes)
            copy.heard_at = time.monotonic()
            self._ask_for_more(copy)

        self._runtime.work(open_portions, opened, lambda error: self._fail(copy, "target", error))

    def give_up(self, why: str) -> None:
        """Take and write nothing more of the copy that is under way, if there is one."""
        if self._copy is not None:
            self._fail(self._copy, "target", ClusterError(f"the copy was given up: {why}"))

    def _ask_for_more(self, copy: _Copy) -> None:
        if copy.written == copy.count:
            self._copy = None
            assert copy.portions is not None
            self._answer(copy.call, RpcMessage({"copied": sum(copy.portions.sizes)}))
            return
        while copy.asked < min(copy.count, copy.written + WINDOW):
            body = {} if copy.asked else {"listens": list(self._network.address)}
            request = Message(
                MessageType.SNAPSHOT_REQUEST,
                0,
                self._number,
                op=copy.asked,
                index=copy.number,
                body=body,
            )
            self._runtime.send(copy.source, request)
            copy.asked += 1

    def take(self, message: Message) -> None:
        """Take a `SNAPSHOT_CHUNK`; one of a copy that was given up is let go.

        **Raises:** `ProtocolError` if it is not the one that comes next.
        """
        copy = self._copy
        if copy is None or (message.sender, message.index) != (copy.source, copy.number):
            return
        if "error" in message.body:
            error = ClusterError(str(message.body.get("text")))
            self._fail(copy, "source", error, str(message.body["error"]))
            return
        if copy.portions is None or message.op != copy.came or message.op >= copy.asked:
            raise message_validation.refuse(
                message, f"brings portion {message.op} where {copy.came} is next"
            )
        if message.step != copy.step:
            text = f"it went from step {copy.step} to step {message.step} while it was copied"
            self._fail(copy, "source", ClusterError(text))
            return
        copy.came += 1
        copy.heard_at = time.monotonic()
        self._write(copy, copy.portions, message)

    def _write(self, copy: _Copy, portions: Portions, message: Message) -> None:
        number = message.op
        data = np.zeros(0, np.uint8) if message.payload is None else message.payload
        # Whoever keeps the job does not keep the data: its memory is the sender's to use again.
        held = [data]

        def write() -> None:
            portions.write(number, held.pop())

        def written(_: object) -> None:
            if copy is self._copy:
                copy.written += 1
                self._ask_for_more(copy)

        self._runtime.work(write, written, lambda error: self._fail(copy, "target", error))

    def tick(self, now: float) -> None:
        """Look whether a portion that was asked for has not come for too long."""
        copy = self._copy
        if copy is not None and copy.came < copy.asked and now - copy.heard_at > SILENCE:
            self._fail(copy, "link", ClusterError(f"nothing came for {SILENCE:.0f} s"))

    def link_ended(self, node: int | None, why: str) -> None:
        """Take note that a link to a node has ended: of what was on its way nothing comes."""
        if self._copy is not None and node == self._copy.source:
            self._fail(self._copy, "link", ClusterError(f"the connection ended ({why})"))

    def _fail(self, copy: _Copy, side: str, error: Exception, kind: str | None = None) -> None:
        if copy is not self._copy:
            return
        self._copy = None
        said = {"failed": side, "kind": kind or type(error).__name__, "text": str(error)}
        self._answer(copy.call, RpcMessage(said))
