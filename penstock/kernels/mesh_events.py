"""When the entities of a simulated mesh are woken: a wheel of ticks, and a list of far events.

Each entity has at most one event; an earlier one replaces it. Events of one tick are served in the
order in which they were made, so that a run depends on nothing but its tables.
"""

from penstock.kernels.compilation import called
from penstock.kernels.mesh_tables import (
    AFTER,
    BEFORE,
    BUCKET,
    BUCKET_FIRST,
    BUCKET_LAST,
    CORE_FIELDS,
    CORE_ROWS,
    CORES,
    DUE,
    ENTITIES,
    EVENT_FIELDS,
    EVENT_ROWS,
    FAR_COUNT,
    IN_WORK,
    NEAR_COUNT,
    NOW,
    STATE,
    STATE_SINCE,
    STATE_SUMS,
    TRACE_STATES,
    TRACE_TICKS,
    TRACE_WINDOWS,
    WHEEL,
    WORK_COUNT,
    WORK_FIRST,
    WORK_LIST,
)


@called
def wake(t, entity):
    """Have an entity served in this tick."""
    row = t[EVENT_ROWS] + entity * EVENT_FIELDS
    if t[row + IN_WORK]:
        return
    t[row + IN_WORK] = 1
    place = t[WORK_FIRST] + t[WORK_COUNT]
    if place > t[ENTITIES]:
        place -= t[ENTITIES] + 1
    t[t[WORK_LIST] + place] = entity
    t[WORK_COUNT] += 1


@called
def remove(t, entity):
    """Take back the event of an entity that has one."""
    rows = t[EVENT_ROWS]
    row = rows + entity * EVENT_FIELDS
    bucket, before, after = t[row + BUCKET], t[row + BEFORE], t[row + AFTER]
    if before >= 0:
        t[rows + before * EVENT_FIELDS + AFTER] = after
    else:
        t[t[BUCKET_FIRST] + bucket] = after
    if after >= 0:
        t[rows + after * EVENT_FIELDS + BEFORE] = before
    else:
        t[t[BUCKET_LAST] + bucket] = before
    t[row + BUCKET] = -1
    if bucket == t[WHEEL]:
        t[FAR_COUNT] -= 1
    else:
        t[NEAR_COUNT] -= 1


@called
def wake_at(t, entity, time):
    """Have an entity served at a later tick, or before if it has an earlier event."""
    rows = t[EVENT_ROWS]
    row = rows + entity * EVENT_FIELDS
    if t[row + BUCKET] >= 0:
        if t[row + DUE] <= time:
            return
        remove(t, entity)
    wheel = t[WHEEL]
    if time - t[NOW] < wheel:
        bucket = time & (wheel - 1)
        t[NEAR_COUNT] += 1
    else:
        bucket = wheel
        t[FAR_COUNT] += 1
    last = t[t[BUCKET_LAST] + bucket]
    t[row + BEFORE] = last
    t[row + AFTER] = -1
    if last >= 0:
        t[rows + last * EVENT_FIELDS + AFTER] = entity
    else:
        t[t[BUCKET_FIRST] + bucket] = entity
    t[t[BUCKET_LAST] + bucket] = entity
    t[row + BUCKET] = bucket
    t[row + DUE] = time


@called
def account(t, core, now):
    """Add the ticks up to now to the sums of a core's state, and to the windows of the trace."""
    row = t[CORE_ROWS] + core * CORE_FIELDS
    since, state = t[row + STATE_SINCE], t[row + STATE]
    t[row + STATE_SINCE] = now
    t[row + STATE_SUMS + state] += now - since
    span = t[TRACE_TICKS]
    if span == 0:
        return
    window = since // span
    while since < now and window < t[TRACE_WINDOWS]:
        end = min(now, (window + 1) * span)
        t[t[TRACE_STATES] + (window * t[CORES] + core) * 3 + state] += end - since
        since = end
        window += 1


@called
def enter_state(t, core, state):
    """Change the state of a core."""
    row = t[CORE_ROWS] + core * CORE_FIELDS
    if t[row + STATE] != state:
        account(t, core, t[NOW])
        t[row + STATE] = state
