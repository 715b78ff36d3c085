"""The tables of a simulated mesh of cores: what the kernels of the simulator read and write.

All state is in one flat buffer of 32-bit cells, which kernels see as whole numbers `t` and as
floats `f`. The first places hold the clock and where each table begins. What a tick touches of a
core is together: a block per core, its events in one cache line, its queues one after the other.
Rows of blocks and queues begin at cache lines, because a large mesh is read from memory in each
cycle. References between rows are places in the buffer.
`MeshTables` has the same tables as views for Python.

An entity is something that can be woken: of each core its router and three threads, then the
streams that enter at the edges. Its event is its handle. Times are in ticks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.errors import MeshError

THREADS = 3  # of a core: 0 computes, 1 receives, 2 sends
CORE_ENTITIES = 1 + THREADS  # the router, then the threads
PORTS = 5  # of a router: north, east, south, west, ramp
RAMP = 4
COLOURS = 24
DATA, CONTROL = 0, 1
HOST_PLACES = 20  # binary places of a tick in the times of the host's links
LINE = 16  # cells of a cache line
MOST_CELLS = (1 << 31) - 1  # of the buffer: places in it are 32-bit numbers

# The clock.
NOW, WORD_TICKS, HOP_TICKS, RAMP_TICKS, DEPTH, SHARED_PATH, CORES, WHEEL = range(8)
WORK_FIRST, WORK_COUNT, WORK_SIZE, NEAR_COUNT, FAR_COUNT, LAST_CHANGE = range(8, 14)
FAULT, FAULT_CORE, FAULT_COLOUR, FAULT_ROW, FAULT_VALUE = range(14, 19)
LAST_TICK, TRACE_TICKS, TRACE_WINDOWS, EVENTS, EVENT_TURNS = range(19, 24)
HOST_IN, HOST_OUT = 24, 26  # whole tick from which it is free, and the part of a tick beyond
HOST_EACH, HOST_EACH_PART = 28, 29
# Cells of a block and a queue, and where a block's variable parts and a queue's words begin in it.
BLOCK_SIZE, QUEUE_SIZE, THREADS_AT, CORE_AT, COUNTERS_AT = range(30, 35)
CORE_QUEUES_AT, RAMP_QUEUES_AT, WORDS_AT, LOOKS_AHEAD = range(35, 39)
CLOCK_FIELDS = 39
EVENT_TURN = 1 << 30  # events after which EVENT_TURNS counts
MOST_INSTRUCTION_TICKS = 1 << 24
MOST_TICKS = (1 << 31) - 4 * MOST_INSTRUCTION_TICKS  # of a run; then threads end what they began

NO_FAULT, NO_ROUTE, NO_TASK, BAD_ADDRESS, ENDLESS_TASK, TOO_LONG, SINK_FULL, ENDLESS_TICK = range(8)

# Where each table begins; the order is that in the buffer.
_TABLES = (
    "buckets",
    "events",
    "work",
    "blocks",
    "queues",
    "edges",
    "feeds",
    "feed_words",
    "sinks",
    "sink_words",
    "code",
    "tasks",
    "trace_states",
    "trace_links",
    "memory",
    "factors",
)
_FLOATS = ("memory", "factors")
(
    BUCKETS,
    EVENT_ROWS,
    WORK_LIST,
    BLOCKS,
    QUEUES,
    EDGES,
    FEEDS,
    FEED_WORDS,
    SINKS,
    SINK_WORDS,
    CODE,
    TASK_ROWS,
    TRACE_STATES,
    TRACE_LINKS,
    MEMORY,
    FACTORS,
) = range(CLOCK_FIELDS, CLOCK_FIELDS + len(_TABLES))
HEADER_FIELDS = CLOCK_FIELDS + len(_TABLES)

# buckets: first and last event of each tick of the wheel, then of far events
FIRST, LAST = range(2)
BUCKET_FIELDS = 2

# events: one row per entity
AFTER, BEFORE, DUE, STATUS = range(4)
EVENT_FIELDS = 4
IN_NEAR, IN_FAR, IN_WORK = 1, 2, 4  # bits of the status

# blocks: the router's part, then at THREADS_AT a line per thread, then at CORE_AT the core's part
LINK_FREE = 0  # for each port, the tick from which its link is free
ROUTER_EVENT, CORE_NUMBER, QUEUE_COUNT, ORDER = 5, 6, 7, 8  # the order of queues has twice room

# threads
THREAD_EVENT, BLOCK, PC, BUSY_UNTIL, WAITS, WAIT_ON, SINCE, PROGRESS = range(8)
ROTATION, TASKS, FIRST_TASK, WHICH = range(8, 12)
RUNNING, IDLE, FOR_WORD, FOR_ROOM, FOR_COUNTER = range(5)

# cores; the sums of states are in the order of the states; after them the registers
STATE, STATE_SINCE, STATE_SUMS, _, _, RAMP_FREE, PATH_FREE, CELLS, REGISTERS = range(9)
BUSY, STARVED, BLOCKED = range(3)

# queues: of each core those of its router, by colour and side, and those to the core
COUNT, HEAD, CONSUMER, CONSUMER_THREAD, UPSTREAM, GREATEST, PASSED, NUMBER = range(8)
OUTPUTS, OUT_LINK, OUT_TARGET = 8, 9, 10  # of the first output; of the next ones 2, 4, ... on
NOWHERE = -1  # a target; drains are -2 and below

# words of queues, feeds and sinks; the numbers are floats
READY, KIND, FIRST_NUMBER, SECOND_NUMBER = range(4)
WORD_FIELDS = 4

# feeds
FEED_EVENT, FEED_QUEUE, FEED_LINK, FEED_NEXT, FEED_END, FEED_HOST, FEED_START = range(7)
FEED_FIELDS = 7

# sinks
SINK_NEXT, SINK_END, SINK_HOST, SINK_START, SINK_COLOUR = range(5)
SINK_FIELDS = 5

# tasks of a thread: a row for each colour
TASK_QUEUE, TASK_COLOUR, TASK_CODE, _ = range(4)  # the code of data words, then of control words
TASK_FIELDS = 4

# code: one instruction per row. An operand is base + register * stride within low..high.
OP, LENGTH, LENGTH_REGISTER, TICKS, ON_PATH, ROUNDS = range(6)
D, B, C, S = 6, 12, 18, 24  # operands of six fields
BASE, REGISTER, STRIDE, LOW, HIGH, WRAP = range(6)
FACTOR, IN_COLOUR, OUT_COLOUR, GATE, SECOND_GATE, SIGNAL, SECOND_SIGNAL = range(30, 37)
INTERVAL, PACK, CLEARS, TARGET, COUNTER_CLASS, AMOUNT, MODULO, ADDS = range(37, 45)
CODE_FIELDS = 48
(
    END,
    WORK,
    AXPY,
    LINEAR,
    MULTIPLY,
    FILL,
    DOT,
    CELL,
    STREAM,
    WAIT,
    POST,
    SET,
    ADVANCE,
    LOOP,
    JUMP_UNLESS_EQUAL,
    JUMP_UNLESS_LESS,
    SEND_CONTROL,
    TAKE,
) = range(18)
ADD_CELLS, SUBTRACT_CELLS, MULTIPLY_CELLS, DIVIDE_CELLS, ROOT_CELL = range(5)


class MeshTables(NamedTuple):
    """All tables of a simulation as views; one set describes one run and is used up by it."""

    integers: np.ndarray  # int32, all of the following
    floats: np.ndarray  # float32, the same cells
    clock: np.ndarray  # [CLOCK_FIELDS]
    buckets: np.ndarray  # [wheel + 1, BUCKET_FIELDS]
    events: np.ndarray  # [entities, EVENT_FIELDS]
    work: np.ndarray  # [entities + 1] events
    blocks: np.ndarray  # [cores, block size]
    queues: np.ndarray  # [queues, queue size]
    edges: np.ndarray  # [links into the mesh] tick from which it is free
    feeds: np.ndarray  # [feeds, FEED_FIELDS]
    feed_words: np.ndarray  # [words, WORD_FIELDS]
    sinks: np.ndarray  # [sinks, SINK_FIELDS]
    sink_words: np.ndarray  # [words, WORD_FIELDS]
    code: np.ndarray  # [instructions, CODE_FIELDS]
    tasks: np.ndarray  # [tasks, TASK_FIELDS]
    trace_states: np.ndarray  # [windows, cores, 3] ticks
    trace_links: np.ndarray  # [windows, cores, PORTS] words
    memory: np.ndarray  # [cores, cells] float32
    factors: np.ndarray  # [factors] float32

    @property
    def threads(self) -> np.ndarray:
        """The threads, [cores, THREADS, LINE]."""
        at = int(self.clock[THREADS_AT])
        return self.blocks[:, at : at + THREADS * LINE].reshape(-1, THREADS, LINE)

    @property
    def cores(self) -> np.ndarray:
        """The cores' own parts, from STATE to CELLS [cores, REGISTERS]."""
        at = int(self.clock[CORE_AT])
        return self.blocks[:, at : at + REGISTERS]


def allocate_tables(clock: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> MeshTables:
    """Return tables of zeros in one buffer, with their places in its header.

    Args:
        clock: the first fields, [CLOCK_FIELDS].
        shapes: of all tables, by the names of `MeshTables`.

    Raises:
        MeshError: a buffer cannot be as large.
    """
    sizes = [int(np.prod(shapes[name], dtype=np.int64)) for name in _TABLES]
    starts, end = [], lines(HEADER_FIELDS)
    for size in sizes:
        starts.append(end)
        end += lines(size)
    if end > MOST_CELLS:
        raise MeshError(
            f"simulation: expected tables of at most {4 * MOST_CELLS:,} bytes, got {4 * end:,}; "
            "take a smaller mesh or a shorter trace, or the closed form"
        )
    raw = np.zeros(end + LINE, np.int32)
    first = -(raw.ctypes.data // 4) % LINE
    whole = raw[first : first + end]
    whole[:CLOCK_FIELDS] = clock
    whole[CLOCK_FIELDS:HEADER_FIELDS] = starts
    floats = whole.view(np.float32)
    views = {
        name: (floats if name in _FLOATS else whole)[start : start + size].reshape(shapes[name])
        for name, start, size in zip(_TABLES, starts, sizes, strict=True)
    }
    return MeshTables(whole, floats, whole[:CLOCK_FIELDS], **views)


def lines(cells: int) -> int:
    """Return the cells of as many whole cache lines as hold some cells."""
    return -(-cells // LINE) * LINE
