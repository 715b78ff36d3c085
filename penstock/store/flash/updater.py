"""The updater of a flash store: a thread that updates blocks in the order of their reads."""

import queue
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import numba
import numpy as np
import xxhash

from penstock.store.flash.blocks import StateBlocks
from penstock.store.flash.changing_weight import ChangedWeight
from penstock.store.flash.frames import Frames
from penstock.store.flash.layout import Block, Unit
from penstock.store.flash.monitor import Monitor
from penstock.store.flash.speculation import Branch
from penstock.store.flash.spill import GradientSpill
from penstock.store.flash.unit_updates import UnitUpdates, Update
from penstock.store.flash.version import Version
from penstock.store.flash.writer import Writer
from penstock.store.masks import Masks


@dataclass(frozen=True)
class _Job:
    """A block that was read; `branch` has its update if that is speculative."""

    unit: Unit
    block: Block
    buffer: np.ndarray
    is_checked: bool
    branch: Branch | None


class Updater:
    """Its state is read and changed under the monitor's lock; `run` is the work of its thread.

    Args:
        frames: the weights in memory.
        writer: writes what was updated.
        state: the blocks of optimizer state in memory.
        spill: the gradients on flash.
        update: computes the update of a block.
        masks: those of the sparse weights; their pending changes are made here.

    Attributes:
        awaiting: units with a pending update.
        updating: units that are partly handed to the updater.
        dirty: checksums of units that are newer than on flash.
        made: checksums of each unit's last update.
        is_written: whether the updates of the present pass are written.
    """

    def __init__(
        self,
        monitor: Monitor,
        version: Version,
        frames: Frames,
        writer: Writer,
        *,
        state: StateBlocks,
        spill: GradientSpill,
        update: Update,
        masks: Masks,
    ) -> None:
        self._monitor, self._version = monitor, version
        self._frames, self._writer = frames, writer
        self._state, self._spill = state, spill
        self._updates = UnitUpdates(version, state, spill, update, masks, self._await_change)
        self.compute = self._updates.compute
        self.awaiting: set[int] = set()
        self.updating: set[int] = set()
        self.dirty: dict[int, list[list[bytes]]] = {}
        self.made: dict[int, list[list[bytes]]] = {}
        self.is_written = True
        self._is_changing = False  # whether all state of a weight with a new mask is in memory
        self._threads = numba.get_num_threads()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def is_kept(self, unit: Unit) -> bool:
        """Whether a unit stays completely in memory between steps."""
        return self._state.stay_whole(unit) and self._frames.holds_all

    def compared(self, unit: Unit) -> tuple[str, str]:
        """Return the name of a unit for people, and a checksum of it as of its last update."""
        made = self.made.get(unit.index)
        checks = b"".join(b"".join(half) for half in made) if made else None
        whole = xxhash.xxh3_64_hexdigest(checks or self._version.checksums_of(unit))
        return f"the weights or the state of {', '.join(unit.names[:2])}", whole

    def lacks_reads(self, units: Collection[int], head: int) -> bool:
        """Whether the update of any of these units still lacks blocks to be read: those of `head`,
        which are read next, or of a later unit."""
        return any(u in self.awaiting and (u == head or u not in self.updating) for u in units)

    def put(
        self,
        unit: Unit,
        block: Block,
        buffer: np.ndarray,
        is_checked: bool,
        branch: Branch | None,
    ) -> None:
        """Update a block whose state, and gradient if it was on flash, are in `buffer`."""
        self._jobs.put(_Job(unit, block, buffer, is_checked, branch))

    def end(self) -> None:
        """End the thread after the blocks that it has."""
        self._jobs.put(None)

    def forget(self) -> None:
        """Forget the unit in progress; only while no block is being updated."""
        self._updates.forget()

    def run(self) -> None:
        """Update blocks until `end`."""
        # As many threads as compute concurrently. A single thread would take a core from one of the
        # computing threads, and the others would wait for that thread at the end of every loop.
        numba.set_num_threads(self._threads)
        while (job := self._jobs.get()) is not None:
            if job.branch is not None and job.branch.is_dropped:
                self._skip(job, job.branch)
            else:
                self._update(job)

    def _skip(self, job: _Job, branch: Branch) -> None:
        with self._monitor.changed:
            self._state.release(job.unit, job.block, job.buffer)
            branch.busy -= 1
            self._monitor.changed.notify_all()

    def _update(self, job: _Job) -> None:
        unit, block, buffer, branch = job.unit, job.block, job.buffer, job.branch
        frame, parts = self._frames[unit.index], self._spill.parts(unit, block, buffer)
        updated = self._updates.update(unit, block, frame, parts, job.is_checked)
        with self._monitor.changed:
            stays = self.is_kept(unit) and not self.is_written and branch is None
            if updated.changed is not None:
                self._state.change({unit.index: updated.changed.blocks})
                self._take_changed(unit, updated.changed, stays)
            if updated.is_gathered:
                self._state.release(unit, block, buffer)
            elif stays:
                self._state.hold(unit, block, buffer)
            else:
                self._writer.block(unit, block, buffer, branch)
            if branch is not None:
                branch.bytes += block.state_bytes + block.elements * unit.stream_width
            if updated.checks is not None:
                self._finish_unit(unit, updated.checks, stays, branch)
            self._monitor.changed.notify_all()

    def _finish_unit(
        self, unit: Unit, checks: list[list[bytes]], stays: bool, branch: Branch | None
    ) -> None:
        self.updating.discard(unit.index)
        if branch is not None and not branch.is_adopted:
            branch.updated[unit.index] = checks
            self._writer.weights(unit, checks, branch)
            return
        self.made[unit.index] = checks
        if stays:
            self.dirty[unit.index] = checks
        else:
            self.dirty.pop(unit.index, None)
            self._writer.weights(unit, checks, branch)
        self.awaiting.discard(unit.index)

    def _await_change(self) -> None:
        """Wait until the state of the last weight with a new mask is written, or kept in memory."""
        with self._monitor.changed:  # a writer that has ended writes nothing more
            self._monitor.changed.wait_for(lambda: self._monitor.is_ending or not self._is_changing)
            self._is_changing = True

    def _take_changed(self, unit: Unit, changed: ChangedWeight, stays: bool) -> None:
        """Keep the state of a weight with a new mask, or let the writer write all of it."""
        if stays:
            self._keep_changed(unit, changed)
            return
        self._writer.changed_weight(unit, changed, partial(self._keep_changed, unit, changed))

    def _keep_changed(self, unit: Unit, changed: ChangedWeight) -> None:
        """Keep the state of a weight with a new mask, if it stays in memory."""
        for block in changed.blocks if self._state.stay_whole(unit) else ():
            self._state.hold(unit, block, changed.state_of(block))
        self._is_changing = False
