"""Routers, edges and links of a simulated mesh: which word moves in a tick.

A queue's first word moves when all links of its route are free and all queues behind them have
room; it holds that room while it is under way, so that no queue exceeds its depth. The queue that
was served last is considered last. A word that waits for links alone keeps younger ones from them.
"""

from penstock.kernels.compilation import called, inlined
from penstock.kernels.mesh_events import wake, wake_at
from penstock.kernels.mesh_tables import (
    BUSY_UNTIL,
    CONSUMER,
    CONSUMER_THREAD,
    CORE_NUMBER,
    CORES,
    COUNT,
    DEPTH,
    FAULT,
    FAULT_CORE,
    FAULT_ROW,
    FEED_END,
    FEED_EVENT,
    FEED_HOST,
    FEED_LINK,
    FEED_NEXT,
    FEED_QUEUE,
    FEED_WORDS,
    FIRST_NUMBER,
    GREATEST,
    HEAD,
    HOP_TICKS,
    HOST_EACH,
    HOST_EACH_PART,
    HOST_IN,
    HOST_OUT,
    HOST_PLACES,
    KIND,
    LAST_CHANGE,
    LINK_FREE,
    NO_ROUTE,
    NOW,
    NOWHERE,
    ORDER,
    OUT_LINK,
    OUT_TARGET,
    OUTPUTS,
    PASSED,
    PORTS,
    QUEUE_COUNT,
    RAMP_TICKS,
    READY,
    ROUTER_EVENT,
    SECOND_NUMBER,
    SINK_END,
    SINK_FIELDS,
    SINK_FULL,
    SINK_HOST,
    SINK_NEXT,
    SINK_WORDS,
    SINKS,
    THREADS_AT,
    TRACE_LINKS,
    TRACE_TICKS,
    TRACE_WINDOWS,
    UPSTREAM,
    WORD_FIELDS,
    WORD_TICKS,
    WORDS_AT,
)

_NEVER = (1 << 31) - 1


@inlined
def first_word(t, queue):
    """Return the first word of a queue that has one."""
    return queue + t[WORDS_AT] + t[queue + HEAD] * WORD_FIELDS


@called
def push(t, f, queue, first, second, kind, ready):
    """Put a word at the end of a queue that has room, and wake its consumer when it is there."""
    count = t[queue + COUNT]
    place = t[queue + HEAD] + count
    if place >= t[DEPTH]:
        place -= t[DEPTH]
    word = queue + t[WORDS_AT] + place * WORD_FIELDS
    t[word + READY] = ready
    t[word + KIND] = kind
    f[word + FIRST_NUMBER] = first
    f[word + SECOND_NUMBER] = second
    count += 1
    t[queue + COUNT] = count
    if count > t[queue + GREATEST]:
        t[queue + GREATEST] = count
    if count > 1:
        return
    thread = t[queue + CONSUMER_THREAD]
    if thread >= 0 and t[thread + BUSY_UNTIL] > ready:
        return  # it looks for words when it is no longer busy
    if ready > t[NOW]:
        wake_at(t, t[queue + CONSUMER], ready)
    else:
        wake(t, t[queue + CONSUMER])


@called
def pop(t, queue):
    """Take the first word of a queue; who waits for room is woken."""
    head = t[queue + HEAD] + 1
    t[queue + HEAD] = 0 if head == t[DEPTH] else head
    if t[queue + COUNT] == t[DEPTH]:
        wake(t, t[queue + UPSTREAM])
    t[queue + COUNT] -= 1
    t[queue + PASSED] += 1
    if t[LAST_CHANGE] < t[NOW]:
        t[LAST_CHANGE] = t[NOW]


@called
def trace_word(t, block, link):
    """Count a word on a link in the windows of the trace."""
    window = t[NOW] // t[TRACE_TICKS]
    if window < t[TRACE_WINDOWS]:
        place = window * t[CORES] + t[block + CORE_NUMBER]
        t[t[TRACE_LINKS] + place * PORTS + link - block - LINK_FREE] += 1


@inlined
def use_host(t, place):
    """Occupy the links of the host in one direction for one word, which may be part of a tick."""
    if t[place] < t[NOW]:
        t[place] = t[NOW]
        t[place + 1] = 0
    part = t[place + 1] + t[HOST_EACH_PART]
    t[place] += t[HOST_EACH] + (part >> HOST_PLACES)
    t[place + 1] = part & ((1 << HOST_PLACES) - 1)


@called
def deliver(t, f, sink, first, second, kind):
    """Let a word leave the mesh."""
    row = t[SINKS] + sink * SINK_FIELDS
    place = t[row + SINK_NEXT]
    word = t[SINK_WORDS] + place * WORD_FIELDS
    f[word + FIRST_NUMBER] = first
    f[word + SECOND_NUMBER] = second
    t[word + KIND] = kind
    t[row + SINK_NEXT] = place + 1
    there = t[NOW] + t[HOP_TICKS]
    if t[LAST_CHANGE] < there:
        t[LAST_CHANGE] = there
    if t[row + SINK_HOST]:
        use_host(t, HOST_OUT)


@called
def free_from(t, block, queue):
    """Return when all links of a route are free, and a mask of their sides; -1 if there is no room
    behind one of them, or after a fault."""
    depth = t[DEPTH]
    free, ports = t[NOW], 0
    for at in range(queue, queue + 2 * t[queue + OUTPUTS], 2):
        link, target = t[at + OUT_LINK], t[at + OUT_TARGET]
        if target >= 0:
            if t[target + COUNT] >= depth:
                return -1, 0
        elif target == NOWHERE:
            t[FAULT] = NO_ROUTE
            t[FAULT_CORE] = t[block + CORE_NUMBER] * PORTS + link - block - LINK_FREE
            t[FAULT_ROW] = queue
            return -1, 0
        else:
            sink = t[SINKS] + (-2 - target) * SINK_FIELDS
            if t[sink + SINK_NEXT] >= t[sink + SINK_END]:
                t[FAULT] = SINK_FULL
                t[FAULT_CORE] = t[block + CORE_NUMBER]
                t[FAULT_ROW] = queue
                return -1, 0
            if t[sink + SINK_HOST]:
                free = max(free, t[HOST_OUT])
        free = max(free, t[link])
        ports |= 1 << (link - block)
    return free, ports


@called
def send_on(t, f, block, queue):
    """Move the first word of a queue over all links of its route."""
    word = first_word(t, queue)
    first, second = f[word + FIRST_NUMBER], f[word + SECOND_NUMBER]
    kind = t[word + KIND]
    for at in range(queue, queue + 2 * t[queue + OUTPUTS], 2):
        link, target = t[at + OUT_LINK], t[at + OUT_TARGET]
        t[link] = t[NOW] + t[WORD_TICKS]
        if t[TRACE_TICKS]:
            trace_word(t, block, link)
        if target >= 0:
            to_core = t[target + CONSUMER_THREAD] >= 0
            time = t[RAMP_TICKS] if to_core else t[HOP_TICKS]
            push(t, f, target, first, second, kind, t[NOW] + time)
        else:
            deliver(t, f, -2 - target, first, second, kind)
    pop(t, queue)


@called
def step_router(t, f, block):
    """Move the words that can move, and have the router woken when a link or a word is ready."""
    now = t[NOW]
    later = _NEVER
    claimed = 0
    served = 0
    order = block + ORDER
    count = t[block + QUEUE_COUNT]
    last = block + t[THREADS_AT] - 1
    for number in range(count):
        queue = t[order + number]
        if served:
            t[order + number - served] = queue
        if t[queue + COUNT] == 0:
            continue
        ready = t[first_word(t, queue) + READY]
        if ready > now:
            later = min(later, ready)
            continue
        free, ports = free_from(t, block, queue)
        if t[FAULT]:
            return
        if free < 0:
            continue
        if free > now:
            claimed |= ports
            later = min(later, free)
            continue
        if claimed & ports:
            continue
        send_on(t, f, block, queue)
        if t[queue + COUNT]:
            ready = t[first_word(t, queue) + READY]
            later = min(later, max(ready, now + t[WORD_TICKS]))
        # Served queues go to the end of the order: kept in the last places of the row till then.
        t[last - served] = queue
        served += 1
    for number in range(served):
        t[order + count - served + number] = t[last - number]
    if later < _NEVER:
        wake_at(t, t[block + ROUTER_EVENT], later)


@called
def step_feed(t, f, row):
    """Let the next word of a stream enter at the edge, if link, host and queue allow it."""
    place = t[row + FEED_NEXT]
    if place >= t[row + FEED_END]:
        return
    now, queue = t[NOW], t[row + FEED_QUEUE]
    if t[queue + COUNT] >= t[DEPTH]:
        return  # woken when the queue has room
    time = t[t[row + FEED_LINK]]
    if t[row + FEED_HOST]:
        time = max(time, t[HOST_IN])
    if time > now:
        wake_at(t, t[row + FEED_EVENT], time)
        return
    t[t[row + FEED_LINK]] = now + t[WORD_TICKS]
    if t[row + FEED_HOST]:
        use_host(t, HOST_IN)
    word = t[FEED_WORDS] + place * WORD_FIELDS
    first, second = f[word + FIRST_NUMBER], f[word + SECOND_NUMBER]
    push(t, f, queue, first, second, t[word + KIND], now + t[HOP_TICKS])
    t[row + FEED_NEXT] = place + 1
    if place + 1 < t[row + FEED_END]:
        wake_at(t, t[row + FEED_EVENT], now + t[WORD_TICKS])
