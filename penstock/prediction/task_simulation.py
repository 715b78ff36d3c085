"""An event model: tasks on lanes that share resources, and when each of them runs.

A lane does its tasks one at a time, in their order. A task starts when its lane is free and the
tasks before it have ended. Tasks that run at the same time may share a resource, such as the cores
of a host or the bandwidth of a disk: if they ask for more than there is, all of them are slowed in
proportion. So a step is neither the sum of its parts nor their maximum.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from penstock.spans import Span

_NOTHING: Mapping[str, float] = MappingProxyType({})
_ROUNDING = 1e-12  # of a task's work that may be left by rounding


@dataclass(frozen=True)
class Task:
    """A piece of work of one lane.

    Attributes:
        lane: does one task at a time.
        what: the work, as in a `Span`.
        seconds: that it takes alone.
        after: numbers of the tasks, earlier in the list, that must have ended.
        uses: share of each resource that it uses while it runs, where 1 is the whole resource.
        step, op, bytes: as in a `Span`.
    """

    lane: str
    what: str
    seconds: float
    after: tuple[int, ...] = ()
    uses: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    step: int | None = None
    op: int | None = None
    bytes: int = 0


def simulate(tasks: Sequence[Task]) -> list[Span]:
    """Return when each task runs, from time 0, in the order of the tasks.

    Args:
        tasks: a lane does its tasks in this order; a task names only earlier tasks in `after`.

    Raises:
        ValueError: a task waits for itself or a later one.
    """
    return _Simulation(tasks).run()


class _Simulation:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._lanes: dict[str, deque[int]] = {}
        self._waiting = [len(set(task.after)) for task in tasks]
        self._followers: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            self._lanes.setdefault(task.lane, deque()).append(number)
            for earlier in set(task.after):
                if not 0 <= earlier < number:
                    raise ValueError(f"task {number} waits for task {earlier}, which is not before")
                self._followers[earlier].append(number)
        self._left = [task.seconds for task in tasks]
        self._begin = [0.0] * len(tasks)
        self._end = [0.0] * len(tasks)
        self._running: list[int] = []
        self._now = 0.0

    def run(self) -> list[Span]:
        self._start(list(self._lanes))
        while self._running:
            rates = self._rates()
            passed = min(self._left[n] / rates[n] for n in self._running)
            self._now += passed
            ended = []
            for number in self._running:
                self._left[number] -= passed * rates[number]
                if self._left[number] <= _ROUNDING * self._tasks[number].seconds:
                    ended.append(number)
            self._finish(ended)
        return [
            Span(t.lane, t.what, self._begin[n], self._end[n], t.step, t.op, t.bytes)
            for n, t in enumerate(self._tasks)
        ]

    def _rates(self) -> dict[int, float]:
        """Return the speed of each running task, where 1 is its speed alone."""
        demand: dict[str, float] = {}
        for number in self._running:
            for resource, share in self._tasks[number].uses.items():
                demand[resource] = demand.get(resource, 0.0) + share
        return {
            number: min(
                (1 / max(1.0, demand[r]) for r, s in self._tasks[number].uses.items() if s),
                default=1.0,
            )
            for number in self._running
        }

    def _start(self, lanes: Sequence[str]) -> None:
        """Start the first task of each of these idle lanes, if nothing holds it back."""
        for lane in lanes:
            queue = self._lanes[lane]
            if queue and not self._waiting[queue[0]]:
                number = queue.popleft()
                self._begin[number] = self._now
                self._running.append(number)

    def _finish(self, ended: Sequence[int]) -> None:
        touched: dict[str, None] = {}
        for number in ended:
            self._end[number] = self._now
            self._running.remove(number)
            touched[self._tasks[number].lane] = None
            for follower in self._followers[number]:
                self._waiting[follower] -= 1
                touched[self._tasks[follower].lane] = None
        busy = {self._tasks[number].lane for number in self._running}
        self._start([lane for lane in touched if lane not in busy])
