"""A forward product on a mesh of cores, written with SimPy: processes, events, a queue of events.

It is what one would write without a compiler: one process per router and per thread of a core,
words in Python's own queues. It has the rules of `penstock.wafer.mesh` for this one program (a
chain of hidden sums, 16-bit activations, numbers of 32 bits), so that numbers and cycles are equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import simpy

from penstock.wafer.closed_form import StreamingOptions
from penstock.wafer.parameters import CoreParameters, Mesh
from penstock.wafer.programs import Run, Spread
from penstock.wafer.programs.streamed import entry_words

Word = tuple[float, float, bool]  # two numbers, and whether it is a control word
Events = Iterator[Any]


class Queue:
    """Words of one colour at one router or core; those on their way have a place already."""

    def __init__(self, env: simpy.Environment, depth: int) -> None:
        self.env, self.depth = env, depth
        self.words: deque[tuple[float, Word]] = deque()
        self.came, self.left = env.event(), env.event()
        self.on_push: Callable[[float], None] = lambda ready: None
        self.on_room: Callable[[], None] = lambda: None

    @property
    def is_full(self) -> bool:
        return len(self.words) >= self.depth

    def is_ready(self) -> bool:
        return bool(self.words) and self.words[0][0] <= self.env.now

    def push(self, word: Word, ready: float) -> None:
        self.words.append((ready, word))
        self.on_push(ready)
        came, self.came = self.came, self.env.event()
        came.succeed()

    def pop(self) -> Word:
        was_full = self.is_full
        word = self.words.popleft()[1]
        if was_full:
            self.on_room()
            left, self.left = self.left, self.env.event()
            left.succeed()
        return word

    def take(self) -> Events:
        """Wait for a word and return it."""
        while not self.is_ready():
            if self.words:
                yield self.env.timeout(self.words[0][0] - self.env.now)
            else:
                yield self.came
        return self.pop()


class Counter:
    """A number that threads wait for."""

    def __init__(self, env: simpy.Environment, value: int) -> None:
        self.env, self.value, self.grew = env, value, env.event()

    def post(self, amount: int) -> None:
        self.value += amount
        grew, self.grew = self.grew, self.env.event()
        grew.succeed()

    def wait(self, amount: int) -> Events:
        while self.value < amount:
            yield self.grew
        self.value -= amount


class Router:
    """Moves the first words of its queues whenever something has changed."""

    def __init__(self, env: simpy.Environment, core: CoreParameters) -> None:
        self.env, self.core = env, core
        self.order: list[Queue] = []
        self.routes: dict[Queue, list[tuple[str, Any, float]]] = {}
        self.free: dict[str, float] = {}
        self.event = env.event()
        self.hops = 0
        env.process(self.run())

    def add(self, queue: Queue, outputs: list[tuple[str, Any, float]]) -> None:
        self.order.append(queue)
        self.routes[queue] = outputs
        queue.on_push = self.wake_at

    def wake(self) -> None:
        if not self.event.triggered:
            self.event.succeed()

    def wake_at(self, time: float) -> None:
        if time <= self.env.now:
            self.wake()
        else:
            timeout = self.env.timeout(time - self.env.now)
            timeout.callbacks.append(lambda _: self.wake())

    def run(self) -> Events:
        while True:
            yield self.event
            self.event = self.env.event()
            self.move()

    def move(self) -> None:
        now, claimed, served = self.env.now, set(), []
        later = float("inf")
        for queue in self.order:
            if not queue.words:
                continue
            if queue.words[0][0] > now:
                later = min(later, queue.words[0][0])
                continue
            outputs = self.routes[queue]
            if any(isinstance(to, Queue) and to.is_full for _, to, _ in outputs):
                continue
            sides = {side for side, _, _ in outputs}
            free = max(self.free.get(side, 0.0) for side in sides)
            if free > now:
                claimed |= sides
                later = min(later, free)
                continue
            if claimed & sides:
                continue
            word = queue.pop()
            for side, to, time in outputs:
                self.free[side] = now + self.core.word_cycles
                self.hops += 1
                if isinstance(to, Queue):
                    to.push(word, now + time)
                else:
                    to.append(word)
                    self.env.timeout(time)  # the run ends when the word is there
            served.append(queue)
            if queue.words:
                later = min(later, max(queue.words[0][0], now + self.core.word_cycles))
        if served:
            self.order = [queue for queue in self.order if queue not in served] + served
        if later < float("inf"):
            self.wake_at(later)


class Core:
    """Three threads: one computes, one receives sums, one adds and sends them."""

    def __init__(
        self,
        env: simpy.Environment,
        core: CoreParameters,
        x: np.ndarray,
        spread: Spread,
        options: StreamingOptions,
        inbox: int,
    ) -> None:
        self.env, self.core, self.x, self.spread = env, core, x, spread
        self.entries, self.sums = Queue(env, core.queue_words), Queue(env, core.queue_words)
        self.out = Queue(env, core.queue_words)
        self.acc = np.zeros((options.accumulators, spread.width), np.float32)
        self.inbox = np.zeros((inbox, spread.width), np.float32)
        words = spread.words
        self.full, self.came = Counter(env, 0), Counter(env, 0)
        self.free = Counter(env, (options.accumulators - 1) * words)
        self.room = Counter(env, inbox * words)

    def compute(self) -> Events:
        slot, words = 0, self.spread.words
        elements = self.core.trigger_cycles + self.core.elements_cycles(self.spread.tokens)
        while True:
            value, place, is_control = yield from self.entries.take()
            if not is_control:
                self.acc[slot] += np.float32(value) * self.x[int(place)]
                yield self.env.timeout(elements)
                continue
            yield self.env.timeout(self.core.partial_sum_cycles)
            self.full.post(words)
            slot = (slot + 1) % len(self.acc)
            yield from self.free.wait(words)

    def receive(self) -> Events:
        cells = self.inbox.reshape(-1, 2)
        for word in range(self.spread.outputs * self.spread.words):
            yield from self.room.wait(1)
            first, second, _ = yield from self.sums.take()
            cells[word % len(cells)] = first, second
            self.came.post(1)
            yield self.env.timeout(self.core.word_cycles)

    def send(self, is_first: bool) -> Events:
        own, other = self.acc.reshape(-1, 2), self.inbox.reshape(-1, 2)
        for word in range(self.spread.outputs * self.spread.words):
            yield from self.full.wait(1)
            if not is_first:
                yield from self.came.wait(1)
            while self.out.is_full:
                yield self.out.left
            total = own[word % len(own)].copy()
            own[word % len(own)] = 0
            if not is_first:
                total = other[word % len(other)] + total
                self.room.post(1)
            self.free.post(1)
            ready = self.env.now + self.core.ramp_cycles
            self.out.push((total[0], total[1], False), ready)
            yield self.env.timeout(self.core.word_cycles)


def forward_in_simpy(
    weight: np.ndarray, mask: np.ndarray, activations: np.ndarray, run: Run, inbox: int
) -> tuple[np.ndarray, float, int]:
    """Return Y [tokens, outputs], the cycles and the words times links."""
    mesh, core = run.mesh, run.core
    spread = Spread(mask, len(activations), run)
    held = spread.features(activations).reshape(mesh.rows, mesh.columns, -1, spread.width)
    env = simpy.Environment()
    places = [(r, c) for r in range(mesh.rows) for c in range(mesh.columns)]
    routers = {place: Router(env, core) for place in places}
    cores = {place: Core(env, core, held[place], spread, run.options, inbox) for place in places}
    drains: dict[tuple[int, int], list[Word]] = {}
    _connect(env, mesh, core, routers, cores, drains)
    for row in range(mesh.rows):
        words = entry_words(spread, row, weight, 1, True)
        queue = routers[row, 0].order[0]
        env.process(_feed(env, core, queue, list(zip(*words, strict=True))))
    for (row, _), one in cores.items():
        env.process(one.compute())
        env.process(one.send(row == 0))
        if row:
            env.process(one.receive())
    last = _last_event(env)
    columns = [
        np.array([word[:2] for word in drains[mesh.rows - 1, c]]) for c in range(mesh.columns)
    ]
    shape = (mesh.columns, spread.outputs, spread.width)
    hops = sum(router.hops for router in routers.values())
    return spread.tokens_of(np.stack(columns).reshape(shape)), last, hops


def _connect(
    env: simpy.Environment,
    mesh: Mesh,
    core: CoreParameters,
    routers: dict,
    cores: dict,
    drains: dict,
) -> None:
    """Join routers by the routes of entries and of sums."""
    hop, ramp = core.hop_cycles, core.ramp_cycles
    entries = {place: Queue(env, core.queue_words) for place in routers}
    downward = {place: Queue(env, core.queue_words) for place in routers}
    for (row, column), router in routers.items():
        one = cores[row, column]
        outputs = [("ramp", one.entries, ramp)]
        if column + 1 < mesh.columns:
            outputs.insert(0, ("east", entries[row, column + 1], hop))
            entries[row, column + 1].on_room = router.wake
        router.add(entries[row, column], outputs)
        one.entries.on_room = router.wake
        if row:
            router.add(downward[row, column], [("ramp", one.sums, ramp)])
            one.sums.on_room = router.wake
        below: Any = drains.setdefault((row, column), []) if row + 1 == mesh.rows else None
        if below is None:
            below = downward[row + 1, column]
            below.on_room = router.wake
        router.add(one.out, [("south", below, hop)])


def _feed(env: simpy.Environment, core: CoreParameters, queue: Queue, words: list[Word]) -> Events:
    """Let words enter at the edge, one per `word_cycles` if there is room."""
    for word in words:
        while queue.is_full:
            yield queue.left
        queue.push(word, env.now + core.hop_cycles)
        yield env.timeout(core.word_cycles)


def _last_event(env: simpy.Environment) -> float:
    """Run until no event is left; return the time of the last."""
    env.run()
    return env.now
