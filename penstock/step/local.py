"""The step protocol: forward sweep, turn, backward sweep, commit.

The fabric streams weights from the store to the engines and reduces gradients to the store. A
step counts only after its commit; a failure before the commit leaves the store unchanged.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence

from penstock.collectives import Fabric
from penstock.engine import (
    Batch,
    Engine,
    PendingGradients,
    compute,
    micro_batches,
    return_unused_pages,
)
from penstock.planning import ExecutionPlan
from penstock.spans import Measured, Spans, gather
from penstock.sparsity import StreamedWeight
from penstock.step.cycle_figures import step_cycles
from penstock.step.deferred_updates import DeferredUpdates
from penstock.step.fetching import Fetches
from penstock.step.mask_figures import MaskFigures
from penstock.step.micro_batches import Batches
from penstock.step.nonfinite import NonFiniteLossError, require_finite, trace
from penstock.step_schedule import Operation, StepSchedule
from penstock.store import Commit, Store, kept_entries
from penstock.telemetry import StepCycles, StepDone, process_memory

_Computed = tuple[Operation, list[PendingGradients | None]]
"""An operation, and the pending gradients of each engine."""


class StepRunner:
    """Runs the steps of one execution plan over a store, a fabric and engines.

    No state of a step outlives it.

    Args:
        batches: returns the rows.
        seed: keys the dropout.
        tokens: the number of tokens that a step counts.
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
        self._fetches = Fetches(self._fetch)
        self._deferred = DeferredUpdates(store, self._fetches)
        self._late_seconds = self._spare_seconds = 0.0  # of the current step
        self._begun = 0  # steps
        self._mask_changes = 0  # commits that have changed masks
        self._engines = engines
        self._batches = batches
        self._seed = seed
        self._tokens = tokens
        self._spans = spans or Spans()  # of the current step
        self._step = 0  # the current step
        self.measured: Measured | None = None  # of the last step
        self.commit: Commit | None = None  # of the last step

    @property
    def engine_peak_bytes(self) -> int:
        """The peak memory of any engine."""
        return max(engine.memory.peak_bytes for engine in self._engines)

    def run(self) -> StepDone:
        """Execute one step and commit it.

        **Raises:** `NonFiniteError` and the errors of the data or the engines. The step is then not
        committed, and the step can be run again.
        """
        started = self._spans.clock()
        gather(self._spans, self._store.spans)  # discard the spans of an interrupted step
        self._fetches.take_hidden_seconds()  # likewise
        self._store.discard()
        self._store.take_traffic()
        self._deferred.begin()
        self._late_seconds = self._spare_seconds = 0.0
        self._step = self._store.step + 1
        kept = kept_entries(self._store)
        schedule = self._layout.schedule_of(self._step)
        loss_scale = self._begin(schedule)
        losses = self._sweep(schedule.operations)
        with self._spans.span("store", "commit", step=self._step):
            commit = self.commit = self._store.commit()
        self._mask_changes += bool(commit.decision.masks)
        seconds = self._spans.clock() - started
        blocked = self._deferred.measured(seconds, self._late_seconds, self._spare_seconds)
        hidden = max(0.0, self._fetches.take_hidden_seconds() - blocked)
        measured = self.measured = gather(self._spans, self._store.spans)
        return step_done(
            commit,
            self._store,
            loss=math.fsum(losses) * loss_scale,
            seconds=self._spans.clock() - started,
            store_seconds=measured.seconds["store"],
            hidden_seconds=hidden,
            tokens=self._tokens,
            engine_bytes=self.engine_peak_bytes,
            figures=MaskFigures.of(self._layout, kept, commit.decision),
            cycles=step_cycles(self._layout, self._engines),
        )

    def _begin(self, schedule: StepSchedule) -> float:
        """Give every engine its rows; return the factor from the sum of losses to their mean."""
        return_unused_pages(self._begun)
        self._begun += 1
        step, batches = self._store.step, self._batches
        parts = batches.parts(step, len(self._engines))
        scale = batches.loss_scale(step, parts)
        is_dense = any(operation.dense_gradients for operation in schedule.operations)
        masks = (self._mask_changes, is_dense)
        for engine, part in zip(self._engines, parts, strict=True):
            rows = micro_batches(part.rows, len(part.numbers))
            first, total = part.numbers.start, batches.micro_batches
            engine.begin(Batch(rows, first, total, self._seed, step, scale, masks))
        return scale

    def _sweep(self, operations: Sequence[Operation]) -> list[float]:
        """Compute all operations of a step; return the losses of all micro-batches.

        During each operation, the gradients of the previous one are returned. An engine with memory
        of its own need not wait for the host after the turn: losses are read when the operation
        after it has been queued.
        """
        losses: list[float] | None = None
        waiting: _Computed | None = None
        try:
            for operation in self._streamed(operations):
                made = [self._compute(number, operation) for number in range(len(self._engines))]
                if operation.sweep == "backward" and losses is None:
                    losses = self._losses()
                self._spare_seconds += self._return_gradients(waiting)
                waiting = (operation, made)
            losses = self._losses() if losses is None else losses
            self._return_gradients(waiting)  # nothing is left to compute beside this
            return losses
        finally:
            try:
                self._fetches.finish()
            finally:
                self._deferred.abandon()

    def _losses(self) -> list[float]:
        """Return the loss of each micro-batch, once the turn has been queued.

        Raises:
            NonFiniteError: a loss is NaN or infinite; names the stage where this began.
        """
        losses = [x for engine in self._engines for x in engine.losses()]
        try:
            require_finite(self._step, losses)
        except NonFiniteLossError as error:
            self._deferred.abandon()
            program = self._layout.program
            trace(error, program, self._engines, self._store, self._batches, self._seed)
        return losses

    def _streamed(self, operations: Sequence[Operation]) -> Iterator[Operation]:
        """Yield operations whose weights are loaded.

        Weights of later operations are loading, as far as the engines have free buffers and the
        weights are there. If there are such buffers, the next weights are being fetched, as long as
        their updates may be pending: none is after the first fetch of a weight. While a later
        operation with gradients is computed, updates that were deferred are made.
        """
        ahead = min(engine.stages_ahead for engine in self._engines)
        coming = deque(operations)
        for place, operation in enumerate(operations):
            last = place + ahead
            while coming and (
                coming[0].number <= operation.number
                or (len(operations) - len(coming) <= last and self._is_there(coming[0]))
            ):
                self._load(coming.popleft())
                if ahead and coming and coming[0].sweep != "backward":
                    self._fetches.start(coming[0])
            self._deferred.start(operation)
            yield operation

    def _is_there(self, operation: Operation) -> bool:
        """Return whether the weights of a later operation can be loaded without waiting."""
        return operation.sweep == "backward" or self._fetches.is_ready()

    def _fetch(self, operation: Operation) -> Sequence[StreamedWeight]:
        return self._store.fetch(operation.stage, operation.positions)

    def _load(self, operation: Operation) -> None:
        span = self._spans.span("store", "fetch", step=self._step, op=operation.number)
        with span:
            begin = self._spans.clock()
            weights = self._fetches.take(operation)
            if operation.sweep != "backward":
                self._late_seconds += self._spans.clock() - begin
            span.bytes = sum(weight.nbytes for weight in weights)
            for engine, tensors in zip(self._engines, self._fabric.broadcast(weights), strict=True):
                engine.load(operation.stage, tensors)

    def _compute(self, number: int, operation: Operation) -> PendingGradients | None:
        """Compute on one engine; on a GPU the measured time is that of queueing the work."""
        lane, op = f"engine {number}", operation.number
        with self._spans.span(lane, operation.sweep, step=self._step, op=op):
            return compute(self._engines[number], operation)

    def _return_gradients(self, computed: _Computed | None) -> float:
        """Finish the reduction of an operation's gradients and add the sums to the store.

        Returns:
            The seconds in which the gradients were waited for.
        """
        if computed is None or not computed[0].gradients:
            return 0.0
        operation, made = computed
        step, op = self._step, operation.number
        begin = self._spans.clock()
        with self._spans.span("gradients", "wait", step=step, op=op):
            nodes = [part.wait() for part in made if part is not None]
        waited = self._spans.clock() - begin
        span = self._spans.span("store", "receive", step=step, op=op)
        with span:
            self._deferred.finish(operation)
            total = self._fabric.reduce(nodes, self._layout.micro_batches)
            span.bytes = sum(gradient.nbytes for gradient in total if gradient is not None)
            self._store.receive(operation.stage, total)
        return waited


def step_done(
    commit: Commit,
    store: Store,
    *,
    loss: float,
    seconds: float,
    store_seconds: float,
    tokens: int,
    engine_bytes: int,
    figures: MaskFigures,
    cycles: StepCycles | None = None,
    hidden_seconds: float = 0.0,
) -> StepDone:
    """Return the event of a committed step.

    Args:
        commit: the commit of the step.
        store: reports its traffic since the previous query.
        seconds: of the whole step.
        store_seconds: the part of `seconds` in which no engine computed.
        engine_bytes: the peak memory of any engine.
        figures: of the arithmetic and the masks.
        cycles: of the engines, if they count them.
        hidden_seconds: of the store's work beside that of engines, not in `store_seconds`.
    """
    decision = commit.decision
    traffic, flash = store.take_traffic(), store.take_flash_traffic()
    delays = (traffic.update_seconds, traffic.snapshot_seconds, flash.waited_seconds)
    update, snapshot, flash_wait = _without(delays, hidden_seconds)
    waited = update + snapshot + flash_wait
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
        flash_wait_seconds=flash_wait,
        flash_speculated_bytes=flash.speculated_bytes,
        flash_discarded_bytes=flash.discarded_bytes,
        compute_seconds=seconds - max(store_seconds, waited),
        weight_seconds=max(0.0, store_seconds - waited),
        update_seconds=update,
        snapshot_seconds=snapshot,
        peak_rss_bytes=process_memory.peak_resident_bytes(),
        flops=figures.flops,
        sparsity=figures.sparsity,
        changed_entries=figures.changed_entries,
        cycles=cycles,
    )


def _without(delays: Sequence[float], hidden: float) -> Iterator[float]:
    """Yield delays without the part that nobody waited for, which is taken from the first ones."""
    for delay in delays:
        shown = max(0.0, delay - hidden)
        hidden -= delay - shown
        yield shown
