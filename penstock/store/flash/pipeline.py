"""The three threads of a flash store and their shared state.

The *reader* reads weights and blocks of state in the order in which they are needed. The *updater*
applies the pending updates, and speculative ones (`speculation.py`). The *writer* (`writer.py`)
writes updated blocks to new places, and seals steps in the journal after all earlier writes. One
lock guards the shared state (`monitor.py`).
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.store.flash.blocks import StateBlocks
from penstock.store.flash.extent_writes import ExtentWrites
from penstock.store.flash.frames import Frames
from penstock.store.flash.layout import Block, FlashLayout, Unit
from penstock.store.flash.monitor import Monitor
from penstock.store.flash.speculation import Branch, Speculation
from penstock.store.flash.spill import GradientSpill
from penstock.store.flash.stored_masks import MaskHistory
from penstock.store.flash.unit_updates import Update
from penstock.store.flash.updater import Updater
from penstock.store.flash.version import Version
from penstock.store.flash.writer import Writer
from penstock.store.interface import FlashTraffic
from penstock.store.masks import Masks


class Pipeline:
    """Reads, updates and writes units. Its methods are called by one thread.

    Args:
        frames: the weights in memory.
        state: the blocks of optimizer state in memory.
        spill: the gradients on flash.
        update: computes the update of a block; called by the updater.
        forget: called when speculative updates are thrown away.
        masks: those of the sparse weights; the updater makes their pending changes.
    """

    def __init__(
        self,
        layout: FlashLayout,
        version: Version,
        writes: ExtentWrites,
        frames: Frames,
        *,
        state: StateBlocks,
        spill: GradientSpill,
        update: Update,
        forget: Callable[[], None],
        masks: Masks,
    ) -> None:
        self._layout = layout
        self._version = version
        self._frames = frames
        self._state = state
        self._spill = spill
        self._monitor = monitor = Monitor(writes.path)
        self._changed, self.spans, self._wait = monitor.changed, monitor.spans, monitor.wait
        self._writer = Writer(
            monitor, version, writes, frames, state=state, spill=spill, masks=masks
        )
        self._updater = Updater(
            monitor,
            version,
            frames,
            self._writer,
            state=state,
            spill=spill,
            update=update,
            masks=masks,
        )
        self.compute = self._updater.compute
        self._speculation = Speculation(layout.units, frames)
        self._forget_updates = forget
        self._reads_ahead = False
        self._pass: deque[tuple[Unit, Block]] = deque()  # blocks that the reader must still read
        self._is_reading = False
        self._filling: set[int] = set()  # units whose frame is being filled
        self._requested: Sequence[int] = ()
        self._urgent: Collection[int] = ()  # units for whose updates the caller waits
        self._in_use: deque[set[int]] = deque([set(), set()], maxlen=2)
        self._read_bytes = 0
        self.restored()
        self._threads = [
            monitor.start("penstock reader", self._read),
            monitor.start("penstock updater", self._updater.run),
            monitor.start("penstock writer", self._writer.run),
        ]

    # Called by the store

    def fetch_frames(self, units: Sequence[int], stage: int | None = None) -> list[np.ndarray]:
        """Return the frames of units, updated; valid until the second call after this one. `stage`
        is the stage that the sweep has reached."""
        with self._changed:
            if stage is not None:
                self._speculation.visit(self._frames.visit(stage))
            self._speculation.fetched(units)
            if self._speculation.touches(units):
                self._drop()
            self._reads_ahead = True
            self._in_use.append(set(units))
            self._frames.require_room(set().union(*self._in_use))
            self._requested = units
            try:
                self._wait_urgently(units, lambda: all(self._is_ready(unit) for unit in units))
            finally:
                self._requested = ()
            return [self._frames[unit] for unit in units]

    def plan(self, is_planned: bool) -> None:
        """Say whether the next step's updates are to be speculated, as far as they can be."""
        with self._changed:
            self._speculation.is_planned = is_planned

    def speculate(self, units: Sequence[Unit], is_written: bool) -> None:
        """Let units whose gradients have arrived be updated before the commit.

        Only after the updates of the last step, whose seal is requested. Units whose last version
        is in memory only cannot be, and units that the pass would not write need not be.

        **Arguments:** `is_written` is as for `begin_pass`.
        """
        with self._changed:
            self._speculation.offer(
                [
                    unit
                    for unit in units
                    if unit.index not in self._updater.dirty
                    and (is_written or not self._updater.is_kept(unit))
                ]
            )
            self._changed.notify_all()

    def wait_for_speculation(self) -> None:
        """Wait until the speculative updates that can be made now are made."""
        with self._changed:
            self._wait(lambda: self._has_speculated)

    @property
    def _has_speculated(self) -> bool:
        branch = self._speculation.branch
        return branch is None or (
            not branch.remaining
            and branch.busy == 0
            and self._speculation.next_unit((), ()) is None
        )

    def drop_speculation(self) -> None:
        """Throw the speculative updates of the present step away."""
        with self._changed:
            self._drop()

    def _drop(self) -> None:
        branch = self._speculation.branch
        if branch is None:
            return
        branch.drop()
        self._speculation.withdraw()
        self._changed.notify_all()
        self._wait(lambda: branch.busy == 0)
        self._updater.forget()
        self._forget_updates()
        for index in branch.started:
            self._updater.updating.discard(index)
            if index in self._frames:
                self._frames.drop(index)
            self._state.invalidate(self._layout.units[index])
        self._speculation.end(is_adopted=False)

    def begin_pass(self, units: Sequence[Unit], is_written: bool, is_as_expected: bool) -> None:
        """Begin to update units, in this order, in the background.

        Args:
            is_written: otherwise units that stay completely in memory between steps are not
                written.
            is_as_expected: whether speculative updates are those of the decided step. Otherwise
                they are thrown away.
        """
        with self._changed:
            if not is_as_expected:
                self._drop()
            begun, updated = self._adopt()
            self._updater.is_written = is_written
            self._updater.awaiting = {unit.index for unit in units}.difference(updated)
            rest = (unit for unit in units if unit.index not in begun)
            blocks = ((unit, block) for unit in rest for block in self._state.blocks(unit))
            self._pass.extend(blocks)
            self._changed.notify_all()

    def _adopt(self) -> tuple[Collection[int], Collection[int]]:
        """Adopt the speculative updates, and begin the pass with the rest of the unit in progress.

        Returns the units whose update has begun, and those whose update is complete.
        """
        branch = self._speculation.branch
        self._speculation.end(is_adopted=True)
        if branch is None:
            return (), ()
        branch.adopt()
        for index, checks in branch.updated.items():
            self._updater.made[index] = checks
            if index in branch.written:
                self._version.advance(self._layout.units[index], checks, branch.written[index])
        self._pass.extend(branch.remaining)
        return branch.started, branch.updated.keys()

    def finish_pass(self) -> None:
        """Wait until all updates are applied. Frames returned before are no longer valid."""
        with self._changed:
            self._in_use.extend([set(), set()])
            self._wait_for_all()

    def release(self) -> None:
        """Let the frames returned before be replaced: they are no longer in use."""
        with self._changed:
            self._in_use.extend([set(), set()])

    def write_out(self) -> None:
        """Let the writer write all units that are newer than on flash. Only after `finish_pass`."""
        with self._changed:
            for index, checks in self._updater.dirty.items():
                unit = self._layout.units[index]
                for block in self._state.blocks(unit):
                    self._writer.block(unit, block, self._state.held(unit, block))
                self._writer.weights(unit, checks)
            self._updater.dirty.clear()

    def slab(self) -> np.ndarray:
        """Wait for a free slab for a unit's gradients and return it; `spill` gives it back."""
        with self._changed:
            self._wait(lambda: bool(self._writer.slabs))
            return self._writer.slabs.popleft()

    def spill(self, unit: Unit, slab: np.ndarray) -> None:
        """Let the writer write a unit's gradients to flash."""
        with self._changed:
            self._writer.gradient(unit, slab)

    def wait_for_updates(self, units: Collection[int]) -> None:
        """Wait until these units are updated."""
        with self._changed:
            self._wait_urgently(units, lambda: self._updater.awaiting.isdisjoint(units))

    @property
    def is_updated(self) -> bool:
        """Whether no unit has a pending update."""
        with self._changed:
            return not self._updater.awaiting

    def seal(self, step: int, extra: Mapping[str, Any], history: MaskHistory | None) -> None:
        """Let the writer make a step durable, after all earlier jobs."""
        with self._changed:
            self._writer.seal(step, extra, history)

    def wait_for_seals(self) -> None:
        """Wait until all requested steps are durable."""
        with self._changed:
            self._wait(lambda: self._writer.seals == 0)

    def compared(self) -> list[tuple[str, str]]:
        """Return checksums of all units as of their last update, in memory or on flash."""
        with self._changed:
            self._wait_for_all()
            return [self._updater.compared(unit) for unit in self._layout.units]

    def drain(self) -> None:
        """Wait until the writer has finished all its jobs."""
        with self._changed:
            self._wait(lambda: self._writer.pending == 0)

    def forget(self) -> None:
        """Drop the content of memory: the content of flash will be overwritten. Only after
        `drain`."""
        with self._changed:
            self._drop()
            self._reads_ahead = False
            self._changed.notify_all()
            self._wait(lambda: not self._filling and not self._is_reading)
            for unit in self._layout.units:
                if unit.index in self._frames:
                    self._frames.drop(unit.index)
            self._state.forget()
            self._updater.dirty.clear()
            self._updater.made.clear()

    def restored(self) -> None:
        """Take the masks that are now on flash. Only after `forget`."""
        with self._changed:
            sparse = self._layout.sparse
            self._state.change({unit.index: self._version.blocks(unit) for unit in sparse})
            self._writer.masks = {u.index: self._version.masks.index(u) for u in sparse}

    def waited(self) -> float:
        """Return the seconds that the caller has waited since the store was opened."""
        return self.spans.seconds("flash")

    def take_traffic(self) -> FlashTraffic:
        """Return the bytes moved and the caller's waiting time since the last call."""
        with self._changed:
            taken = FlashTraffic(
                self._read_bytes,
                self._writer.written_bytes,
                self.spans.take_seconds("flash"),
                self._speculation.adopted_bytes,
                self._speculation.dropped_bytes,
            )
            self._read_bytes = self._writer.written_bytes = 0
            self._speculation.adopted_bytes = self._speculation.dropped_bytes = 0
        return taken

    def close(self) -> None:
        """Stop the threads; the writer finishes the jobs that it has."""
        self._monitor.close()
        self._updater.end()
        self._writer.end()
        for thread in self._threads:
            thread.join()

    def _is_ready(self, unit: int) -> bool:
        is_busy = unit in self._updater.awaiting or unit in self._filling
        return unit in self._frames and not is_busy

    def _wait_urgently(self, units: Collection[int], is_so: Callable[[], bool]) -> None:
        """Wait, as `_wait`, for a condition that needs the updates of these units."""
        self._urgent = units
        self._changed.notify_all()
        try:
            self._wait(is_so)
        finally:
            self._urgent = ()

    def _wait_for_all(self) -> None:
        self._wait_urgently(set(self._updater.awaiting), lambda: not self._updater.awaiting)

    # The reader

    def _read(self) -> None:
        while True:
            with self._changed:
                job = self._next_job()
                while job is None:
                    if self._monitor.is_ending:
                        return
                    self._changed.wait()
                    job = self._next_job()
            job()
            with self._changed:
                self._is_reading = False
                self._changed.notify_all()

    def _next_job(self) -> Callable[[], None] | None:
        job = self._choose()
        self._is_reading = job is not None
        return job

    def _choose(self) -> Callable[[], None] | None:
        """Choose the next read: what the caller waits for, input of updates, weights and state of
        the next visits, input of speculative updates."""
        if self._monitor.is_ending:
            return None
        units = self._layout.units
        awaiting = self._updater.awaiting
        missing = [u for u in self._requested if u not in self._frames and u not in awaiting]
        for requested in missing:
            if self._make_room(requested, ahead=False):
                return partial(self._fill_frame, units[requested])
        if self._pass:
            return self._next_of_pass(*self._pass[0])
        if missing or not self._reads_ahead:
            return self._next_of_speculation()
        for coming in self._frames.upcoming():
            if coming in self._frames or self._speculation.touches([coming]):
                continue
            if not self._make_room(coming, ahead=True):
                break
            return partial(self._fill_frame, units[coming])
        return self._next_of_speculation() or self._read_state_ahead()

    def _next_of_pass(self, unit: Unit, block: Block) -> Callable[[], None] | None:
        if unit.index in self._writer.unwritten or self._writer.spilling[unit.index]:
            return None  # the previous step's state, or the gradient, is still being written
        if unit.index not in self._frames:
            # A unit for which the caller waits is read as at its visit.
            ahead = not self._updater.lacks_reads(self._urgent, unit.index)
            if self._make_room(unit.index, ahead=ahead):
                return partial(self._fill_frame, unit)
            return None
        if unit.index in self._filling:
            return None
        is_there = self._state.holds(unit, block)
        buffer = self._state.take(unit, block)
        if buffer is None:
            return None
        self._pass.popleft()
        self._updater.updating.add(unit.index)
        return partial(self._fetch_block, unit, block, buffer, is_there, None)

    def _next_speculative_unit(self) -> Unit | None:
        if self._updater.awaiting or not self._speculation.is_offered:
            return None
        busy = {*self._writer.unwritten, *self._filling, *(+self._writer.spilling)}
        return self._speculation.next_unit(busy, self._updater.updating | self._writer.unwritten)

    def _next_of_speculation(self) -> Callable[[], None] | None:
        branch = self._speculation.branch
        if branch is None or not branch.is_open:
            return None
        if branch.remaining:
            unit, block = branch.remaining[0]
        elif (begun := self._next_speculative_unit()) is not None:
            unit, block = begun, self._state.blocks(begun)[0]
        else:
            return None
        is_there = self._state.holds(unit, block)
        buffer = self._state.take(unit, block)
        if buffer is None:
            self._state.give_up()
            buffer = self._state.take(unit, block)
        if buffer is None:
            return None
        if not branch.remaining:
            self._speculation.begin(unit, self._state.blocks(unit))
            self._updater.updating.add(unit.index)
        branch.remaining.popleft()
        branch.busy += 1
        return partial(self._fetch_block, unit, block, buffer, is_there, branch)

    def _read_state_ahead(self) -> Callable[[], None] | None:
        """Read state that the next pass needs first, as far as memory allows."""
        missing = self._state.first_missing()
        if self._updater.awaiting or missing is None or missing[0].index in self._writer.unwritten:
            return None  # no later block: the pass would wait for its memory
        unit, block = missing
        if self._speculation.touches([unit.index]):
            return None  # its state on flash will be that of the last step but one
        may_fill_all = not self._speculation.is_planned or self._state.has_many_free
        if not may_fill_all and not self._state.is_resident(unit, block):
            return None  # speculative updates need the rest of the buffers
        buffer = self._state.take(*missing)
        return None if buffer is None else partial(self._hold, *missing, buffer)

    def _make_room(self, unit: int, *, ahead: bool) -> bool:
        held = set().union(*self._in_use) - self._updater.awaiting
        held.update(self._requested, self._updater.updating, self._filling)
        unwritten, kept = self._writer.unwritten, self._speculation.keeps
        if not self._frames.make_room(unit, held, ahead=ahead, unwritten=unwritten, kept=kept):
            return False
        self._filling.add(unit)
        return True

    def _fill_frame(self, unit: Unit) -> None:
        """Read a unit's weights into its frame, checking each block."""
        frame = self._frames[unit.index]
        try:
            read_bytes = self._version.read_frame(unit, frame)
        except BaseException:
            with self._changed:
                self._frames.drop(unit.index)
            raise
        with self._changed:
            self._read_bytes += read_bytes
            self._filling.discard(unit.index)
            self._changed.notify_all()

    def _fetch_block(
        self,
        unit: Unit,
        block: Block,
        buffer: np.ndarray,
        is_there: bool,
        branch: Branch | None,
    ) -> None:
        """Hand a block to the updater, with its gradient if the gradient is on flash.

        The updater verifies the checksum, so that the data is in its cache for the update.
        """
        data, gradient = self._spill.parts(unit, block, buffer)
        if not is_there:
            self._version.fetch_state(unit, block, data)
        if gradient is not None:
            self._spill.fetch(unit, block, gradient)
        with self._changed:
            self._read_bytes += 0 if is_there else data.nbytes
            self._read_bytes += 0 if gradient is None else gradient.nbytes
        self._updater.put(unit, block, buffer, is_there, branch)

    def _hold(self, unit: Unit, block: Block, buffer: np.ndarray) -> None:
        data, _ = self._spill.parts(unit, block, buffer)
        self._version.read_state(unit, block, data)
        with self._changed:
            self._read_bytes += data.nbytes
            self._state.hold(unit, block, buffer)
