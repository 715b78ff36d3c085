"""The base of all nodes of a run: an epoch, a step in flight, and one worker.

A node is only ever called from one thread. Its jobs run elsewhere, one after another. The result of
a job counts only if the job's step is still in flight.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import COORDINATOR, Message, MessageType
from penstock.distributed.protocol.node_context import Job, NodeContext
from penstock.distributed.protocol.span_messages import keep_of, spans_message
from penstock.errors import ProtocolError
from penstock.spans import Spans, gather


class StepState(Protocol):
    """A node's state of the step in flight; the number is 0 before the epoch's first step."""

    number: int


Step = TypeVar("Step", bound=StepState)


class ProtocolNode(ABC, Generic[Step]):
    """One engine or replica of a run.

    Args:
        number: its node number.
        context: carries its messages and runs its jobs.
        step: creates the state of a step from its number.
    """

    lane: str
    """The lane of its jobs."""

    def __init__(self, number: int, context: NodeContext, step: Callable[[int], Step]) -> None:
        self.number = number
        self.epoch = 0
        self.refused = 0  # messages of another epoch or step
        self.progress = 0  # grows with everything that this node completes in this epoch
        self.failure: Exception | None = None  # the last error of its own work
        self.spans = Spans(context.clock)  # of its jobs
        self._context, self._new_step = context, step
        self._step = step(0)
        self._view: MembershipView | None = None  # of the epoch; None if this node is not in it
        self._jobs = 0

    @property
    def is_busy(self) -> bool:
        """Whether a job is queued or running, even a job of an earlier step."""
        return self._jobs > 0

    def handle(self, message: Message) -> None:
        """Handle a message; an invalid message is reported to the coordinator."""
        try:
            if message.kind is MessageType.VIEW:
                self._take_view(message)
            elif message.kind is MessageType.SPANS:
                self._send_spans(message)
            elif self._view is None or message.epoch != self.epoch:
                self.refused += 1
            else:
                self._take(message)
        except ProtocolError as error:
            self._report(message.epoch, message.step, error, message.sender)

    @abstractmethod
    def _take(self, message: Message) -> None:
        """Handle a message of this epoch, in which the node takes part."""

    @abstractmethod
    def _takes_part(self, view: MembershipView) -> bool:
        """Tell whether a view names this node."""

    def _enter(self, view: MembershipView) -> None:
        """Begin an epoch in which the node takes part."""

    def _take_view(self, message: Message) -> None:
        if message.epoch > self.epoch:
            view = MembershipView.read(message.body)
            self.epoch = message.epoch
            self.progress = 0
            self._step = self._new_step(0)
            self._view = view if self._takes_part(view) else None
            if self._view is not None:
                self._enter(view)
        if message.epoch == self.epoch:
            self._notify(MessageType.VIEW_ACK)

    def _notify(self, kind: MessageType, body: Mapping[str, Any] | None = None) -> None:
        """Send a message of the step in flight to the coordinator."""
        message = Message(kind, self.epoch, self.number, self._step.number, body=body or {})
        self._context.send(COORDINATOR, message)

    def _report(self, epoch: int, step: int, error: Exception, sender: int | None = None) -> None:
        """Report an error of the node's own work, or an invalid message of a sender."""
        body: dict[str, Any] = {"error": type(error).__name__, "text": str(error)}
        if sender is None:
            self.failure = error
        else:
            body["about"] = sender
        self._context.send(
            COORDINATOR, Message(MessageType.FAILURE, epoch, self.number, step, body=body)
        )

    def _work_spans(self) -> Sequence[Spans]:
        """Return what the node's work measures itself."""
        return ()

    def _send_spans(self, message: Message) -> None:
        """Keep spans from now on, and send those that were kept so far."""
        self.spans.keep = keep_of(message)
        measured = gather(self.spans, self._work_spans())
        answer = spans_message(message, self.number, self.spans.clock, measured)
        self._context.send(COORDINATOR, answer)

    def _run(
        self,
        step: Step,
        what: str,
        job: Callable[[], Any],
        then: Callable[[Any], None],
        op: int | None = None,
    ) -> None:
        """Run a job; its result counts only while its step is in flight."""
        self._jobs += 1
        span = self.spans.span(self.lane, what, step=step.number or None, op=op)

        def done(result: Any) -> None:
            self._jobs -= 1
            if step is not self._step:
                return
            self.progress += 1
            try:
                then(result)
            except Exception as error:  # an error of the work, or an invalid result of it
                self._report(self.epoch, step.number, error)

        def failed(error: Exception) -> None:
            self._jobs -= 1
            if step is self._step:
                self._report(self.epoch, step.number, error)

        self._context.work(Job(job, done, failed, span))
