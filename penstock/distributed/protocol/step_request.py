"""The step requested from the coordinator, its result, and the protocol's events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.distributed.protocol.messages import Message
from penstock.errors import ProtocolError


@dataclass(frozen=True)
class EngineInput:
    """The input of one engine for a step: its micro-batches (`BEGIN`'s body), and their rows."""

    body: Mapping[str, Any]
    rows: Mapping[str, np.ndarray]


class StepRequest(Protocol):
    """The coordinator's interface to a requested step."""

    step: int
    micro_batches: int

    def parts(self, engines: int) -> Sequence[EngineInput]:
        """Return the input of each of so many engines."""
        ...

    def report(self, message: Message, shard: int) -> Any:
        """Return the report of a shard on its gradients, or raise `ProtocolError`."""
        ...

    def difference(self, first: Any, other: Any) -> str | None:
        """Return the difference between the reports of two replicas; None if they are equal."""
        ...

    def decide(self, losses: Sequence[float], reports: Sequence[Any]) -> Mapping[str, Any]:
        """Return the decision for the shards' commit, or raise the error that forbids it."""
        ...

    def open_selections(self) -> np.ndarray | None:
        """Return the selections that the next round narrows, bytes; None once all are decided.
        Called once the step is decided but for its masks."""
        ...

    def histograms(self, message: Message, shard: int) -> Any:
        """Return the histograms of a shard for the open selections, or raise `ProtocolError`."""
        ...

    def narrow(self, histograms: Sequence[Any]) -> None:
        """Finish a round by the histograms of every shard, in shard order; or raise
        `ProtocolError`."""
        ...

    def masks(self) -> np.ndarray | None:
        """Return the changes of masks that the rounds have decided, bytes; None without any."""
        ...

    def answer(self, message: Message) -> Any:
        """Return a shard's acknowledgement of the commit, or raise `ProtocolError`."""
        ...


class WithoutMasks:
    """The part of a request for a step that changes no mask."""

    def open_selections(self) -> np.ndarray | None:
        """Nothing is selected."""
        return None

    def histograms(self, message: Message, shard: int) -> Any:
        """No histogram was requested."""
        raise ProtocolError("histograms of mask entries came for a step that changes no mask")

    def narrow(self, histograms: Sequence[Any]) -> None:
        """No histogram was requested."""
        raise ProtocolError("histograms of mask entries came for a step that changes no mask")

    def masks(self) -> np.ndarray | None:
        """No mask changes."""
        return None


@dataclass(frozen=True)
class StepResult:
    """The result of a step: the decision and the shards' acknowledgements, or an error."""

    step: int
    losses: Sequence[float] = ()
    decision: Mapping[str, Any] = field(default_factory=dict)
    answers: Sequence[Any] = ()
    error: BaseException | None = None


@dataclass(frozen=True)
class Timeouts:
    """The timeouts in seconds, and the number of retries.

    A node that is silent for `silence` is lost. A step without progress for `stall` is retried,
    unless a node computes; bytes that arrive at `LEAST_BYTES_PER_SECOND` are progress. One job of a
    node may take `job`; until then a step with a busy node needs no progress. `attempts` is how
    often one step may be retried after corrupt frames, invalid messages and stalls.
    """

    silence: float = 1.0
    stall: float = 5.0
    job: float = 600.0
    attempts: int = 32


@dataclass(frozen=True)
class ProtocolEvent:
    """An event for the log: its kind, and one line of text."""

    kind: str
    text: str
    node: int | None = None


class UnrecoverableError(Exception):
    """A node failed for a reason that a retry would not repair."""

    def __init__(self, node: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.node, self.kind = node, kind


class RolledBackError(Exception):
    """All shards are at `step`, which is not the step before the requested step.

    This is no failure: the run continues with the step after `step`.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the shards rolled back to step {step}, the newest that all of them hold")
        self.step = step
