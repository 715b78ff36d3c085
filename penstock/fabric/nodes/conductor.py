"""The conductor's part of the step protocol: who takes part, and when a step counts.

A step is an attempt in an epoch: everyone has seen the view, begins, and reports; when all losses
and all shards' gradients are in, the step is decided, and the shards are told until each has
answered. Whatever is lost before the decision costs the attempt: the epoch rises, and the step
begins anew with those who are left. After it the engines are not needed.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from penstock.fabric.messages import Kind, Message, message_with, pack_arrays
from penstock.fabric.nodes.engine import CONDUCTOR
from penstock.fabric.nodes.runtime import Runtime
from penstock.fabric.view import View


@dataclass(frozen=True)
class Part:
    """What one engine begins a step with: which micro-batches (`BEGIN`'s body), and their rows."""

    body: Mapping[str, Any]
    rows: Mapping[str, np.ndarray]


class StepOrder(Protocol):
    """What the conductor needs to know of a step that it is to have made."""

    step: int
    micro_batches: int

    def parts(self, engines: int) -> Sequence[Part]:
        """Return, for so many engines, what each begins with."""
        ...

    def decide(
        self, losses: Sequence[float], prepared: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return the decision that shards commit by, or raise what forbids it."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How a step ended: with the decision and the shards' answers, or with an error."""

    step: int
    losses: Sequence[float] = ()
    decision: Mapping[str, Any] = field(default_factory=dict)
    answers: Sequence[Mapping[str, Any]] = ()
    error: BaseException | None = None


@dataclass(frozen=True)
class Leases:
    """Seconds: `silence` without a word is a loss; `stall` in which nobody gets on is a retry."""

    silence: float = 1.0
    stall: float = 5.0


@dataclass(frozen=True)
class Happened:
    """Something that people should know of: what kind of thing, and a line about it."""

    kind: str
    text: str
    node: int | None = None


class Phase(enum.Enum):
    """Where the step in flight stands."""

    IDLE = "no step"
    GATHERING = "waiting for engines"
    FORMING = "waiting until all have seen the view"
    RUNNING = "waiting for losses and gradients"
    COMMITTING = "waiting until the shards have committed"


class TroubleError(Exception):
    """A node could not do its work, for a reason that trying again would not mend."""

    def __init__(self, node: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.node, self.kind = node, kind


# What a node may run into that another attempt can mend.
_PASSING = ("CorruptionError",)


class Conductor:
    """Keeps the roster and drives one step at a time.

    Args:
        runtime: carries its messages.
        shards: the numbers of the shards, in their order.
        engines: how many engines are wanted; `wanted` may be set at any time.
        leases: when silence and standstill count as losses.
        tell: is told what happens.
        least: with fewer engines than this no step is made: they would not have the memory.
        addresses: where nodes listen, by number; those of a view's nodes are sent with it.
    """

    def __init__(
        self,
        runtime: Runtime,
        shards: Sequence[int],
        engines: int,
        leases: Leases,
        tell: Callable[[Happened], None],
        least: int = 1,
        addresses: Mapping[int, Any] | None = None,
    ) -> None:
        self.wanted = engines
        self._least = least
        self._addresses = addresses if addresses is not None else {}
        self.epoch = 0
        self.phase = Phase.IDLE
        self.counts: Counter[str] = Counter()
        self._runtime, self._leases, self._tell = runtime, leases, tell
        self._shards = tuple(shards)
        self._ready: dict[int, None] = {}  # engines that may take part, in the order they came
        self._view = View(self._shards, ())
        self._order: StepOrder | None = None
        self._done: Callable[[Outcome], None] = lambda outcome: None
        self._seen: set[int] = set()
        self._losses: dict[int, list[float]] = {}
        self._prepared: dict[int, Mapping[str, Any]] = {}
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._decision: Mapping[str, Any] = {}
        self._heard: dict[int, float] = {}
        self._beats: dict[int, Mapping[str, Any]] = {}
        self._moved_at = 0.0
        self._moved: Any = None
        self._stalls = 0
        self._now = 0.0

    # What the run's process says

    @property
    def ready(self) -> Sequence[int]:
        """The engines that may take part, spare ones too."""
        return tuple(self._ready)

    def joined(self, engine: int) -> None:
        """An engine is ready; it takes part from the next step on, if it is wanted."""
        self._ready[engine] = None
        self._heard[engine] = self._now
        self._happened("joined", f"engine {engine} is ready", engine)
        if self.phase is Phase.GATHERING:
            self._form()

    def lost(self, node: int, why: str) -> None:
        """A node is gone, or counts as gone."""
        if node in self._shards:
            self._happened("shard lost", f"shard {self._shards.index(node)}: {why}", node)
            self._end(Outcome(self._step, error=TroubleError(node, "StorageError", why)))
            return
        if node not in self._ready:
            return
        del self._ready[node]
        self._beats.pop(node, None)
        self._happened("engine lost", f"engine {node}: {why}", node)
        if node in self._view.engines and self.phase in (Phase.FORMING, Phase.RUNNING):
            self._form()

    def start(self, order: StepOrder, done: Callable[[Outcome], None]) -> None:
        """Have a step made; `done` is called once, with how it ended."""
        if self.phase is not Phase.IDLE:
            raise RuntimeError(f"a step is in flight: {self.phase.value}")
        self._order, self._done, self._stalls = order, done, 0
        if self.epoch and self._view.engines == self._members():
            self._begin()
        else:
            self._form()

    # What nodes say

    def handle(self, message: Message) -> None:
        """Take a message."""
        self._heard[message.sender] = self._now
        if message.kind is Kind.BEAT:
            self._beats[message.sender] = message.body
            return
        if message.epoch != self.epoch:
            self.counts["stale messages"] += 1
            return
        if message.kind is Kind.SEEN and self.phase is Phase.FORMING:
            self._seen.add(message.sender)
            if self._seen >= {*self._view.engines, *self._view.shards}:
                self._begin()
            return
        if message.kind is Kind.TROUBLE and message.body.get("error") in _PASSING:
            self.damaged(f"node {message.sender}: {message.body.get('text')}")
        elif message.step != self._step:
            self.counts["stale messages"] += 1
        elif message.kind is Kind.TROUBLE and self.phase is not Phase.IDLE:
            self._take_trouble(message)
        elif message.kind is Kind.LOSSES and self.phase is Phase.RUNNING:
            self._losses[message.sender] = [float.fromhex(x) for x in message.body["losses"]]
            self._decide_if_whole()
        elif message.kind is Kind.PREPARED and self.phase is Phase.RUNNING:
            self._prepared[message.sender] = message.body
            self._decide_if_whole()
        elif message.kind is Kind.COMMITTED and self.phase is Phase.COMMITTING:
            self._answers[message.sender] = message.body
            if len(self._answers) == len(self._shards):
                self._end(
                    Outcome(
                        self._step,
                        self._all_losses(),
                        self._decision,
                        [self._answers[shard] for shard in self._shards],
                    )
                )

    def damaged(self, text: str) -> None:
        """Something came whose checksum is wrong: nobody knows what it was to say."""
        self.counts["damaged"] += 1
        if self.phase in (Phase.FORMING, Phase.RUNNING):
            self._happened("retry", f"{text}; the step begins anew")
            self._form()

    def tick(self, now: float) -> None:
        """Look whether somebody has been silent, or nothing has moved, for too long."""
        self._now = now
        for node in list(self._ready):
            silent = now - self._heard.get(node, now)
            if silent > self._leases.silence:
                self._heard.pop(node)
                self.lost(node, f"silent for {silent:.1f} s")
        if self.phase in (Phase.IDLE, Phase.GATHERING):
            self._moved_at = now
            return
        here = [node for node in (*self._view.engines, *self._view.shards) if node in self._beats]
        busy = any(self._beats[node].get("busy") for node in here)
        moved = (
            self.phase,
            self.epoch,
            len(self._losses),
            len(self._prepared),
            len(self._answers),
            tuple(self._beats[node].get("progress") for node in here),
        )
        if busy or moved != self._moved:
            self._moved, self._moved_at = moved, now
        elif now - self._moved_at > self._leases.stall:
            self._moved_at = now
            self._stalled()

    # The attempt

    @property
    def _step(self) -> int:
        return self._order.step if self._order is not None else 0

    def _members(self) -> tuple[int, ...]:
        most = self.wanted if self._order is None else min(self.wanted, self._order.micro_batches)
        return tuple(self._ready)[:most]

    def _form(self) -> None:
        """Raise the epoch and tell everybody who takes part."""
        engines = self._members()
        if len(engines) < self._least:
            self._phase(Phase.GATHERING)
            self._happened(
                "waiting", f"{len(engines)} engine(s) left, {self._least} needed; waiting"
            )
            return
        self.epoch += 1
        self._view = View(self._shards, engines)
        self._seen.clear()
        self._phase(Phase.FORMING)
        nodes = (*self._shards, *engines)
        listening = {str(n): self._addresses[n] for n in nodes if n in self._addresses}
        body = {**self._view.as_body(), "addresses": listening}
        for node in nodes:
            self._send(node, Kind.VIEW, body)

    def _begin(self) -> None:
        order = self._order
        assert order is not None
        self._losses.clear()
        self._prepared.clear()
        self._answers.clear()
        self._phase(Phase.RUNNING)
        try:
            parts = order.parts(len(self._view.engines))
        except Exception as error:  # the data's: it ends the step, not the conductor
            self._end(Outcome(order.step, error=error))
            return
        for shard in self._shards:
            self._send(shard, Kind.BEGIN)
        for engine, part in zip(self._view.engines, parts, strict=True):
            described, payload = pack_arrays(part.rows)
            self._send(engine, Kind.BEGIN, {**part.body, "rows": described}, payload)

    def _decide_if_whole(self) -> None:
        engines = self._view.engines
        if len(self._losses) < len(engines) or len(self._prepared) < len(self._shards):
            return
        order = self._order
        assert order is not None
        try:
            self._decision = order.decide(
                self._all_losses(), [self._prepared[shard] for shard in self._shards]
            )
        except Exception as error:  # not committed, for a reason that the caller is told
            self._end(Outcome(order.step, error=error))
            return
        self._phase(Phase.COMMITTING)
        self._send_commit()

    def _send_commit(self) -> None:
        for shard in self._shards:
            if shard not in self._answers:
                self._send(shard, Kind.COMMIT, self._decision)

    def _all_losses(self) -> list[float]:
        return [x for engine in self._view.engines for x in self._losses[engine]]

    def _take_trouble(self, message: Message) -> None:
        kind, text = str(message.body.get("error")), str(message.body.get("text"))
        self._end(Outcome(self._step, error=TroubleError(message.sender, kind, text)))

    def _stalled(self) -> None:
        """Nobody computes and nothing moves: something was lost on the way."""
        if self.phase is Phase.COMMITTING:
            self._send_commit()
            return
        if self.phase is Phase.FORMING:
            missing = [node for node in self._view.engines if node not in self._seen]
            if missing and self._stalls:
                self.lost(missing[0], "it has not answered to a new epoch")
                return
        self._stalls += 1
        if self._stalls > 1 and len(self._view.engines) > 1:
            # Who has got least is behind the broken link; of equals, the one nearest the root.
            progress = {n: self._beats.get(n, {}).get("progress", 0) for n in self._view.engines}
            self.lost(min(progress, key=lambda n: progress[n]), "the step stands still behind it")
            return
        self._happened("retry", "nothing moves: the step begins anew in a new epoch")
        self._form()

    def _end(self, outcome: Outcome) -> None:
        if self.phase is Phase.IDLE:
            return
        done, self._done = self._done, lambda outcome: None
        self._phase(Phase.IDLE)
        self._order = None
        done(outcome)

    def _phase(self, phase: Phase) -> None:
        self.phase, self._moved_at = phase, self._now

    def _happened(self, kind: str, text: str, node: int | None = None) -> None:
        self.counts[kind] += 1
        self._tell(Happened(kind, text, node))

    def _send(
        self,
        to: int,
        kind: Kind,
        body: Mapping[str, Any] | None = None,
        payload: np.ndarray | None = None,
    ) -> None:
        self._runtime.send(
            to,
            message_with(
                payload,
                kind=kind,
                epoch=self.epoch,
                sender=CONDUCTOR,
                step=self._step,
                body=body or {},
            ),
        )
