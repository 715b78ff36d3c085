"""The flash store: weights and optimizer state are on flash, with as much in memory as allowed.

The pipeline decides what is read, updated and written when (`pipeline.py`). This module defines a
step, and ensures that no write goes over data of the last durable steps. A crash at any instant
therefore leaves the last durable step.

Per step, weights and state of a trainable weight are read once and written once for the update. The
weights are read once more for the backward sweep unless they are still in memory.
"""

from __future__ import annotations

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

from penstock.errors import BudgetError
from penstock.io import durable, failpoints
from penstock.store import files
from penstock.store.commit import CommitRule, commit_by, require_next
from penstock.store.comparing import Compared
from penstock.store.flash.block_updates import BlockUpdates
from penstock.store.flash.blocks import StateBlocks
from penstock.store.flash.description import EXTENTS, JOURNAL, describe, require_same
from penstock.store.flash.division import SLABS, divide, visits_of
from penstock.store.flash.frames import Frames, least_bytes
from penstock.store.flash.journal import Journal, Record
from penstock.store.flash.layout import BLOCK_ELEMENTS, FlashLayout, Unit
from penstock.store.flash.medium import ExtentFile
from penstock.store.flash.pipeline import Pipeline
from penstock.store.flash.portions import BlockPortions
from penstock.store.flash.shards import store_id_of
from penstock.store.flash.spill import GradientSpill
from penstock.store.flash.staging import StagedUnit, Staging
from penstock.store.flash.version import Version, checksum, recorded_step
from penstock.store.gradients import Gradients
from penstock.store.holding import Holding
from penstock.store.incoming import fill
from penstock.store.interface import Commit, Decision, FlashTraffic, Traffic
from penstock.store.lock import FolderLock
from penstock.store.masters import stream_of
from penstock.store.norm import GradientReport
from penstock.store.optimizers import GroupSettings, Optimizer
from penstock.store.packed import require_dense
from penstock.store.roles import MASTER, Stored, stored_of
from penstock.store.unchanged import UnchangedWeights


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
    ) -> None:
        require_dense(program, "store.tier flash")
        self.program, self.folder = program, folder
        self.step = 0
        self.extra: dict[str, Any] = {}
        self._rule, self._keep = rule, keep_steps
        self._block_elements = block_elements
        self._layout = FlashLayout.of(program, optimizer.roles, keep_steps, block_elements)
        units = self._layout.units
        half = gradient_dtype == torch.bfloat16
        visits = visits_of(program, self._layout)
        self._division = divide(self._layout, half, least_bytes(units, visits), dram_bytes)
        self._require_flash(flash_bytes)
        self._frames = Frames(units, visits, self._division.weight_bytes)
        spilled = [unit for unit in units if unit.index in self._division.spilled]
        elsewhere = {name for unit in spilled for name in unit.names}
        self._gradients = Gradients(program, gradient_dtype, elsewhere)
        self._unchanged = UnchangedWeights(
            [name for name in program.weights if program.weights[name].trainable]
        )
        self._updates = BlockUpdates(program, optimizer, groups, self._gradients, self._unchanged)
        self._durable_every = durable_every

        self._is_loaded = False
        self._is_closed = False
        self._unsealed = False
        self._streamed_bytes = self._gradient_bytes = 0
        self._staging: Staging | None = None

        with ExitStack() as opened:  # resources opened before an error are released
            self._lock = FolderLock(folder, "store.flash.path")
            opened.callback(self._lock.release)
            self._open(opened)
            self._spill = GradientSpill(folder, spilled, half, self._division.slab_bytes)
            opened.callback(self._spill.close)
            self._pipeline = Pipeline(
                self._layout,
                self._version,
                self._file,
                self._journal,
                self._frames,
                state=StateBlocks(
                    self._layout,
                    self._division.held_bytes,
                    self._division.buffers,
                    self._division.buffer_bytes,
                ),
                spill=self._spill,
                update=self._updates.apply,
                keep_steps=keep_steps,
            )
            opened.callback(self._pipeline.close)
            self._opened = opened.pop_all()
        # Threads that run until interpreter exit can deadlock in the OpenMP pools.
        self._at_exit = functools.partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    # Creating, opening and closing

    def _require_flash(self, limit: int | None) -> None:
        state, gradients = self._layout.file_bytes, self._division.spilled_bytes
        if limit is None or state + gradients <= limit:
            return
        also = f" and {gradients:,} for gradients" if gradients else ""
        advice = ", or raise store.dram, which leaves no room for them" if gradients else ""
        raise BudgetError(
            f"store.flash.size: {self.program.name} needs {state:,} bytes on flash for "
            f"{self._keep + 1} versions of its state{also}, the limit is {limit:,}; "
            f"raise it, or lower store.flash.keep_steps{advice}"
        )

    def _open(self, opened: ExitStack) -> None:
        journal, extents = self.folder / JOURNAL, self.folder / EXTENTS
        store_id = store_id_of(self.folder)
        described = describe(self._layout, self._block_elements, self._keep, store_id)
        if journal.exists():
            self._journal = Journal(journal)
            opened.callback(self._journal.close)
            self._journal.settle()
            require_same(self.folder, self._journal.records[0].content, described)
            self._file = ExtentFile(extents, self._layout.file_bytes, create=False)
            opened.callback(self._file.close)
            self._version = Version(self._layout, self._file)
            if len(self._journal.records) > 1:
                last = self._journal.records[-1]
                self._version.restore(last)
                self.step, self.extra = recorded_step(journal, last)
                self._is_loaded = True
            return
        size = self._layout.file_bytes
        with files.storage_errors(self.folder, size):
            extents.unlink(missing_ok=True)  # without a journal the file never counted
            files.require_space(extents, size)
            self._file = ExtentFile(extents, size, create=True)
            opened.callback(self._file.close)
            self._file.sync()  # the file size, on which the journal relies
            durable.sync_folder(self.folder)
            self._version = Version(self._layout, self._file)
            failpoints.point("flash.before_journal")
            self._journal = Journal.create(journal, Record(described))
            opened.callback(self._journal.close)

    @property
    def is_new(self) -> bool:
        """Whether the store has no durable step yet, so that weights must be loaded."""
        return not self._is_loaded

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
        return self._layout.file_bytes + self._spill.bytes

    @property
    def flash_rule(self) -> FlashTraffic:
        """Maximum traffic of a step: state once each way, weights read twice and written once.

        Gradients that do not fit in memory are written once and read once.
        """
        spilled = self._spill.bytes
        units = self._layout.units
        updated = sum(unit.place_bytes for unit in units if unit.trainable)
        once = sum(unit.stream_bytes for unit in units)
        frozen = sum(unit.stream_bytes for unit in units if not unit.trainable)
        return FlashTraffic(updated + frozen + once + spilled, updated + spilled)

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Maximum memory of the store, by use."""
        division = self._division
        return {
            "weights": division.weight_bytes,
            "gradient": self._gradients.memory_bytes + SLABS * division.slab_bytes,
            "blocks": division.buffers * division.buffer_bytes,
            "state": division.held_bytes,
        }

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, by name."""
        return {name: spec.shape for name, spec in self.program.weights.items()}

    # One step

    def fetch(self, stage: int, positions: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return the weights of a stage, after any pending update.

        As `DramStore.fetch`, but the views are valid only until the second fetch after this one.
        """
        names = self.program.stages[stage].weights
        chosen = names if positions is None else [names[position] for position in positions]
        self._pipeline.visit(stage)
        return self._fetch_weights(chosen)

    def stream(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return weights by name, as `fetch` does by stage; used by another program of the
        model."""
        return self._fetch_weights(names)

    def _fetch_weights(self, names: Sequence[str]) -> list[torch.Tensor]:
        self._require_loaded()
        units = self._layout.units_of(names)
        frames = dict(zip(units, self._pipeline.fetch_frames(units), strict=True))
        views = [self._view(name, frames[self._layout.unit_of[name]]) for name in names]
        self._streamed_bytes += sum(view.nbytes for view in views)
        return views

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Accept the gradients of one stage, summed over the whole batch (`DramStore.receive`)."""
        self._gradients.check(stage, gradients)
        self._seal_when_due()
        units = self._layout.units_of(self._gradients.trainable(stage))
        # The old gradients must be used before the new ones overwrite them.
        self._pipeline.wait_for_updates(units)
        slabs: dict[Unit, np.ndarray] = {}
        try:  # the slab is returned even after an interrupt: later steps wait for it
            for unit in (self._layout.units[index] for index in units):
                if unit in self._spill:
                    slabs[unit] = self._pipeline.slab()
                    self._gradients.place(self._spill.arrays(unit, slabs[unit]))
            with self._pipeline.compute:
                self._gradient_bytes += self._gradients.receive(stage, gradients)
        finally:
            for unit, slab in slabs.items():
                self._pipeline.spill(unit, slab)

    def commit(self) -> Commit:
        """Decide the step; its updates begin at once in the background (`DramStore.commit`)."""
        return commit_by(self._rule, self)

    def prepare(self) -> GradientReport:
        """Return the report on the step's gradients; the store is then ready to decide."""
        self._require_loaded()
        report = self._gradients.report()
        self._pipeline.finish_pass()
        self._seal_when_due()
        # The previous step was sealed long ago, unless the disk is slower than a whole step.
        self._pipeline.wait_for_seals()
        return report

    def decide(self, decision: Decision) -> None:
        """Commit the step by the decision for all shards (`DramStore.decide`)."""
        require_next(decision, self.step)
        self._gradients.decided()
        self._updates.decision, self._unsealed = decision, True
        self.step += 1
        units = [unit for unit in self._layout.units if unit.is_updated]
        self._pipeline.begin_pass(units, is_written=self._is_due)

    def discard(self) -> None:
        """Discard the gradients received since the last commit; the step may be replayed."""
        self._gradients.clear()

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
        self._pipeline.seal(self.step, self.extra)

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
        fill(self, weights)

    def begin_restore(self) -> None:
        """Discard everything; the store is unusable until `finish_restore`."""
        if self.durable_step is not None and any(u.places == 1 for u in self._layout.units):
            raise RuntimeError("frozen weights are written only once: load them into a new folder")
        self._pipeline.finish_pass()
        self._is_loaded = False
        self._gradients.clear()
        self._unchanged.begin()
        self._pipeline.drain()
        self._pipeline.forget()
        self._staging = Staging(self._write_staged)

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values of a weight or of its state, during a restore; each value once."""
        if self._is_loaded:
            raise RuntimeError("state is written only between begin_restore and finish_restore")
        assert self._staging is not None
        unit = self._layout.unit(name)
        origin = self._layout.begin_of(name) // unit.role(role).group
        self._staging.take(unit, name, role, origin + begin, values)

    def portions(self, portion_bytes: int) -> BlockPortions:
        """Return the whole content, in portions of at most so many bytes (`portions.py`)."""
        if self._staging is None:
            self._settle()
        return BlockPortions(self._layout, self._version, self._pipeline.put, portion_bytes)

    def compared(self) -> Compared:
        """Return checksums of the whole content as of the last update (`comparing.py`)."""
        return self._pipeline.compared()

    def clear_state(self, name: str) -> None:
        """Leave the optimizer state of a weight at its initial zeros, during a restore."""
        assert self._staging is not None
        unit, elements = self._layout.unit(name), self.program.weights[name].elements
        for role in unit.roles:
            self._staging.skip(unit, role.name, role.count(elements))

    def _write_staged(self, staged: StagedUnit) -> None:
        """Write a complete unit to its next place."""
        unit = staged.unit
        place = self._version.next_place(unit)
        checks: list[list[bytes]] = [[], []]
        for block in unit.blocks:
            stream, state = staged.block(block)
            self._pipeline.put(unit.stream_offset(place, block.begin), stream)
            self._pipeline.put(unit.state_offset(place, block), state)
            checks[0].append(checksum(stream))
            checks[1].append(checksum(state))
        self._version.advance(unit, *checks)

    def finish_restore(self, step: int) -> None:
        """Make the store usable and durable: its content is the state after `step` commits."""
        if self._staging is None or self._staging.unfinished:
            unfinished = self._staging.unfinished if self._staging else []
            raise RuntimeError(
                f"received only a part of {', '.join(unfinished[:5]) or 'the weights'}"
            )
        self._staging = None
        self.step = step
        self._is_loaded = True
        self._pipeline.seal_now(step, self.extra)

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat."""
        self._settle()
        return self._version.read(name, role, begin, end)

    def master(self, name: str) -> torch.Tensor:
        """Return a copy of a weight, float32 in its shape."""
        spec = self.program.weights[name]
        return torch.from_numpy(self.read(name, MASTER, 0, spec.elements)).view(spec.shape)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return copies of a weight's optimizer state by role, in the shapes of a checkpoint."""
        stored = self.roles(name)
        stored.pop(MASTER)
        return {
            role: torch.from_numpy(self.read(name, role, 0, math.prod(kind.shape))).view(kind.shape)
            for role, kind in stored.items()
        }

    def roles(self, name: str) -> dict[str, Stored]:
        """Return the arrays of a weight that `read` and `write` accept: its master, then its
        state."""
        return stored_of(self.program.weights[name], self._layout.unit(name).roles)

    def content_hash(self) -> str:
        """Return a hash of all weights (`content_hash.py`)."""
        self._settle()
        return self._version.content_hash()

    def _settle(self) -> None:
        """Write all updates to flash, so that flash can be read."""
        self._require_loaded()
        self._pipeline.finish_pass()
        self._pipeline.write_out()
        self._pipeline.drain()

    def _view(self, name: str, frame: np.ndarray) -> torch.Tensor:
        spec, unit = self.program.weights[name], self._layout.unit(name)
        begin = self._layout.begin_of(name) * unit.stream_width
        part = frame[begin : begin + spec.elements * unit.stream_width]
        return stream_of(part.view(unit.format.stream.dtype), spec)

    def _require_loaded(self) -> None:
        if not self._is_loaded:
            raise RuntimeError("the store holds no weights yet: load them, or restore a checkpoint")


def _close_if_alive(store: weakref.ref[FlashStore]) -> None:
    alive = store()
    if alive is not None:
        alive.close()
