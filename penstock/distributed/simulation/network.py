"""A network of nodes in virtual time.

Every node has a network card with a rate in each direction, and every message has a latency. A card
sends messages one after another, and receives them one after another, in the order in which their
first bytes arrive. Messages without a payload wait for no other: they are a few bytes on
connections of their own. The seed of `Faults` is the
only source of chance, and nothing depends on the clock: one seed is one run.
"""

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
    Job,
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
        """Return for how many seconds a message of `size` bytes occupies a card."""
        return (HEADER_BYTES + size) / self.bytes_per_second


class Node(Protocol):
    """A node that receives messages from the network."""

    epoch: int
    progress: int

    def handle(self, message: Message) -> None: ...


class Network:
    """Delivers the messages of nodes and runs their jobs, in virtual time.

    Args:
        links: the rate and the latency of every node's card.
        faults: the faults of messages; none by default.
        cost: returns the seconds of the job that a node has just begun; 0 by default.
        heartbeat_seconds: seconds between two heartbeats of a node.
        notice: seconds until the coordinator is notified of a node's death; None: never, so that
            the coordinator's timeout must detect it.
    """

    def __init__(
        self,
        links: Links | None = None,
        faults: Faults | None = None,
        *,
        cost: Callable[[int], float] = lambda number: 0.0,
        heartbeat_seconds: float = 0.2,
        notice: float | None = 0.02,
    ) -> None:
        self.now = 0.0
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self.taken_bytes: dict[int, int] = defaultdict(int)
        self.delivered = 0
        self._links, self._faults = links or Links(), faults or Faults()
        self._cost, self._heartbeat_seconds, self._notice = cost, heartbeat_seconds, notice
        self._nodes: dict[int, Node] = {}
        self._coordinator: Coordinator | None = None
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._sending_until: dict[int, float] = defaultdict(float)  # when a card is free to send
        self._receiving_until: dict[int, float] = defaultdict(float)
        self._to_receive: dict[int, int] = defaultdict(int)  # bytes, when the card is free again
        self._jobs: dict[int, deque[Job]] = defaultdict(deque)
        self._working: set[int] = set()  # the nodes whose worker is running a job
        self._dead: set[int] = set()
        self._cut_off: set[int] = set()  # dead nodes whose process continues
        # By sender and receiver: messages sent before this time are lost with their connection.
        self._ended: dict[tuple[int, int], float] = defaultdict(float)
        self._stopped: dict[int, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}

    # Setup

    def context(self, number: int) -> BoundContext:
        """Return the context of a node."""
        return BoundContext(self, number)

    def add(self, number: int, node: Node) -> None:
        """Add a node; its heartbeats begin now."""
        self._nodes[number] = node
        self.after(0.0, self._send_heartbeats, number)

    def set_coordinator(self, coordinator: Coordinator) -> None:
        """Add the coordinator, which is also notified of time and of deaths."""
        self._coordinator = coordinator
        self._tick()

    # Running

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action in `seconds` seconds."""
        self._at(self.now + seconds, action, arguments)

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Run until a condition holds; return whether it holds by the time `limit`."""
        while not until():
            if not self._events or self._events[0][0] > limit:
                return False
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        return True

    def kill(self, number: int) -> None:
        """Kill a node at once; its messages in flight are still delivered."""
        self._dead.add(number)
        self._stopped.pop(number, None)
        if self._notice is not None:
            self.after(self._notice, self._report_loss, number, "its process ended")

    def is_dead(self, number: int) -> bool:
        """Whether a node was killed, or its connection to the coordinator has ended."""
        return number in self._dead

    def is_cut_off(self, number: int) -> bool:
        """Whether a node's connection has ended; its process may join again as another node."""
        return number in self._cut_off

    def is_stopped(self, number: int) -> bool:
        """Whether a node is paused."""
        return number in self._stopped

    def stop(self, number: int) -> None:
        """Pause a node: it handles no messages, sends no heartbeats, and does not know of it."""
        self._stopped.setdefault(number, [])

    def resume(self, number: int) -> None:
        """Resume a paused node, which then receives all deferred messages."""
        for action, arguments in self._stopped.pop(number, []):
            action(*arguments)

    def received_bytes(self, number: int) -> int:
        """Return the bytes that a node's card has received, of a message in progress too."""
        missing = self._receiving_until[number] - self.now
        if missing <= 0:
            return self._to_receive[number]
        return max(0, self._to_receive[number] - int(missing * self._links.bytes_per_second))

    # The node context

    def clock(self) -> float:
        """Return the simulated time."""
        return self.now

    def send(self, sender: int, to: int, message: Message) -> None:
        """Send a message, subject to the faults."""
        if sender in self._dead:
            return
        size, latency = message.size, self._links.latency
        seconds, departure = self._links.seconds(size), self.now
        if size:
            departure = max(departure, self._sending_until[sender])
            self._sending_until[sender] = departure + seconds
            self.sent_bytes[sender] += size
        for late, carried in self._faults.carry(self.now, sender, to, message):
            arguments = (sender, to, self.now, carried)
            begins = departure + latency + late
            if size and not late:
                self._at(begins, self._receive, (HEADER_BYTES + size, to, arguments))
            else:
                self._at(begins + seconds, self._unless_stopped, (to, self._deliver, arguments))

    def work(self, number: int, job: Job) -> None:
        """Run a job when the node's worker is free; the job takes `cost` seconds.

        The effects of the job happen at its start. The node receives the result at its end, if the
        node is still alive.
        """
        self._jobs[number].append(job)
        if number not in self._working:
            self._begin_job(number)

    def _at(self, when: float, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action, arguments))

    def _begin_job(self, number: int) -> None:
        job = self._jobs[number].popleft()
        self._working.add(number)
        report: Callable[[], None]
        job.span.__enter__()
        try:
            result = job.run()
        except Exception as error:  # the node reports the error, as with a real worker
            report = functools.partial(job.failed, error)
        else:
            report = functools.partial(job.then, result)
        end = self.now + self._cost(number)
        self._at(end, self._unless_stopped, (number, self._end_job, (number, job, report)))

    def _end_job(self, number: int, job: Job, report: Callable[[], None]) -> None:
        if number in self._dead:
            return
        self._working.discard(number)
        job.span.__exit__(None, None, None)
        report()
        if self._jobs[number] and number not in self._working:
            self._begin_job(number)

    def _receive(self, size: int, to: int, arguments: tuple[Any, ...]) -> None:
        """Receive a message whose first byte is there, after those that were there before it."""
        end = max(self.now, self._receiving_until[to]) + size / self._links.bytes_per_second
        self._receiving_until[to] = end
        self._to_receive[to] += size
        self._at(end, self._unless_stopped, (to, self._deliver, arguments))

    def _deliver(
        self, sender: int, to: int, sent: float, carried: Message | CorruptionError
    ) -> None:
        if to in self._dead or sent < self._ended[sender, to]:
            return
        self.delivered += 1
        if isinstance(carried, CorruptionError):
            self._report_damage(sender, to, carried)
            return
        carried = _as_received(carried)
        self.taken_bytes[to] += carried.size
        if to == COORDINATOR:
            assert self._coordinator is not None
            self._coordinator.handle(carried)
        elif to in self._nodes:
            self._nodes[to].handle(carried)

    def _report_damage(self, sender: int, to: int, error: CorruptionError) -> None:
        """Handle a frame with a wrong checksum like a real node: end the connection, and report.

        A node whose connection to the coordinator has ended is lost.
        """
        assert self._coordinator is not None
        if to == COORDINATOR:
            self._coordinator.report_corruption(str(error), [sender])
        if COORDINATOR in (sender, to):
            self._cut(sender or to)
            return
        # Later messages are lost, too, until the sender has noticed and connects again.
        self._ended[sender, to] = self.now + self._links.latency
        epoch, body = self._nodes[to].epoch, {"text": str(error), "peer": sender}
        self.send(to, COORDINATOR, Message(MessageType.CORRUPT_FRAME, epoch, to, body=body))

    def _cut(self, number: int) -> None:
        """End a node's connection to the coordinator."""
        if number in self._dead:
            return
        self._dead.add(number)
        self._cut_off.add(number)
        for link in ((number, COORDINATOR), (COORDINATOR, number)):
            self._ended[link] = float("inf")
        self.after(self._links.latency, self._report_loss, number, "its connection ended")

    def _unless_stopped(
        self, number: int, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if number in self._stopped:
            self._stopped[number].append((action, arguments))
        else:
            action(*arguments)

    def _send_heartbeats(self, number: int) -> None:
        if number in self._dead or number not in self._nodes:
            return
        if number not in self._stopped:
            body = {
                "progress": self._nodes[number].progress,
                "busy": number in self._working,
                "received": self.received_bytes(number),
            }
            self.send(number, COORDINATOR, Message(MessageType.HEARTBEAT, 0, number, body=body))
        self.after(self._heartbeat_seconds, self._send_heartbeats, number)

    def _tick(self) -> None:
        assert self._coordinator is not None
        self._coordinator.tick(self.now, self.received_bytes(COORDINATOR))
        self.after(self._heartbeat_seconds / 2, self._tick)

    def _report_loss(self, number: int, why: str) -> None:
        assert self._coordinator is not None
        self._coordinator.lost(number, why)


def _as_received(message: Message) -> Message:
    """Return a message as received over a wire: with a payload in the receiver's own memory.

    The payload is copied on delivery, not on sending, because a real sender reads the payload after
    `send` has returned. So a test fails if a node reuses the payload's memory too early.
    """
    if message.payload is None:
        return message
    return sent_on(message, message.sender, message.payload.copy())
