"""Steps of a run whose engines, and maybe whose shards, are other processes.

A step is asked for by the trainer's thread and made by the nodes; whoever is lost meanwhile is
replaced, and the trainer learns of it only from what happened.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from penstock.config import Config
from penstock.distributed.control.cluster_manager import Hall
from penstock.distributed.control.worker_stats import Computing, Stragglers
from penstock.distributed.protocol import (
    Outcome,
    Part,
    Phase,
    TroubleError,
    WentBackError,
    message_validation,
)
from penstock.distributed.protocol.messages import Message
from penstock.distributed.rpc.commit_codec import ShardReport, commit_of
from penstock.distributed.rpc.rpc import error_class
from penstock.planning import builders
from penstock.planning.execution_plan import Layout
from penstock.program import Program
from penstock.step.local import step_done
from penstock.step.micro_batches import Batches
from penstock.step.nonfinite import NonFiniteLossError, require_finite, trace
from penstock.store import Commit, Store, global_norm, merged, zero_gradients
from penstock.telemetry.events import StepDone

_GIVING_UP = 60.0  # seconds in which a step that is decided must end
_LOOK = 0.05  # seconds between two looks at what has happened


class ClusterRunner:
    """Runs steps of one layout over a store and the processes of a hall.

    Args:
        store: the whole store, wherever its shards are.
        batches: gives the rows.
        tokens: what a step counts as.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        store: Store,
        batches: Batches,
        hall: Hall,
        *,
        tokens: int,
    ) -> None:
        self._config, self._layout, self._store = config, layout, store
        self._batches, self._tokens = batches, tokens
        self.hall = hall
        self._stragglers = Stragglers(config.cluster.slow)
        self._computing = Computing()
        self._has_begun = False
        self.commit: Commit | None = None  # of the last step

    @property
    def engine_peak_bytes(self) -> int:
        """The most that any engine has said to have held."""
        return self.hall.vitals.peak_bytes

    def run(self) -> StepDone:
        """Do one step and commit it, whoever is lost meanwhile.

        It is the step after the one at which the shards stand: one that is made again where they
        had to go back.

        Raises:
            NonFiniteError: and whatever the data or the store raise; the step has then not
                happened, and running it again is safe.
            ClusterError: no engine can be had.
            StorageError: a shard is lost whose weights and state nobody else has.
            InterruptedError: a stop was asked for while too few were there.
        """
        started = time.perf_counter()
        self._store.take_traffic()
        if not self._has_begun:
            self.hall.await_engines()
            self._has_begun = True
        while True:
            self.hall.copy_to_newcomers(self._store)
            self.hall.news.step = self._store.step  # as the shards have last said
            order = _Order(
                self._layout.program, self._batches, self._store.step, self._config.run.seed
            )
            outcome = self._attempt(order)
            if outcome.error is None:
                break
            if not self._begins_anew(outcome.error):
                self.hall.news.require_sound()
                if isinstance(outcome.error, NonFiniteLossError):
                    self._trace(outcome.error)
                raise _as_ours(outcome.error)
            self._store.take_traffic()  # what shards say with it is where they stand
        self.hall.call(self._look_for_stragglers)
        return self._done(order, outcome, started)

    def _attempt(self, order: _Order) -> Outcome:
        """Have the conductor make a step, and wait for how it ends."""
        ended = threading.Event()
        outcomes: list[Outcome] = []

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            ended.set()

        hall = self.hall
        hall.call(lambda: hall.conductor.start(order, done))
        try:
            while not ended.wait(timeout=_LOOK):
                hall.news.look()
                if hall.conductor.phase is Phase.GATHERING and hall.should_stop():
                    raise InterruptedError("stopped while waiting for engines or shards")
        except BaseException:  # the next step must find the conductor at rest
            self._give_up(ended)
            raise
        hall.news.look()
        if outcomes[0].error is not None:
            self._give_up(ended)
        return outcomes[0]

    def _give_up(self, ended: threading.Event) -> None:
        """Return when nobody works for the step any more, be it given up or failed."""
        hall, deadline = self.hall, time.monotonic() + _GIVING_UP

        def is_over(seen: Callable[[], bool]) -> bool:
            return seen() or hall.news.has_failed or time.monotonic() > deadline

        hall.call(hall.conductor.cancel)
        while not is_over(ended.is_set):
            ended.wait(timeout=_LOOK)
        told = threading.Event()
        hall.call(hall.conductor.disband)
        hall.call(told.set)
        while not is_over(told.is_set):
            told.wait(timeout=_LOOK)
        while not is_over(hall.is_at_rest):
            time.sleep(0.002)

    def _begins_anew(self, error: BaseException) -> bool:
        """Tell whether the shards go on, or will, from a step that all of them hold."""
        if isinstance(error, TroubleError):
            return self.hall.comes_back(error.node)
        return isinstance(error, WentBackError)

    def _done(self, order: _Order, outcome: Outcome, started: float) -> StepDone:
        commit: Commit = replace(outcome.answers[0], zero_gradients=order.zero_gradients)
        self.commit = commit
        self.hall.news.step = commit.step
        seconds = time.perf_counter() - started
        return step_done(
            commit,
            self._store,
            loss=math.fsum(outcome.losses) * order.scale,
            seconds=seconds,
            store_seconds=seconds - self._computing.of_step(self.hall.figures(), seconds),
            tokens=self._tokens,
            engine_bytes=self.hall.vitals.peak_bytes,
        )

    def _trace(self, error: NonFiniteLossError) -> NoReturn:
        """Find in this process where a loss began that is not a number."""
        layout = self._layout
        made = builders.make_engines(layout.program, layout.plan, layout.shares, 1, layout.device)
        trace(error, layout.program, made, self._store, self._batches, self._config.run.seed)

    def _look_for_stragglers(self) -> None:
        """Name engines that are slow, and replace those that stay so; in the hall's thread."""
        conductor = self.hall.conductor
        said = self.hall.figures().items()
        computed = {engine: (each.computed, each.micro_batches) for engine, each in said}
        patience = self._config.cluster.evict_slow
        for slow in self._stragglers.look(computed):
            text = f"engine {slow.engine} takes {slow.times:.1f} times as long as the others"
            self.hall.news.say("slow", text, slow.engine)
            spare = len(conductor.ready) > conductor.wanted
            if patience is not None and slow.looks >= patience and spare:
                conductor.lost(slow.engine, f"it was slow {slow.looks} times in a row")


class _Order:
    """One step, as the conductor has it made."""

    def __init__(self, program: Program, batches: Batches, done: int, seed: int) -> None:
        self._program = program
        self.step = done + 1
        self.micro_batches = batches.micro_batches
        self.scale = 1.0
        self.zero_gradients: tuple[str, ...] = ()
        self._batches, self._done, self._seed = batches, done, seed

    def parts(self, engines: int) -> Sequence[Part]:
        """Return what each engine begins with."""
        parts = self._batches.parts(self._done, engines)
        self.scale = self._batches.loss_scale(self._done, parts)
        return [
            Part(
                {
                    "first": part.numbers.start,
                    "count": len(part.numbers),
                    "total": self.micro_batches,
                    "seed": self._seed,
                    "scale": self.scale,
                },
                {name: tensor.numpy() for name, tensor in part.rows.items()},
            )
            for part in parts
        ]

    def report(self, message: Message) -> ShardReport:
        """Return what a shard says of its gradients, and of what it holds."""
        report, count = ShardReport.read(message.body), len(self._program.stages)
        gradients = report.gradients
        if not all(0 <= n < count for n in (*gradients.silent, *(gradients.non_finite or {}))):
            raise message_validation.refuse(message, f"names stages that are none of {count}")
        return report

    def difference(self, first: ShardReport, other: ShardReport) -> str | None:
        """Say in what the reports of two nodes of a shard differ; None if in nothing."""
        return first.difference(other)

    def answer(self, message: Message) -> Commit:
        """Return what a shard says of its commit."""
        return commit_of(message.body)

    def decide(self, losses: Sequence[float], reports: Sequence[ShardReport]) -> Mapping[str, Any]:
        """Return the decision to commit by.

        Raises:
            NonFiniteError: a loss or a gradient is not a number.
            NoTrainingError: a trainable weight has got no gradient.
        """
        require_finite(self.step, losses)
        gradients = merged(self._program, [report.gradients for report in reports])
        norm = global_norm(self._program, self.step, gradients)
        self.zero_gradients = zero_gradients(self._program, gradients)
        return {"norm": norm.hex()}


def _as_ours(error: BaseException) -> BaseException:
    """Return a node's trouble as the error that it was there."""
    if isinstance(error, TroubleError):
        return error_class(error.kind)(str(error))
    return error
