"""The store in host memory: streams weights, receives gradients and applies the updates.

Updates are lazy and exact. `commit` only fixes their inputs (the clip factor, the learning rate).
Each weight is updated at its next fetch, so stage 0 is ready at once and the other updates overlap
with computation. Every read of a weight updates the weight first, so callers cannot observe the
delay.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from penstock.errors import StorageError
from penstock.store.commit import CommitRule, commit_by, require_next
from penstock.store.comparing import Compared, Rotation
from penstock.store.content_hash import hash_read
from penstock.store.gradients import Gradients
from penstock.store.holding import Holding, home_stages
from penstock.store.incoming import fill
from penstock.store.interface import Commit, Decision, FlashTraffic, Traffic
from penstock.store.layout import allocate_role, slabs_of
from penstock.store.masters import Masters
from penstock.store.norm import GradientReport
from penstock.store.optimizers import GroupSettings, Optimizer, rounding_key
from penstock.store.portions import SlabPortions
from penstock.store.roles import MASTER, Stored, stored_of
from penstock.store.snapshot import Parts, Snapshot
from penstock.store.unchanged import UnchangedWeights
from penstock.weight_formats import BFLOAT16, DENSE, SPLIT

_FORMATS = {"fp32": (DENSE, BFLOAT16), "bf16": (SPLIT, DENSE, BFLOAT16)}


class DramStore:
    """Weights, gradients and optimizer state of one program, or of a part, in slabs of exact size.

    `fetch` and `receive` may be called from several threads. `load`, `commit`, `discard`, `flush`
    and all methods that read or restore state require that no other call is in progress.

    Args:
        program: names the weights, their shapes and the stages that use them.
        precision: `fp32`, or `bf16` for a program whose weights are streamed as bfloat16.
        optimizer: computes the updates; None for inference only.
        groups: settings of every trainable weight, by name (`assign_groups`).
        rule: decides the steps that are committed.
        gradient_dtype: float32 or bfloat16, the type of stored gradients.

    Raises:
        ValueError: the program has another precision, or a weight has no settings.
        BudgetError: the slabs cannot be allocated.
    """

    def __init__(
        self,
        program: Holding,
        precision: Literal["fp32", "bf16"],
        optimizer: Optimizer | None = None,
        groups: Mapping[str, GroupSettings] | None = None,
        rule: CommitRule | None = None,
        gradient_dtype: torch.dtype = torch.float32,
    ) -> None:
        _check_precision(program, precision)
        self.program = program
        self.step = 0
        self._optimizer = optimizer
        self._groups = dict(groups or {})
        self._rule = rule
        self._trainable = tuple(n for n in home_stages(program) if program.weights[n].trainable)
        self._masters = Masters(program)
        self.memory_bytes = dict(self._masters.memory_bytes)
        self._gradients: Gradients | None = None
        self._state: dict[str, dict[str, np.ndarray]] = {}
        if optimizer is not None:
            self._prepare_training(optimizer, gradient_dtype)
        self._is_loaded = False
        self._state_is_zero = True
        self._decision: Decision | None = None
        self._pending: set[str] = set()
        self._updating: str | None = None
        self._snapshot: Snapshot | None = None
        self._rotation: Rotation | None = None
        self._unchanged = UnchangedWeights(self._trainable)
        # Kernels are parallel inside; Numba does not guarantee that two kernels may run
        # concurrently.
        self._compute = threading.Lock()
        self._count = threading.Lock()
        self._streamed_bytes = self._gradient_bytes = 0
        self._update_seconds = 0.0

    def _prepare_training(self, optimizer: Optimizer, gradient_dtype: torch.dtype) -> None:
        missing = [name for name in self._trainable if name not in self._groups]
        if missing:
            raise ValueError(f"trainable weights without settings: {', '.join(missing[:5])}")
        if self._rule is None:
            raise ValueError("a store with an optimizer needs a commit rule")
        self._gradients = Gradients(self.program, gradient_dtype)
        self.memory_bytes["gradient"] = self._gradients.memory_bytes
        for role in optimizer.roles:
            kinds = dict.fromkeys(self._trainable, role.numpy)
            arrays, role_bytes = allocate_role(self.program, kinds, role.group)
            self.memory_bytes[role.name] = role_bytes
            for name, array in arrays.items():
                self._state.setdefault(name, {})[role.name] = array

    def page_lock(self) -> bool:
        """Page-lock the streamed memory for engines on a GPU; once, before the first step.

        Returns:
            Whether the system allowed it. Otherwise the copies to the GPU are slower and do not
            overlap with computation; results are the same.
        """
        return self._masters.page_lock()

    def take_flash_traffic(self) -> FlashTraffic:
        """No traffic to flash."""
        return FlashTraffic()

    @property
    def flash_bytes(self) -> int:
        """No bytes on flash."""
        return 0

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, by name."""
        return {name: spec.shape for name, spec in self.program.weights.items()}

    @property
    def flash_rule(self) -> FlashTraffic:
        """No traffic to flash is expected."""
        return FlashTraffic()

    def remember(self, extra: Mapping[str, Any]) -> None:
        """Do nothing: memory is lost in a crash; data kept with a step is saved in a checkpoint."""

    def close(self) -> None:
        """Do nothing: the store holds only memory."""

    # --- weights in -------------------------------------------------------------------------------

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill all masters, one weight at a time, and start at step 0 with no optimizer state.

        Args:
            weights: every weight of the program once, as name and float32 tensor of its shape.

        Raises:
            ConfigError: a name is unknown or occurs twice, a weight is missing or has another shape
                or type; the store must then be loaded again.
        """
        fill(self, weights)
        self._state_is_zero = True

    # --- one step ---------------------------------------------------------------------------------

    def fetch(self, stage: int, positions: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return the weights of a stage for streaming, after any pending update.

        Args:
            stage: index of the stage.
            positions: which of the stage's weights, in this order; all by default.

        Returns:
            Read-only views of the store's memory, float32 or bfloat16 as in the program, in the
            weights' shapes; valid until the next commit.
        """
        self._require_loaded()
        names = self.program.stages[stage].weights
        for name in names:
            self._update(name)
        chosen = names if positions is None else [names[position] for position in positions]
        return self._views(chosen)

    def stream(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return weights by name, as `fetch` does by stage; used by another program of the
        model."""
        self._require_loaded()
        for name in names:
            self._update(name)
        return self._views(names)

    def _views(self, names: Sequence[str]) -> list[torch.Tensor]:
        views = [self._masters.stream(name) for name in names]
        with self._count:
            self._streamed_bytes += sum(view.nbytes for view in views)
        return views

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Accept the gradients of one stage, summed over the whole batch.

        Args:
            stage: index of the stage.
            gradients: per trainable weight of the stage, in stage order, a float32 tensor of the
                weight's shape in host memory, or None where the loss does not depend on it.

        Raises:
            RuntimeError: the stage has already sent its gradients in this step.
            ValueError: the number of gradients, or a shape, type or device, is wrong.
        """
        slabs = self._require_optimizer()
        with self._compute:
            slabs.check(stage, gradients)
        for name in slabs.trainable(stage):
            self._update(name)  # the old gradient must be used before the new one overwrites it
        with self._compute:
            received_bytes = slabs.receive(stage, gradients)
        with self._count:
            self._gradient_bytes += received_bytes

    def commit(self) -> Commit:
        """Decide the step: fix clip factor and learning rate. Every weight then has a pending
        update.

        Raises:
            NoTrainingError: a trainable weight received no gradient. Nothing is committed.
            NonFiniteError: a gradient is NaN or infinite. Nothing is committed; after `discard` the
                step may be replayed.
        """
        self._require_optimizer()
        assert self._rule is not None
        return commit_by(self._rule, self)

    def prepare(self) -> GradientReport:
        """Return the report on the step's gradients; afterwards `decide` cannot fail."""
        self._require_loaded()
        return self._require_optimizer().report()

    def decide(self, decision: Decision) -> None:
        """Commit the step by the decision for all shards of the store.

        **Raises:** `StorageError` if the decision is for another step.
        """
        slabs = self._require_optimizer()
        require_next(decision, self.step)
        self._decision = decision
        self.step += 1
        self._state_is_zero = False
        self._pending.update(self._trainable)
        slabs.decided()

    def discard(self) -> None:
        """Discard the gradients received since the last commit; the step may be replayed."""
        self._require_optimizer().clear()

    def flush(self) -> None:
        """Apply all pending updates now."""
        for name in self._trainable:
            self._update(name)

    def _update(self, name: str) -> None:
        """Apply the pending update of a weight, if there is one; thread-safe."""
        # A name leaves the set only after its update, so a weight outside the set is up to date.
        if name not in self._pending:
            return
        snapshot, decision = self._snapshot, self._decision
        if snapshot is not None and decision is not None:
            snapshot.preserve(name, decision.step)
        started = time.perf_counter()
        with self._compute:
            if self._updating is not None:
                raise StorageError(
                    f"the update of {self._updating} was interrupted, so the weights are not those "
                    "of a complete step; open the run again: it continues from its last checkpoint"
                )
            if name in self._pending:
                self._updating = name  # remains if an interrupt occurs within the next two lines
                self._apply(name)
                self._pending.discard(name)
                self._updating = None
        with self._count:
            self._update_seconds += time.perf_counter() - started
        if snapshot is not None:
            snapshot.updated(name)

    def _apply(self, name: str) -> None:
        decision, slabs, optimizer = self._decision, self._gradients, self._optimizer
        assert decision is not None
        assert slabs is not None
        assert optimizer is not None
        settings = self._groups[name]
        rate = decision.learning_rate * settings.learning_rate_scale
        weight = self._masters.weight(name)
        with self._unchanged.watching(name, weight, rate):
            optimizer.update(
                weight,
                slabs.array(name),
                self._state.get(name, {}),
                step=decision.step,
                learning_rate=rate,
                weight_decay=settings.weight_decay,
                gradient_scale=decision.clip_scale,
                key=rounding_key(name),
                position=self.program.weights[name].begin,
            )

    def unchanged(self) -> tuple[str, ...]:
        """Return the trainable weights of which no update has changed a bit.

        Only updates with a learning rate above zero since the weights were loaded or restored
        count. A weight without such an update is not listed. Call `flush` first.
        """
        return self._unchanged.names()

    def take_traffic(self) -> Traffic:
        """Return bytes streamed and received, and waiting times, since the last call."""
        snapshot_seconds = self._snapshot.take_waited_seconds() if self._snapshot else 0.0
        with self._count:
            taken = Traffic(
                self._streamed_bytes, self._gradient_bytes, self._update_seconds, snapshot_seconds
            )
            self._streamed_bytes = self._gradient_bytes = 0
            self._update_seconds = 0.0
        return taken

    # --- reading and restoring state
    # ------------------------------------------------------------------

    def master(self, name: str) -> torch.Tensor:
        """Return a copy of a weight, float32 in its shape."""
        self._require_loaded()
        self._update(name)
        spec = self.program.weights[name]
        return torch.from_numpy(self._masters.read(name, 0, spec.elements).copy()).view(spec.shape)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return views of a weight's optimizer state by role, in the shapes of a checkpoint."""
        self._require_loaded()
        self._update(name)
        stored = self.roles(name)
        arrays = self._state.get(name, {})
        return {
            role: torch.from_numpy(array).view(stored[role].shape) for role, array in arrays.items()
        }

    def roles(self, name: str) -> dict[str, Stored]:
        """Return the arrays of a weight that `read` and `write` accept: its master, then its
        state."""
        roles = self._optimizer.roles if self._optimizer and name in self._state else ()
        return stored_of(self.program.weights[name], roles)

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat; maybe a view."""
        self._require_loaded()
        self._update(name)
        if role == MASTER:
            return self._masters.read(name, begin, end)
        return self._state[name][role][begin:end]

    def snapshot(self, buffer_bytes: int) -> Snapshot:
        """Return the state of the present step, for a thread that reads it during later steps.

        Fetches apply the updates of this step as usual; if no fetch follows, `flush` applies them.
        The caller must close the snapshot after reading.

        Args:
            buffer_bytes: most that the snapshot may copy before later updates overwrite it.

        Raises:
            RuntimeError: the previous snapshot is not closed yet.
        """
        self._require_loaded()
        if self._snapshot is not None and not self._snapshot.is_closed:
            raise RuntimeError(f"the snapshot of step {self._snapshot.step} is not closed yet")
        tensors = {name: self.roles(name) for name in self.program.weights}
        self._snapshot = Snapshot(
            self.program, self.step, tensors, self._memory_of, self._pending, buffer_bytes
        )
        return self._snapshot

    def _memory_of(self, name: str, role: str) -> Parts:
        return self._masters.weight(name) if role == MASTER else (self._state[name][role],)

    def begin_restore(self) -> None:
        """Discard gradients and pending updates; the store is unusable until `finish_restore`.

        A snapshot that is not completely read is abandoned.
        """
        if self._snapshot is not None:
            self._snapshot.close()
        self._is_loaded = False
        self._pending.clear()
        self._updating = None
        self._decision = None
        self._unchanged.begin()
        if self._gradients is not None:
            self._gradients.clear()

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values of a weight or of its state from `begin` on, during a restore."""
        if self._is_loaded:
            raise RuntimeError("state is written only between begin_restore and finish_restore")
        if role == MASTER:
            self._masters.write(name, begin, values)
        else:
            self._state_is_zero = False
            self._state[name][role][begin : begin + values.size] = values

    def portions(self, portion_bytes: int) -> SlabPortions:
        """Return the whole content, in portions of at most so many bytes (`portions.py`)."""
        self.flush()
        if not self._is_loaded:
            self._state_is_zero = False  # the caller is about to write it
        return SlabPortions((slab for _, slab in self._slabs()), portion_bytes)

    def compared(self) -> Compared:
        """Return checksums of a part of the content, chosen by the step (`comparing.py`)."""
        self.flush()
        if self._rotation is None:
            self._rotation = Rotation(self._slabs())
        return self._rotation.part(self.step)

    def _slabs(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the memory of all weights and their state, stage by stage, with descriptions."""
        by_stage: dict[int, list[str]] = {}
        for name, home in home_stages(self.program).items():
            by_stage.setdefault(home, []).append(name)
        for home, names in by_stage.items():
            stage = self.program.stages[home].name
            for slab in slabs_of(part for name in names for part in self._masters.weight(name)):
                yield f"the weights of stage {stage}", slab
            states = [self._state[name] for name in names if name in self._state]
            for slab in slabs_of(array for state in states for array in state.values()):
                yield f"the optimizer's state of stage {stage}", slab

    def clear_state(self, name: str) -> None:
        """Set the optimizer state of a weight to its initial zeros, during a restore."""
        if self._state_is_zero:
            return  # zeroing again would only allocate untouched pages
        for array in self._state.get(name, {}).values():
            array.fill(0)

    def finish_restore(self, step: int) -> None:
        """Make the store usable; its content is the state after `step` commits."""
        self.step = step
        self._is_loaded = True

    def content_hash(self) -> str:
        """Return a hash of all weights (`content_hash.py`)."""
        self._require_loaded()
        self.flush()
        return hash_read(self.shapes, self._masters.read)

    def _require_loaded(self) -> None:
        if not self._is_loaded:
            raise RuntimeError("the store holds no weights yet: load them, or restore a checkpoint")

    def _require_optimizer(self) -> Gradients:
        if self._gradients is None:
            raise RuntimeError(
                "this store has no optimizer: it streams weights and accepts no gradients"
            )
        return self._gradients


def _check_precision(program: Holding, precision: str) -> None:
    if precision not in _FORMATS:
        raise ValueError(f"precision must be 'fp32' or 'bf16', not {precision!r}")
    for name, spec in program.weights.items():
        if spec.format not in _FORMATS[precision]:
            raise ValueError(f"{name} streams as {spec.stream_dtype}, the precision is {precision}")
