"""The store in host memory: streams weights, receives gradients and applies the updates.

Updates are lazy and exact. `commit` only fixes their inputs (the clip factor, the learning rate).
Each weight is updated at its next fetch, so stage 0 is ready at once and the other updates overlap
with computation (`pending_updates.py`). Every read of a weight updates the weight first, so callers
cannot observe the delay. For engines on a GPU, a fetch may compute only the streamed values, and
the update is made later in the step (`early_weights.py`).

A sparse weight has memory for the entries that its mask keeps. When its mask changes, the pending
update moves the entries that stay, and their state, to their new places.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from penstock.spans import Spans
from penstock.sparsity import Histogram, MaskSize, PackedIndex, Selection, StreamedWeight
from penstock.store.commit import CommitRule, commit_by, require_next
from penstock.store.comparing import Compared, Rotation
from penstock.store.gradients import Gradients
from penstock.store.holding import Holding, home_stages
from penstock.store.interface import Commit, Decision, FlashTraffic, Traffic, UpdateTimes
from penstock.store.mask_plan import EMPTY_HISTOGRAM, OpenSelection
from penstock.store.mask_rule import MaskRule
from penstock.store.masters import check_precision
from penstock.store.norm import GradientReport
from penstock.store.optimizers import GroupSettings, Optimizer
from penstock.store.part_masks import PartMasks
from penstock.store.pending_updates import PendingUpdates
from penstock.store.portions import Portions
from penstock.store.roles import MASTER, Stored
from penstock.store.snapshot import Snapshot
from penstock.store.weight_memory import WeightMemory


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
        masks: decides the masks of sparse weights; needed to load them, and to train them.

    Raises:
        ValueError: the program has another precision, or a weight has no settings, or no mask rule.
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
        masks: MaskRule | None = None,
    ) -> None:
        check_precision(program, precision)
        self.program = program
        self._groups = dict(groups or {})
        self._rule = rule
        self._trainable = tuple(n for n in home_stages(program) if program.weights[n].trainable)
        self._optimizer = optimizer
        self._memory = WeightMemory(program, self._trainable, optimizer, masks)
        self._masks = self._memory.masks
        self._gradients: Gradients | None = None
        if optimizer is not None:
            self._check_settings(masks)
            self._gradients = Gradients(program, gradient_dtype, masks=self._masks)
        self._rotation: Rotation | None = None
        self._count = threading.Lock()
        self._streamed_bytes = self._gradient_bytes = 0
        self._spans = Spans()
        self.spans = (self._spans,)
        self._updates = PendingUpdates(
            program,
            self._trainable,
            self._memory,
            optimizer,
            self._groups,
            self._gradients,
            self._spans,
        )

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self._masks.step

    @property
    def memory_bytes(self) -> dict[str, int]:
        """The memory, by use."""
        gradients = self._gradients
        own = {} if gradients is None else {"gradient": gradients.memory_bytes}
        early = self._updates.early
        if early is not None and early.memory_bytes:
            own["early weights"] = early.memory_bytes
        return {**self._memory.masters.memory_bytes, **own, **self._memory.state_bytes}

    def _check_settings(self, masks: MaskRule | None) -> None:
        missing = [name for name in self._trainable if name not in self._groups]
        if missing:
            raise ValueError(f"trainable weights without settings: {', '.join(missing[:5])}")
        if self._rule is None:
            raise ValueError("a store with an optimizer needs a commit rule")
        if self._masks.names and masks is None:
            raise ValueError("a store that trains sparse weights needs a mask rule")

    def page_lock(self) -> bool:
        """Page-lock the streamed memory for engines on a GPU; once, before the first step.

        Returns:
            Whether the system allowed it. Otherwise the copies to the GPU are slower and do not
            overlap with computation; results are the same.
        """
        if self._updates.early is not None:
            self._updates.early.page_lock()
        return self._memory.masters.page_lock()

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

        Of a sparse weight, the entries of its first mask are kept.

        Raises:
            ConfigError: a name is unknown or occurs twice, a weight is missing or has another shape
                or type, or a mask would keep no entry; the store must then be loaded again.
        """
        self.begin_restore()
        self._memory.load(weights)

    # --- one step ---------------------------------------------------------------------------------

    def fetch(self, stage: int, positions: Sequence[int] | None = None) -> list[StreamedWeight]:
        """Return the weights of a stage for streaming, after any pending update.

        Args:
            stage: index of the stage.
            positions: which of the stage's weights, in this order; all by default.

        Returns:
            Read-only views of the store's memory, float32 or bfloat16 as in the program, in the
            weights' shapes, or `SparseWeight`s; valid until the next commit.
        """
        self._require_loaded()
        names = self.program.stages[stage].weights
        for name in names:
            self._updates.prepare(name)
        chosen = names if positions is None else [names[position] for position in positions]
        return self._views(chosen)

    def stream(self, names: Sequence[str]) -> list[StreamedWeight]:
        """Return weights by name, as `fetch` does by stage; used by another program of the
        model."""
        self._require_loaded()
        for name in names:
            self._update(name)
        return self._views(names)

    def _views(self, names: Sequence[str]) -> list[StreamedWeight]:
        views: list[StreamedWeight] = []
        for name in names:
            early = self._updates.early_stream(name)
            views.append(self._memory.streamed(name) if early is None else early)
        with self._count:
            self._streamed_bytes += sum(view.nbytes for view in views)
        return views

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Accept the gradients of one stage, summed over the whole batch.

        Args:
            stage: index of the stage.
            gradients: per trainable weight of the stage, in stage order, a float32 tensor of the
                weight's shape in host memory, or None where the loss does not depend on it. For a
                sparse weight, one number per kept entry, or the dense gradient if the fetch has
                asked for it.

        Raises:
            RuntimeError: the stage has already sent its gradients in this step.
            ValueError: the number of gradients, or a shape, type or device, is wrong.
        """
        slabs = self._require_optimizer()
        for name in slabs.trainable(stage):
            self._update(name)  # the old gradient must be used before the new one overwrites it
        with self._updates.computing():
            slabs.check(stage, gradients)
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
            ConfigError: a mask would keep no entry. Nothing is committed.
        """
        self._require_optimizer()
        assert self._rule is not None
        return commit_by(self._rule, self, self._decide_masks)

    def _decide_masks(self, decision: Decision) -> Decision:
        return self._masks.decide(decision, self._memory.entries)

    def prepare(self) -> GradientReport:
        """Return the report on the step's gradients; afterwards `decide` cannot fail."""
        self._require_loaded()
        return self._require_optimizer().report()

    def histograms(self, selections: Sequence[OpenSelection]) -> list[Histogram]:
        """Return the histogram of a shard's entries for each undecided selection.

        **Raises:** `NonFiniteError` if the value of an entry is NaN or infinite.
        """
        masks = self._masks
        if not isinstance(masks, PartMasks):
            return [EMPTY_HISTOGRAM for _ in selections]
        return [masks.histogram(each, self._memory.entries) for each in selections]

    def settle(self, name: str, grow: Selection) -> None:
        """Keep, of the entries that may be grown, those that are selected over all shards."""
        if isinstance(self._masks, PartMasks):
            self._masks.settle(name, grow)

    def decide(self, decision: Decision) -> None:
        """Commit the step by the decision for all shards of the store.

        **Raises:** `StorageError` if the decision is for another step.
        """
        slabs = self._require_optimizer()
        require_next(decision, self.step)
        self._masks.accept(decision)
        self._memory.state_is_zero = False
        self._updates.decided(decision)
        slabs.decided()

    def discard(self) -> None:
        """Discard the gradients received since the last commit; the step may be replayed."""
        self._require_optimizer().clear()
        self._masks.discard()

    def flush(self) -> None:
        """Apply all pending updates now."""
        for name in self._trainable:
            self._update(name)

    def _update(self, name: str) -> None:
        """Make the pending update of a weight, if there is one; thread-safe."""
        self._updates.make(name)

    # --- updates that are deferred ----------------------------------------------------------------

    def allow_early(self) -> None:
        """Let weights be streamed before their update, as many as `defer` says; before the first
        step. Memory for them is allocated when `defer` asks for the first ones."""
        self._updates.allow_early()

    @property
    def early_elements(self) -> int:
        """The elements of all weights that can be streamed before their update; 0 without
        `allow_early`, and if the memory for them could not be allocated or page-locked."""
        return 0 if self._updates.early is None else self._updates.early.elements

    def defer(self, elements: int) -> None:
        """From the next commit on, let the fetches after each commit stream weights before their
        update, the first up to this number of elements. The bits are the same."""
        if self._updates.early is not None:
            self._updates.early.limit(elements)

    def make_deferred(self, stage: int) -> None:
        """Make the updates of a stage's weights that are still pending; from any thread, during a
        step. `receive` makes those that are left."""
        for name in self._require_optimizer().trainable(stage):
            self._update(name)

    def take_update_times(self) -> UpdateTimes:
        """Return the updates since the last call."""
        return self._updates.take_times()

    def unchanged(self) -> tuple[str, ...]:
        """Return the trainable weights of which no update has changed a bit.

        Only updates with a learning rate above zero since the weights were loaded or restored
        count. A weight without such an update is not listed. Call `flush` first.
        """
        return self._updates.unchanged.names()

    def take_traffic(self) -> Traffic:
        """Return bytes streamed and received, and waiting times, since the last call."""
        update_seconds = self._spans.take_seconds("update")
        snapshot_seconds = self._spans.take_seconds("snapshot")
        with self._count:
            streamed, received = self._streamed_bytes, self._gradient_bytes
            self._streamed_bytes = self._gradient_bytes = 0
        return Traffic(streamed, received, update_seconds, snapshot_seconds)

    # --- reading and restoring state --------------------------------------------------------------

    def master(self, name: str) -> torch.Tensor:
        """Return a copy of a weight, float32 in its shape, with zeros where it has no entry."""
        self._require_loaded()
        self._update(name)
        spec = self.program.weights[name]
        values = self.read(name, MASTER, 0, spec.elements)
        return torch.from_numpy(values if name in self._masks else values.copy()).view(spec.shape)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return views of a weight's optimizer state by role, in the shapes of a checkpoint."""
        self._require_loaded()
        self._update(name)
        stored = self._memory.state.stored(name)
        return {
            role: torch.from_numpy(array).view(stored[role].shape)
            for role, array in self._memory.state.arrays(name).items()
        }

    def roles(self, name: str) -> dict[str, Stored]:
        """Return the arrays of a weight that `read` and `write` accept: its master, then its
        state; of a sparse weight, its entries, their state, and its mask."""
        if self._masks.is_changing(name):
            self._update(name)
        return self._memory.roles(name)

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat; maybe a view."""
        self._require_loaded()
        self._update(name)
        return self._memory.read(name, role, begin, end)

    def mask(self, name: str) -> PackedIndex | None:
        """Return the mask of a weight, after any pending update; None if the weight is dense."""
        self._require_loaded()
        self._update(name)
        return self._masks.index(name)

    @property
    def mask_sizes(self) -> Mapping[str, MaskSize]:
        """The sizes of all masks after the last commit."""
        return self._masks.sizes

    def needs_dense_gradient(self, name: str) -> bool:
        """Return whether the next step needs the gradients of a weight's absent entries too."""
        return self._masks.needs_dense_gradient(name)

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
        before = self._updates.snapshot
        if before is not None and not before.is_closed:
            raise RuntimeError(f"the snapshot of step {before.step} is not closed yet")
        # The roles of a sparse weight have the shapes of its new mask, so its change is applied.
        tensors = {name: self.roles(name) for name in self.program.weights}
        snapshot = self._updates.snapshot = Snapshot(
            self.program,
            self.step,
            tensors,
            self._memory.memory_of,
            self._updates.pending,
            buffer_bytes,
            self._spans,
        )
        return snapshot

    def begin_restore(self) -> None:
        """Discard gradients and pending updates; the store is unusable until `finish_restore`.

        A snapshot that is not completely read is abandoned.
        """
        if self._updates.snapshot is not None:
            self._updates.snapshot.close()
        self._memory.begin_restore()
        self._updates.forget()
        if self._gradients is not None:
            self._gradients.clear()

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values of a weight or of its state from `begin` on, during a restore."""
        if self._memory.is_loaded:
            raise RuntimeError("state is written only between begin_restore and finish_restore")
        self._memory.write(name, role, begin, values)

    def portions(self, portion_bytes: int) -> Portions:
        """Return the whole content, in portions of at most so many bytes (`portions.py`)."""
        self.flush()
        if not self._memory.is_loaded:
            self._memory.state_is_zero = False  # the caller is about to write it
        return self._memory.portions(portion_bytes)

    def compared(self) -> Compared:
        """Return checksums of a part of the content, chosen by the step (`comparing.py`)."""
        self.flush()
        self._rotation = self._memory.rotation(self._rotation)
        return self._rotation.part(self.step)

    def clear_state(self, name: str) -> None:
        """Set the optimizer state of a weight to its initial zeros, during a restore."""
        self._memory.clear_state(name)

    def finish_restore(self, step: int, updates: int | None = None) -> None:
        """Make the store usable; its content is the state after `step` commits.

        **Arguments:** `updates` is the number of these that updated weights, if a shard may hold no
        sparse weight that says so.

        Raises:
            CorruptionError: the parts of a sparse weight that were written do not belong together.
            ConfigError: a mask keeps more entries than its weight has room for.
        """
        self._memory.finish_restore(step, updates)

    def content_hash(self) -> str:
        """Return a hash of all weights (`content_hash.py`)."""
        self._require_loaded()
        self.flush()
        return self._memory.content_hash()

    def _require_loaded(self) -> None:
        if not self._memory.is_loaded:
            raise RuntimeError("the store holds no weights yet: load them, or restore a checkpoint")

    def _require_optimizer(self) -> Gradients:
        if self._gradients is None:
            raise RuntimeError(
                "this store has no optimizer: it streams weights and accepts no gradients"
            )
        return self._gradients
