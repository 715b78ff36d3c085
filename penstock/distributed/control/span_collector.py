"""The spans of all nodes of a run, on the clock of the trainer's process.

Every process measures its own spans by its own clock. A request names how many spans a node shall
keep; the answer carries those that it has kept, and the node's clock. A node that was never asked
keeps none. The offset between two clocks is estimated from a request and its answer: the node reads
its clock halfway between the two, with an error of at most half of their distance. The estimate is
that of the closest of the latest answers, because clocks of different hosts drift.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from penstock.distributed.protocol import (
    COORDINATOR,
    MOST_SPANS,
    Message,
    MessageType,
    clock_of,
    measured_of,
)
from penstock.spans import Measured, Span, Spans

_ESTIMATES = 16  # answers from which the offset of a clock is estimated
_LATE = 16  # requests after which an answer does not count any more
_WAIT_SECONDS = 1.0  # for answers: a lost node sends none


class SpanCollector:
    """Requests the spans of nodes, and converts them to one clock.

    **Arguments:** `send` sends a message to a node, from any thread.
    """

    def __init__(self, send: Callable[[int, Message], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._request = 0
        self._keep = 0  # what the nodes were asked to keep
        self._asked: dict[int, float] = {}  # nodes that have not answered, and the time of asking
        self._late: set[tuple[int, int]] = set()  # nodes, and requests before it without answer
        self._most = 0  # spans that a part of a node was ever asked to keep
        self._clock = Spans().clock
        self._estimates: dict[int, deque[tuple[float, float]]] = {}  # error and offset, by node
        self._spans: list[Span] = []
        self._dropped = 0

    def collect(self, nodes: Collection[int], spans: Spans) -> Measured:
        """Request what nodes have measured since the last request, and wait for it.

        Once no spans are wanted any more, the nodes are told so by one last request.
        """
        if not (spans.keep or self._keep):
            return Measured()
        self.request(nodes, spans)
        with self._changed:
            self._changed.wait_for(lambda: not self._asked, _WAIT_SECONDS)
        return self.take_measured()

    def request(self, nodes: Collection[int], spans: Spans) -> None:
        """Request what nodes have measured since the last request.

        Args:
            nodes: the node numbers.
            spans: has the clock to convert to, and the number of spans that each part keeps.
        """
        with self._changed:
            self._late |= {(node, self._request) for node in self._asked}
            self._request += 1
            self._late = {each for each in self._late if each[1] >= self._request - _LATE}
            self._keep, self._most = spans.keep, max(spans.keep, self._most)
            self._clock = spans.clock
            self._asked = dict.fromkeys(nodes, spans.clock())
        for node in nodes:
            body = {"keep": min(spans.keep, MOST_SPANS)}
            self._send(
                node, Message(MessageType.SPANS, 0, COORDINATOR, op=self._request, body=body)
            )

    def take(self, message: Message) -> None:
        """Take an answer. An answer to an earlier request says nothing of the node's clock.

        A message that answers no request, or one a second time, changes nothing.

        **Raises:** `ProtocolError` if the message is malformed.
        """
        node = message.sender
        with self._changed:
            received, asked = self._clock(), None
            if message.op == self._request and node in self._asked:
                asked = self._asked.pop(node)
                self._changed.notify_all()  # even if the answer is malformed
            elif (node, message.op) in self._late:
                self._late.remove((node, message.op))
            else:
                return
            measured, clock = measured_of(message, self._most), clock_of(message)
            estimates = self._estimates.setdefault(node, deque(maxlen=_ESTIMATES))
            if asked is not None:
                estimates.append((received - asked, (asked + received) / 2 - clock))
            if not estimates:
                return
            _, offset = min(estimates)
            self._spans += [
                replace(
                    span,
                    lane=f"{node}: {span.lane}",
                    begin=span.begin + offset,
                    end=span.end + offset,
                )
                for span in measured.spans
            ]
            self._dropped += measured.dropped

    def take_measured(self) -> Measured:
        """Return the spans that have arrived since the last call."""
        with self._changed:
            found = Measured({}, tuple(self._spans), self._dropped)
            self._spans, self._dropped = [], 0
        return found
