"""A network of nodes in virtual time.

Every node has a network card with a rate in each direction, and every message a latency. A message
leaves when those before it have left, and has come when those before it have come. Nothing depends
on the clock or on chance other than the seeds of `Faults`: one seed is one run.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.distributed.protocol import (
    COORDINATOR,
    HEADER_BYTES,
    BoundContext,
    Coordinator,
    Message,
    MessageType,
    sent_on,
)
from penstock.distributed.simulation.faults import Faults
from penstock.errors import CorruptionError


@dataclass(frozen=True)
class Links:
    """Bytes per second of a node's card in each direction, and seconds from card to card."""

    bytes_per_second: float = float("inf")
    latency: float = 1e-5

    def seconds(self, size: int) -> float:
        """Return how long a message of so many bytes occupies a card."""
        return (HEADER_BYTES + size) / self.bytes_per_second


_Job = tuple[Callable[[], Any], Callable[[Any], None], Callable[[Exception], None]]


class Node(Protocol):
    """What the network delivers to."""

    epoch: int
    progress: int

    def handle(self, message: Message) -> None: ...


class Network:
    """Delivers messages among nodes and does their work, in virtual time.

    Args:
        links: what every node's card can do.
        faults: what goes wrong; nothing by default.
        cost: seconds of the job that a node has just begun; none by default.
        beat: seconds between the words by which nodes say that they are there.
        notice: seconds until the coordinator is told that a node has died; None: it is not told,
            the lease must find out.
    """

    def __init__(
        self,
        links: Links | None = None,
        faults: Faults | None = None,
        *,
        cost: Callable[[int], float] = lambda number: 0.0,
        beat: float = 0.2,
        notice: float | None = 0.02,
    ) -> None:
        self.now = 0.0
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self.taken_bytes: dict[int, int] = defaultdict(int)
        self.delivered = 0
        self._links, self._faults = links or Links(), faults or Faults()
        self._cost, self._beat, self._notice = cost, beat, notice
        self._nodes: dict[int, Node] = {}
        self._coordinator: Coordinator | None = None
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._leaving: dict[int, float] = defaultdict(float)  # when a card is free again
        self._coming: dict[int, float] = defaultdict(float)
        self._jobs: dict[int, deque[_Job]] = defaultdict(deque)
        self._working: set[int] = set()  # the nodes whose worker is at a job
        self._dead: set[int] = set()
        self._cut_off: set[int] = set()  # of those, whose process goes on
        # By sender and receiver: what was sent before is lost, its connection has ended.
        self._ended: dict[tuple[int, int], float] = defaultdict(float)
        self._stopped: dict[int, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}

    # Making it

    def runtime(self, number: int) -> BoundContext:
        """Return what a node of this number is to send and work by."""
        return BoundContext(self, number)

    def add(self, number: int, node: Node) -> None:
        """Add a node; its beats begin now."""
        self._nodes[number] = node
        self.after(0.0, self._beats, number)

    def conduct(self, coordinator: Coordinator) -> None:
        """Add the coordinator, which is also told the time and who dies."""
        self._coordinator = coordinator
        self._tick()

    # Running it

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something so much later."""
        self._at(self.now + seconds, action, arguments)

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Let time pass until something is so; return whether it became so within `limit`."""
        while not until():
            if not self._events or self._events[0][0] > limit:
                return False
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        return True

    def kill(self, number: int) -> None:
        """End a node at once; what it has sent already still travels."""
        self._dead.add(number)
        self._stopped.pop(number, None)
        if self._notice is not None:
            self.after(self._notice, self._tell_lost, number, "its process ended")

    def is_dead(self, number: int) -> bool:
        """Whether a node was killed, or is no more since its link to the coordinator has ended."""
        return number in self._dead

    def is_cut_off(self, number: int) -> bool:
        """Whether a node is no more, and its process may come again as another."""
        return number in self._cut_off

    def is_stopped(self, number: int) -> bool:
        """Whether a node stands still."""
        return number in self._stopped

    def stop(self, number: int) -> None:
        """Let a node stand still: it neither hears nor beats; it is not told of it."""
        self._stopped.setdefault(number, [])

    def resume(self, number: int) -> None:
        """Let a stopped node go on, with all that has come meanwhile."""
        for action, arguments in self._stopped.pop(number, []):
            action(*arguments)

    # What runtimes ask

    def send(self, sender: int, to: int, message: Message) -> None:
        """Carry a message, as far as the faults let it."""
        if sender in self._dead:
            return
        seconds = self._links.seconds(message.size)
        left = max(self.now, self._leaving[sender]) + seconds
        self._leaving[sender] = left
        self.sent_bytes[sender] += message.size
        for late, carried in self._faults.carry(self.now, sender, to, message):
            came = max(left + self._links.latency + late, self._coming[to] + seconds)
            if late == 0:
                self._coming[to] = came
            arguments = (sender, to, self.now, carried)
            self._at(came, self._unless_stopped, (to, self._deliver, arguments))

    def work(
        self,
        number: int,
        job: Callable[[], Any],
        then: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Do a job when the node's worker is free; it takes as long as `cost` says.

        What the job does has happened when it begins; the node learns of it at its end, if it is
        still there.
        """
        self._jobs[number].append((job, then, failed))
        if number not in self._working:
            self._begin_job(number)

    def _at(self, when: float, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action, arguments))

    def _begin_job(self, number: int) -> None:
        job, then, failed = self._jobs[number].popleft()
        self._working.add(number)
        tell: Callable[[], None]
        try:
            result = job()
        except Exception as error:  # it is the node's to report, as a real worker's is
            tell = functools.partial(failed, error)
        else:
            tell = functools.partial(then, result)
        end = self.now + self._cost(number)
        self._at(end, self._unless_stopped, (number, self._end_job, (number, tell)))

    def _end_job(self, number: int, tell: Callable[[], None]) -> None:
        if number in self._dead:
            return
        self._working.discard(number)
        tell()
        if self._jobs[number] and number not in self._working:
            self._begin_job(number)

    def _deliver(
        self, sender: int, to: int, sent: float, carried: Message | CorruptionError
    ) -> None:
        if to in self._dead or sent < self._ended[sender, to]:
            return
        self.delivered += 1
        if isinstance(carried, CorruptionError):
            self._report_damage(sender, to, carried)
            return
        carried = _taken(carried)
        self.taken_bytes[to] += carried.size
        if to == COORDINATOR:
            assert self._coordinator is not None
            self._coordinator.handle(carried)
        elif to in self._nodes:
            self._nodes[to].handle(carried)

    def _report_damage(self, sender: int, to: int, error: CorruptionError) -> None:
        """Do as a real node does with a frame whose checksum is wrong: end the link, and tell.

        A node's link to the coordinator is its place: with it the node is lost.
        """
        assert self._coordinator is not None
        if to == COORDINATOR:
            self._coordinator.damaged(str(error), [sender])
        if COORDINATOR in (sender, to):
            self._cut(sender or to)
            return
        # What follows is lost too, until the sender has noticed and connects again.
        self._ended[sender, to] = self.now + self._links.latency
        epoch, body = self._nodes[to].epoch, {"text": str(error), "peer": sender}
        self.send(to, COORDINATOR, Message(MessageType.CORRUPT_FRAME, epoch, to, body=body))

    def _cut(self, number: int) -> None:
        """End a node's link to the coordinator."""
        if number in self._dead:
            return
        self._dead.add(number)
        self._cut_off.add(number)
        for link in ((number, COORDINATOR), (COORDINATOR, number)):
            self._ended[link] = float("inf")
        self.after(self._links.latency, self._tell_lost, number, "its connection ended")

    def _unless_stopped(
        self, number: int, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if number in self._stopped:
            self._stopped[number].append((action, arguments))
        else:
            action(*arguments)

    def _beats(self, number: int) -> None:
        if number in self._dead or number not in self._nodes:
            return
        if number not in self._stopped:
            body = {
                "progress": self._nodes[number].progress,
                "busy": number in self._working,
            }
            self.send(number, COORDINATOR, Message(MessageType.HEARTBEAT, 0, number, body=body))
        self.after(self._beat, self._beats, number)

    def _tick(self) -> None:
        assert self._coordinator is not None
        self._coordinator.tick(self.now)
        self.after(self._beat / 2, self._tick)

    def _tell_lost(self, number: int, why: str) -> None:
        assert self._coordinator is not None
        self._coordinator.lost(number, why)


def _taken(message: Message) -> Message:
    """Return a message as it comes over a wire: in memory of the receiver's own.

    It is copied when it comes and not when it is sent, as a real sender reads what it sends after
    `send` has returned: who uses that memory again too early sends something else.
    """
    if message.payload is None:
        return message
    return sent_on(message, message.sender, message.payload.copy())
