"""The store whose weights and optimizer state live on flash, with as much in memory as is allowed.

What is read, updated and written when is the pipeline's business (`pipeline.py`). Here: what a step
is, and that nothing is ever written over what the last durable steps need, so that a crash at any
instant leaves the last durable step.

Per step, weights and state of a trainable weight are read once and written once for the update,
and its weights are read once more for the backward sweep unless they are still in memory.
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
from penstock.store.roles import MASTER, Stored, stored_of
from penstock.store.unchanged import UnchangedWeights


class FlashStore:
    """Weights and optimizer state of one program in files under `folder`.

    `fetch`, `receive`, `commit` and the rest are called from one thread.

    Args:
        program: names the weights, their shapes and the stages that use them.
        folder: where the files are, or are to be; a store that is there is opened.
        optimizer: makes the updates.
        groups: settings of every trainable weight, by name.
        rule: decides the steps that are committed.
        dram_bytes: memory for gradients, weights in memory and state on its way.
        gradient_dtype: float32 or bfloat16, how gradients are kept until they are used.
        keep_steps: how many durable steps can be opened again.
        flash_bytes: most that the files may take, or None.
        block_elements: what is read, updated and written at a time.
        durable_every: every how many steps are durable.

    Raises:
        BudgetError: `dram_bytes` cannot hold what must be there at once.
        ConfigError: the store in `folder` is of another program or optimizer, or of a newer
            format.
        CorruptionError: the journal's bytes have changed.
        StorageError: another process has it open, or there is no room.
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
        self.program = program
        self.folder = folder
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

        with ExitStack() as opened:  # what is open when something is refused is let go of
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
        # Threads that are left to the interpreter's end can hang it, within the OpenMP pools.
        self._at_exit = functools.partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    # Making, opening and closing

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
            extents.unlink(missing_ok=True)  # without a journal it never counted
            files.require_space(extents, size)
            self._file = ExtentFile(extents, size, create=True)
            opened.callback(self._file.close)
            self._file.sync()  # its size, on which the journal counts
            durable.sync_folder(self.folder)
            self._version = Version(self._layout, self._file)
            failpoints.point("flash.before_journal")
            self._journal = Journal.create(journal, Record(described))
            opened.callback(self._journal.close)

    @property
    def is_new(self) -> bool:
        """Whether it holds no durable step yet, so that weights must be loaded."""
        return not self._is_loaded

    @property
    def durable_step(self) -> int | None:
        """The step that would be found after a crash now; None before the first."""
        record = self._journal.records[-1].content
        return record.get("step")

    @property
    def durable_steps(self) -> Sequence[int]:
        """The steps to which the store can go back."""
        return [record.content["step"] for record in self._journal.records[1:]]

    def close(self) -> None:
        """Stop the threads and let go of the files; what is not durable yet is given up."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self._opened.close()

    def page_lock(self) -> bool:
        """Lock in place the memory of weights that is taken from now on, for engines on a GPU.

        Where the system refuses some of it, copies from there are slower, and nobody is told.
        """
        self._frames.page_locked = True
        return True

    @property
    def flash_bytes(self) -> int:
        """What the store takes on flash."""
        return self._layout.file_bytes + self._spill.bytes

    @property
    def flash_rule(self) -> FlashTraffic:
        """What a step should move at most: state once each way, weights in twice and out once.

        Gradients that have no room in memory go there and back once.
        """
        spilled = self._spill.bytes
        units = self._layout.units
        updated = sum(unit.place_bytes for unit in units if unit.trainable)
        once = sum(unit.stream_bytes for unit in units)
        frozen = sum(unit.stream_bytes for unit in units if not unit.trainable)
        return FlashTraffic(updated + frozen + once + spilled, updated + spilled)

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """What the store may take of memory, by what it holds."""
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
        """Return the weights of a stage, after any update that they still await.

        As `DramStore.fetch`, but the views are good only until the second fetch after this one.
        """
        names = self.program.stages[stage].weights
        chosen = names if positions is None else [names[position] for position in positions]
        self._pipeline.visit(stage)
        return self._bring(chosen)

    def stream(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return weights by name, as `fetch` does by stage: for another program of the model."""
        return self._bring(names)

    def _bring(self, names: Sequence[str]) -> list[torch.Tensor]:
        self._require_loaded()
        units = self._layout.units_of(names)
        frames = dict(zip(units, self._pipeline.bring(units), strict=True))
        views = [self._view(name, frames[self._layout.unit_of[name]]) for name in names]
        self._streamed_bytes += sum(view.nbytes for view in views)
        return views

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of one stage, summed over the whole batch (`DramStore.receive`)."""
        self._gradients.check(stage, gradients)
        self._seal_when_due()
        units = self._layout.units_of(self._gradients.trainable(stage))
        # Their old gradients must be used before the new ones overwrite them.
        self._pipeline.wait_for_updates(units)
        slabs: dict[Unit, np.ndarray] = {}
        try:  # a slab that is taken goes back, whatever interrupts: later steps wait for it
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
        """Decide the step; its updates begin at once, in the background (`DramStore.commit`)."""
        return commit_by(self._rule, self)

    def prepare(self) -> GradientReport:
        """Return what is known of the step's gradients, ready to decide (`DramStore.prepare`)."""
        self._require_loaded()
        report = self._gradients.report()
        self._pipeline.finish_pass()
        self._seal_when_due()
        # Sealed long ago, unless the disk is slower than a whole step: then the step waits for it.
        self._pipeline.wait_for_seals()
        return report

    def decide(self, decision: Decision) -> None:
        """Commit the step by what was decided for all shards (`DramStore.decide`)."""
        require_next(decision, self.step)
        self._gradients.decided()
        self._updates.decision, self._unsealed = decision, True
        self.step += 1
        units = [unit for unit in self._layout.units if unit.is_updated]
        self._pipeline.begin_pass(units, goes_out=self._is_due)

    def discard(self) -> None:
        """Throw away the gradients that came since the last commit; the step may be replayed."""
        self._gradients.clear()

    def flush(self) -> None:
        """Make all updates that are still awaited, now."""
        self._pipeline.finish_pass()

    def remember(self, extra: Mapping[str, Any]) -> None:
        """Keep plain data with the present step: what the trainer wants to find again."""
        self.extra = dict(extra)

    def make_durable(self) -> None:
        """Return when the present step would be found after a crash."""
        self._pipeline.finish_pass()
        self._pipeline.write_out()
        if self._unsealed:
            self._seal()
        self._pipeline.drain()

    def _seal_when_due(self) -> None:
        """Ask for the present step to be sealed behind its last extent, if it is to be durable."""
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
        """Return what moved to and from flash, and what was waited for it, since the last call."""
        return self._pipeline.take_traffic()

    # Weights in, and looking at them

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill all masters, one weight at a time, and begin at step 0 (`DramStore.load`)."""
        fill(self, weights)

    def begin_restore(self) -> None:
        """Forget everything; the store is of no use until `finish_restore`."""
        if self.durable_step is not None and any(u.places == 1 for u in self._layout.units):
            raise RuntimeError("frozen weights lie in one place: load them into a new folder")
        self._pipeline.finish_pass()
        self._is_loaded = False
        self._gradients.clear()
        self._unchanged.begin()
        self._pipeline.drain()
        self._pipeline.forget()
        self._staging = Staging(self._land)

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values of a weight or of its state, while restoring; each value once."""
        if self._is_loaded:
            raise RuntimeError("state is written only between begin_restore and finish_restore")
        assert self._staging is not None
        unit = self._layout.unit(name)
        origin = self._layout.begin_of(name) // unit.role(role).group
        self._staging.take(unit, name, role, origin + begin, values)

    def portions(self, portion_bytes: int) -> BlockPortions:
        """Return all that it holds, in portions of at most so many bytes (`portions.py`)."""
        if self._staging is None:
            self._settle()
        return BlockPortions(self._layout, self._version, self._pipeline.put, portion_bytes)

    def compared(self) -> Compared:
        """Return checksums of all of it, those of the last update (`comparing.py`)."""
        return self._pipeline.compared()

    def clear_state(self, name: str) -> None:
        """Leave the optimizer's state of a weight at zero, as it begins, while restoring."""
        assert self._staging is not None
        unit, elements = self._layout.unit(name), self.program.weights[name].elements
        for role in unit.roles:
            self._staging.skip(unit, role.name, role.count(elements))

    def _land(self, staged: StagedUnit) -> None:
        """Write a unit that has come to its next place."""
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
        """Make the store usable, and durable: all is as after `step` commits."""
        if self._staging is None or self._staging.unfinished:
            unfinished = self._staging.unfinished if self._staging else []
            raise RuntimeError(f"only a part came of {', '.join(unfinished[:5]) or 'the weights'}")
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
        """Return copies of the optimizer's state of a weight by role, as they would be saved."""
        stored = self.roles(name)
        stored.pop(MASTER)
        return {
            role: torch.from_numpy(self.read(name, role, 0, math.prod(kind.shape))).view(kind.shape)
            for role, kind in stored.items()
        }

    def roles(self, name: str) -> dict[str, Stored]:
        """Return what `read` and `write` know of a weight: its master, then its state."""
        return stored_of(self.program.weights[name], self._layout.unit(name).roles)

    def content_hash(self) -> str:
        """Return a hash of all weights (`content_hash.py`)."""
        self._settle()
        return self._version.content_hash()

    def _settle(self) -> None:
        """Bring flash up to date, so that it can be read."""
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
