"""From a program to the tables of the simulator, with the checks that need the whole program."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.errors import MeshError
from penstock.kernels import mesh_tables as tables
from penstock.kernels.mesh_tables import MeshTables
from penstock.wafer.language.arrays import Array
from penstock.wafer.language.code import Code
from penstock.wafer.language.colours import Routes, neighbour, opposite
from penstock.wafer.mesh.labels import SIDES
from penstock.wafer.mesh.report import TraceOptions
from penstock.wafer.mesh.ticks import Ticks
from penstock.wafer.parameters import CoreParameters, Mesh

_NONE = (
    tables.LENGTH_REGISTER,
    tables.IN_COLOUR,
    tables.OUT_COLOUR,
    tables.GATE,
    tables.SECOND_GATE,
    tables.SIGNAL,
    tables.SECOND_SIGNAL,
    *(
        operand + place
        for operand in (tables.D, tables.B, tables.C, tables.S)
        for place in (tables.BASE, tables.REGISTER)
    ),
)
"""Fields of an instruction that are -1 where it has no such part."""
_WHEEL_CYCLES = 64


@dataclass(frozen=True, eq=False)
class Placed:
    """Code of some cores: the beginning of a thread (colour -1), or a task."""

    code: Code
    cores: np.ndarray
    colour: int
    kind: int


@dataclass(frozen=True, eq=False)
class Feed:
    """Words that enter at an edge."""

    colour: int
    core: int
    side: int
    first: np.ndarray
    second: np.ndarray
    kinds: np.ndarray
    from_host: bool


@dataclass(frozen=True)
class Sink:
    """Words that leave at an edge."""

    colour: int
    core: int
    side: int
    words: int
    to_host: bool


@dataclass
class Layout:
    """What a program has placed."""

    values: list[tuple[Array, np.ndarray, np.ndarray]] = field(default_factory=list)
    registers: list[np.ndarray] = field(default_factory=list)
    counters: list[np.ndarray] = field(default_factory=list)
    counter_names: list[str] = field(default_factory=list)
    codes: list[Placed] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)


def lower(
    mesh: Mesh,
    core: CoreParameters,
    ticks: Ticks,
    routes: Routes,
    layout: Layout,
    cells: int,
    trace: TraceOptions | None,
    most_cycles: int,
) -> tuple[MeshTables, list[str]]:
    """Return the tables of a program, and what each instruction is in words.

    Raises:
        MeshError: a route that loops, a word that leaves the mesh without a drain, two threads
            that take words of one colour, a colour that is sent without a route.
    """
    routes.check_loops()
    made = _Lowering(mesh, core, ticks, routes, layout)
    code, factors, instructions = made.code()
    made.tasks()
    made.make_queues()
    cores = mesh.cores
    memory = np.zeros((cores, cells), np.float32)
    for array, placed, values in layout.values:
        memory[placed, array.base : array.base + array.size] = values
    registers = np.zeros((cores, tables.THREADS + len(layout.registers)), np.int64)
    for number, full in enumerate(layout.registers):
        registers[:, tables.THREADS + number] = full
    counters = np.zeros((cores, max(1, len(layout.counters))), np.int64)
    for number, full in enumerate(layout.counters):
        counters[:, number] = full
    feeds, feed_values, kinds = made.feeds()
    sinks = made.sinks()
    kept = int(sinks[:, tables.SINK_END].max(initial=0))
    entities = cores * (1 + tables.THREADS) + len(feeds)
    depth, count = core.queue_words, len(made.queues)
    links = cores * tables.PORTS + len(feeds)
    windows = trace.windows if trace else 0
    most = int(np.bincount(made.router_of, minlength=cores).max()) if count else 0
    wheel = 1 << (_WHEEL_CYCLES * ticks.per_cycle - 1).bit_length()
    sizes = {
        tables.ENTITIES: entities,
        tables.WHEEL: wheel,
        tables.ROUTER_WIDTH: 2 * max(1, most),
        tables.LINK_COUNT: links,
        tables.REGISTER_COUNT: registers.shape[1],
        tables.COUNTER_COUNT: counters.shape[1],
        tables.CELL_COUNT: cells,
    }
    clock = made.clock(len(feeds), trace, most_cycles)
    clock[list(sizes)] = list(sizes.values())
    events = np.full((entities, tables.EVENT_FIELDS), -1, np.int64)
    events[:, tables.IN_WORK] = 0
    router_queues, router_count = made.router_order(2 * max(1, most))
    packed = tables.pack_tables(
        clock,
        {
            "bucket_first": np.full(wheel + 1, -1),
            "bucket_last": np.full(wheel + 1, -1),
            "events": events,
            "work": np.zeros(entities + 1, np.int64),
            "router_queues": router_queues,
            "router_count": router_count,
            "queues": made.queues,
            "words": np.zeros((count, depth, 2), np.int64),
            "links": np.zeros((links, 2), np.int64),
            "feeds": feeds,
            "feed_kind": kinds,
            "sinks": sinks,
            "sink_kind": np.zeros(kept, np.int64),
            "threads": made.threads,
            "cores": made.core_states(),
            "registers": registers,
            "counters": counters,
            "code": code,
            "core_queue": made.core_queue,
            "ramp_queue": made.ramp_queue,
            "task_code": made.task_code,
            "task_colours": made.task_colours,
            "trace_states": np.zeros((windows, cores, 3), np.int64),
            "trace_links": np.zeros((windows, links), np.int64),
            "word_values": np.zeros((count, depth, 2), np.float32),
            "feed_values": feed_values,
            "sink_values": np.zeros((kept, 2), np.float32),
            "memory": memory,
            "factors": factors,
        },
    )
    return packed, instructions


class _Lowering:
    """The parts of the tables, made one after the other."""

    def __init__(
        self, mesh: Mesh, core: CoreParameters, ticks: Ticks, routes: Routes, layout: Layout
    ) -> None:
        self.mesh, self.core, self.ticks = mesh, core, ticks
        self.routes, self.layout = routes, layout
        cores = mesh.cores
        self.threads = np.zeros((cores * tables.THREADS, tables.THREAD_FIELDS), np.int64)
        self.threads[:, tables.PC] = -1
        self.threads[:, tables.WAITS] = tables.IDLE
        self.task_code = np.full((cores, tables.THREADS, tables.COLOURS, 2), -1, np.int32)
        self.task_colours = np.full((cores, tables.THREADS, tables.COLOURS), -1, np.int32)
        self.core_queue = np.full((cores, tables.COLOURS), -1, np.int32)
        self.ramp_queue = np.full((cores, tables.COLOURS), -1, np.int32)
        self.consumers = np.full((cores, tables.COLOURS), -1, np.int64)  # thread of each colour
        self.starts: list[int] = []
        self.queues = np.zeros((0, tables.QUEUE_FIELDS), np.int64)
        self.router_of = np.zeros(0, np.int64)

    def code(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Return the instructions of all codes, the factors in them and their names."""
        rows: list[np.ndarray] = []
        names: list[str] = []
        factors: dict[float, int] = {1.0: 0}
        word = self.ticks.count(self.core.word_cycles)
        for placed in self.layout.codes:
            start = len(rows)
            self.starts.append(start)
            for item in placed.code.rows:
                row = np.zeros(tables.CODE_FIELDS, np.int64)
                row[list(_NONE)] = -1
                row[tables.OP] = item.op
                row[tables.TICKS] = self.ticks.count(item.cycles)
                row[tables.INTERVAL] = word
                row[tables.FACTOR] = factors.setdefault(float(item.factor), len(factors))
                for place, value in item.fields.items():
                    row[place] = value + start if place == tables.TARGET else value
                rows.append(row)
                names.append(item.what)
            row = np.zeros(tables.CODE_FIELDS, np.int64)
            row[tables.OP] = tables.END
            rows.append(row)
            names.append("end")
        table = np.array(rows) if rows else np.zeros((0, tables.CODE_FIELDS), np.int64)
        return table, np.array(list(factors), np.float32), names

    def tasks(self) -> None:
        """Give threads their beginnings, and colours their tasks and the thread that takes them."""
        for placed, start in zip(self.layout.codes, self.starts, strict=True):
            thread, cores = placed.code.thread, placed.cores
            if placed.colour < 0:
                self.threads[cores * tables.THREADS + thread, tables.PC] = start
                self.threads[cores * tables.THREADS + thread, tables.WAITS] = tables.RUNNING
            else:
                self.task_code[cores, thread, placed.colour, placed.kind] = start
                self._consume(cores, placed.colour, thread)
            for colour in placed.code.takes:
                self._consume(cores, colour, thread)
        counts = self.threads.reshape(-1, tables.THREADS, tables.THREAD_FIELDS)
        for thread in range(tables.THREADS):
            has = (self.task_code[:, thread] >= 0).any(axis=-1)  # [cores, colours]
            order = np.argsort(~has, axis=-1, kind="stable")
            counts[:, thread, tables.TASKS] = has.sum(axis=-1)
            self.task_colours[:, thread] = np.where(np.take_along_axis(has, order, -1), order, -1)

    def _consume(self, cores: np.ndarray, colour: int, thread: int) -> None:
        before = self.consumers[cores, colour]
        wrong = np.flatnonzero((before >= 0) & (before != thread))
        if len(wrong):
            raise MeshError(
                f"{self._place(int(cores[wrong[0]]))}, {self._colour(colour)}, before the first "
                "cycle: two threads take its words; let one of them do it"
            )
        self.consumers[cores, colour] = thread

    def make_queues(self) -> None:
        """Make a queue for each route, and one to each core for each colour that it takes."""
        routes = self.routes.outputs
        number = {key: place for place, key in enumerate(routes)}
        cores, colours = np.nonzero(self.consumers >= 0)
        first = len(routes)
        self.core_queue[cores, colours] = first + np.arange(len(cores))
        self.queues = np.zeros((first + len(cores), tables.QUEUE_FIELDS), np.int64)
        self.queues[:, tables.UPSTREAM] = -1
        sinks = {
            (sink.colour, sink.core, sink.side): place
            for place, sink in enumerate(self.layout.sinks)
        }
        for key, place in number.items():
            self._fill_queue(key, place, number, sinks)
        taken = self.queues[first:]
        taken[:, tables.CONSUMER] = (
            self.mesh.cores + cores * tables.THREADS + self.consumers[cores, colours]
        )
        taken[:, tables.UPSTREAM] = cores
        taken[:, tables.QUEUE_CORE], taken[:, tables.QUEUE_COLOUR] = cores, colours
        taken[:, tables.QUEUE_INPUT] = tables.PORTS
        self.router_of = self.queues[:first, tables.QUEUE_CORE]
        self._check_senders()

    def _fill_queue(
        self,
        key: tuple[int, int, int],
        place: int,
        number: dict[tuple[int, int, int], int],
        sinks: dict[tuple[int, int, int], int],
    ) -> None:
        colour, core, side = key
        row = self.queues[place]
        row[tables.CONSUMER] = core
        row[tables.QUEUE_CORE], row[tables.QUEUE_COLOUR] = core, colour
        row[tables.QUEUE_INPUT] = side
        outputs = self.routes.outputs[key]
        row[tables.OUTPUTS] = len(outputs)
        if side == tables.RAMP:
            self.ramp_queue[core, colour] = place
        else:
            beside = neighbour(self.mesh, core, side)
            row[tables.UPSTREAM] = beside  # a feed where there is none
        for turn, output in enumerate(outputs):
            row[tables.OUT_LINK + 2 * turn] = core * tables.PORTS + output
            if output == tables.RAMP:
                target = int(self.core_queue[core, colour])
            else:
                beside = neighbour(self.mesh, core, output)
                if beside >= 0:
                    target = number.get((colour, beside, opposite(output)), tables.NOWHERE)
                else:
                    target = -2 - self._sink(sinks, colour, core, output)
            row[tables.OUT_TARGET + 2 * turn] = target

    def _sink(
        self, sinks: dict[tuple[int, int, int], int], colour: int, core: int, side: int
    ) -> int:
        if (colour, core, side) not in sinks:
            raise MeshError(
                f"{self._place(core)}, {self._colour(colour)}, before the first cycle: the route "
                f"leaves the mesh to the {SIDES[side]} without a drain; add one or end the route"
            )
        return sinks[(colour, core, side)]

    def _check_senders(self) -> None:
        """Refuse colours that a core sends without a route from its ramp."""
        senders = np.full((self.mesh.cores, tables.COLOURS), -1, np.int64)
        for placed in self.layout.codes:
            for colour in placed.code.sends:
                missing = placed.cores[self.ramp_queue[placed.cores, colour] < 0]
                if len(missing):
                    raise MeshError(
                        f"{self._place(int(missing[0]))}, {self._colour(colour)}, before the first "
                        "cycle: the core sends it, but no route takes it from the ramp"
                    )
                senders[placed.cores, colour] = placed.code.thread
                queues = self.ramp_queue[placed.cores, colour]
                others = self.queues[queues, tables.UPSTREAM]
                threads = self.mesh.cores + placed.cores * tables.THREADS + placed.code.thread
                wrong = np.flatnonzero((others >= 0) & (others != threads))
                if len(wrong):
                    raise MeshError(
                        f"{self._place(int(placed.cores[wrong[0]]))}, {self._colour(colour)}, "
                        "before the first cycle: two threads send it; let one of them do it"
                    )
                self.queues[queues, tables.UPSTREAM] = threads

    def router_order(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the queues of each router, in order of colour and side."""
        cores = self.mesh.cores
        counts = np.bincount(self.router_of, minlength=cores)
        found = np.zeros((cores, width), np.int32)
        count = len(self.router_of)
        keys = self.queues[:count]
        order = np.lexsort(
            (keys[:, tables.QUEUE_INPUT], keys[:, tables.QUEUE_COLOUR], self.router_of)
        )
        starts = np.concatenate(([0], np.cumsum(counts)))[:-1]
        found[self.router_of[order], np.arange(count) - np.repeat(starts, counts)] = order
        return found, counts.astype(np.int32)

    def feeds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the streams that enter, and their words one after the other: values and kinds."""
        given = self.layout.feeds
        table = np.zeros((len(given), tables.FEED_FIELDS), np.int64)
        number = {key: place for place, key in enumerate(self.routes.outputs)}
        edge_links: dict[tuple[int, int], int] = {}
        start = 0
        for place, feed in enumerate(given):
            queue = number[(feed.colour, feed.core, feed.side)]
            entity = self.mesh.cores * (1 + tables.THREADS) + place
            self.queues[queue, tables.UPSTREAM] = entity
            link = edge_links.setdefault((feed.core, feed.side), len(edge_links))
            end = start + len(feed.first)
            link += self.mesh.cores * tables.PORTS
            table[place] = (queue, link, start, end, feed.from_host, start)
            start = end
        values = np.zeros((start, 2), np.float32)
        kinds = np.zeros(start, np.int64)
        for feed, row in zip(given, table, strict=True):
            span = slice(row[tables.FEED_START], row[tables.FEED_END])
            values[span, 0], values[span, 1] = feed.first, feed.second
            kinds[span] = feed.kinds
        return table, values, kinds

    def sinks(self) -> np.ndarray:
        """Return the drains."""
        table = np.zeros((len(self.layout.sinks), tables.SINK_FIELDS), np.int64)
        start = 0
        for place, sink in enumerate(self.layout.sinks):
            table[place] = (start, start + sink.words, sink.to_host, 0, start, sink.colour)
            start += sink.words
        return table

    def clock(self, feeds: int, trace: TraceOptions | None, most_cycles: int) -> np.ndarray:
        """Return the clock and the times of a word's way."""
        clock = np.zeros(tables.CLOCK_FIELDS, np.int64)
        count = self.ticks.count
        clock[tables.WORD_TICKS] = count(self.core.word_cycles)
        clock[tables.HOP_TICKS] = count(self.core.hop_cycles)
        clock[tables.RAMP_TICKS] = count(self.core.ramp_cycles)
        clock[tables.DEPTH] = self.core.queue_words
        clock[tables.SHARED_PATH] = self.core.threads_share_data_path
        clock[tables.CORES], clock[tables.FEED_COUNT] = self.mesh.cores, feeds
        clock[tables.LAST_TICK] = min(most_cycles * self.ticks.per_cycle, tables.MOST_TICKS)
        each = self.ticks.per_cycle / self.core.host_words_per_cycle
        parts = round(each * (1 << tables.HOST_PLACES))
        clock[tables.HOST_EACH] = parts >> tables.HOST_PLACES
        clock[tables.HOST_EACH_PART] = parts & ((1 << tables.HOST_PLACES) - 1)
        if trace:
            clock[tables.TRACE_TICKS] = trace.cycles * self.ticks.per_cycle
            clock[tables.TRACE_WINDOWS] = trace.windows
        return clock

    def core_states(self) -> np.ndarray:
        """Return cores that have not begun: starved."""
        states = np.zeros((self.mesh.cores, tables.CORE_FIELDS), np.int64)
        states[:, tables.STATE] = tables.STARVED
        return states

    def _place(self, core: int) -> str:
        return f"core ({core // self.mesh.columns}, {core % self.mesh.columns})"

    def _colour(self, colour: int) -> str:
        return f"colour {self.routes.colours[colour].name!r}"
