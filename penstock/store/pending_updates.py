"""The updates of the last commit of a store in memory, each made before its weight is read.

Where engines wait for weights, the streamed values of a weight may be computed at its fetch, and
its update is deferred (`early_weights.py`); at the latest it is made before the weight's next
gradient arrives.
"""

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from penstock.errors import StorageError
from penstock.spans import Spans
from penstock.store.early_weights import EarlyWeights, early_weights_of
from penstock.store.gradients import Gradients
from penstock.store.holding import Holding
from penstock.store.interface import Decision, UpdateTimes
from penstock.store.optimizers import GroupSettings, Optimizer, UpdateSettings, rounding_key
from penstock.store.roles import AGE
from penstock.store.snapshot import Snapshot
from penstock.store.unchanged_weights import UnchangedWeights
from penstock.store.weight_memory import WeightMemory


class PendingUpdates:
    """Makes each update once. Thread-safe, except for `decided` and `forget`.

    Args:
        program: describes the weights.
        trainable: the weights that every commit updates.
        memory: of the weights and their state.
        optimizer, groups, gradients: of training; None without.
        spans: measure the updates.
    """

    def __init__(
        self,
        program: Holding,
        trainable: Collection[str],
        memory: WeightMemory,
        optimizer: Optimizer | None,
        groups: Mapping[str, GroupSettings],
        gradients: Gradients | None,
        spans: Spans,
    ) -> None:
        self._program = program
        self._trainable = trainable
        self._memory = memory
        self._masks = memory.masks
        self._optimizer, self._groups, self._gradients = optimizer, groups, gradients
        self._spans = spans
        # Kernels are parallel inside; Numba does not guarantee that two kernels may run
        # concurrently.
        self._compute = threading.Lock()
        self._decision: Decision | None = None
        self._updating: str | None = None
        self._times = UpdateTimes()
        self.pending: set[str] = set()  # weights
        self.early: EarlyWeights | None = None  # with `allow_early`
        self.snapshot: Snapshot | None = None
        self.unchanged = UnchangedWeights(trainable)

    def decided(self, decision: Decision) -> None:
        """Let the update of every trainable weight be pending; none may be."""
        self._decision = decision
        self.pending.update(self._trainable)
        if self.early is not None:
            self.early.begin()

    def forget(self) -> None:
        """Forget all updates and new values: other weights are restored."""
        self.pending.clear()
        self._updating = self._decision = None
        self.unchanged.begin()
        if self.early is not None:
            self.early.begin()

    # --- at once ----------------------------------------------------------------------------------

    def make(self, name: str) -> None:
        """Make the pending update of a weight, if there is one.

        Raises:
            StorageError: an update was interrupted.
        """
        # A name leaves the set only after its update, so a weight outside the set is up to date.
        if name not in self.pending:
            return
        snapshot, decision = self.snapshot, self._decision
        if snapshot is not None and decision is not None:
            snapshot.preserve(name, decision.step)
        with self._compute, self._spans.span("update", name, step=self._masks.step):
            self._require_whole()
            if name in self.pending:
                self._updating = name  # remains if an interrupt occurs within the next two lines
                self._apply(name)
                self.pending.discard(name)
                self._updating = None
        if snapshot is not None:
            snapshot.updated(name)

    def _require_whole(self) -> None:
        if self._updating is not None:
            raise StorageError(
                f"the update of {self._updating} was interrupted, so the weights are not those "
                "of a complete step; open the run again: it continues from its last checkpoint"
            )

    def _apply(self, name: str) -> None:
        decision, memory = self._decision, self._memory
        assert decision is not None
        assert self._gradients is not None
        assert self._optimizer is not None
        weight, state = memory.masters.weight(name), memory.state.arrays(name)
        remap = self._masks.remap(name, memory.entries)  # by the values before the update
        if not decision.replaces_update:
            settings = self._settings(name, decision)
            begin = time.perf_counter()
            with self.unchanged.watching(name, weight, settings["learning_rate"]):
                self._optimizer.update(weight, self._gradients.array(name), state, **settings)
            self._count(name, time.perf_counter() - begin)
        if remap is not None:
            memory.change_mask(name, remap)
        if name in self._masks:
            self._masks.updated(name)

    def _settings(self, name: str, decision: Decision) -> UpdateSettings:
        settings, state = self._groups[name], self._memory.state.arrays(name)
        is_sparse = name in self._masks
        return {
            "step": self._masks.updates,
            "learning_rate": decision.learning_rate * settings.learning_rate_scale,
            "weight_decay": settings.weight_decay,
            "gradient_scale": decision.clip_scale,
            "key": rounding_key(name),
            "position": self._program.weights[name].begin,
            "packed": self._masks.entries(name, state.get(AGE)) if is_sparse else None,
        }

    def _count(self, name: str, seconds: float) -> None:
        elements, times = self._program.weights[name].elements, self._times
        is_deferred = self.early is not None and self.early.is_there(name)
        self._times = replace(
            times,
            elements=times.elements + elements,
            seconds=times.seconds + seconds,
            deferred_elements=times.deferred_elements + (elements if is_deferred else 0),
        )

    # --- deferred ---------------------------------------------------------------------------------

    def allow_early(self) -> None:
        """Let weights be streamed before their update, as many as `early` is told to."""
        names = early_weights_of(self._program, self._optimizer)
        if self.early is None and names:
            self.early = EarlyWeights(self._program, names)

    def take_times(self) -> UpdateTimes:
        """Return the updates since the last call."""
        with self._compute:
            times, self._times = self._times, UpdateTimes()
        return times

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Hold the lock of kernels; the time that it is waited for is that of other updates."""
        begin = time.perf_counter()
        with self._compute:
            waited = time.perf_counter() - begin
            times = self._times
            self._times = replace(times, blocked_seconds=times.blocked_seconds + waited)
            yield

    def prepare(self, name: str) -> None:
        """Make the new streamed values of a weight: early if they may be, else by its update.

        **Raises:** as `make`.
        """
        if name not in self.pending:
            return
        early, decision = self.early, self._decision
        if early is not None and decision is not None and not decision.replaces_update:
            if early.is_there(name):
                return
            if early.has_room(name) and self._make_early(name, early, decision):
                return
        self.make(name)

    def _make_early(self, name: str, early: EarlyWeights, decision: Decision) -> bool:
        """Make the new streamed values of a weight; return whether they are there."""
        with self._compute, self._spans.span("update", f"{name}, streamed", step=decision.step):
            self._require_whole()
            if name not in self.pending or early.is_there(name) or not early.has_room(name):
                return early.is_there(name)  # another thread was first
            assert self._gradients is not None
            assert self._optimizer is not None
            weight, state = self._memory.masters.weight(name), self._memory.state.arrays(name)
            settings = self._settings(name, decision)
            settings["streamed"] = early.array(name)
            self._optimizer.update(weight, self._gradients.array(name), state, **settings)
            early.add(name)
            return True

    def early_stream(self, name: str) -> torch.Tensor | None:
        """Return the new streamed values of a weight, if they were made before its update."""
        return None if self.early is None else self.early.stream(name)
