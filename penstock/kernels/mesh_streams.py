"""Streams of a simulated core: words that come from a colour or from memory, and go to either."""

import numpy as np

from penstock.kernels.compilation import called, inlined
from penstock.kernels.mesh_events import wake, wake_at
from penstock.kernels.mesh_routers import first_word, pop, push
from penstock.kernels.mesh_states import enter_state
from penstock.kernels.mesh_tables import (
    ADDS,
    BLOCK,
    BLOCKED,
    CLEARS,
    CONTROL,
    CORE_AT,
    CORE_NUMBER,
    CORE_QUEUES_AT,
    COUNT,
    COUNTER_CLASS,
    COUNTERS_AT,
    DATA,
    DEPTH,
    FAULT,
    FAULT_COLOUR,
    FAULT_CORE,
    FAULT_ROW,
    FIRST_NUMBER,
    FOR_COUNTER,
    FOR_ROOM,
    FOR_WORD,
    GATE,
    IN_COLOUR,
    KIND,
    LINE,
    NO_TASK,
    NOW,
    OUT_COLOUR,
    PACK,
    PROGRESS,
    RAMP_FREE,
    RAMP_QUEUES_AT,
    RAMP_TICKS,
    READY,
    ROUNDS,
    SECOND_GATE,
    SECOND_NUMBER,
    SECOND_SIGNAL,
    SIGNAL,
    SINCE,
    STARVED,
    THREAD_EVENT,
    THREADS,
    THREADS_AT,
    WAIT_ON,
    WAITS,
    WHICH,
    WORD_TICKS,
    WRAP,
    B,
    C,
    D,
)
from penstock.kernels.mesh_vectors import address, half


@called
def wait_for(t, thread, what, on, state):
    """Have a thread wait, and account the state of its core if it is the one that computes."""
    if t[thread + WAITS] != what or t[thread + WAIT_ON] != on:
        t[thread + WAITS] = what
        t[thread + WAIT_ON] = on
        t[thread + SINCE] = t[NOW]
    if t[thread + WHICH] == 0:
        enter_state(t, t[thread + BLOCK], state)


@called
def has_word(t, thread, queue):
    """Return whether a word is there; if one is under way, have the thread woken when it is."""
    if t[queue + COUNT] == 0:
        return False
    ready = t[first_word(t, queue) + READY]
    if ready <= t[NOW]:
        return True
    wake_at(t, t[thread + THREAD_EVENT], ready)
    return False


@called
def has_room(t, thread, queue, colour):
    """Return whether a core may send a word now; the thread waits otherwise."""
    if t[queue + COUNT] < t[DEPTH]:
        free = t[t[thread + BLOCK] + t[CORE_AT] + RAMP_FREE]
        if free <= t[NOW]:
            return True
        wake_at(t, t[thread + THREAD_EVENT], free)
    wait_for(t, thread, FOR_ROOM, colour, BLOCKED)
    return False


@inlined
def send_word(t, f, block, queue, first, second, kind, ticks):
    """Send a word up the ramp, after the ticks in which it was made."""
    t[block + t[CORE_AT] + RAMP_FREE] = t[NOW] + t[WORD_TICKS]
    push(t, f, queue, first, second, kind, t[NOW] + ticks + t[RAMP_TICKS])


@called
def post(t, thread, counter, amount):
    """Add to a counter of the core; its other threads that wait for one look again."""
    block = t[thread + BLOCK]
    t[block + t[COUNTERS_AT] + counter] += amount
    first = block + t[THREADS_AT]
    for other in range(first, first + THREADS * LINE, LINE):
        if other != thread and t[other + WAITS] == FOR_COUNTER:
            wake(t, t[other + THREAD_EVENT])


@inlined
def passes(t, thread, row, gate):
    """Return whether a counter has one for a stream; the thread waits otherwise."""
    counter = t[row + gate]
    if counter < 0 or t[t[thread + BLOCK] + t[COUNTERS_AT] + counter] > 0:
        return True
    wait_for(t, thread, FOR_COUNTER, counter, t[row + COUNTER_CLASS])
    return False


@inlined
def begins(t, block, row, operand, count):
    """Return where a stream's operand begins; it may be a ring of cells."""
    ring = t[row + operand + WRAP]
    return address(t, block, row, operand, ring if ring else count * t[row + PACK])


@inlined
def cell_of(t, row, operand, start, offset):
    """Return the cell of a stream's operand that belongs to its next word."""
    ring = t[row + operand + WRAP]
    return start + (offset % ring if ring else offset)


@called
def stream_word(t, f, thread, row, count):
    """Move one word of a stream; return whether it moved. The thread waits otherwise."""
    if not passes(t, thread, row, GATE) or not passes(t, thread, row, SECOND_GATE):
        return False
    block = t[thread + BLOCK]
    taken, sent = t[row + IN_COLOUR], t[row + OUT_COLOUR]
    source, out = -1, -1
    if taken >= 0:
        source = t[block + t[CORE_QUEUES_AT] + taken]
        if not has_word(t, thread, source):
            wait_for(t, thread, FOR_WORD, taken, STARVED)
            return False
    if sent >= 0:
        out = t[block + t[RAMP_QUEUES_AT] + sent]
        if not has_room(t, thread, out, sent):
            return False
    b, c = begins(t, block, row, B, count), begins(t, block, row, C, count)
    d = begins(t, block, row, D, count)
    if t[FAULT]:
        return False
    first, second = np.float32(0.0), np.float32(0.0)
    if source >= 0:
        word = first_word(t, source)
        if t[word + KIND] != DATA:
            t[FAULT] = NO_TASK
            t[FAULT_CORE] = t[block + CORE_NUMBER]
            t[FAULT_COLOUR] = taken
            t[FAULT_ROW] = CONTROL
            return False
        first, second = f[word + FIRST_NUMBER], f[word + SECOND_NUMBER]
        pop(t, source)
    is_pair = t[row + PACK] > 1
    offset = t[thread + PROGRESS] * t[row + PACK]
    if c >= 0:
        place = cell_of(t, row, C, c, offset)
        first += f[place]
        if is_pair:
            second += f[place + 1]
    if b >= 0:
        place = cell_of(t, row, B, b, offset)
        first += f[place]
        if is_pair:
            second += f[place + 1]
        if t[row + CLEARS]:
            f[place] = 0.0
            if is_pair:
                f[place + 1] = 0.0
    if d >= 0:
        place = cell_of(t, row, D, d, offset)
        if t[row + ADDS]:
            first += f[place]
            if is_pair:
                second += f[place + 1]
    if t[row + ROUNDS]:
        first, second = half(first), half(second)
    if d >= 0:
        f[place] = first
        if is_pair:
            f[place + 1] = second
    if out >= 0:
        # A word that came from the router goes through the core in one more step.
        made = t[WORD_TICKS] if source >= 0 else 0
        send_word(t, f, block, out, first, second, DATA, made)
    t[thread + PROGRESS] += 1
    count_word(t, thread, row)
    return True


@inlined
def count_word(t, thread, row):
    """Take one from the counters that gate a stream, and add one to those that it signals."""
    counters = t[thread + BLOCK] + t[COUNTERS_AT]
    if t[row + GATE] >= 0:
        t[counters + t[row + GATE]] -= 1
    if t[row + SECOND_GATE] >= 0:
        t[counters + t[row + SECOND_GATE]] -= 1
    if t[row + SIGNAL] >= 0:
        post(t, thread, t[row + SIGNAL], 1)
    if t[row + SECOND_SIGNAL] >= 0:
        post(t, thread, t[row + SECOND_SIGNAL], 1)
