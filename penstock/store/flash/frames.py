"""Which units' weights are in memory, and which unit is evicted for another.

The schedule (`step_schedule.py`) fixes the order in which stages are visited, step after step. The
evicted unit is therefore the unit whose next visit is farthest away, which is optimal (Belady, A
study of replacement algorithms, 1966). Units that fit stay in memory, the rest is streamed, and the
turns at both ends of the sweep need no reads. Least-recently-used would be the worst policy for
this order.

A unit that is read ahead takes the memory that it would take if it were read when it is needed. So
the speed of the disk changes no read, and the bytes that a step reads can be forecast. Speculated
updates (`speculation.py`) are the exception.
"""

import bisect
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import BudgetError
from penstock.kernels.memory import allocate, page_lock
from penstock.store.flash.layout import Unit


@dataclass(frozen=True)
class Visit:
    """One operation of a step: its stage, and the units that contain the stage's weights."""

    stage: int
    units: Sequence[int]


def least_bytes(units: Sequence[Unit], visits: Sequence[Visit]) -> int:
    """Return the minimum bytes in memory at once: the computing stage and the following stage."""
    ring = [*visits, *visits[:1]]
    return max(
        sum(units[unit].expected.stream_bytes for unit in {*first.units, *second.units})
        for first, second in itertools.pairwise(ring)
    )


class Frames:
    """The weights in memory, one frame per unit, within `budget_bytes`. Not thread-safe: the owner
    calls it under a lock.

    A frame has addresses for the most entries of a sparse weight. Its pages are allocated when they
    are used, so the size that is expected counts (`Unit.expected`).

    **Arguments:** `allocate` returns the memory of a frame; a forecast gives none.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        visits: Sequence[Visit],
        budget: int,
        allocate: Callable[[int], np.ndarray] = allocate,
    ) -> None:
        self.budget_bytes = budget
        self._allocate = allocate
        self._units = units
        self._visits = visits
        self._places: list[list[int]] = [[] for _ in units]
        self._places_of_stage: dict[int, list[int]] = {}
        for position, visit in enumerate(visits):
            self._places_of_stage.setdefault(visit.stage, []).append(position)
            for unit in visit.units:
                self._places[unit].append(position)
        self._frames: dict[int, np.ndarray] = {}
        self._spare: list[tuple[np.ndarray, int]] = []  # frames, and the sizes that count
        self.least_bytes = least_bytes(units, visits)  # what the caller may need at once
        self.page_locked = False  # whether new frames are page-locked
        self.cursor = 0  # the next visit

    @property
    def holds_all(self) -> bool:
        """Whether all units fit, so that none is ever evicted."""
        return sum(unit.expected.stream_bytes for unit in self._units) <= self.budget_bytes

    def __contains__(self, unit: int) -> bool:
        return unit in self._frames

    def __getitem__(self, unit: int) -> np.ndarray:
        return self._frames[unit]

    def visit(self, stage: int) -> Sequence[int]:
        """Record that a stage was fetched: the cursor moves behind the stage's next visit.

        Returns the units of the visit.
        """
        count, places = len(self._visits), self._places_of_stage[stage]
        place = min(places, key=lambda place: (place - self.cursor) % count)
        self.cursor = (1 + place) % count
        return self._visits[place].units

    @property
    def is_backward(self) -> bool:
        """Whether the stage that was visited last is the last stage, or in the backward sweep."""
        return (self.cursor - 1) % len(self._visits) >= len(self._visits) // 2

    def next_use(self, unit: int, after: int = 0) -> int:
        """Return the number of visits before the next visit of a unit, not counting those of the
        first `after` visits."""
        places, count = self._places[unit], len(self._visits)
        begin = (self.cursor + after) % count
        at = bisect.bisect_left(places, begin)
        place = places[at] if at < len(places) else places[0] + count
        return after + place - begin

    def upcoming(self) -> list[int]:
        """Return the units in the order of their next visits."""
        return sorted(range(len(self._units)), key=self.next_use)

    def require_room(self, units: Collection[int]) -> None:
        """Check that the weights of these units fit in memory together.

        **Raises:** `BudgetError` if they do not.
        """
        need = sum(self._units[unit].expected.stream_bytes for unit in units)
        if need > self.budget_bytes:
            raise BudgetError(
                f"{need:,} bytes of weights are needed at once, store.dram leaves "
                f"{self.budget_bytes:,} for them; raise store.dram"
            )

    def make_room(
        self,
        unit: int,
        pinned: Collection[int],
        *,
        ahead: bool,
        unwritten: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> bool:
        """Allocate a frame for `unit`, evicting other units; return whether this was possible.

        With `ahead`, those are evicted that would be if the unit were read at its next visit. If
        one of them is needed before, this is not possible yet.

        **Arguments:** units in `pinned` cannot be evicted now. Units in `unwritten` are being
        written: if one of them is the one to evict, no other is evicted instead. Ahead of its
        visit, a unit waits in the same way for `pinned`, but not for units in `kept`, which stay
        for long.
        """
        need = self._units[unit].expected.stream_bytes
        if self._reuse(unit):
            return True
        before = self.next_use(unit) if ahead else 0  # visits before the unit is needed
        held = {*kept, *self._visits_around(before)} if ahead else pinned
        after = before + 1 if ahead else 0
        victims = sorted(
            (u for u in self._frames if u not in held),
            key=lambda u: self.next_use(u, after),
            reverse=True,
        )
        chosen: list[int] = []
        free = self.budget_bytes - self._frames_bytes
        for victim in victims:
            if free >= need:
                break
            chosen.append(victim)
            free += self._units[victim].expected.stream_bytes
        if free < need:
            return False
        if any(v in unwritten for v in chosen):
            return False
        if ahead and any(v in pinned or self.next_use(v) < before for v in chosen):
            return False
        for victim in chosen:
            self.drop(victim)
        if not self._reuse(unit):
            self._frames[unit] = self._new(self._units[unit])
        while self._spare and self.memory_bytes > self.budget_bytes:
            self._spare.pop()
        return True

    def _visits_around(self, before: int) -> set[int]:
        """Return the units of the visit that comes after `before` others, and of the one before
        it: neither can be evicted then."""
        count, place = len(self._visits), self.cursor + before
        return {*self._visits[place % count].units, *self._visits[(place - 1) % count].units}

    def _new(self, unit: Unit) -> np.ndarray:
        frame = self._allocate(unit.stream_bytes)
        # Page-locking allocates all pages, but the budget has room for the expected ones alone.
        if self.page_locked and not unit.planned:
            page_lock(frame)  # if this is refused, copies to a GPU are slower; results are the same
        return frame

    def _reuse(self, unit: int) -> bool:
        """Give `unit` a spare frame of its size, if one exists."""
        need, expected = self._units[unit].stream_bytes, self._units[unit].expected.stream_bytes
        for number, (spare, spare_bytes) in enumerate(self._spare):
            if (spare.nbytes, spare_bytes) == (need, expected):
                self._frames[unit] = self._spare.pop(number)[0]
                return True
        return False

    def drop(self, unit: int) -> None:
        """Release a unit's frame; its content is discarded."""
        self._spare.append((self._frames.pop(unit), self._units[unit].expected.stream_bytes))

    @property
    def _frames_bytes(self) -> int:
        return sum(self._units[unit].expected.stream_bytes for unit in self._frames)

    @property
    def memory_bytes(self) -> int:
        return self._frames_bytes + sum(size for _, size in self._spare)
