"""Steps of a run whose engines, and optionally shards, are other processes.

The trainer's thread requests a step, and the nodes execute it. Lost nodes are replaced during the
step; the trainer sees a loss only as an event.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from penstock.config import Config
from penstock.distributed.control import (
    ClusterManager,
    ComputeTimer,
    StragglerDetector,
    StragglerReports,
)
from penstock.distributed.control_messages import WorkerMetrics
from penstock.distributed.protocol import (
    EngineInput,
    Message,
    Phase,
    RolledBackError,
    StepResult,
    UnrecoverableError,
    message_validation,
)
from penstock.distributed.rpc import (
    ShardReport,
    body_of_decision,
    bytes_of_masks,
    bytes_of_open_selections,
    error_class,
    histograms_of,
)
from penstock.errors import ProtocolError
from penstock.planning import ExecutionPlan, builders, store_factory
from penstock.program import Program
from penstock.spans import Measured, Spans
from penstock.sparsity import Histogram
from penstock.step.local import step_done
from penstock.step.mask_figures import MaskFigures
from penstock.step.micro_batches import Batches
from penstock.step.nonfinite import NonFiniteLossError, require_finite, trace
from penstock.store import (
    Commit,
    CommitRule,
    SelectionRounds,
    ShardedMasks,
    ShardedStore,
    Store,
    merged,
)
from penstock.store.flash import ShardedFlashStore
from penstock.telemetry import StepDone

_CANCEL_SECONDS = 60.0  # seconds in which a decided step must end
_POLL_SECONDS = 0.05  # seconds between two checks for events


class DistributedStepRunner:
    """Runs the steps of one execution plan over a store and the processes of a cluster manager.

    Args:
        store: the whole store, wherever its shards are.
        batches: returns the rows of a step.
        tokens: the number of tokens that a step counts.
        spans: measure the steps; if they keep spans, those of all nodes are collected after every
            step.
    """

    def __init__(
        self,
        config: Config,
        layout: ExecutionPlan,
        store: Store,
        batches: Batches,
        manager: ClusterManager,
        *,
        tokens: int,
        spans: Spans | None = None,
    ) -> None:
        self._config, self._layout, self._store = config, layout, store
        self._batches, self._tokens = batches, tokens
        self._rule = store_factory.commit_rule(config)
        self._masks: ShardedMasks | None = None
        if layout.sparse is not None and isinstance(store, ShardedStore):
            self._masks = store.masks
        self.manager = manager
        self._straggler_detector = StragglerDetector(config.cluster.slow)
        self._straggler_reports = StragglerReports()
        self._compute_timer = ComputeTimer()
        self._has_begun = False
        self._following: _TrainingStepRequest | None = None  # whose rows are sent ahead
        self._spans = spans or Spans()
        self.measured: Measured | None = None  # of the last step
        self.commit: Commit | None = None  # of the last step

    @property
    def engine_peak_bytes(self) -> int:
        """The highest peak memory that any engine has reported."""
        return self.manager.heartbeat_stats.peak_bytes

    def run(self) -> StepDone:
        """Execute one step and commit it; lost nodes are replaced meanwhile.

        The step follows the current step of the shards. After a rollback of the shards, an earlier
        step is executed again.

        Raises:
            NonFiniteError: this error, and errors of the data or the store, leave the step
                uncommitted; the step can be run again.
            ClusterError: no engine is available, or the run's processes were released.
            StorageError: a shard was lost, and no copy of its weights and state exists.
            InterruptedError: a stop was requested while nodes were missing.
        """
        self.manager.event_queue.require_sound()  # no step is requested from closed connections
        started = self._spans.clock()
        self._store.take_traffic()
        if not self._has_begun:
            self.manager.await_engines()
            self._has_begun = True
        self._collect_spans()  # discards the spans before the step
        while True:
            on_flash = self._store if isinstance(self._store, ShardedFlashStore) else None
            self.manager.replicas.copy_to_learners(on_flash)
            self.manager.event_queue.step = self._store.step  # as the shards last reported
            request = self._request_after(self._store.step)
            with self._spans.span("trainer", "step", step=request.step):
                outcome = self._attempt(request)
            if outcome.error is None:
                break
            if not self._can_retry(outcome.error):
                self.manager.event_queue.require_sound()
                if isinstance(outcome.error, NonFiniteLossError):
                    self._trace(outcome.error)
                raise _as_ours(outcome.error)
            self._store.take_traffic()  # the replies also update the shards' current step
            if self._masks is not None:
                self._masks.forget()
        self.manager.call(self._check_stragglers)
        assert request.commit is not None  # a result without an error has a decision
        if self._masks is not None:
            self._masks.follow(request.commit.decision)
        done = self._done(request, outcome, started)
        self.measured = self._collect_spans()
        return done

    def _request_after(self, done: int) -> _TrainingStepRequest:
        """Return the request for the step after `done` steps, and remember the one behind it."""
        known = self._following
        request = known if known is not None and known.step == done + 1 else self._new_request(done)
        is_last = request.step >= self._config.run.steps
        self._following = None if is_last else self._new_request(request.step)
        return request

    def _new_request(self, done: int) -> _TrainingStepRequest:
        return _TrainingStepRequest(
            self._layout.program,
            self._rule,
            self._batches,
            done,
            self._config.run.seed,
            self._masks,
        )

    def _collect_spans(self) -> Measured:
        """Return what was measured since the last call, by the nodes too if spans are kept."""
        own = self._spans.drain()
        nodes = self.manager.coordinator.membership.participants
        others = self.manager.span_collector.collect(nodes, self._spans)
        return replace(own, spans=own.spans + others.spans, dropped=own.dropped + others.dropped)

    def _attempt(self, request: _TrainingStepRequest) -> StepResult:
        """Request a step from the coordinator, and wait for its result."""
        ended = threading.Event()
        outcomes: list[StepResult] = []

        def done(outcome: StepResult) -> None:
            outcomes.append(outcome)
            ended.set()

        manager = self.manager
        following = self._following
        manager.call(lambda: manager.coordinator.start(request, done, following))
        try:
            while not ended.wait(timeout=_POLL_SECONDS):
                manager.event_queue.poll()
                if (
                    manager.coordinator.phase is Phase.GATHERING
                    and manager.event_queue.should_stop()
                ):
                    raise InterruptedError("stopped while waiting for engines or shards")
        except BaseException:  # the next step needs a quiescent coordinator
            self._cancel_step(ended)
            raise
        manager.event_queue.poll()
        if outcomes[0].error is not None:
            self._cancel_step(ended)
        return outcomes[0]

    def _cancel_step(self, ended: threading.Event) -> None:
        """Cancel the step; return when no node works on it, or the run has failed."""
        manager, deadline = self.manager, time.monotonic() + _CANCEL_SECONDS

        def is_over(seen: Callable[[], bool]) -> bool:
            return seen() or manager.event_queue.has_failed or time.monotonic() > deadline

        manager.call(manager.coordinator.cancel)
        while not is_over(ended.is_set):
            ended.wait(timeout=_POLL_SECONDS)
        epoch_advanced = threading.Event()
        manager.call(manager.coordinator.advance_epoch)
        manager.call(epoch_advanced.set)
        while not is_over(epoch_advanced.is_set):
            epoch_advanced.wait(timeout=_POLL_SECONDS)
        while not is_over(manager.is_quiescent):
            time.sleep(0.002)

    def _can_retry(self, error: BaseException) -> bool:
        """Return whether the step can be retried from a step that all shards hold or will hold."""
        if isinstance(error, UnrecoverableError):
            return self.manager.replicas.assignment.is_replaced(error.node)
        return isinstance(error, RolledBackError)

    def _done(
        self,
        request: _TrainingStepRequest,
        outcome: StepResult,
        started: float,
    ) -> StepDone:
        commit = self.commit = request.commit
        assert commit is not None
        self.manager.event_queue.step = commit.decision.step
        seconds = self._spans.clock() - started
        return step_done(
            commit,
            self._store,
            loss=math.fsum(outcome.losses) * request.scale,
            seconds=seconds,
            store_seconds=seconds - self._compute_timer.of_step(self._figures(), seconds),
            tokens=self._tokens,
            engine_bytes=self.manager.heartbeat_stats.peak_bytes,
            figures=MaskFigures.of(self._layout, request.kept, commit.decision),
        )

    def _figures(self) -> Mapping[int, WorkerMetrics]:
        """Return the latest metrics of the engines of the current view."""
        return self.manager.heartbeat_stats.figures(self.manager.coordinator.engines)

    def _trace(self, error: NonFiniteLossError) -> NoReturn:
        """Find, in this process, the stage where a loss became non-finite."""
        layout = self._layout
        made = builders.make_engines(
            layout.program, layout.plan, layout.shares, 1, layout.device, layout.sparse_weights
        )
        trace(error, layout.program, made, self._store, self._batches, self._config.run.seed)

    def _check_stragglers(self) -> None:
        """Report slow engines and replace persistently slow ones; runs in the endpoint's thread."""
        coordinator = self.manager.coordinator
        metrics = self._figures().items()
        computed = {engine: (each.computed, each.micro_batches) for engine, each in metrics}
        looks_to_evict = self._config.cluster.evict_slow
        for slow in self._straggler_detector.look(computed):
            if self._straggler_reports.is_due(slow):
                others = "the other" if len(computed) == 2 else "the others"
                text = f"engine {slow.engine} takes {slow.times:.1f} times as long as {others}"
                self.manager.event_queue.emit("slow", text, slow.engine)
            spare = len(coordinator.ready) > coordinator.wanted
            if looks_to_evict is not None and slow.looks >= looks_to_evict and spare:
                coordinator.lost(slow.engine, f"it was slow {slow.looks} times in a row")


class _TrainingStepRequest:
    """The coordinator's request for one training step."""

    def __init__(
        self,
        program: Program,
        rule: CommitRule,
        batches: Batches,
        done: int,
        seed: int,
        masks: ShardedMasks | None = None,
    ) -> None:
        self._program, self._rule, self._masks = program, rule, masks
        self._rounds: SelectionRounds | None = None
        self.step = done + 1
        self.micro_batches = batches.micro_batches
        self.scale = 1.0
        self.commit: Commit | None = None  # set once the step is decided
        self.kept: Mapping[str, int] = {}  # entries of sparse weights before the step
        self._batches, self._done, self._seed = batches, done, seed

    def parts(self, engines: int) -> Sequence[EngineInput]:
        """Return the input of each engine."""
        parts = self._batches.parts(self._done, engines)
        self.scale = self._batches.loss_scale(self._done, parts)
        return [
            EngineInput(
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

    def report(self, message: Message, shard: int) -> ShardReport:
        """Return a shard's report of its gradients and its state."""
        report, count = ShardReport.read(message.body), len(self._program.stages)
        gradients = report.gradients
        if not all(0 <= n < count for n in (*gradients.silent, *(gradients.non_finite or {}))):
            raise message_validation.refuse(
                message, f"names stages outside of the {count} stages of the program"
            )
        parts = {} if self._masks is None else self._masks.parts_in(shard)
        counts = zip(report.kept, parts.values(), strict=False)
        if len(report.kept) != len(parts) or any(kept > most for kept, most in counts):
            raise message_validation.refuse(
                message,
                f"has {str([*report.kept])[:80]} as the entries of the shard's {len(parts)} parts "
                "of sparse weights, expected for each at most its elements",
            )
        return report

    def difference(self, first: ShardReport, other: ShardReport) -> str | None:
        """Describe the difference between the reports of two replicas; None if they are equal."""
        return first.difference(other)

    def answer(self, message: Message) -> int:
        """Return the step that a shard reports as committed: this one."""
        step = message_validation.integer(message, "step", 0)
        if step != self.step:
            raise message_validation.refuse(
                message, f"commits step {step}, expected step {self.step}"
            )
        return step

    def decide(self, losses: Sequence[float], reports: Sequence[ShardReport]) -> Mapping[str, Any]:
        """Return the decision by which all shards commit.

        Raises:
            NonFiniteError: a loss or a gradient is not finite.
            NoTrainingError: a trainable weight has no gradient.
        """
        require_finite(self.step, losses)
        gradients = merged(self._program, [report.gradients for report in reports])
        self.commit = self._rule.decide(self._program, self.step, gradients)
        if self._masks is not None:
            # The shards may have gone back since the last step.
            self.kept = self._masks.reported(
                [
                    dict(zip(self._masks.parts_in(shard), report.kept, strict=True))
                    for shard, report in enumerate(reports)
                ]
            )
            self._rounds = self._masks.plan.selection_rounds(self.step, {})
        return body_of_decision(self.commit.decision)

    def open_selections(self) -> np.ndarray | None:
        """Return the selections that the next round narrows, bytes; None once all are decided."""
        rounds, commit = self._rounds, self.commit
        if rounds is None or commit is None:
            return None
        if selections := rounds.open_selections:
            return bytes_of_open_selections(selections)
        self.commit = replace(commit, decision=rounds.decided(commit.decision))
        return None

    def histograms(self, message: Message, shard: int) -> Sequence[Histogram]:
        """Return the histograms of a shard for the open selections."""
        assert self._rounds is not None
        assert self._masks is not None
        parts = self._masks.parts_in(shard)
        elements = [parts.get(each.weight, 0) for each in self._rounds.open_selections]
        return histograms_of(message.payload, elements)

    def narrow(self, histograms: Sequence[Sequence[Histogram]]) -> None:
        """Finish a round by the histograms of every shard."""
        assert self._rounds is not None
        try:
            self._rounds.narrow(histograms)
        except ValueError as error:
            raise ProtocolError(f"step {self.step}: masks cannot be decided: {error}") from None

    def masks(self) -> np.ndarray | None:
        """Return the changes of masks that the rounds have decided; None if there are none."""
        return None if self.commit is None else bytes_of_masks(self.commit.decision)


def _as_ours(error: BaseException) -> BaseException:
    """Return a node's failure as the error that the node raised."""
    if isinstance(error, UnrecoverableError):
        return error_class(error.kind)(str(error))
    return error
