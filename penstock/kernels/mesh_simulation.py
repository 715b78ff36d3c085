"""The simulation of a mesh, tick by tick: it skips ticks and cores in which nothing happens."""

from penstock.kernels.compilation import called, serial_kernel
from penstock.kernels.mesh_events import account, remove, wake, wake_at
from penstock.kernels.mesh_routers import step_feed, step_router
from penstock.kernels.mesh_tables import (
    AFTER,
    BUCKET_FIRST,
    CORE_FIELDS,
    CORE_ROWS,
    CORES,
    DUE,
    ENTITIES,
    EVENT_FIELDS,
    EVENT_ROWS,
    EVENT_TURN,
    EVENT_TURNS,
    EVENTS,
    FAR_COUNT,
    FAULT,
    IN_WORK,
    LAST_CHANGE,
    LAST_TICK,
    NEAR_COUNT,
    NOW,
    STATE_SINCE,
    THREADS,
    TOO_LONG,
    WHEEL,
    WORK_COUNT,
    WORK_FIRST,
    WORK_LIST,
)
from penstock.kernels.mesh_threads import step_thread


@called
def serve(t, f):
    """Serve the entities that are due in this tick, and those that they wake in it."""
    entity = t[t[BUCKET_FIRST] + (t[NOW] & (t[WHEEL] - 1))]
    while entity >= 0:
        following = t[t[EVENT_ROWS] + entity * EVENT_FIELDS + AFTER]
        remove(t, entity)
        wake(t, entity)
        entity = following
    cores = t[CORES]
    while t[WORK_COUNT] > 0 and t[FAULT] == 0:
        entity = t[t[WORK_LIST] + t[WORK_FIRST]]
        t[WORK_FIRST] += 1
        if t[WORK_FIRST] > t[ENTITIES]:
            t[WORK_FIRST] = 0
        t[WORK_COUNT] -= 1
        t[t[EVENT_ROWS] + entity * EVENT_FIELDS + IN_WORK] = 0
        t[EVENTS] += 1
        if t[EVENTS] == EVENT_TURN:
            t[EVENTS] = 0
            t[EVENT_TURNS] += 1
        if entity < cores:
            step_router(t, f, entity)
        elif entity < cores * (1 + THREADS):
            step_thread(t, f, entity - cores)
        else:
            step_feed(t, f, entity - cores * (1 + THREADS))


@called
def bring_near(t):
    """Put far events that are within a turn of the wheel onto it."""
    entity = t[t[BUCKET_FIRST] + t[WHEEL]]
    while entity >= 0:
        row = t[EVENT_ROWS] + entity * EVENT_FIELDS
        following, time = t[row + AFTER], t[row + DUE]
        if time - t[NOW] < t[WHEEL]:
            remove(t, entity)
            wake_at(t, entity, time)
        entity = following


@called
def first_far(t):
    """Return the tick of the earliest far event."""
    entity = t[t[BUCKET_FIRST] + t[WHEEL]]
    first = t[t[EVENT_ROWS] + entity * EVENT_FIELDS + DUE]
    while entity >= 0:
        row = t[EVENT_ROWS] + entity * EVENT_FIELDS
        first = min(first, t[row + DUE])
        entity = t[row + AFTER]
    return first


@serial_kernel
def simulate(t, f):
    """Run until nothing can happen any more, a fault, or the last tick allowed.

    What is found is in the tables: times, words, memory, what each thread waits for.

    Args:
        t, f: `MeshTables.integers` and `MeshTables.floats`.
    """
    serve(t, f)
    while t[FAULT] == 0 and t[NEAR_COUNT] + t[FAR_COUNT] > 0:
        if t[NEAR_COUNT] == 0:
            t[NOW] = first_far(t)
            bring_near(t)
        else:
            t[NOW] += 1
            if t[NOW] & (t[WHEEL] - 1) == 0 and t[FAR_COUNT] > 0:
                bring_near(t)
        if t[NOW] > t[LAST_TICK]:
            t[FAULT] = TOO_LONG
        elif t[t[BUCKET_FIRST] + (t[NOW] & (t[WHEEL] - 1))] >= 0:
            serve(t, f)
    if t[FAULT] == 0:
        t[NOW] = t[LAST_CHANGE]
        for core in range(t[CORES]):
            t[NOW] = max(t[NOW], t[t[CORE_ROWS] + core * CORE_FIELDS + STATE_SINCE])
        for core in range(t[CORES]):
            account(t, core, t[NOW])
