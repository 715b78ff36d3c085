"""The three threads of a flash store, and what they share.

The *reader* brings weights and blocks of state in, in the order in which they will be needed; the
*updater* makes the pending updates; the *writer* takes what was updated to fresh places, and seals
steps in the journal behind all that was written before. What they share is under one lock, and
whoever waits is woken when any of it changes. An error in a thread stops all three and is raised
to the caller.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from penstock import fault
from penstock.errors import BudgetError, PenstockError, StorageError
from penstock.kernels.memory import allocate
from penstock.store import files
from penstock.store.flash.frames import Frames
from penstock.store.flash.journal import Journal
from penstock.store.flash.layout import Block, FlashLayout, Unit
from penstock.store.flash.medium import ExtentFile
from penstock.store.flash.version import Version, checksum
from penstock.store.interface import FlashTraffic

Update = Callable[[Unit, Block, np.ndarray, np.ndarray], None]
"""Updates one block in place: of a unit, which block, its frame whole, the block's state."""


class Pipeline:
    """Brings units in, updates them and takes them out. Its methods are called by one thread.

    Args:
        frames: which weights are in memory.
        buffers, buffer_bytes: how many blocks of state may be on their way, and their size.
        update: makes the update of a block; called by the updater.
        keep_steps: durable steps that the journal keeps.
    """

    def __init__(
        self,
        layout: FlashLayout,
        version: Version,
        file: ExtentFile,
        journal: Journal,
        frames: Frames,
        *,
        buffers: int,
        buffer_bytes: int,
        update: Update,
        keep_steps: int,
    ) -> None:
        self._layout = layout
        self._version = version
        self._file = file
        self._journal = journal
        self._frames = frames
        self._apply = update
        self._keep = keep_steps
        self._buffers = deque(allocate(buffer_bytes) for _ in range(buffers))
        self.compute = threading.Lock()  # kernels must not run side by side
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self._reads_ahead = False
        self._awaiting: set[int] = set()  # units whose update is not yet made
        self._pass: deque[tuple[Unit, Block]] = deque()  # blocks that the reader has yet to bring
        self._updating: set[int] = set()  # units of which some blocks have been given out
        self._unwritten: set[int] = set()  # units whose frame is newer than their extents
        self._arriving: set[int] = set()  # units whose frame is being filled
        self._demanded: Sequence[int] = ()
        self._hurried = False  # the caller waits for updates, whatever must leave for them
        self._in_use: deque[set[int]] = deque([set(), set()], maxlen=2)
        self._read_bytes = self._written_bytes = 0
        self._waited_seconds = 0.0
        self._to_update: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writing = 0  # jobs that the writer has yet to finish
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (
                ("penstock reader", self._read),
                ("penstock updater", self._update),
                ("penstock writer", self._write),
            )
        ]
        for thread in self._threads:
            thread.start()

    # What the store asks for

    def visit(self, stage: int) -> None:
        """Note that the sweep has come to a stage."""
        with self._changed:
            self._frames.visit(stage)

    def bring(self, units: Sequence[int]) -> list[np.ndarray]:
        """Return the frames of units, updated; good until the second call after this one."""
        with self._changed:
            self._reads_ahead = True
            self._in_use.append(set(units))
            self._demanded = units
            self._require_room()
            self._hurried = bool(self._awaiting.intersection(units))
            self._changed.notify_all()
            self._wait(lambda: all(self._is_ready(unit) for unit in units))
            self._demanded, self._hurried = (), False
            return [self._frames[unit] for unit in units]

    def begin_pass(self, units: Sequence[Unit]) -> None:
        """Begin to update units, in this order, in the background."""
        with self._changed:
            self._awaiting = {unit.index for unit in units}
            self._pass = deque((unit, block) for unit in units for block in unit.blocks)
            self._changed.notify_all()

    def finish_pass(self) -> None:
        """Wait until all updates are made. Frames that were brought before are good no more."""
        with self._changed:
            self._hurried = True
            self._in_use.extend([set(), set()])
            self._changed.notify_all()
            self._wait(lambda: not self._awaiting)
            self._hurried = False

    def wait_for_updates(self, units: Collection[int]) -> None:
        """Wait until these units are updated."""
        with self._changed:
            self._wait(lambda: not self._awaiting.intersection(units))

    @property
    def is_updated(self) -> bool:
        """Whether no unit awaits its update."""
        with self._changed:
            return not self._awaiting

    def seal(self, step: int, extra: Mapping[str, Any]) -> None:
        """Let the writer make a step durable, behind all that it has been given."""
        with self._changed:
            self._hand_to_writer(("seal", step, dict(extra)))

    def drain(self) -> None:
        """Wait until the writer has done all that it was given."""
        with self._changed:
            self._wait(lambda: self._writing == 0)

    def forget(self) -> None:
        """Drop all frames: what is on flash will be written anew. Only after `drain`."""
        with self._changed:
            self._reads_ahead = False
            self._changed.notify_all()
            self._wait(lambda: not self._arriving)
            for unit in self._layout.units:
                if unit.index in self._frames:
                    self._frames.drop(unit.index)

    def take_traffic(self) -> FlashTraffic:
        """Return what moved, and what the caller waited, since the last call."""
        with self._changed:
            taken = FlashTraffic(self._read_bytes, self._written_bytes, self._waited_seconds)
            self._read_bytes = self._written_bytes = 0
            self._waited_seconds = 0.0
        return taken

    def close(self) -> None:
        """Stop the threads; what the writer was given it still writes."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._to_update.put(None)
        self._to_write.put(None)
        for thread in self._threads:
            thread.join()

    def put(self, offset: int, data: np.ndarray) -> None:
        """Write to the extents, from any thread."""
        with files.storage_errors(self._file.path.parent, data.nbytes):
            self._file.write(offset, data)

    def seal_now(self, step: int, extra: Mapping[str, Any]) -> None:
        """Make a step durable: its extents, then the record that names them."""
        fault.point("flash.before_sync")
        record = self._version.record(step, extra)
        with files.storage_errors(self._file.path.parent, len(record.blob)):
            self._file.sync()
            fault.point("flash.after_sync")
            self._journal.append(record, self._keep)

    # Waiting

    def _is_ready(self, unit: int) -> bool:
        return unit in self._frames and unit not in self._awaiting and unit not in self._arriving

    def _require_room(self) -> None:
        at_once = set().union(*self._in_use)
        need = sum(self._layout.units[unit].stream_bytes for unit in at_once)
        if need > self._frames.budget_bytes:
            raise BudgetError(
                f"{need:,} bytes of weights are needed at once, store.dram leaves "
                f"{self._frames.budget_bytes:,} for them; raise store.dram"
            )

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition under the lock; raise what stopped a thread."""
        if not is_so():
            started = time.perf_counter()
            self._changed.wait_for(lambda: self._error is not None or is_so())
            self._waited_seconds += time.perf_counter() - started
        if self._error is not None:
            if isinstance(self._error, PenstockError):
                raise self._error
            raise StorageError(
                f"{self._file.path}: the store stopped: {self._error}; open the run again, it goes "
                "on from the last durable step"
            ) from self._error

    # The threads

    def _hand_to_writer(self, job: tuple[Any, ...]) -> None:
        self._writing += 1
        self._to_write.put(job)

    def _read(self) -> None:
        while True:
            with self._changed:
                job = self._next_job()
                while job is None:
                    if self._closing or self._error is not None:
                        return
                    self._changed.wait()
                    job = self._next_job()
            unit, block, buffer = job
            if block is None:
                self._fill_frame(unit)
                continue
            data = self._read_state(unit, block, buffer)
            self._to_update.put((unit, block, buffer, data))

    def _next_job(self) -> tuple[Unit, Block | None, np.ndarray | None] | None:
        """Choose what to read: what is waited for, then what the updates need, then ahead."""
        if self._closing or self._error is not None:
            return None
        units = self._layout.units
        for demanded in self._demanded:
            missing = demanded not in self._frames and demanded not in self._awaiting
            if missing and self._make_room(demanded, patient=False):
                return units[demanded], None, None
        if self._pass:
            unit, block = self._pass[0]
            if unit.index in self._unwritten:
                return None  # the state of the step before is still on its way out
            if unit.index not in self._frames:
                if self._make_room(unit.index, patient=not self._hurried):
                    return unit, None, None
            elif unit.index not in self._arriving and self._buffers:
                self._pass.popleft()
                self._updating.add(unit.index)
                return unit, block, self._buffers.popleft()
            return None
        if not self._reads_ahead:
            return None
        for ahead in self._frames.upcoming():
            if ahead in self._frames:
                continue
            if not self._make_room(ahead, patient=True):
                break
            return units[ahead], None, None
        return None

    def _make_room(self, unit: int, *, patient: bool) -> bool:
        handed_out = set().union(*self._in_use) - self._awaiting
        held = handed_out | self._updating | self._unwritten | self._arriving
        if not self._frames.make_room(unit, held - {unit}, patient):
            return False
        self._arriving.add(unit)
        return True

    def _fill_frame(self, unit: Unit) -> None:
        """Read a unit's weights into its frame, checking each block."""
        frame = self._frames[unit.index]
        try:
            for block in unit.blocks:
                part = _bytes_of(frame, unit.stream_width, block)
                self._version.read_stream(unit, block, part)
        except BaseException:
            with self._changed:
                self._frames.drop(unit.index)
            raise
        with self._changed:
            self._read_bytes += unit.stream_bytes
            self._arriving.discard(unit.index)
            self._changed.notify_all()

    def _read_state(self, unit: Unit, block: Block, buffer: np.ndarray | None) -> np.ndarray:
        assert buffer is not None
        data = buffer[: block.elements * unit.state_width]
        self._version.read_state(unit, block, data)
        with self._changed:
            self._read_bytes += data.nbytes
        return data

    def _update(self) -> None:
        import numba

        numba.set_num_threads(1)  # the other one computes; an update runs at memory speed anyway
        checks: list[list[bytes]] = [[], []]
        while (job := self._to_update.get()) is not None:
            unit, block, buffer, data = job
            stream = _bytes_of(self._frames[unit.index], unit.stream_width, block)
            with self.compute:
                self._apply(unit, block, self._frames[unit.index], data)
            checks[0].append(checksum(stream))
            checks[1].append(checksum(data))
            with self._changed:
                self._hand_to_writer(("block", unit, block, buffer, data))
                if block.number == len(unit.blocks) - 1:
                    self._hand_to_writer(("frame", unit, checks))
                    checks = [[], []]
                    self._unwritten.add(unit.index)
                    self._updating.discard(unit.index)
                    self._awaiting.discard(unit.index)
                    self._changed.notify_all()

    def _write(self) -> None:
        while (job := self._to_write.get()) is not None:
            what, *rest = job
            written = 0
            if what == "block":
                unit, block, buffer, data = rest
                fault.point("flash.before_block")
                self.put(unit.state_offset(self._version.next_place(unit), block), data)
                written = data.nbytes
            elif what == "frame":
                unit, checks = rest
                fault.point("flash.before_weights")
                frame = self._frames[unit.index]
                self.put(unit.stream_offset(self._version.next_place(unit)), frame)
                written = frame.nbytes
            else:
                self.seal_now(*rest)
            with self._changed:
                self._writing -= 1
                self._written_bytes += written
                if what == "block":
                    self._buffers.append(buffer)
                elif what == "frame":
                    self._version.advance(unit, *checks)
                    self._unwritten.discard(unit.index)
                self._changed.notify_all()


def _bytes_of(frame: np.ndarray, width: int, block: Block) -> np.ndarray:
    return frame[block.begin * width : block.end * width]
