"""Routers, edges and links of a simulated mesh: which word moves in a tick.

A queue's first word moves when all links of its route are free and all queues behind them have
room; it holds that room while it is under way, so that no queue exceeds its depth. The queue that
was served last is considered last. A word that waits for links alone keeps younger ones from them.
"""

from penstock.kernels.compilation import called
from penstock.kernels.mesh_events import wake, wake_at
from penstock.kernels.mesh_tables import (
    BUSY_UNTIL,
    CONSUMER,
    CORES,
    COUNT,
    DEPTH,
    FAULT,
    FAULT_COLOUR,
    FAULT_CORE,
    FEED_END,
    FEED_FIELDS,
    FEED_HOST,
    FEED_KINDS,
    FEED_LINK,
    FEED_NEXT,
    FEED_QUEUE,
    FEED_VALUES,
    FEEDS,
    FREE,
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
    LINK_COUNT,
    LINK_WORDS,
    LINKS,
    NO_ROUTE,
    NOW,
    NOWHERE,
    OUT_LINK,
    OUT_TARGET,
    OUTPUTS,
    PASSED,
    PORTS,
    QUEUE_COLOUR,
    QUEUE_CORE,
    QUEUE_FIELDS,
    QUEUES,
    RAMP_TICKS,
    READY,
    ROUTER_COUNT,
    ROUTER_QUEUES,
    ROUTER_WIDTH,
    SINK_END,
    SINK_FIELDS,
    SINK_FULL,
    SINK_HOST,
    SINK_KINDS,
    SINK_LAST,
    SINK_NEXT,
    SINK_VALUES,
    SINKS,
    THREAD_FIELDS,
    THREAD_ROWS,
    THREADS,
    TRACE_LINKS,
    TRACE_TICKS,
    TRACE_WINDOWS,
    UPSTREAM,
    WORD_ROWS,
    WORD_TICKS,
    WORD_VALUES,
)

_NEVER = (1 << 31) - 1


@called
def push(t, f, queue, first, second, kind, ready):
    """Put a word at the end of a queue that has room, and wake its consumer when it is there."""
    row = t[QUEUES] + queue * QUEUE_FIELDS
    depth, count = t[DEPTH], t[row + COUNT]
    place = t[row + HEAD] + count
    if place >= depth:
        place -= depth
    word = 2 * (queue * depth + place)
    f[t[WORD_VALUES] + word] = first
    f[t[WORD_VALUES] + word + 1] = second
    t[t[WORD_ROWS] + word + READY] = ready
    t[t[WORD_ROWS] + word + KIND] = kind
    count += 1
    t[row + COUNT] = count
    if count > t[row + GREATEST]:
        t[row + GREATEST] = count
    if count > 1:
        return
    consumer, cores = t[row + CONSUMER], t[CORES]
    if consumer >= cores:
        thread = t[THREAD_ROWS] + (consumer - cores) * THREAD_FIELDS
        if t[thread + BUSY_UNTIL] > ready:
            return  # it looks for words when it is no longer busy
    if ready > t[NOW]:
        wake_at(t, consumer, ready)
    else:
        wake(t, consumer)


@called
def pop(t, queue):
    """Take the first word of a queue; who waits for room is woken."""
    row = t[QUEUES] + queue * QUEUE_FIELDS
    head = t[row + HEAD] + 1
    t[row + HEAD] = 0 if head == t[DEPTH] else head
    if t[row + COUNT] == t[DEPTH]:
        wake(t, t[row + UPSTREAM])
    t[row + COUNT] -= 1
    t[row + PASSED] += 1
    if t[LAST_CHANGE] < t[NOW]:
        t[LAST_CHANGE] = t[NOW]


@called
def use_link(t, link):
    """Occupy a link for one word."""
    row = t[LINKS] + 2 * link
    t[row + FREE] = t[NOW] + t[WORD_TICKS]
    t[row + LINK_WORDS] += 1
    span = t[TRACE_TICKS]
    if span and t[NOW] // span < t[TRACE_WINDOWS]:
        t[t[TRACE_LINKS] + t[NOW] // span * t[LINK_COUNT] + link] += 1


@called
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
    f[t[SINK_VALUES] + 2 * place] = first
    f[t[SINK_VALUES] + 2 * place + 1] = second
    t[t[SINK_KINDS] + place] = kind
    t[row + SINK_NEXT] = place + 1
    there = t[NOW] + t[HOP_TICKS]
    t[row + SINK_LAST] = there
    if t[LAST_CHANGE] < there:
        t[LAST_CHANGE] = there
    if t[row + SINK_HOST]:
        use_host(t, HOST_OUT)


@called
def free_from(t, router, row):
    """Return when all links of a route are free, and a mask of their sides; -1 if there is no room
    behind one of them, or after a fault."""
    depth = t[DEPTH]
    free, ports = t[NOW], 0
    for output in range(t[row + OUTPUTS]):
        link, target = t[row + OUT_LINK + 2 * output], t[row + OUT_TARGET + 2 * output]
        if target >= 0:
            if t[t[QUEUES] + target * QUEUE_FIELDS + COUNT] >= depth:
                return -1, 0
        elif target == NOWHERE:
            t[FAULT] = NO_ROUTE
            t[FAULT_CORE] = link
            t[FAULT_COLOUR] = t[row + QUEUE_COLOUR]
            return -1, 0
        else:
            sink = t[SINKS] + (-2 - target) * SINK_FIELDS
            if t[sink + SINK_NEXT] >= t[sink + SINK_END]:
                t[FAULT] = SINK_FULL
                t[FAULT_CORE] = t[row + QUEUE_CORE]
                t[FAULT_COLOUR] = t[row + QUEUE_COLOUR]
                return -1, 0
            if t[sink + SINK_HOST]:
                free = max(free, t[HOST_OUT])
        free = max(free, t[t[LINKS] + 2 * link + FREE])
        ports |= 1 << (link - router * PORTS)
    return free, ports


@called
def send_on(t, f, queue):
    """Move the first word of a queue over all links of its route."""
    row = t[QUEUES] + queue * QUEUE_FIELDS
    word = 2 * (queue * t[DEPTH] + t[row + HEAD])
    first, second = f[t[WORD_VALUES] + word], f[t[WORD_VALUES] + word + 1]
    kind = t[t[WORD_ROWS] + word + KIND]
    for output in range(t[row + OUTPUTS]):
        target = t[row + OUT_TARGET + 2 * output]
        use_link(t, t[row + OUT_LINK + 2 * output])
        if target >= 0:
            to_core = t[t[QUEUES] + target * QUEUE_FIELDS + CONSUMER] >= t[CORES]
            time = t[RAMP_TICKS] if to_core else t[HOP_TICKS]
            push(t, f, target, first, second, kind, t[NOW] + time)
        else:
            deliver(t, f, -2 - target, first, second, kind)
    pop(t, queue)


@called
def step_router(t, f, router):
    """Move the words that can move, and have the router woken when a link or a word is ready."""
    now = t[NOW]
    later = _NEVER
    claimed = 0
    served = 0
    order = t[ROUTER_QUEUES] + router * t[ROUTER_WIDTH]
    count = t[t[ROUTER_COUNT] + router]
    last = order + t[ROUTER_WIDTH] - 1
    for number in range(count):
        queue = t[order + number]
        if served:
            t[order + number - served] = queue
        row = t[QUEUES] + queue * QUEUE_FIELDS
        if t[row + COUNT] == 0:
            continue
        ready = t[t[WORD_ROWS] + 2 * (queue * t[DEPTH] + t[row + HEAD]) + READY]
        if ready > now:
            later = min(later, ready)
            continue
        free, ports = free_from(t, router, row)
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
        send_on(t, f, queue)
        if t[row + COUNT]:
            ready = t[t[WORD_ROWS] + 2 * (queue * t[DEPTH] + t[row + HEAD]) + READY]
            later = min(later, max(ready, now + t[WORD_TICKS]))
        # Served queues go to the end of the order: kept in the last places of the row till then.
        t[last - served] = queue
        served += 1
    for number in range(served):
        t[order + count - served + number] = t[last - number]
    if later < _NEVER:
        wake_at(t, router, later)


@called
def step_feed(t, f, feed):
    """Let the next word of a stream enter at the edge, if link, host and queue allow it."""
    row = t[FEEDS] + feed * FEED_FIELDS
    place = t[row + FEED_NEXT]
    if place >= t[row + FEED_END]:
        return
    now, queue = t[NOW], t[row + FEED_QUEUE]
    entity = t[CORES] * (1 + THREADS) + feed
    if t[t[QUEUES] + queue * QUEUE_FIELDS + COUNT] >= t[DEPTH]:
        return  # woken when the queue has room
    time = t[t[LINKS] + 2 * t[row + FEED_LINK] + FREE]
    if t[row + FEED_HOST]:
        time = max(time, t[HOST_IN])
    if time > now:
        wake_at(t, entity, time)
        return
    use_link(t, t[row + FEED_LINK])
    if t[row + FEED_HOST]:
        use_host(t, HOST_IN)
    values = t[FEED_VALUES] + 2 * place
    kind = t[t[FEED_KINDS] + place]
    push(t, f, queue, f[values], f[values + 1], kind, now + t[HOP_TICKS])
    t[row + FEED_NEXT] = place + 1
    if place + 1 < t[row + FEED_END]:
        wake_at(t, entity, now + t[WORD_TICKS])
