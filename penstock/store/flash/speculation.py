"""Speculative updates: made as gradients arrive, and adopted or thrown away by the commit.

The clip factor of a step needs all gradients of the step, so updates wait for the commit, and all
state moves in the forward sweep. A speculative update is made with the factor that is expected. Its
unit is updated in place in memory and written to its next place, which no journal record names. If
the commit decides by the same factor, these places become the unit's version (`Branch.adopt`).
Otherwise memory and places are forgotten, and the unit is read and updated again from its last
version, as if nothing had been speculated. The bits are the same in both cases.

A speculative update takes only what nobody waits for. It begins with a unit whose weights are still
in memory after their backward visit, the newest first: the units of the first stages, which the
next forward sweep needs first, have the least time. Weights that the caller needs have priority
over speculation in the reader, and always find room beside the units that are being updated.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Sequence
from enum import Enum

from penstock.store.flash.frames import Frames
from penstock.store.flash.layout import Block, Unit


class _Verdict(Enum):
    OPEN, ADOPTED, DROPPED = range(3)


class Branch:
    """The speculative updates of one step. Its state changes under the pipeline's lock.

    Attributes:
        started: the units that an update has changed in memory, or soon will.
        remaining: the blocks of the unit in progress that the reader must still read.
        updated: the checksums of the units whose blocks are all updated.
        written: the blocks of units that are written, but belong to no version.
        busy: blocks and units that a thread works on, or will.
        bytes: of the state and the weights that were updated.
    """

    def __init__(self) -> None:
        self.started: set[int] = set()
        self.remaining: deque[tuple[Unit, Block]] = deque()
        self.updated: dict[int, list[list[bytes]]] = {}
        self.written: dict[int, Sequence[Block]] = {}
        self.busy = self.bytes = 0
        self._verdict = _Verdict.OPEN

    @property
    def is_open(self) -> bool:
        """Whether the step is not decided yet."""
        return self._verdict is _Verdict.OPEN

    @property
    def is_adopted(self) -> bool:
        """Whether the step was decided as it was expected."""
        return self._verdict is _Verdict.ADOPTED

    @property
    def is_dropped(self) -> bool:
        """Whether the updates were thrown away."""
        return self._verdict is _Verdict.DROPPED

    def adopt(self) -> None:
        """Make the updates those of the decided step."""
        self._verdict = _Verdict.ADOPTED

    def drop(self) -> None:
        """Throw the updates away."""
        self._verdict = _Verdict.DROPPED
        self.remaining.clear()

    def unless_dropped(self, write: Callable[[], int]) -> Callable[[], int]:
        """Return a job that writes nothing once the updates are thrown away."""
        return lambda: 0 if self.is_dropped else write()


def is_speculative(unit: Unit) -> bool:
    """Whether a unit may be updated before the commit.

    The gradient of a tied unit is complete only at the end of the step. The update of a sparse
    weight may change its mask.
    """
    return unit.is_updated and not unit.tied and not unit.is_sparse


class Speculation:
    """Which units may be updated speculatively, and in which order. Not thread-safe: the owner
    calls it under a lock.

    Args:
        units: all units.
        frames: the weights in memory.
    """

    def __init__(self, units: Sequence[Unit], frames: Frames) -> None:
        self._units, self._frames = units, frames
        self.branch: Branch | None = None
        self.is_planned = False  # whether this step speculates, if it can
        self._visited: deque[int] = deque()  # in the backward sweep, whose update has not begun
        self._offered: list[Unit] = []  # whose gradients have arrived, oldest first
        self.adopted_bytes = self.dropped_bytes = 0

    def visit(self, units: Collection[int]) -> None:
        """Record that the sweep has reached units: in the backward sweep their weights are kept
        for their update, as far as there is room."""
        if not self.is_planned or not self._frames.is_backward:
            self._visited.clear()
            return
        for unit in units:
            if is_speculative(self._units[unit]):
                self._visited.append(unit)
        while self._visited and 2 * self._bytes_of(self._visited) > self._room:
            self._visited.popleft()

    def fetched(self, units: Collection[int]) -> None:
        """Record that the caller reads the weights of units: they must not be updated now."""
        self._offered = [unit for unit in self._offered if unit.index not in units]

    @property
    def keeps(self) -> Collection[int]:
        """The units whose weights are kept for their update; those that the caller needs come
        first."""
        return self._visited

    def offer(self, units: Collection[Unit]) -> None:
        """Record that the gradients of units have arrived."""
        if self.branch is None:
            self.branch = Branch()
        self._offered += units

    @property
    def is_offered(self) -> bool:
        """Whether there may be a unit to begin with."""
        return bool(self._offered)

    def touches(self, units: Collection[int]) -> bool:
        """Whether the memory of these units may contain speculative updates, of a step that is
        not decided."""
        return self.branch is not None and not self.branch.started.isdisjoint(units)

    def next_unit(self, busy: Container[int], held: Collection[int]) -> Unit | None:
        """Return the unit whose update should begin next; None if none can.

        Args:
            busy: units to which something else happens.
            held: the units that are being updated or written: their weights cannot be evicted.
        """
        for unit in reversed(self._offered):
            if unit.index not in self._frames or unit.index in busy:
                continue
            if self._bytes_of({*held, unit.index}) > self._room:
                return None
            return unit
        return None

    def begin(self, unit: Unit, blocks: Sequence[Block]) -> None:
        """Begin to update a unit."""
        assert self.branch is not None
        self._offered.remove(unit)
        if unit.index in self._visited:
            self._visited.remove(unit.index)
        self.branch.started.add(unit.index)
        self.branch.remaining.extend((unit, block) for block in blocks)

    def withdraw(self) -> None:
        """Begin no further update in this step."""
        self._offered.clear()
        self._visited.clear()

    def end(self, *, is_adopted: bool) -> None:
        """Begin the next step, after the verdict on this one."""
        if self.branch is not None:
            self.adopted_bytes += self.branch.bytes * is_adopted
            self.dropped_bytes += self.branch.bytes * (not is_adopted)
        self.branch = None
        self.withdraw()

    @property
    def _room(self) -> float:
        """The memory beside the weights that the caller may need at once."""
        if self._frames.holds_all:
            return math.inf
        return self._frames.budget_bytes - self._frames.least_bytes

    def _bytes_of(self, units: Collection[int]) -> int:
        return sum(self._units[unit].expected.stream_bytes for unit in units)
