"""The tables of a simulated mesh of cores: what the kernels of the simulator read and write.

All state is in two flat arrays, one of 32-bit whole numbers and one of 32-bit floats, so that
kernels are compiled quickly and a mesh stays in the processor's caches. The first places hold the
clock and where each table begins; a row of a table is then `t[QUEUES] + number * QUEUE_FIELDS`, and
`t[row + COUNT]` one of its fields.
`MeshTables` has the same tables as views for Python.

An entity is something that can be woken: first the routers, one per core, then three threads per
core, then the streams that enter at the edges. Times are in ticks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

THREADS = 3  # of a core: 0 computes, 1 receives, 2 sends
PORTS = 5  # of a router: north, east, south, west, ramp
RAMP = 4
COLOURS = 24
DATA, CONTROL = 0, 1
HOST_PLACES = 20  # binary places of a tick in the times of the host's links

# The clock.
NOW, WORD_TICKS, HOP_TICKS, RAMP_TICKS, DEPTH, SHARED_PATH, CORES, FEED_COUNT = range(8)
WORK_FIRST, WORK_COUNT, NEAR_COUNT, FAR_COUNT, WHEEL, ENTITIES = range(8, 14)
FAULT, FAULT_CORE, FAULT_COLOUR, FAULT_ROW, FAULT_VALUE = range(14, 19)
LAST_TICK, TRACE_TICKS, TRACE_WINDOWS, EVENTS, EVENT_TURNS, LAST_CHANGE = range(19, 25)
HOST_IN, HOST_OUT = 25, 27  # whole tick from which it is free, and the part of a tick beyond
HOST_EACH, HOST_EACH_PART = 29, 30
ROUTER_WIDTH, LINK_COUNT, REGISTER_COUNT, COUNTER_COUNT, CELL_COUNT = range(31, 36)
CLOCK_FIELDS = 36
EVENT_TURN = 1 << 30  # events after which EVENT_TURNS counts
MOST_TICKS = (1 << 31) - (1 << 24)  # of a run; an instruction takes less than the rest

NO_FAULT, NO_ROUTE, NO_TASK, BAD_ADDRESS, ENDLESS_TASK, TOO_LONG, SINK_FULL = range(7)

# Where each table of whole numbers begins, then each of floats.
_INTEGER_TABLES = (
    "bucket_first",
    "bucket_last",
    "events",
    "work",
    "router_queues",
    "router_count",
    "queues",
    "words",
    "links",
    "feeds",
    "feed_kind",
    "sinks",
    "sink_kind",
    "threads",
    "cores",
    "registers",
    "counters",
    "code",
    "core_queue",
    "ramp_queue",
    "task_code",
    "task_colours",
    "trace_states",
    "trace_links",
)
_FLOAT_TABLES = (
    "word_values",
    "feed_values",
    "sink_values",
    "memory",
    "factors",
)
(
    BUCKET_FIRST,
    BUCKET_LAST,
    EVENT_ROWS,
    WORK_LIST,
    ROUTER_QUEUES,
    ROUTER_COUNT,
    QUEUES,
    WORD_ROWS,
    LINKS,
    FEEDS,
    FEED_KINDS,
    SINKS,
    SINK_KINDS,
    THREAD_ROWS,
    CORE_ROWS,
    REGISTERS,
    COUNTERS,
    CODE,
    CORE_QUEUE,
    RAMP_QUEUE,
    TASK_CODE,
    TASK_COLOURS,
    TRACE_STATES,
    TRACE_LINKS,
    WORD_VALUES,
    FEED_VALUES,
    SINK_VALUES,
    MEMORY,
    FACTORS,
) = range(CLOCK_FIELDS, CLOCK_FIELDS + 29)
HEADER_FIELDS = CLOCK_FIELDS + 29

# events: one row per entity; the bucket is -1 where none is due, the last bucket of far events.
BUCKET, AFTER, BEFORE, DUE, IN_WORK = range(5)
EVENT_FIELDS = 5

# queues: one row per router, colour and input, and per core and colour
HEAD, COUNT, UPSTREAM, CONSUMER, GREATEST, PASSED, OUTPUTS = range(7)
OUT_LINK, OUT_TARGET = 7, 8  # of the first output; of the next ones 2, 4, 6, 8 places on
QUEUE_CORE, QUEUE_COLOUR, QUEUE_INPUT = 17, 18, 19
QUEUE_FIELDS = 20
NOWHERE = -1  # a target; drains are -2 and below

# words: `DEPTH` rows per queue; word_values has two numbers for each
READY, KIND = range(2)

# links
FREE, LINK_WORDS = range(2)

# feeds; feed_values has two numbers per word
FEED_QUEUE, FEED_LINK, FEED_NEXT, FEED_END, FEED_HOST, FEED_START = range(6)
FEED_FIELDS = 6

# sinks; sink_values has two numbers per word
SINK_NEXT, SINK_END, SINK_HOST, SINK_LAST, SINK_START, SINK_COLOUR = range(6)
SINK_FIELDS = 6

# threads
PC, BUSY_UNTIL, WAITS, PROGRESS, WAIT_ON, SINCE, ROTATION, TASKS = range(8)
THREAD_FIELDS = 8
RUNNING, IDLE, FOR_WORD, FOR_ROOM, FOR_COUNTER = range(5)

# cores; the sums of states are in the order of the states
STATE, STATE_SINCE, STATE_SUMS, _, _, RAMP_FREE, PATH_FREE = range(7)
CORE_FIELDS = 7
BUSY, STARVED, BLOCKED = range(3)

# code: one instruction per row. An operand is base + register * stride within low..high.
OP, LENGTH, LENGTH_REGISTER, TICKS, ON_PATH, ROUNDS = range(6)
D, B, C, S = 6, 12, 18, 24  # operands of six fields
BASE, REGISTER, STRIDE, LOW, HIGH, WRAP = range(6)
FACTOR, IN_COLOUR, OUT_COLOUR, GATE, SECOND_GATE, SIGNAL, SECOND_SIGNAL = range(30, 37)
INTERVAL, PACK, CLEARS, TARGET, COUNTER_CLASS, AMOUNT, MODULO, ADDS = range(37, 45)
CODE_FIELDS = 45
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
    floats: np.ndarray  # float32, all of the following
    clock: np.ndarray  # [CLOCK_FIELDS]
    bucket_first: np.ndarray  # [wheel + 1]
    bucket_last: np.ndarray  # [wheel + 1]
    events: np.ndarray  # [entities, EVENT_FIELDS]
    work: np.ndarray  # [entities + 1]
    router_queues: np.ndarray  # [cores, width]
    router_count: np.ndarray  # [cores]
    queues: np.ndarray  # [queues, QUEUE_FIELDS]
    words: np.ndarray  # [queues, depth, 2]
    links: np.ndarray  # [links, 2]
    feeds: np.ndarray  # [feeds, FEED_FIELDS]
    feed_kind: np.ndarray  # [words]
    sinks: np.ndarray  # [sinks, SINK_FIELDS]
    sink_kind: np.ndarray  # [words]
    threads: np.ndarray  # [cores * THREADS, THREAD_FIELDS]
    cores: np.ndarray  # [cores, CORE_FIELDS]
    registers: np.ndarray  # [cores, registers]
    counters: np.ndarray  # [cores, counters]
    code: np.ndarray  # [instructions, CODE_FIELDS]
    core_queue: np.ndarray  # [cores, COLOURS]; -1 where none
    ramp_queue: np.ndarray  # [cores, COLOURS]
    task_code: np.ndarray  # [cores, THREADS, COLOURS, 2]
    task_colours: np.ndarray  # [cores, THREADS, COLOURS]; -1 after the last
    trace_states: np.ndarray  # [windows, cores, 3] ticks
    trace_links: np.ndarray  # [windows, links] words
    word_values: np.ndarray  # [queues, depth, 2]
    feed_values: np.ndarray  # [words, 2]
    sink_values: np.ndarray  # [words, 2]
    memory: np.ndarray  # [cores, cells]
    factors: np.ndarray  # [factors]


def pack_tables(clock: np.ndarray, tables: dict[str, np.ndarray]) -> MeshTables:
    """Return tables in two flat arrays.

    Args:
        clock: the first fields, [CLOCK_FIELDS].
        tables: arrays by the names of `MeshTables`.
    """
    views: dict[str, np.ndarray] = {}
    header = np.zeros(HEADER_FIELDS, np.int64)
    header[:CLOCK_FIELDS] = clock
    flat = {}
    for dtype, names, first in (
        (np.int32, _INTEGER_TABLES, HEADER_FIELDS),
        (np.float32, _FLOAT_TABLES, 0),
    ):
        sizes = [tables[name].size for name in names]
        starts = first + np.concatenate(([0], np.cumsum(sizes)))
        whole = np.zeros(int(starts[-1]) + 1, dtype)
        for name, start in zip(names, starts, strict=False):
            given = tables[name]
            views[name] = whole[start : start + given.size].reshape(given.shape)
            views[name][...] = given
        at = CLOCK_FIELDS + (0 if dtype is np.int32 else len(_INTEGER_TABLES))
        header[at : at + len(names)] = starts[:-1]
        flat[dtype] = whole
    integers, floats = flat[np.int32], flat[np.float32]
    integers[:HEADER_FIELDS] = header
    return MeshTables(integers, floats, integers[:CLOCK_FIELDS], **views)
