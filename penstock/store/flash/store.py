"""The flash store: weights and optimizer state are on flash, with as much in memory as allowed.

The pipeline decides what is read, updated and written when (`pipeline.py`). This module defines a
step, and ensures that no write goes over data of the last durable steps. A crash at any instant
therefore leaves the last durable step.

Per step, weights and state of a trainable weight are read once and written once for the update. The
weights are read once more for the backward sweep unless they are still in memory.

The masks of sparse weights are in memory; on flash they are written when they change. A commit that
drops entries reads the masters of the weights that change, to select these entries.
"""

import atexit
import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.sparsity import Histogram, MaskSize, PackedIndex, Selection, StreamedWeight
from penstock.store.commit import CommitRule, commit_by, require_next
from penstock.store.comparing import Compared
from penstock.store.flash.adaptive_guesses import guesses_of
from penstock.store.flash.block_updates import BlockUpdates
from penstock.store.flash.blocks import StateBlocks
from penstock.store.flash.content import FlashContent
from penstock.store.flash.description import describe
from penstock.store.flash.division import (
    age_role,
    divide,
    memory_of_masks,
    step_traffic,
    visits_of,
)
from penstock.store.flash.extent_writes import ExtentWrites
from penstock.store.flash.frames import Frames, least_bytes
from penstock.store.flash.guesses import Speculate
from penstock.store.flash.layout import BLOCK_ELEMENTS, FlashLayout, Unit
from penstock.store.flash.opening import open_files, require_flash, require_masks
from penstock.store.flash.pipeline import Pipeline
from penstock.store.flash.portions import BlockPortions
from penstock.store.flash.shards import store_id_of
from penstock.store.flash.speculator import Speculator
from penstock.store.flash.spill import GradientSpill
from penstock.store.flash.stored_masks import history_of
from penstock.store.flash.version import recorded_step
from penstock.store.gradients import Gradients
from penstock.store.holding import Holding
from penstock.store.interface import Commit, Decision, FlashTraffic, Traffic
from penstock.store.lock import FolderLock
from penstock.store.mask_plan import EMPTY_HISTOGRAM, OpenSelection
from penstock.store.mask_rule import MaskRule
from penstock.store.norm import GradientReport
from penstock.store.optimizers import GroupSettings, Optimizer
from penstock.store.part_masks import PartMasks, masks_of
from penstock.store.roles import CHANGES, INDEX, MASTER, VALUES, Stored
from penstock.store.unchanged_weights import UnchangedWeights


class FlashStore:
    """Weights and optimizer state of one program, in files under `folder`.

    `fetch`, `receive`, `commit` and the rest are called from one thread.

    Args:
        program: names the weights, their shapes and the stages that use them.
        folder: the folder of the files; an existing store is opened.
        optimizer: computes the updates.
        groups: settings of every trainable weight, by name.
        rule: decides the steps that are committed.
        dram_bytes: memory for gradients, weights and state.
        gradient_dtype: float32 or bfloat16, the type of stored gradients.
        keep_steps: number of durable steps that can be reopened.
        flash_bytes: limit of the files' size, or None.
        block_elements: elements that are read, updated and written at once.
        durable_every: one of every so many steps is durable.
        masks: decides the masks of sparse weights, if there are any.
        speculate: whether updates are made before the commit (`speculation.py`); with `auto`, where
            that is expected to pay (`adaptive_guesses.py`).

    Raises:
        BudgetError: `dram_bytes` cannot hold the minimum working set.
        ConfigError: the store in `folder` has another program or optimizer, or a newer format.
        CorruptionError: the journal's bytes have changed.
        StorageError: another process has the store open, or the disk is full.
    """

    def __init__(
        self,
        program: Holding,
        folder: Path,
        *,
        optimizer: Optimizer,
        groups: Mapping[str, GroupSettings],
        rule: CommitRule,
        dram_bytes: int,
        gradient_dtype: torch.dtype = torch.float32,
        keep_steps: int = 2,
        flash_bytes: int | None = None,
        block_elements: int = BLOCK_ELEMENTS,
        durable_every: int = 1,
        masks: MaskRule | None = None,
        speculate: Speculate = "off",
    ) -> None:
        self.program, self.folder, self.step = program, folder, 0
        self.extra: dict[str, Any] = {}
        require_masks(program, masks)
        self._masks = masks_of(program, masks)
        self._rule, self._keep = rule, keep_steps
        self._block_elements = block_elements
        age = age_role(optimizer, masks)
        self._layout = FlashLayout.of(program, optimizer.roles, keep_steps, block_elements, age)
        units = self._layout.units
        self._mask_memory = memory_of_masks(self._layout, program, masks)
        half = gradient_dtype == torch.bfloat16
        visits = visits_of(program, self._layout)
        self._division = divide(
            self._layout, half, least_bytes(units, visits), dram_bytes, self._mask_memory
        )
        require_flash(program, self._layout, self._division, flash_bytes, keep_steps)
        self._frames = Frames(units, visits, self._division.weight_bytes)
        spilled = [unit for unit in units if unit.index in self._division.spilled]
        elsewhere = {name for unit in spilled for name in unit.names}
        self._gradients = Gradients(program, gradient_dtype, elsewhere, self._masks)
        self._unchanged = UnchangedWeights(
            [name for name in program.weights if program.weights[name].trainable]
        )
        self._updates = BlockUpdates(
            program, optimizer, groups, self._gradients, self._unchanged, self._masks
        )
        self._durable_every = durable_every
        self._is_closed = self._unsealed = False
        self._streamed_bytes = self._gradient_bytes = 0
        with ExitStack() as opened:  # resources opened before an error are released
            self._lock = FolderLock(folder, "store.flash.path")
            opened.callback(self._lock.release)
            self._open(opened)
            self._spill = GradientSpill(folder, spilled, half, self._division.slab_bytes)
            opened.callback(self._spill.close)
            self._writes = ExtentWrites(self._file, self._version, self._journal, keep_steps)
            self._pipeline = self._make_pipeline()
            self.spans = (self._pipeline.spans,)
            opened.callback(self._pipeline.close)
            self._speculator = self._make_speculator(speculate)
            self._speculator.begin(self.step + 1)
            self._content = self._make_content(may_change_masks=masks is not None)
            self._opened = opened.pop_all()
        # Threads that run until interpreter exit can deadlock in the OpenMP pools.
        self._at_exit = functools.partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    # Creating, opening and closing

    def _make_speculator(self, speculate: Speculate) -> Speculator:
        return Speculator(
            guesses_of(speculate, self._rule.clip_norm, self._pipeline.waited),
            self._rule,
            self._gradients,
            self._updates,
            self._pipeline,
            self._masks,
            self._durable_every,
        )

    def _make_content(self, *, may_change_masks: bool) -> FlashContent:
        return FlashContent(
            self.program,
            self._layout,
            self._version,
            self._writes,
            self._pipeline,
            self._masks,
            may_change_masks=may_change_masks,
            is_loaded=len(self._journal.records) > 1,
        )

    def _make_pipeline(self) -> Pipeline:
        layout, division = self._layout, self._division
        blocks = [self._version.blocks(unit) for unit in layout.units]
        memory = (division.held_bytes, division.buffers, division.buffer_bytes)
        return Pipeline(
            layout,
            self._version,
            self._writes,
            self._frames,
            state=StateBlocks(layout, blocks, *memory),
            spill=self._spill,
            update=self._updates.apply,
            forget=self._updates.dropped,
            masks=self._masks,
        )

    def _open(self, opened: ExitStack) -> None:
        store_id = store_id_of(self.folder)
        described = describe(self._layout, self._block_elements, self._keep, store_id)
        found = open_files(self.folder, self._layout, described, opened)
        self._journal, self._file, self._version = found.journal, found.file, found.version
        if found.last is not None:
            self.step, self.extra = recorded_step(self._journal.path, found.last)
            self._version.masks.resume(self._masks, self.step)

    @property
    def is_new(self) -> bool:
        """Whether the store has no durable step yet, so that weights must be loaded."""
        return not self._content.is_loaded

    @property
    def durable_step(self) -> int | None:
        """The step that a restart after a crash would find; None before the first."""
        record = self._journal.records[-1].content
        return record.get("step")

    @property
    def durable_steps(self) -> Sequence[int]:
        """The steps to which the store can be rolled back."""
        return [record.content["step"] for record in self._journal.records[1:]]

    def close(self) -> None:
        """Stop the threads and close the files; steps that are not durable yet are lost."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._opened.close()

    def page_lock(self) -> bool:
        """Page-lock the memory of weights that is allocated from now on, for engines on a GPU.

        If the system refuses part of it, copies from that part are slower; no error is reported.
        """
        self._frames.page_locked = True
        return True

    @property
    def flash_bytes(self) -> int:
        """Bytes of the store on flash."""
        return self._layout.planned_bytes + self._spill.bytes

    @property
    def flash_rule(self) -> FlashTraffic:
        """Maximum traffic of a step (`step_traffic`)."""
        return step_traffic(self._layout, self._spill.bytes)

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Maximum memory of the store, by use."""
        return self._division.memory_bytes(self._mask_memory)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, by name."""
        return {name: spec.shape for name, spec in self.program.weights.items()}

    # One step

    def fetch(self, stage: int, positions: Sequence[int] | None = None) -> list[StreamedWeight]:
        """Return the weights of a stage, after any pending update.

        As `DramStore.fetch`, but the views are valid only until the second fetch after this one.
        """
        names = self.program.stages[stage].weights
        chosen = names if positions is None else [names[position] for position in positions]
        return self._fetch_weights(chosen, stage)

    def stream(self, names: Sequence[str]) -> list[StreamedWeight]:
        """Return weights by name, as `fetch` does by stage; used by another program of the
        model."""
        return self._fetch_weights(names)

    def _fetch_weights(
        self, names: Sequence[str], stage: int | None = None
    ) -> list[StreamedWeight]:
        self._content.require_loaded()
        units = self._layout.units_of(names)
        frames = dict(zip(units, self._pipeline.fetch_frames(units, stage), strict=True))
        views = [self._content.view(n, frames[self._layout.unit_of[n]]) for n in names]
        self._streamed_bytes += sum(view.nbytes for view in views)
        return views

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Accept the gradients of one stage, summed over the whole batch (`DramStore.receive`)."""
        names = self._gradients.trainable(stage)
        units = [self._layout.units[index] for index in self._layout.units_of(names)]
        # The old gradients must be used before the new ones, with the new masks, overwrite them.
        self._pipeline.wait_for_updates([unit.index for unit in units])
        self._gradients.check(stage, gradients)
        self._seal_when_due()
        for unit in units:  # one at a time: a stage may have more of them than there are slabs
            self._receive_unit(stage, unit, dict(zip(names, gradients, strict=True)))
        self._gradients.finish(stage)
        if not self._unsealed:  # then a speculative update goes to a place of its own
            self._speculator.received(self.step + 1, stage, units)

    def _receive_unit(
        self, stage: int, unit: Unit, gradients: Mapping[str, torch.Tensor | None]
    ) -> None:
        """Accept those gradients of a stage that are of one unit."""
        slab = self._pipeline.slab() if unit in self._spill else None
        try:  # the slab is returned even after an interrupt: later steps wait for it
            if slab is not None:
                self._gradients.place(self._spill.arrays(unit, slab))
            with self._pipeline.compute:
                for name in filter(gradients.__contains__, unit.names):
                    taken = self._gradients.receive_one(stage, name, gradients[name])
                    self._gradient_bytes += taken
        finally:
            if slab is not None:
                self._pipeline.spill(unit, slab)

    def commit(self) -> Commit:
        """Decide the step; its updates begin at once in the background (`DramStore.commit`)."""
        decide_masks = functools.partial(self._masks.decide, values=self._entries)
        return commit_by(self._rule, self, decide_masks)

    def _entries(self, name: str) -> np.ndarray:
        """Return the values of a sparse weight's entries, float32."""
        return self.read(name, VALUES, 0, self._masks.kept(name))

    def prepare(self) -> GradientReport:
        """Return the report on the step's gradients; the store is then ready to decide."""
        self._content.require_loaded()
        report = self._gradients.report()
        self._pipeline.finish_pass()
        self._seal_when_due()
        # The previous step was sealed long ago, unless the disk is slower than a whole step.
        self._pipeline.wait_for_seals()
        return report

    def histograms(self, selections: Sequence[OpenSelection]) -> list[Histogram]:
        """Return a shard's histograms for each open selection of the step (`DramStore`)."""
        masks = self._masks
        if not isinstance(masks, PartMasks):
            return [EMPTY_HISTOGRAM for _ in selections]
        return [masks.histogram(selection, self._entries) for selection in selections]

    def settle(self, name: str, grow: Selection) -> None:
        """Keep, of a weight's entries that may be grown, those that the rounds have selected."""
        if isinstance(self._masks, PartMasks):
            self._masks.settle(name, grow)

    def decide(self, decision: Decision) -> None:
        """Commit the step by the decision for all shards (`DramStore.decide`)."""
        require_next(decision, self.step)
        self._masks.accept(decision)
        is_as_expected = self._speculator.decided(decision)
        self._gradients.decided()
        self._updates.decided(decision)
        self.step, self._unsealed = self.step + 1, True
        units = [unit for unit in self._layout.units if unit.is_updated]
        self._pipeline.begin_pass(units, self._is_due, is_as_expected)
        self._speculator.begin(self.step + 1)

    def discard(self) -> None:
        """Discard the gradients received since the last commit; the step may be replayed."""
        self._pipeline.release()
        self._speculator.drop()
        self._gradients.clear()
        self._masks.discard()
        self._speculator.begin(self.step + 1)

    def flush(self) -> None:
        """Apply all pending updates."""
        self._pipeline.finish_pass()

    def remember(self, extra: Mapping[str, Any]) -> None:
        """Keep plain data with the present step: the trainer's own state."""
        self.extra = dict(extra)

    def make_durable(self) -> None:
        """Return when the present step is durable."""
        self._pipeline.finish_pass()
        self._pipeline.write_out()
        if self._unsealed:
            self._seal()
        self._pipeline.drain()

    def _seal_when_due(self) -> None:
        """Request the seal of the present step after its last extent, if the step is to be
        durable."""
        if self._unsealed and self._is_due and self._pipeline.is_updated:
            self._seal()

    def _seal(self) -> None:
        self._unsealed = False
        self._pipeline.seal(self.step, self.extra, history_of(self._masks))

    @property
    def _is_due(self) -> bool:
        return self.step % self._durable_every == 0

    def unchanged(self) -> tuple[str, ...]:
        """Return the trainable weights that no update has changed (`DramStore.unchanged`)."""
        return self._unchanged.names()

    def take_traffic(self) -> Traffic:
        """Return the bytes that were streamed and received since the last call."""
        taken = Traffic(self._streamed_bytes, self._gradient_bytes)
        self._streamed_bytes = self._gradient_bytes = 0
        return taken

    def take_flash_traffic(self) -> FlashTraffic:
        """Return the bytes moved to and from flash, and the waiting time for them, since the last
        call."""
        return self._pipeline.take_traffic()

    # Loading and reading state

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill all masters, one weight at a time, and begin at step 0 (`DramStore.load`)."""
        self.begin_restore()
        self._content.load(weights)
        self.finish_restore(0)

    def begin_restore(self) -> None:
        """Discard everything; the store is unusable until `finish_restore`."""
        if self.durable_step is not None and any(u.places == 1 for u in self._layout.units):
            raise RuntimeError("frozen weights are written only once: load them into a new folder")
        self._pipeline.finish_pass()
        self._speculator.drop()
        self._gradients.clear()
        self._unchanged.begin()
        self._content.begin_restore()

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values of a weight or of its state, during a restore; each value once."""
        self._content.write(name, role, begin, values)

    def portions(self, portion_bytes: int) -> BlockPortions:
        """Return the whole content, in portions of at most so many bytes (`portions.py`)."""
        return self._content.portions(portion_bytes)

    def compared(self) -> Compared:
        """Return checksums of the whole content as of the last update (`comparing.py`)."""
        return self._content.compared()

    def clear_state(self, name: str) -> None:
        """Leave the optimizer state of a weight at its initial zeros, during a restore."""
        self._content.clear_state(name)

    def finish_restore(self, step: int, updates: int | None = None) -> None:
        """Make the store usable and durable: its content is the state after `step` commits.

        Arguments and errors are those of `DramStore.finish_restore`.
        """
        self._content.finish(step, updates)
        self.step = step
        self._speculator.begin(step + 1)
        self._writes.seal(step, self.extra, history_of(self._masks))

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat."""
        return self._content.read(name, role, begin, end)

    def master(self, name: str) -> torch.Tensor:
        """Return a copy of a weight, float32 in its shape."""
        spec = self.program.weights[name]
        return torch.from_numpy(self.read(name, MASTER, 0, spec.elements)).view(spec.shape)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return copies of a weight's optimizer state by role, in the shapes of a checkpoint."""
        stored = self.roles(name)
        for role in (MASTER, VALUES, INDEX, CHANGES):
            stored.pop(role, None)
        return {
            role: torch.from_numpy(self.read(name, role, 0, math.prod(kind.shape))).view(kind.shape)
            for role, kind in stored.items()
        }

    def roles(self, name: str) -> dict[str, Stored]:
        """Return the arrays of a weight that `read` and `write` accept (`DramStore.roles`)."""
        return self._content.roles(name)

    def mask(self, name: str) -> PackedIndex | None:
        """Return the mask of a weight, after any pending update; None if the weight is dense."""
        return self._content.mask(name)

    @property
    def mask_sizes(self) -> Mapping[str, MaskSize]:
        """The sizes of all masks after the last commit."""
        return self._masks.sizes

    def needs_dense_gradient(self, name: str) -> bool:
        """Return whether the next step needs the gradients of a weight's absent entries too."""
        return self._masks.needs_dense_gradient(name)

    def content_hash(self) -> str:
        """Return a hash of all weights (`content_hash.py`)."""
        return self._content.content_hash()


def _close_if_alive(store: weakref.ref[FlashStore]) -> None:
    alive = store()
    if alive is not None:
        alive.close()
