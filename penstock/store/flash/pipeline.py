"""The three threads of a flash store and their shared state.

The *reader* reads weights and blocks of state in the order in which they are needed. The *updater*
applies the pending updates. The *writer* writes updated blocks to new places, and seals steps in
the journal after all earlier writes. One lock guards the shared state; a change wakes every waiting
thread. An error in a thread stops all three threads and is raised to the caller.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
import xxhash

from penstock.errors import PenstockError, StorageError
from penstock.io import failpoints
from penstock.spans import Spans
from penstock.sparsity import PackedIndex
from penstock.store.flash.blocks import StateBlocks
from penstock.store.flash.changing_weight import ChangedWeight
from penstock.store.flash.extent_writes import ExtentWrites
from penstock.store.flash.frames import Frames
from penstock.store.flash.layout import Block, FlashLayout, Unit
from penstock.store.flash.spill import GradientSpill
from penstock.store.flash.stored_masks import MaskHistory
from penstock.store.flash.unit_updates import UnitUpdates, Update
from penstock.store.flash.version import Version
from penstock.store.interface import FlashTraffic
from penstock.store.masks import Masks

_Job = tuple[Callable[[], int], Callable[[], object]]
"""A job of the writer, which returns the bytes written, and what it then does under the lock."""


class Pipeline:
    """Reads, updates and writes units. Its methods are called by one thread.

    Args:
        frames: the weights in memory.
        state: the blocks of optimizer state in memory.
        spill: the gradients on flash.
        update: computes the update of a block; called by the updater.
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
        masks: Masks,
    ) -> None:
        self._layout = layout
        self._version = version
        self._writes = writes
        self._frames = frames
        self._state = state
        self._spill = spill
        self._masks = masks
        self._updates = UnitUpdates(version, state, spill, update, masks, self._await_change)
        self.compute = self._updates.compute
        # The masks that are on flash, or that the writer must still write, by unit.
        self._handed: dict[int, PackedIndex] = {}
        self._is_changing = False  # whether all state of a weight with a new mask is in memory
        self._slabs = deque(spill.slabs)
        self._dirty: dict[int, list[list[bytes]]] = {}  # checksums of units newer than on flash
        self._made: dict[int, list[list[bytes]]] = {}  # checksums of each unit's last update
        self._update_threads = numba.get_num_threads()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self._reads_ahead = False
        self._awaiting: set[int] = set()  # units with a pending update
        self._pass: deque[tuple[Unit, Block]] = deque()  # blocks that the reader must still read
        self._updating: set[int] = set()  # units that are partly handed to the updater
        self._unwritten: set[int] = set()  # units that the writer must still write
        # Gradients that the writer must still write, by unit; a replayed step adds to them.
        self._spilling: Counter[int] = Counter()
        self._seals = 0  # steps that the writer must still seal
        self._is_written = True  # whether the updates of the present pass are written
        self._is_reading = False
        self._filling: set[int] = set()  # units whose frame is being filled
        self._requested: Sequence[int] = ()
        self._is_urgent = False  # the caller waits for updates: any unit may be evicted
        self._in_use: deque[set[int]] = deque([set(), set()], maxlen=2)
        self._read_bytes, self._written_bytes, self.spans = 0, 0, Spans()
        self._to_update: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writing = 0  # unfinished jobs of the writer
        self.restored()
        self._threads = [
            threading.Thread(target=self._run_thread, args=(work,), name=name, daemon=True)
            for name, work in (
                ("penstock reader", self._read),
                ("penstock updater", self._update),
                ("penstock writer", self._write),
            )
        ]
        for thread in self._threads:
            thread.start()

    # Called by the store

    def visit(self, stage: int) -> None:
        """Record that the sweep has reached a stage."""
        with self._changed:
            self._frames.visit(stage)

    def fetch_frames(self, units: Sequence[int]) -> list[np.ndarray]:
        """Return the frames of units, updated; valid until the second call after this one."""
        with self._changed:
            self._reads_ahead = True
            self._in_use.append(set(units))
            self._requested = units
            self._frames.require_room(set().union(*self._in_use))
            self._is_urgent = bool(self._awaiting.intersection(units))
            self._changed.notify_all()
            self._wait(lambda: all(self._is_ready(unit) for unit in units))
            self._requested, self._is_urgent = (), False
            return [self._frames[unit] for unit in units]

    def begin_pass(self, units: Sequence[Unit], is_written: bool) -> None:
        """Begin to update units, in this order, in the background.

        Unless `is_written`, units that stay completely in memory between steps are not written.
        """
        with self._changed:
            self._is_written = is_written
            self._awaiting = {unit.index for unit in units}
            blocks = ((unit, block) for unit in units for block in self._state.blocks(unit))
            self._pass = deque(blocks)
            self._changed.notify_all()

    def finish_pass(self) -> None:
        """Wait until all updates are applied. Frames returned before are no longer valid."""
        with self._changed:
            self._is_urgent = True
            self._in_use.extend([set(), set()])
            self._changed.notify_all()
            self._wait(lambda: not self._awaiting)
            self._is_urgent = False

    def write_out(self) -> None:
        """Let the writer write all units that are newer than on flash. Only after `finish_pass`."""
        with self._changed:
            for index, checks in self._dirty.items():
                unit = self._layout.units[index]
                for block in self._state.blocks(unit):
                    self._hand_block(unit, block, self._state.held(unit, block))
                self._hand_weights(unit, checks)
            self._dirty.clear()

    def slab(self) -> np.ndarray:
        """Wait for a free slab for a unit's gradients and return it; `spill` gives it back."""
        with self._changed:
            self._wait(lambda: bool(self._slabs))
            return self._slabs.popleft()

    def spill(self, unit: Unit, slab: np.ndarray) -> None:
        """Let the writer write a unit's gradients to flash."""
        with self._changed:
            self._spilling[unit.index] += 1
            write = partial(self._write_gradient, unit, self._state.blocks(unit), slab)
            self._hand_to_writer(write, partial(self._return_slab, unit, slab))

    def wait_for_updates(self, units: Collection[int]) -> None:
        """Wait until these units are updated."""
        with self._changed:
            self._wait(lambda: not self._awaiting.intersection(units))

    @property
    def is_updated(self) -> bool:
        """Whether no unit has a pending update."""
        with self._changed:
            return not self._awaiting

    def seal(self, step: int, extra: Mapping[str, Any], history: MaskHistory | None) -> None:
        """Let the writer make a step durable, after all earlier jobs."""
        with self._changed:
            self._seals += 1
            seal = partial(self._writes.seal, step, dict(extra), history)
            self._hand_to_writer(seal, self._finish_seal)

    def wait_for_seals(self) -> None:
        """Wait until all requested steps are durable."""
        with self._changed:
            self._wait(lambda: self._seals == 0)

    def compared(self) -> list[tuple[str, str]]:
        """Return checksums of all units as of their last update, in memory or on flash."""
        with self._changed:
            self._wait(lambda: not self._awaiting)
            found = []
            for unit in self._layout.units:
                made = self._made.get(unit.index)
                checks = b"".join(b"".join(half) for half in made) if made else None
                whole = xxhash.xxh3_64_hexdigest(checks or self._version.checksums_of(unit))
                found.append((f"the weights or the state of {', '.join(unit.names[:2])}", whole))
            return found

    def drain(self) -> None:
        """Wait until the writer has finished all its jobs."""
        with self._changed:
            self._wait(lambda: self._writing == 0)

    def forget(self) -> None:
        """Drop the content of memory: the content of flash will be overwritten. Only after
        `drain`."""
        with self._changed:
            self._reads_ahead = False
            self._changed.notify_all()
            self._wait(lambda: not self._filling and not self._is_reading)
            for unit in self._layout.units:
                if unit.index in self._frames:
                    self._frames.drop(unit.index)
            self._state.forget()
            self._dirty.clear()
            self._made.clear()

    def restored(self) -> None:
        """Take the masks that are now on flash. Only after `forget`."""
        with self._changed:
            sparse = self._layout.sparse
            self._state.change({unit.index: self._version.blocks(unit) for unit in sparse})
            self._handed = {unit.index: self._version.masks.index(unit) for unit in sparse}

    def take_traffic(self) -> FlashTraffic:
        """Return the bytes moved and the caller's waiting time since the last call."""
        with self._changed:
            waited_seconds = self.spans.take_seconds("flash")
            taken = FlashTraffic(self._read_bytes, self._written_bytes, waited_seconds)
            self._read_bytes, self._written_bytes = 0, 0
        return taken

    def close(self) -> None:
        """Stop the threads; the writer finishes the jobs that it has."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._to_update.put(None)
        self._to_write.put(None)
        for thread in self._threads:
            thread.join()

    # Waiting

    @property
    def _is_ending(self) -> bool:
        return self._closing or self._error is not None

    def _is_ready(self, unit: int) -> bool:
        return unit in self._frames and unit not in self._awaiting and unit not in self._filling

    def _run_thread(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition under the lock; raise the error of a stopped thread."""
        if not is_so():
            with self.spans.span("flash", "wait"):
                self._changed.wait_for(lambda: self._error is not None or is_so())
        if self._error is not None:
            if isinstance(self._error, PenstockError):
                raise self._error
            raise StorageError(
                f"{self._writes.path}: the store stopped: {self._error}; open the run again: it "
                "continues from the last durable step"
            ) from self._error

    # The threads

    def _hand_to_writer(self, write: Callable[[], int], finish: Callable[[], object]) -> None:
        self._writing += 1
        self._to_write.put((write, finish))

    def _hand_block(self, unit: Unit, block: Block, buffer: np.ndarray) -> None:
        write = partial(self._writes.state, unit, block, buffer[: block.state_bytes])
        self._hand_to_writer(write, partial(self._state.put_back, unit, block, buffer))

    def _hand_weights(self, unit: Unit, checks: list[list[bytes]]) -> None:
        """Let the writer write the weights of a unit, and its mask if that has changed."""
        self._unwritten.add(unit.index)
        blocks, index = self._state.blocks(unit), self._masks.index(unit.names[0])
        if index is not None and index is not self._handed[unit.index]:
            self._handed[unit.index] = index
            self._hand_to_writer(partial(self._writes.mask, unit, index), lambda: None)
        write = partial(self._writes.weights, unit, blocks, self._frames[unit.index])
        self._hand_to_writer(write, partial(self._finish_weights, unit, checks, blocks))

    def _read(self) -> None:
        while True:
            with self._changed:
                job = self._next_job()
                while job is None:
                    if self._is_ending:
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
        """Choose the next read: first what the caller waits for, then the updates' input, then
        read-ahead."""
        if self._is_ending:
            return None
        units = self._layout.units
        for requested in self._requested:
            missing = requested not in self._frames and requested not in self._awaiting
            if missing and self._make_room(requested, only_later=False):
                return partial(self._fill_frame, units[requested])
        if self._pass:
            return self._next_of_pass(*self._pass[0])
        if not self._reads_ahead:
            return None
        for ahead in self._frames.upcoming():
            if ahead in self._frames:
                continue
            if not self._make_room(ahead, only_later=True):
                break
            return partial(self._fill_frame, units[ahead])
        return self._read_state_ahead()

    def _next_of_pass(self, unit: Unit, block: Block) -> Callable[[], None] | None:
        if unit.index in self._unwritten or self._spilling[unit.index]:
            return None  # the previous step's state, or the gradient, is still being written
        if unit.index not in self._frames:
            if self._make_room(unit.index, only_later=not self._is_urgent):
                return partial(self._fill_frame, unit)
            return None
        if unit.index in self._filling:
            return None
        is_there = self._state.holds(unit, block)
        buffer = self._state.take(unit, block)
        if buffer is None:
            return None
        self._pass.popleft()
        self._updating.add(unit.index)
        return partial(self._fetch_block, unit, block, buffer, is_there)

    def _read_state_ahead(self) -> Callable[[], None] | None:
        """Read state that the next pass needs first, as far as memory allows."""
        missing = self._state.first_missing()
        if self._awaiting or missing is None or missing[0].index in self._unwritten:
            return None  # no later block: the pass would wait for its memory
        buffer = self._state.take(*missing)
        return None if buffer is None else partial(self._hold, *missing, buffer)

    def _make_room(self, unit: int, *, only_later: bool) -> bool:
        handed_out = set().union(*self._in_use) - self._awaiting
        held = handed_out | self._updating | self._unwritten | self._filling
        if not self._frames.make_room(unit, held - {unit}, only_later):
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

    def _fetch_block(self, unit: Unit, block: Block, buffer: np.ndarray, is_there: bool) -> None:
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
        self._to_update.put((unit, block, buffer, is_there))

    def _hold(self, unit: Unit, block: Block, buffer: np.ndarray) -> None:
        data, _ = self._spill.parts(unit, block, buffer)
        self._version.read_state(unit, block, data)
        with self._changed:
            self._read_bytes += data.nbytes
            self._state.hold(unit, block, buffer)

    # The updater

    def _update(self) -> None:
        # As many threads as compute concurrently. A single thread would take a core from one of the
        # computing threads, and the others would wait for that thread at the end of every loop.
        numba.set_num_threads(self._update_threads)
        while (job := self._to_update.get()) is not None:
            unit, block, buffer, is_checked = job
            frame, parts = self._frames[unit.index], self._spill.parts(unit, block, buffer)
            updated = self._updates.update(unit, block, frame, parts, is_checked)
            with self._changed:
                is_kept = self._state.stay_whole(unit) and self._frames.holds_all
                stays = is_kept and not self._is_written
                if updated.changed is not None:
                    self._state.change({unit.index: updated.changed.blocks})
                    self._take_changed(unit, updated.changed, stays)
                if updated.is_gathered:
                    self._state.release(unit, block, buffer)
                elif stays:
                    self._state.hold(unit, block, buffer)
                else:
                    self._hand_block(unit, block, buffer)
                if updated.checks is not None:
                    self._finish_unit(unit, updated.checks, stays)
                self._changed.notify_all()

    def _finish_unit(self, unit: Unit, checks: list[list[bytes]], stays: bool) -> None:
        self._made[unit.index] = checks
        if stays:
            self._dirty[unit.index] = checks
        else:
            self._dirty.pop(unit.index, None)
            self._hand_weights(unit, checks)
        self._updating.discard(unit.index)
        self._awaiting.discard(unit.index)

    def _await_change(self) -> None:
        """Wait until the state of the last weight with a new mask is written, or kept in memory."""
        with self._changed:  # a writer that has ended writes nothing more
            self._changed.wait_for(lambda: self._is_ending or not self._is_changing)
            self._is_changing = True

    def _take_changed(self, unit: Unit, changed: ChangedWeight, stays: bool) -> None:
        """Keep the state of a weight with a new mask, or let the writer write all of it."""
        if stays:
            self._keep_changed(unit, changed)
            return
        write = partial(self._writes.state, unit, changed.blocks[0], changed.state)
        self._hand_to_writer(write, partial(self._keep_changed, unit, changed))

    def _keep_changed(self, unit: Unit, changed: ChangedWeight) -> None:
        """Keep the state of a weight with a new mask, if it stays in memory."""
        for block in changed.blocks if self._state.stay_whole(unit) else ():
            self._state.hold(unit, block, changed.state_of(block))
        self._is_changing = False

    # The writer

    def _write(self) -> None:
        while (job := self._to_write.get()) is not None:
            write, finish = job
            written = write()
            with self._changed:
                self._writing -= 1
                self._written_bytes += written
                finish()
                self._changed.notify_all()

    def _write_gradient(self, unit: Unit, blocks: Sequence[Block], slab: np.ndarray) -> int:
        failpoints.point("flash.before_gradient")
        return self._spill.write(unit, blocks, slab)

    def _return_slab(self, unit: Unit, slab: np.ndarray) -> None:
        self._spilling[unit.index] -= 1
        self._slabs.append(slab)

    def _finish_weights(
        self, unit: Unit, checks: list[list[bytes]], blocks: Sequence[Block]
    ) -> None:
        self._version.advance(unit, checks, blocks)
        self._unwritten.discard(unit.index)

    def _finish_seal(self) -> None:
        self._seals -= 1
