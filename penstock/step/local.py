"""The step protocol: forward sweep, turn, backward sweep, commit.

Weights come from the store through the fabric to the engines, gradients go back the same way.
Only the commit makes a step count; whatever fails before it has not happened.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from penstock.collectives import Fabric
from penstock.engine import Batch, Engine, PendingGradients, compute, micro_batches
from penstock.planning import ExecutionPlan
from penstock.step.micro_batches import Batches
from penstock.step.nonfinite import NonFiniteLossError, require_finite, trace
from penstock.step_schedule import Operation
from penstock.store import Commit, Store
from penstock.telemetry import Measured, Spans, StepDone, process_memory

_Computed = tuple[Operation, list[PendingGradients | None]]
"""An operation, and what each engine has made of it."""


class StepRunner:
    """Runs steps of one layout over a store, a fabric and engines; no state outlives a step.

    Args:
        batches: gives the rows.
        seed: keys the dropout.
        tokens: what a step counts as.
    """

    def __init__(
        self,
        layout: ExecutionPlan,
        store: Store,
        fabric: Fabric,
        engines: Sequence[Engine],
        batches: Batches,
        *,
        seed: int,
        tokens: int,
        spans: Spans | None = None,
    ) -> None:
        self._layout = layout
        self._store = store
        self._fabric = fabric
        self._engines = engines
        self._batches = batches
        self._seed = seed
        self._tokens = tokens
        self._spans = spans or Spans()  # of the step that is being made
        self._step = 0  # the one that is being made
        self.measured: Measured | None = None  # of the last step
        self.commit: Commit | None = None  # of the last step

    @property
    def engine_peak_bytes(self) -> int:
        """The most that an engine has held."""
        return max(engine.memory.peak_bytes for engine in self._engines)

    def run(self) -> StepDone:
        """Do one step and commit it.

        **Raises:** `NonFiniteError` and whatever the data or the engines raise; the step has then
        not happened, and running it again is safe.
        """
        started = self._spans.clock()
        self._spans.drain()  # what an interrupted step left behind, as below
        self._store.discard()
        self._store.take_traffic()
        self._step = self._store.step + 1
        schedule = self._layout.schedule_of(self._step)
        loss_scale = self._begin()
        waiting = self._sweep(schedule.before_loss, None)
        losses = [x for engine in self._engines for x in engine.losses()]
        try:
            require_finite(self._step, losses)
        except NonFiniteLossError as error:
            program = self._layout.program
            trace(error, program, self._engines, self._store, self._batches, self._seed)
        self._return_gradients(self._sweep(schedule.after_loss, waiting))
        with self._spans.span("store", "commit", step=self._step):
            commit = self.commit = self._store.commit()
        measured = self.measured = self._spans.drain()
        return step_done(
            commit,
            self._store,
            loss=math.fsum(losses) * loss_scale,
            seconds=self._spans.clock() - started,
            store_seconds=measured.seconds["store"],
            tokens=self._tokens,
            engine_bytes=self.engine_peak_bytes,
        )

    def _begin(self) -> float:
        """Give every engine its part of the batch; return the factor from losses to their mean."""
        step, batches = self._store.step, self._batches
        parts = batches.parts(step, len(self._engines))
        scale = batches.loss_scale(step, parts)
        for engine, part in zip(self._engines, parts, strict=True):
            rows = micro_batches(part.rows, len(part.numbers))
            first, total = part.numbers.start, batches.micro_batches
            engine.begin(Batch(rows, first, total, self._seed, step, scale))
        return scale

    def _sweep(
        self, operations: Sequence[Operation], waiting: _Computed | None
    ) -> _Computed | None:
        """Compute operations; each returns the gradients of the one before while it computes.

        Args:
            waiting: the operation before the first.

        Returns:
            The last operation, whose gradients are still to be returned.
        """
        for operation in self._streamed(operations):
            made = [self._compute(number, operation) for number in range(len(self._engines))]
            self._return_gradients(waiting)
            waiting = (operation, made)
        return waiting

    def _streamed(self, operations: Sequence[Operation]) -> Iterator[Operation]:
        """Yield operations whose weights are loaded; those of later ones are on their way where the
        engines have room for them."""
        ahead = min(engine.stages_ahead for engine in self._engines)
        coming = iter(operations)
        for place, operation in enumerate(operations):
            for later in itertools.islice(coming, 1 if place else 1 + ahead):
                self._load(later)
            yield operation

    def _load(self, operation: Operation) -> None:
        size = sum(self._layout.program.weights[name].stream_bytes for name in operation.weights)
        with self._spans.span("store", "fetch", step=self._step, op=operation.number, bytes=size):
            weights = self._store.fetch(operation.stage, operation.positions)
            for engine, tensors in zip(self._engines, self._fabric.broadcast(weights), strict=True):
                engine.load(operation.stage, tensors)

    def _compute(self, number: int, operation: Operation) -> PendingGradients | None:
        """Have an engine compute; on a device of its own memory this is the time of queueing it."""
        lane, op = f"engine {number}", operation.number
        with self._spans.span(lane, operation.sweep, step=self._step, op=op):
            return compute(self._engines[number], operation)

    def _return_gradients(self, computed: _Computed | None) -> None:
        """Finish the sum of an operation's gradients in the fabric and hand it to the store."""
        if computed is None or not computed[0].gradients:
            return
        operation, made = computed
        step, op = self._step, operation.number
        with self._spans.span("gradients", "wait", step=step, op=op):
            nodes = [part.wait() for part in made if part is not None]
        size = sum(4 * self._layout.program.weights[name].elements for name in operation.gradients)
        with self._spans.span("store", "receive", step=step, op=op, bytes=size):
            total = self._fabric.reduce(nodes, self._layout.micro_batches)
            self._store.receive(operation.stage, total)


def step_done(
    commit: Commit,
    store: Store,
    *,
    loss: float,
    seconds: float,
    store_seconds: float,
    tokens: int,
    engine_bytes: int,
) -> StepDone:
    """Return what is told of a step that was committed.

    Args:
        commit: what was decided.
        store: is asked what has moved since it was asked last.
        seconds: of the whole step.
        store_seconds: of these, those in which no engine computed, whatever they went into.
        engine_bytes: the most that an engine has held.
    """
    decision = commit.decision
    traffic, flash = store.take_traffic(), store.take_flash_traffic()
    waited = traffic.update_seconds + traffic.snapshot_seconds + flash.waited_seconds
    return StepDone(
        step=decision.step,
        loss=loss,
        learning_rate=decision.learning_rate,
        grad_norm=decision.norm,
        clip_scale=decision.clip_scale,
        seconds=seconds,
        tokens=tokens,
        streamed_bytes=traffic.streamed_bytes,
        gradient_bytes=traffic.gradient_bytes,
        engine_bytes=engine_bytes,
        store_bytes=sum(store.memory_bytes.values()),
        flash_read_bytes=flash.read_bytes,
        flash_written_bytes=flash.written_bytes,
        flash_wait_seconds=flash.waited_seconds,
        compute_seconds=seconds - max(store_seconds, waited),
        weight_seconds=max(0.0, store_seconds - waited),
        update_seconds=traffic.update_seconds,
        snapshot_seconds=traffic.snapshot_seconds,
        peak_rss_bytes=process_memory.peak_resident_bytes(),
    )
