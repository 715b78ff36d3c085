"""The threads of a simulated core: tasks that words start, and the instructions in them.

A thread that has no instruction left takes the first word of a colour for which it has a task. An
instruction takes effect when it starts; the thread goes on after its ticks.
"""

import numpy as np

from penstock.kernels.compilation import called, inlined
from penstock.kernels.mesh_events import wake_at
from penstock.kernels.mesh_routers import first_word, pop
from penstock.kernels.mesh_states import enter_state
from penstock.kernels.mesh_streams import has_room, has_word, post, send_word, stream_word, wait_for
from penstock.kernels.mesh_tables import (
    ADVANCE,
    AMOUNT,
    BLOCK,
    BUSY,
    BUSY_UNTIL,
    CELLS,
    CODE_FIELDS,
    CONTROL,
    CORE_AT,
    CORE_NUMBER,
    CORE_QUEUES_AT,
    COUNTER_CLASS,
    COUNTERS_AT,
    END,
    ENDLESS_TASK,
    FAULT,
    FAULT_COLOUR,
    FAULT_CORE,
    FAULT_ROW,
    FIRST_NUMBER,
    FIRST_TASK,
    FOR_COUNTER,
    FOR_WORD,
    GATE,
    IDLE,
    IN_COLOUR,
    INTERVAL,
    JUMP_UNLESS_EQUAL,
    JUMP_UNLESS_LESS,
    KIND,
    LAST_CHANGE,
    LENGTH,
    LENGTH_REGISTER,
    LOOP,
    MODULO,
    NO_TASK,
    NOW,
    ON_PATH,
    OP,
    OUT_COLOUR,
    PATH_FREE,
    PC,
    POST,
    PROGRESS,
    RAMP_QUEUES_AT,
    REGISTER,
    REGISTERS,
    ROTATION,
    RUNNING,
    SECOND_NUMBER,
    SEND_CONTROL,
    SET,
    SHARED_PATH,
    SIGNAL,
    STARVED,
    STREAM,
    TAKE,
    TARGET,
    TASK_CODE,
    TASK_COLOUR,
    TASK_FIELDS,
    TASK_QUEUE,
    TASKS,
    THREAD_EVENT,
    TICKS,
    WAIT,
    WAITS,
    WHICH,
    WORK,
    B,
    C,
    D,
)
from penstock.kernels.mesh_vectors import address, compute

_BEYOND = np.float32(2.0**31)
_MOST_STEPS = 1_000_000  # instructions of a thread in one tick


@called
def take_value(t, f, thread, queue):
    """Take a word: its first number to the thread's cell, its second to the thread's register."""
    core = t[thread + BLOCK] + t[CORE_AT]
    word = first_word(t, queue)
    f[t[core + CELLS] + t[thread + WHICH]] = f[word + FIRST_NUMBER]
    index = f[word + SECOND_NUMBER]
    is_whole = -_BEYOND <= index < _BEYOND  # not so where it is a second value; no array is as long
    t[core + REGISTERS + t[thread + WHICH]] = int(index) if is_whole else -(1 << 31)
    pop(t, queue)


@called
def take_task(t, f, thread):
    """Start the task of a word that is there; colours are asked in turn."""
    colours = t[thread + TASKS]
    for turn in range(colours):
        place = t[thread + ROTATION] + turn
        if place >= colours:
            place -= colours
        task = t[thread + FIRST_TASK] + place * TASK_FIELDS
        queue = t[task + TASK_QUEUE]
        if not has_word(t, thread, queue):
            continue
        kind = t[first_word(t, queue) + KIND]
        start = t[task + TASK_CODE + kind]
        if start < 0:
            t[FAULT] = NO_TASK
            t[FAULT_CORE] = t[t[thread + BLOCK] + CORE_NUMBER]
            t[FAULT_COLOUR] = t[task + TASK_COLOUR]
            t[FAULT_ROW] = kind
            return False
        take_value(t, f, thread, queue)
        t[thread + ROTATION] = 0 if place + 1 == colours else place + 1
        t[thread + PC] = start
        return True
    wait_for(t, thread, IDLE, -1, STARVED)
    return False


@inlined
def path_ticks(t, block, ticks):
    """Return the ticks of a vector operation, with those it waits for the core's data path."""
    if t[SHARED_PATH]:
        path = block + t[CORE_AT] + PATH_FREE
        start = max(t[NOW], t[path])
        t[path] = start + ticks
        ticks = start + ticks - t[NOW]
    return ticks


@called
def waits(t, f, thread, row):
    """Do an instruction that may have to wait; return whether it waits, or there is a fault."""
    block = t[thread + BLOCK]
    op = t[row + OP]
    if op == WAIT:
        counter = block + t[COUNTERS_AT] + t[row + GATE]
        if t[counter] < t[row + AMOUNT]:
            wait_for(t, thread, FOR_COUNTER, t[row + GATE], t[row + COUNTER_CLASS])
            return True
        t[counter] -= t[row + AMOUNT]
    elif op == TAKE:
        colour = t[row + IN_COLOUR]
        queue = t[block + t[CORE_QUEUES_AT] + colour]
        if not has_word(t, thread, queue):
            wait_for(t, thread, FOR_WORD, colour, STARVED)
            return True
        index = block + t[CORE_AT] + REGISTERS + t[thread + WHICH]
        kept = t[index]
        take_value(t, f, thread, queue)
        t[index] = kept  # a word without an index leaves that of the word before
    elif op == SEND_CONTROL:
        colour = t[row + OUT_COLOUR]
        out = t[block + t[RAMP_QUEUES_AT] + colour]
        if not has_room(t, thread, out, colour):
            return True
        send_word(t, f, block, out, 0.0, 0.0, CONTROL, 0)
    return False


@called
def turn(t, f, block, row, following):
    """Do an instruction on registers; return the place of the one that follows."""
    op = t[row + OP]
    registers = block + t[CORE_AT] + REGISTERS
    register = registers + t[row + D + REGISTER]
    if op == SET:
        t[register] = t[row + AMOUNT]
    elif op == ADVANCE:
        value = t[register] + t[row + AMOUNT]
        t[register] = value % t[row + MODULO] if t[row + MODULO] else value
    elif op == LOOP:
        t[register] += 1
        limit = t[row + LENGTH]
        if t[row + LENGTH_REGISTER] >= 0:
            limit = t[registers + t[row + LENGTH_REGISTER]]
        if t[register] < limit:
            return t[row + TARGET]
    elif op == JUMP_UNLESS_EQUAL:
        if t[register] != t[row + AMOUNT]:
            return t[row + TARGET]
    elif op == JUMP_UNLESS_LESS:
        b, c = address(t, block, row, B, 1), address(t, block, row, C, 1)
        if t[FAULT] == 0 and not f[b] < f[c]:
            return t[row + TARGET]
    return following


@inlined
def stream_length(t, block, row):
    """Return the words of a stream."""
    register = t[row + LENGTH_REGISTER]
    return t[row + LENGTH] if register < 0 else t[block + t[CORE_AT] + REGISTERS + register]


@called
def step_thread(t, f, thread):
    """Run a thread until it waits, or until its instruction takes time."""
    now = t[NOW]
    block = t[thread + BLOCK]
    if t[thread + BUSY_UNTIL] > now:
        wake_at(t, t[thread + THREAD_EVENT], t[thread + BUSY_UNTIL])
        return
    row = -1
    for _ in range(_MOST_STEPS):
        if t[thread + PC] < 0 and not take_task(t, f, thread):
            return
        row = t[thread + PC]
        op, ticks, following = t[row + OP], t[row + TICKS], row + CODE_FIELDS
        if op == STREAM:
            count = stream_length(t, block, row)
            if count > 0:
                if not stream_word(t, f, thread, row, count):
                    return
                ticks = t[row + INTERVAL]
                following = row
                if t[thread + PROGRESS] >= count:
                    t[thread + PROGRESS] = 0
                    following = row + CODE_FIELDS
        elif op < STREAM:
            if op == END:
                following = -1
            elif op != WORK:
                compute(t, f, block, row)
        elif op in (WAIT, TAKE, SEND_CONTROL):
            if waits(t, f, thread, row):
                return
        elif op == POST:
            post(t, thread, t[row + SIGNAL], t[row + AMOUNT])
        else:
            following = turn(t, f, block, row, following)
        if t[FAULT]:
            return
        t[thread + PC] = following
        t[thread + WAITS] = RUNNING
        if ticks > 0:
            if t[row + ON_PATH]:
                ticks = path_ticks(t, block, ticks)
            if t[thread + WHICH] == 0:
                enter_state(t, block, BUSY)
            t[thread + BUSY_UNTIL] = now + ticks
            if t[LAST_CHANGE] < now + ticks:
                t[LAST_CHANGE] = now + ticks
            wake_at(t, t[thread + THREAD_EVENT], now + ticks)
            return
    t[FAULT] = ENDLESS_TASK
    t[FAULT_CORE] = t[block + CORE_NUMBER]
    t[FAULT_ROW] = row
