"""From a program to the tables of the simulator, with the checks that need the whole program."""

import numpy as np

from penstock.errors import MeshError
from penstock.kernels import mesh_tables as tables
from penstock.kernels.mesh_tables import MeshTables, allocate_tables, lines
from penstock.wafer.language.code_table import CodeTable
from penstock.wafer.language.colours import Routes
from penstock.wafer.language.layout import Layout, Placed
from penstock.wafer.language.queues import Queues, block_of, event_of, queue_of
from penstock.wafer.mesh import KINDS, THREAD_NAMES, Labels, Ticks, TraceOptions
from penstock.wafer.parameters import CoreParameters, Mesh

_WHEEL_CYCLES = 64
_CACHE_BYTES = 1 << 20  # of a processor core; smaller tables need no look ahead


def lower(
    mesh: Mesh,
    core: CoreParameters,
    ticks: Ticks,
    routes: Routes,
    layout: Layout,
    cells: int,
    trace: TraceOptions | None,
    most_cycles: int,
) -> tuple[MeshTables, Labels]:
    """Return the tables of a program, and the names of its parts.

    Args:
        cells: of a core's memory.

    Raises:
        MeshError: a route that loops, a word that leaves the mesh without a drain, two threads
            that take or send words of one colour, a colour that is sent without a route, a task
            without one, two codes for the same words, an operand that a core does not have,
            numbers beyond 32 bits.
    """
    routes.check_loops()
    made = _Lowering(mesh, core, ticks, layout, Queues(routes, layout))
    t = made.allocate(cells, trace, most_cycles)
    made.code.fill(t)
    made.fill_blocks(t)
    made.queues.fill(t)
    made.fill_tasks(t)
    made.fill_feeds(t)
    made.fill_sinks(t)
    for array, placed, values in layout.values:
        t.memory[placed, array.base : array.base + array.size] = values
    names = [colour.name for colour in routes.colours]
    return t, Labels(mesh, names, layout.counter_names, made.code.names, made.queues.places)


class _Lowering:
    """The parts of the tables, filled one after the other."""

    def __init__(
        self, mesh: Mesh, core: CoreParameters, ticks: Ticks, layout: Layout, queues: Queues
    ) -> None:
        self.mesh, self.core, self.ticks = mesh, core, ticks
        self.layout, self.queues = layout, queues
        self.code = CodeTable(mesh, core, ticks, layout)
        self._place_codes()

    def _place_codes(self) -> None:
        """Note which code each thread begins with, and which code the words of a colour start."""
        shape = (self.mesh.cores, tables.THREADS)
        colours = self.queues.consumers.shape[1]
        self.main = np.full(shape, -1, np.int64)
        self.task_code = np.full((*shape, colours, 2), -1, np.int64)
        for placed, start in zip(self.layout.codes, self.code.starts.tolist(), strict=True):
            thread = placed.code.thread
            if placed.colour < 0:
                chosen = self.main[:, thread]
            else:
                chosen = self.task_code[:, thread, placed.colour, placed.kind]
            twice = placed.cores[chosen[placed.cores] >= 0]
            if len(twice):
                raise MeshError(self._placed_twice(placed, int(twice[0])))
            chosen[placed.cores] = start

    def _placed_twice(self, placed: Placed, core: int) -> str:
        place = f"core ({core // self.mesh.columns}, {core % self.mesh.columns})"
        thread = THREAD_NAMES[placed.code.thread]
        if placed.colour < 0:
            return (
                f"{place}, before the first cycle: two codes with which its thread {thread!r} "
                "begins; write one after the other in one code"
            )
        name = self.queues.routes.colours[placed.colour].name
        return (
            f"{place}, colour {name!r}, before the first cycle: two tasks for its "
            f"{KINDS[placed.kind]} words; join them"
        )

    # --- sizes ------------------------------------------------------------------------------------

    def allocate(self, cells: int, trace: TraceOptions | None, most_cycles: int) -> MeshTables:
        """Return tables of the right sizes, with the clock set."""
        cores, layout, queues = self.mesh.cores, self.layout, self.queues
        wheel = 1 << (_WHEEL_CYCLES * self.ticks.per_cycle - 1).bit_length()
        clock = self.clock(trace, most_cycles)
        colours = queues.consumers.shape[1]
        threads_at = lines(tables.ORDER + 2 * queues.most_in_router)
        core_at = threads_at + tables.THREADS * tables.LINE
        counters_at = core_at + tables.REGISTERS + tables.THREADS + len(layout.registers)
        core_queues_at = counters_at + len(layout.counters)
        words_at = tables.OUT_LINK + 2 * queues.most_outputs
        entities = cores * tables.CORE_ENTITIES + len(layout.feeds)
        sizes = {
            tables.WHEEL: wheel,
            tables.WORK_SIZE: entities + 1,
            tables.THREADS_AT: threads_at,
            tables.CORE_AT: core_at,
            tables.COUNTERS_AT: counters_at,
            tables.CORE_QUEUES_AT: core_queues_at,
            tables.RAMP_QUEUES_AT: core_queues_at + colours,
            tables.BLOCK_SIZE: lines(core_queues_at + 2 * colours),
            tables.WORDS_AT: words_at,
            tables.QUEUE_SIZE: lines(words_at + self.core.queue_words * tables.WORD_FIELDS),
        }
        cells_of_state = cores * sizes[tables.BLOCK_SIZE]
        cells_of_state += len(queues.places) * sizes[tables.QUEUE_SIZE]
        sizes[tables.LOOKS_AHEAD] = int(4 * cells_of_state > _CACHE_BYTES)
        clock[list(sizes)] = list(sizes.values())
        windows = trace.windows if trace else 0
        tasks = int((self.task_code >= 0).any(axis=-1).sum())
        return allocate_tables(
            clock,
            {
                "buckets": (wheel + 1, tables.BUCKET_FIELDS),
                "events": (entities, tables.EVENT_FIELDS),
                "work": (entities + 1,),
                "blocks": (cores, sizes[tables.BLOCK_SIZE]),
                "queues": (len(queues.places), sizes[tables.QUEUE_SIZE]),
                "edges": (len(layout.feeds),),
                "feeds": (len(layout.feeds), tables.FEED_FIELDS),
                "feed_words": (sum(len(feed.kinds) for feed in layout.feeds), tables.WORD_FIELDS),
                "sinks": (len(layout.sinks), tables.SINK_FIELDS),
                "sink_words": (sum(sink.words for sink in layout.sinks), tables.WORD_FIELDS),
                "code": (len(self.code.names), tables.CODE_FIELDS),
                "tasks": (tasks, tables.TASK_FIELDS),
                "trace_states": (windows, cores, 3),
                "trace_links": (windows, cores, tables.PORTS),
                "memory": (cores, cells),
                "factors": (len(self.code.factors),),
            },
        )

    def clock(self, trace: TraceOptions | None, most_cycles: int) -> np.ndarray:
        """Return the clock and the times of a word's way."""
        clock = np.zeros(tables.CLOCK_FIELDS, np.int64)
        count = self.ticks.count
        clock[tables.WORD_TICKS] = count(self.core.word_cycles)
        clock[tables.HOP_TICKS] = count(self.core.hop_cycles)
        clock[tables.RAMP_TICKS] = count(self.core.ramp_cycles)
        clock[tables.DEPTH] = self.core.queue_words
        clock[tables.SHARED_PATH] = self.core.threads_share_data_path
        clock[tables.CORES] = self.mesh.cores
        clock[tables.LAST_TICK] = min(most_cycles * self.ticks.per_cycle, tables.MOST_TICKS)
        each = self.ticks.per_cycle / self.core.host_words_per_cycle
        parts = round(each * (1 << tables.HOST_PLACES))
        clock[tables.HOST_EACH] = parts >> tables.HOST_PLACES
        clock[tables.HOST_EACH_PART] = parts & ((1 << tables.HOST_PLACES) - 1)
        slowest = max(clock[[tables.WORD_TICKS, tables.HOP_TICKS, tables.RAMP_TICKS]].max(), each)
        if slowest >= tables.MOST_INSTRUCTION_TICKS:
            most = tables.MOST_INSTRUCTION_TICKS // self.ticks.per_cycle
            raise MeshError(
                f"{self.core.name} cores: expected at most {most:,} cycles for a word on a link or "
                f"between wafer and host, got {slowest / self.ticks.per_cycle:,.12g}"
            )
        if trace:
            clock[tables.TRACE_TICKS] = trace.cycles * self.ticks.per_cycle
            clock[tables.TRACE_WINDOWS] = trace.windows
        return clock

    # --- cores ------------------------------------------------------------------------------------

    def fill_blocks(self, t: MeshTables) -> None:
        """Write the beginnings of routers, threads, cores and events."""
        cores = np.arange(self.mesh.cores)
        t.buckets[...] = -1
        t.blocks[:, tables.ROUTER_EVENT] = event_of(t, cores, 0)
        t.blocks[:, tables.CORE_NUMBER] = cores
        threads, own = t.threads, t.cores
        for which in range(tables.THREADS):
            row = threads[:, which]
            row[:, tables.THREAD_EVENT] = event_of(t, cores, 1 + which)
            row[:, tables.BLOCK] = block_of(t, cores)
            row[:, tables.WHICH] = which
            main = self.main[:, which]
            row[:, tables.PC] = np.where(main >= 0, self._code_places(t, main), -1)
            row[:, tables.WAITS] = np.where(main >= 0, tables.RUNNING, tables.IDLE)
        own[:, tables.STATE] = tables.STARVED
        own[:, tables.CELLS] = int(t.integers[tables.MEMORY]) + cores * t.memory.shape[1]
        core_at, counters_at = int(t.clock[tables.CORE_AT]), int(t.clock[tables.COUNTERS_AT])
        for number, values in enumerate(self.layout.registers, tables.THREADS):
            t.blocks[:, core_at + tables.REGISTERS + number] = values
        for number, values in enumerate(self.layout.counters):
            t.blocks[:, counters_at + number] = values

    def fill_tasks(self, t: MeshTables) -> None:
        """Write which queues each thread takes words of, and the code that they start."""
        has = (self.task_code >= 0).any(axis=-1)
        cores, threads, colours = np.nonzero(has)
        codes = self.task_code[cores, threads, colours]
        t.tasks[:, tables.TASK_QUEUE] = queue_of(t, self.queues.numbers[cores, colours, -1])
        t.tasks[:, tables.TASK_COLOUR] = colours
        places = np.where(codes >= 0, self._code_places(t, codes), -1)
        t.tasks[:, tables.TASK_CODE : tables.TASK_CODE + 2] = places
        counts = has.sum(axis=-1)
        starts = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
        t.threads[:, :, tables.TASKS] = counts
        first = int(t.integers[tables.TASK_ROWS])
        t.threads[:, :, tables.FIRST_TASK] = first + starts * tables.TASK_FIELDS

    @staticmethod
    def _code_places(t: MeshTables, numbers: np.ndarray) -> np.ndarray:
        return int(t.integers[tables.CODE]) + numbers * tables.CODE_FIELDS

    # --- edges ------------------------------------------------------------------------------------

    def fill_feeds(self, t: MeshTables) -> None:
        """Write the streams that enter, and their words one after the other."""
        edges: dict[tuple[int, int], int] = {}
        start = 0
        for place, feed in enumerate(self.layout.feeds):
            number = int(self.queues.numbers[feed.core, feed.colour, feed.side])
            event = int(event_of(t, np.array(self.mesh.cores), place))
            t.queues[number, tables.UPSTREAM] = event
            link = edges.setdefault((feed.core, feed.side), len(edges))
            end = start + len(feed.kinds)
            row = t.feeds[place]
            row[tables.FEED_EVENT] = event
            row[tables.FEED_QUEUE] = queue_of(t, np.array(number))
            row[tables.FEED_LINK] = int(t.integers[tables.EDGES]) + link
            row[tables.FEED_START] = row[tables.FEED_NEXT] = start
            row[tables.FEED_END] = end
            row[tables.FEED_HOST] = feed.from_host
            words = t.feed_words[start:end]
            words[:, tables.KIND] = feed.kinds
            for at, numbers in enumerate(feed.numbers, tables.FIRST_NUMBER):
                words.view(np.float32)[:, at] = numbers
            start = end

    def fill_sinks(self, t: MeshTables) -> None:
        """Write the drains."""
        start = 0
        for place, sink in enumerate(self.layout.sinks):
            row = t.sinks[place]
            row[tables.SINK_START] = row[tables.SINK_NEXT] = start
            row[tables.SINK_END] = start + sink.words
            row[tables.SINK_HOST] = sink.to_host
            row[tables.SINK_COLOUR] = sink.colour
            start += sink.words
