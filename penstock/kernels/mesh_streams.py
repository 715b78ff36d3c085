"""Streams of a simulated core: words that come from a colour or from memory, and go to either."""

import numpy as np

from penstock.kernels.compilation import called
from penstock.kernels.mesh_events import enter_state, wake, wake_at
from penstock.kernels.mesh_routers import pop, push
from penstock.kernels.mesh_tables import (
    ADDS,
    BLOCKED,
    CLEARS,
    COLOURS,
    CONTROL,
    CORE_FIELDS,
    CORE_QUEUE,
    CORE_ROWS,
    CORES,
    COUNT,
    COUNTER_CLASS,
    COUNTER_COUNT,
    COUNTERS,
    DATA,
    DEPTH,
    FAULT,
    FAULT_COLOUR,
    FAULT_CORE,
    FAULT_ROW,
    FOR_COUNTER,
    FOR_ROOM,
    FOR_WORD,
    GATE,
    HEAD,
    IN_COLOUR,
    KIND,
    NO_TASK,
    NOW,
    OUT_COLOUR,
    PACK,
    PROGRESS,
    QUEUE_FIELDS,
    QUEUES,
    RAMP_FREE,
    RAMP_QUEUE,
    RAMP_TICKS,
    READY,
    ROUNDS,
    SECOND_GATE,
    SECOND_SIGNAL,
    SIGNAL,
    SINCE,
    STARVED,
    THREAD_FIELDS,
    THREAD_ROWS,
    THREADS,
    WAIT_ON,
    WAITS,
    WORD_ROWS,
    WORD_TICKS,
    WORD_VALUES,
    WRAP,
    B,
    C,
    D,
)
from penstock.kernels.mesh_vectors import address, half


@called
def wait_for(t, thread, what, on, state):
    """Have a thread wait, and account the state of its core if it is the one that computes."""
    row = t[THREAD_ROWS] + thread * THREAD_FIELDS
    if t[row + WAITS] != what or t[row + WAIT_ON] != on:
        t[row + WAITS] = what
        t[row + WAIT_ON] = on
        t[row + SINCE] = t[NOW]
    if thread % THREADS == 0:
        enter_state(t, thread // THREADS, state)


@called
def has_word(t, thread, queue):
    """Return whether a word is there; if one is under way, have the thread woken when it is."""
    row = t[QUEUES] + queue * QUEUE_FIELDS
    if t[row + COUNT] == 0:
        return False
    ready = t[t[WORD_ROWS] + 2 * (queue * t[DEPTH] + t[row + HEAD]) + READY]
    if ready <= t[NOW]:
        return True
    wake_at(t, t[CORES] + thread, ready)
    return False


@called
def has_room(t, thread, queue, colour):
    """Return whether a core may send a word now; the thread waits otherwise."""
    free = t[t[CORE_ROWS] + thread // THREADS * CORE_FIELDS + RAMP_FREE]
    if t[t[QUEUES] + queue * QUEUE_FIELDS + COUNT] < t[DEPTH]:
        if free <= t[NOW]:
            return True
        wake_at(t, t[CORES] + thread, free)
    wait_for(t, thread, FOR_ROOM, colour, BLOCKED)
    return False


@called
def send_word(t, f, core, queue, first, second, kind, ticks):
    """Send a word up the ramp, after the ticks in which it was made."""
    t[t[CORE_ROWS] + core * CORE_FIELDS + RAMP_FREE] = t[NOW] + t[WORD_TICKS]
    push(t, f, queue, first, second, kind, t[NOW] + ticks + t[RAMP_TICKS])


@called
def post(t, thread, counter, amount):
    """Add to a counter of the core; its other threads that wait for one look again."""
    core = thread // THREADS
    t[t[COUNTERS] + core * t[COUNTER_COUNT] + counter] += amount
    for other in range(core * THREADS, core * THREADS + THREADS):
        if other != thread and t[t[THREAD_ROWS] + other * THREAD_FIELDS + WAITS] == FOR_COUNTER:
            wake(t, t[CORES] + other)


@called
def passes(t, thread, row, gate):
    """Return whether a counter has one for a stream; the thread waits otherwise."""
    counter = t[row + gate]
    if counter < 0 or t[t[COUNTERS] + thread // THREADS * t[COUNTER_COUNT] + counter] > 0:
        return True
    wait_for(t, thread, FOR_COUNTER, counter, t[row + COUNTER_CLASS])
    return False


@called
def begins(t, core, row, operand, count):
    """Return where a stream's operand begins; it may be a ring of cells."""
    ring = t[row + operand + WRAP]
    return address(t, core, row, operand, ring if ring else count * t[row + PACK])


@called
def stream_word(t, f, thread, row, count):
    """Move one word of a stream; return whether it moved. The thread waits otherwise."""
    core = thread // THREADS
    if not passes(t, thread, row, GATE) or not passes(t, thread, row, SECOND_GATE):
        return False
    taken, sent = t[row + IN_COLOUR], t[row + OUT_COLOUR]
    source, out = -1, -1
    if taken >= 0:
        source = t[t[CORE_QUEUE] + core * COLOURS + taken]
        if not has_word(t, thread, source):
            wait_for(t, thread, FOR_WORD, taken, STARVED)
            return False
    if sent >= 0:
        out = t[t[RAMP_QUEUE] + core * COLOURS + sent]
        if not has_room(t, thread, out, sent):
            return False
    b, c = begins(t, core, row, B, count), begins(t, core, row, C, count)
    d = begins(t, core, row, D, count)
    if t[FAULT]:
        return False
    pack = t[row + PACK]
    state = t[THREAD_ROWS] + thread * THREAD_FIELDS
    offset = t[state + PROGRESS] * pack
    first, second = np.float32(0.0), np.float32(0.0)
    if source >= 0:
        queue = t[QUEUES] + source * QUEUE_FIELDS
        word = 2 * (source * t[DEPTH] + t[queue + HEAD])
        if t[t[WORD_ROWS] + word + KIND] != DATA:
            t[FAULT] = NO_TASK
            t[FAULT_CORE] = core
            t[FAULT_COLOUR] = taken
            t[FAULT_ROW] = CONTROL
            return False
        first = f[t[WORD_VALUES] + word]
        second = f[t[WORD_VALUES] + word + 1]
        pop(t, source)
    if c >= 0:
        ring = t[row + C + WRAP]
        place = c + (offset % ring if ring else offset)
        first += f[place]
        if pack > 1:
            second += f[place + 1]
    if b >= 0:
        ring = t[row + B + WRAP]
        place = b + (offset % ring if ring else offset)
        first += f[place]
        if pack > 1:
            second += f[place + 1]
        if t[row + CLEARS]:
            f[place] = 0.0
            if pack > 1:
                f[place + 1] = 0.0
    if d >= 0:
        ring = t[row + D + WRAP]
        place = d + (offset % ring if ring else offset)
        if t[row + ADDS]:
            first += f[place]
            if pack > 1:
                second += f[place + 1]
    if t[row + ROUNDS]:
        first, second = half(first), half(second)
    if d >= 0:
        f[place] = first
        if pack > 1:
            f[place + 1] = second
    if out >= 0:
        # A word that came from the router goes through the core in one more step.
        made = t[WORD_TICKS] if source >= 0 else 0
        send_word(t, f, core, out, first, second, DATA, made)
    counters = t[COUNTERS] + core * t[COUNTER_COUNT]
    if t[row + GATE] >= 0:
        t[counters + t[row + GATE]] -= 1
    if t[row + SECOND_GATE] >= 0:
        t[counters + t[row + SECOND_GATE]] -= 1
    t[state + PROGRESS] += 1
    if t[row + SIGNAL] >= 0:
        post(t, thread, t[row + SIGNAL], 1)
    if t[row + SECOND_SIGNAL] >= 0:
        post(t, thread, t[row + SECOND_SIGNAL], 1)
    return True
