"""The threads of a simulated core: tasks that words start, and the instructions in them.

A thread that has no instruction left takes the first word of a colour for which it has a task. An
instruction takes effect when it starts; the thread goes on after its ticks.
"""

from penstock.kernels.compilation import called
from penstock.kernels.mesh_events import enter_state, wake_at
from penstock.kernels.mesh_routers import pop
from penstock.kernels.mesh_streams import has_room, has_word, post, send_word, stream_word, wait_for
from penstock.kernels.mesh_tables import (
    ADVANCE,
    AMOUNT,
    BUSY,
    BUSY_UNTIL,
    CELL_COUNT,
    CODE,
    CODE_FIELDS,
    COLOURS,
    CONTROL,
    CORE_FIELDS,
    CORE_QUEUE,
    CORE_ROWS,
    CORES,
    COUNTER_CLASS,
    COUNTER_COUNT,
    COUNTERS,
    DEPTH,
    END,
    ENDLESS_TASK,
    FAULT,
    FAULT_COLOUR,
    FAULT_CORE,
    FAULT_ROW,
    FOR_COUNTER,
    FOR_WORD,
    GATE,
    HEAD,
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
    MEMORY,
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
    QUEUE_FIELDS,
    QUEUES,
    RAMP_QUEUE,
    REGISTER,
    REGISTER_COUNT,
    REGISTERS,
    ROTATION,
    RUNNING,
    SEND_CONTROL,
    SET,
    SHARED_PATH,
    SIGNAL,
    STARVED,
    STREAM,
    TAKE,
    TARGET,
    TASK_CODE,
    TASK_COLOURS,
    TASKS,
    THREAD_FIELDS,
    THREAD_ROWS,
    THREADS,
    TICKS,
    WAIT,
    WAITS,
    WORD_ROWS,
    WORD_VALUES,
    WORK,
    B,
    C,
    D,
)
from penstock.kernels.mesh_vectors import address, compute

_MOST_STEPS = 1_000_000  # instructions of a thread in one tick


@called
def take_value(t, f, thread, queue):
    """Take a word: its first number to the thread's cell, its second to the thread's register."""
    core, which = thread // THREADS, thread % THREADS
    word = t[WORD_VALUES] + 2 * (queue * t[DEPTH] + t[t[QUEUES] + queue * QUEUE_FIELDS + HEAD])
    f[t[MEMORY] + core * t[CELL_COUNT] + which] = f[word]
    t[t[REGISTERS] + core * t[REGISTER_COUNT] + which] = int(f[word + 1])
    pop(t, queue)


@called
def take_task(t, f, thread):
    """Start the task of a word that is there; colours are asked in turn."""
    core = thread // THREADS
    state = t[THREAD_ROWS] + thread * THREAD_FIELDS
    colours = t[state + TASKS]
    for turn in range(colours):
        place = t[state + ROTATION] + turn
        if place >= colours:
            place -= colours
        colour = t[t[TASK_COLOURS] + thread * COLOURS + place]
        queue = t[t[CORE_QUEUE] + core * COLOURS + colour]
        if not has_word(t, thread, queue):
            continue
        head = t[t[QUEUES] + queue * QUEUE_FIELDS + HEAD]
        kind = t[t[WORD_ROWS] + 2 * (queue * t[DEPTH] + head) + KIND]
        start = t[t[TASK_CODE] + 2 * (thread * COLOURS + colour) + kind]
        if start < 0:
            t[FAULT] = NO_TASK
            t[FAULT_CORE] = core
            t[FAULT_COLOUR] = colour
            t[FAULT_ROW] = kind
            return False
        take_value(t, f, thread, queue)
        t[state + ROTATION] = 0 if place + 1 == colours else place + 1
        t[state + PC] = start
        return True
    wait_for(t, thread, IDLE, -1, STARVED)
    return False


@called
def path_ticks(t, core, ticks):
    """Return the ticks of a vector operation, with those it waits for the core's data path."""
    if t[SHARED_PATH] == 0:
        return ticks
    row = t[CORE_ROWS] + core * CORE_FIELDS + PATH_FREE
    start = max(t[NOW], t[row])
    t[row] = start + ticks
    return start + ticks - t[NOW]


@called
def waits(t, f, thread, row):
    """Do an instruction that may have to wait; return whether it waits, or there is a fault."""
    core = thread // THREADS
    op = t[row + OP]
    if op == WAIT:
        counter = t[COUNTERS] + core * t[COUNTER_COUNT] + t[row + GATE]
        if t[counter] < t[row + AMOUNT]:
            wait_for(t, thread, FOR_COUNTER, t[row + GATE], t[row + COUNTER_CLASS])
            return True
        t[counter] -= t[row + AMOUNT]
    elif op == TAKE:
        colour = t[row + IN_COLOUR]
        queue = t[t[CORE_QUEUE] + core * COLOURS + colour]
        if not has_word(t, thread, queue):
            wait_for(t, thread, FOR_WORD, colour, STARVED)
            return True
        index = t[REGISTERS] + core * t[REGISTER_COUNT] + thread % THREADS
        kept = t[index]
        take_value(t, f, thread, queue)
        t[index] = kept  # a word without an index leaves that of the word before
    elif op == SEND_CONTROL:
        colour = t[row + OUT_COLOUR]
        out = t[t[RAMP_QUEUE] + core * COLOURS + colour]
        if not has_room(t, thread, out, colour):
            return True
        send_word(t, f, core, out, 0.0, 0.0, CONTROL, 0)
    return False


@called
def turn(t, f, core, row, following):
    """Do an instruction on registers; return the place of the one that follows."""
    op = t[row + OP]
    registers = t[REGISTERS] + core * t[REGISTER_COUNT]
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
        b, c = address(t, core, row, B, 1), address(t, core, row, C, 1)
        if t[FAULT] == 0 and not f[b] < f[c]:
            return t[row + TARGET]
    return following


@called
def stream_length(t, core, row):
    """Return the words of a stream."""
    register = t[row + LENGTH_REGISTER]
    if register >= 0:
        return t[t[REGISTERS] + core * t[REGISTER_COUNT] + register]
    return t[row + LENGTH]


@called
def step_thread(t, f, thread):
    """Run a thread until it waits, or until its instruction takes time."""
    now = t[NOW]
    core = thread // THREADS
    state = t[THREAD_ROWS] + thread * THREAD_FIELDS
    if t[state + BUSY_UNTIL] > now:
        wake_at(t, t[CORES] + thread, t[state + BUSY_UNTIL])
        return
    for _ in range(_MOST_STEPS):
        if t[state + PC] < 0 and not take_task(t, f, thread):
            return
        number = t[state + PC]
        row = t[CODE] + number * CODE_FIELDS
        op, ticks, following = t[row + OP], t[row + TICKS], number + 1
        if op == STREAM:
            count = stream_length(t, core, row)
            if count > 0:
                if not stream_word(t, f, thread, row, count):
                    return
                ticks = t[row + INTERVAL]
                following = number
                if t[state + PROGRESS] >= count:
                    t[state + PROGRESS] = 0
                    following = number + 1
        elif op < STREAM:
            if op == END:
                following = -1
            elif op != WORK:
                compute(t, f, core, row)
        elif op in (WAIT, TAKE, SEND_CONTROL):
            if waits(t, f, thread, row):
                return
        elif op == POST:
            post(t, thread, t[row + SIGNAL], t[row + AMOUNT])
        else:
            following = turn(t, f, core, row, following)
        if t[FAULT]:
            return
        t[state + PC] = following
        t[state + WAITS] = RUNNING
        if ticks > 0:
            if t[row + ON_PATH]:
                ticks = path_ticks(t, core, ticks)
            if thread % THREADS == 0:
                enter_state(t, core, BUSY)
            t[state + BUSY_UNTIL] = now + ticks
            if t[LAST_CHANGE] < now + ticks:
                t[LAST_CHANGE] = now + ticks
            wake_at(t, t[CORES] + thread, now + ticks)
            return
    t[FAULT] = ENDLESS_TASK
    t[FAULT_CORE] = core
    t[FAULT_ROW] = row
