"""The step that the coordinator is asked to make, its result, and the events on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.distributed.protocol.messages import Message


@dataclass(frozen=True)
class EngineInput:
    """What one engine begins a step with: which micro-batches (`BEGIN`'s body), and their rows."""

    body: Mapping[str, Any]
    rows: Mapping[str, np.ndarray]


class StepRequest(Protocol):
    """What the coordinator needs to know of a step that it is to have made."""

    step: int
    micro_batches: int

    def parts(self, engines: int) -> Sequence[EngineInput]:
        """Return, for so many engines, what each begins with."""
        ...

    def report(self, message: Message) -> Any:
        """Return what a shard says of its gradients, or raise `ProtocolError`."""
        ...

    def difference(self, first: Any, other: Any) -> str | None:
        """Say in what the reports of two nodes of a shard differ; None if in nothing."""
        ...

    def decide(self, losses: Sequence[float], reports: Sequence[Any]) -> Mapping[str, Any]:
        """Return the decision that shards commit by, or raise what forbids it."""
        ...

    def answer(self, message: Message) -> Any:
        """Return what a shard says of its commit, or raise `ProtocolError`."""
        ...


@dataclass(frozen=True)
class StepResult:
    """How a step ended: with the decision and the shards' answers, or with an error."""

    step: int
    losses: Sequence[float] = ()
    decision: Mapping[str, Any] = field(default_factory=dict)
    answers: Sequence[Any] = ()
    error: BaseException | None = None


@dataclass(frozen=True)
class Timeouts:
    """Seconds: `silence` without a word is a loss; `stall` in which nobody gets on is a retry.

    While somebody computes, nobody need get on for as long as `job`, the longest that one job of a
    node may take. `attempts` is how often one step may begin anew for damaged frames and
    standstills before it is given up.
    """

    silence: float = 1.0
    stall: float = 5.0
    job: float = 600.0
    attempts: int = 32


@dataclass(frozen=True)
class ProtocolEvent:
    """Something that people should know of: what kind of thing, and a line about it."""

    kind: str
    text: str
    node: int | None = None


class UnrecoverableError(Exception):
    """A node could not do its work, for a reason that trying again would not mend."""

    def __init__(self, node: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.node, self.kind = node, kind


class RolledBackError(Exception):
    """All shards stand at `step`, which is not the one before the step that was to be made.

    Nothing is wrong: the run goes on with the step after it.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"the shards went back to step {step}, the newest that all of them hold")
        self.step = step
