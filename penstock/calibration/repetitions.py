"""Repeated measurements within a time budget.

Each case is first measured once. The repetitions then go over the whole list again and again, so
that a disturbance of some seconds spoils at most one repetition of a case, and the median ignores
it.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ClusterError

Part = Literal["engine", "store", "flash", "processes"]
"""The part of the machine to which a figure belongs."""

ENOUGH_REPETITIONS = 3
"""Fewer give a median that one disturbance can spoil."""

OnProgress = Callable[[str, float], None]
"""Called with what is being done and the share of the work that is done."""

OnLost = Callable[[Part, ClusterError], None]
"""Called with a part whose other process has failed, and the error."""

_LEAST_SECONDS = 0.002  # of a repetition; shorter calls are repeated within it
_MOST_CALLS = 10_000


@dataclass(frozen=True)
class Quantity:
    """What is measured: a curve of `penstock.machines`, or a figure of its own.

    `work` is a `penstock.machines.Work`, or `operator call`, `stage call`, `flash both`,
    `reference step`, `reference steps at once`, `shared memory both ways`, `message`.
    """

    part: Part
    work: str
    dtype: str = "any"
    layout: str = "any"

    def __str__(self) -> str:
        return " ".join([self.work, *(x for x in (self.dtype, self.layout) if x != "any")])


@dataclass(frozen=True)
class Prepared:
    """A call that can be timed: its amount of work in FLOPs, bytes or calls, and its size as
    `RateCurve` defines it."""

    run: Callable[[], object]
    amount: float
    size: float = 1.0


@dataclass(frozen=True)
class Case:
    """One point of a curve. `most` limits the repetitions, for work that wears the machine."""

    quantity: Quantity
    prepare: Callable[[], Prepared]
    most: int | None = None


@dataclass(frozen=True)
class Measured:
    """The rates of one case, one per repetition, in FLOP/s, bytes/s or calls/s."""

    quantity: Quantity
    size: float
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        """The median."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Half the range, relative to the median."""
        return (max(self.rates) - min(self.rates)) / 2 / self.rate


def _raise(part: Part, error: ClusterError) -> None:
    raise error


def measure(
    cases: Iterable[Case],
    budget_seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: OnProgress = lambda text, share: None,
    on_lost: OnLost = _raise,
) -> list[Measured]:
    """Measure every case at least once, then repeat them in turn while the budget lasts.

    Args:
        budget_seconds: of all. Preparation and the first call of each case, in which kernels may
            be compiled, can take longer: they count only if every case has enough repetitions.
        on_progress: also called before each repetition.
        on_lost: called if a case of a part raises `ClusterError`, once per part. No figures of that
            part are returned. By default the error is raised.
    """
    cases = list(cases)
    runs: list[_Run] = []
    lost: set[Part] = set()

    def lose(part: Part, error: ClusterError) -> None:
        on_lost(part, error)
        lost.add(part)
        runs[:] = [run for run in runs if run.part != part]

    begun = clock()
    for number, case in enumerate(cases):
        part = case.quantity.part
        if part in lost:
            continue
        on_progress(f"measuring {case.quantity}", number / (2 * len(cases)))
        try:
            runs.append(_Run(case, clock))
        except ClusterError as error:
            lose(part, error)
    spent = first = sum(run.seconds for run in runs)
    rounds = 1
    while any(run.may_repeat for run in runs):
        rounds += 1
        for run in list(runs):
            if not run.may_repeat or run.part in lost:
                continue
            taken = clock() - begun if rounds > ENOUGH_REPETITIONS else spent
            if taken + run.seconds > budget_seconds:
                return [run.measured() for run in runs]
            share = (spent - first) / max(budget_seconds - first, 1e-9)
            on_progress(f"repeating {run.case.quantity}", 0.5 + share / 2)
            try:
                spent += run.repeat()
            except ClusterError as error:
                lose(run.part, error)
    return [run.measured() for run in runs]


class _Run:
    """The repetitions of one case. `seconds` is the time of the first one."""

    def __init__(self, case: Case, clock: Callable[[], float]) -> None:
        self.case, self._clock = case, clock
        self._prepared = case.prepare()
        self._prepared.run()  # warm-up
        self._rates: list[float] = []
        self._calls = 1
        self.seconds = self.repeat()
        if self.seconds < _LEAST_SECONDS:
            enough = _LEAST_SECONDS / max(self.seconds, _LEAST_SECONDS / _MOST_CALLS)
            self._calls = math.ceil(enough)
            self._rates.clear()
            self.seconds = self.repeat()

    @property
    def part(self) -> Part:
        return self.case.quantity.part

    @property
    def may_repeat(self) -> bool:
        return self.case.most is None or len(self._rates) < self.case.most

    def repeat(self) -> float:
        """Measure once and return the seconds that it took."""
        run = self._prepared.run
        began = self._clock()
        for _ in range(self._calls):
            run()
        seconds = self._clock() - began
        self._rates.append(self._calls * self._prepared.amount / max(seconds, 1e-9))
        return seconds

    def measured(self) -> Measured:
        return Measured(self.case.quantity, self._prepared.size, tuple(self._rates))


def repetition_counts(measured: Sequence[Measured]) -> tuple[int, int]:
    """Return the least and the greatest number of repetitions of any case."""
    counts = [len(one.rates) for one in measured]
    return min(counts), max(counts)
