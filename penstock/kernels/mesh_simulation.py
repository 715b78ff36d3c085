"""The simulation of a mesh, tick by tick: it skips ticks and cores in which nothing happens."""

from penstock.kernels.compilation import called, serial_kernel
from penstock.kernels.mesh_events import bring_near, first_far, wake_due
from penstock.kernels.mesh_lookahead import look_ahead
from penstock.kernels.mesh_routers import step_feed, step_router
from penstock.kernels.mesh_states import account
from penstock.kernels.mesh_tables import (
    BLOCK_SIZE,
    BLOCKS,
    BUCKET_FIELDS,
    BUCKETS,
    CORE_AT,
    CORE_ENTITIES,
    CORES,
    ENDLESS_TICK,
    EVENT_FIELDS,
    EVENT_ROWS,
    EVENT_TURN,
    EVENT_TURNS,
    EVENTS,
    FAR_COUNT,
    FAULT,
    FAULT_CORE,
    FEED_FIELDS,
    FEEDS,
    FIRST,
    IN_FAR,
    IN_NEAR,
    LAST_CHANGE,
    LAST_TICK,
    LINE,
    LOOKS_AHEAD,
    NEAR_COUNT,
    NOW,
    STATE_SINCE,
    STATUS,
    THREADS_AT,
    TOO_LONG,
    WHEEL,
    WORK_COUNT,
    WORK_FIRST,
    WORK_LIST,
    WORK_SIZE,
)
from penstock.kernels.mesh_threads import step_thread
from penstock.kernels.pointers import pointer_to

_MOST_EVENTS = 1000  # of an entity in one tick, and a thousand times that


@called
def step(t, f, event):
    """Serve an entity."""
    number = (event - t[EVENT_ROWS]) // EVENT_FIELDS
    core = number // CORE_ENTITIES
    if core >= t[CORES]:
        step_feed(t, f, t[FEEDS] + (number - CORE_ENTITIES * t[CORES]) * FEED_FIELDS)
        return
    block = t[BLOCKS] + core * t[BLOCK_SIZE]
    which = number % CORE_ENTITIES
    if which == 0:
        step_router(t, f, block)
    else:
        step_thread(t, f, block + t[THREADS_AT] + (which - 1) * LINE)


@called
def serve(t, f):
    """Serve the entities that are due in this tick and those that they wake in it, and return how
    often one was served."""
    served, most = 0, _MOST_EVENTS * (t[WORK_SIZE] + _MOST_EVENTS)
    while t[WORK_COUNT] > 0 and t[FAULT] == 0:
        event = t[t[WORK_LIST] + t[WORK_FIRST]]
        t[WORK_FIRST] += 1
        if t[WORK_FIRST] == t[WORK_SIZE]:
            t[WORK_FIRST] = 0
        t[WORK_COUNT] -= 1
        t[event + STATUS] &= IN_NEAR | IN_FAR
        if t[LOOKS_AHEAD]:
            look_ahead(t)
        step(t, f, event)
        served += 1
        if served == most and t[FAULT] == 0:
            t[FAULT] = ENDLESS_TICK
            t[FAULT_CORE] = min(
                (event - t[EVENT_ROWS]) // (EVENT_FIELDS * CORE_ENTITIES), t[CORES] - 1
            )
    events = t[EVENTS] + served
    t[EVENTS] = events % EVENT_TURN
    t[EVENT_TURNS] += events // EVENT_TURN
    return served


@called
def finish(t):
    """Account the states of all cores up to the last change."""
    t[NOW] = t[LAST_CHANGE]
    first, size = t[BLOCKS], t[BLOCK_SIZE]
    end = first + t[CORES] * size
    for block in range(first, end, size):
        t[NOW] = max(t[NOW], t[block + t[CORE_AT] + STATE_SINCE])
    for block in range(first, end, size):
        account(t, block, t[NOW])


@serial_kernel
def simulate(integers, floats, most_events):
    """Run until nothing can happen any more, a fault, or the last tick allowed.

    What is found is in the tables: times, words, memory, what each thread waits for.

    Args:
        integers, floats: those of `MeshTables`.
        most_events: after which the call returns, at the end of a tick.

    Returns:
        Whether the run has ended; it goes on with the next call otherwise.
    """
    t, f = pointer_to(integers), pointer_to(floats)
    events = serve(t, f)
    while t[FAULT] == 0 and t[NEAR_COUNT] + t[FAR_COUNT] > 0:
        if events >= most_events:
            return False
        if t[NEAR_COUNT] == 0:
            t[NOW] = first_far(t)
            bring_near(t)
        else:
            t[NOW] += 1
            if t[NOW] & (t[WHEEL] - 1) == 0 and t[FAR_COUNT] > 0:
                bring_near(t)
        if t[NOW] > t[LAST_TICK]:
            t[FAULT] = TOO_LONG
        elif t[t[BUCKETS] + (t[NOW] & (t[WHEEL] - 1)) * BUCKET_FIELDS + FIRST] >= 0:
            wake_due(t)
            events += serve(t, f)
    if t[FAULT] == 0:
        finish(t)
    return True
