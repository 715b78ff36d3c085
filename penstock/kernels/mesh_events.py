"""When the entities of a simulated mesh are woken: a wheel of ticks, and a list of far events.

Each entity has at most one event; an earlier one replaces it. Events of one tick are served in the
order in which they were made, so that a run depends on nothing but its tables.
"""

from penstock.kernels.compilation import called, inlined
from penstock.kernels.mesh_tables import (
    AFTER,
    BEFORE,
    BUCKET_FIELDS,
    BUCKETS,
    DUE,
    FAR_COUNT,
    FIRST,
    IN_FAR,
    IN_NEAR,
    IN_WORK,
    LAST,
    NEAR_COUNT,
    NOW,
    STATUS,
    WHEEL,
    WORK_COUNT,
    WORK_FIRST,
    WORK_LIST,
    WORK_SIZE,
)


@inlined
def wake(t, event):
    """Have an entity served in this tick."""
    if t[event + STATUS] & IN_WORK == 0:
        t[event + STATUS] |= IN_WORK
        place = t[WORK_FIRST] + t[WORK_COUNT]
        if place >= t[WORK_SIZE]:
            place -= t[WORK_SIZE]
        t[t[WORK_LIST] + place] = event
        t[WORK_COUNT] += 1


@inlined
def bucket_of(t, time):
    """Return the bucket of a tick; that of far events is behind the wheel."""
    wheel = t[WHEEL]
    place = time & (wheel - 1) if time - t[NOW] < wheel else wheel
    return t[BUCKETS] + place * BUCKET_FIELDS


@called
def remove(t, event):
    """Take back the event of an entity that has one."""
    before, after = t[event + BEFORE], t[event + AFTER]
    if t[event + STATUS] & IN_FAR:
        bucket = t[BUCKETS] + t[WHEEL] * BUCKET_FIELDS
        t[FAR_COUNT] -= 1
    else:
        bucket = t[BUCKETS] + (t[event + DUE] & (t[WHEEL] - 1)) * BUCKET_FIELDS
        t[NEAR_COUNT] -= 1
    if before >= 0:
        t[before + AFTER] = after
    else:
        t[bucket + FIRST] = after
    if after >= 0:
        t[after + BEFORE] = before
    else:
        t[bucket + LAST] = before
    t[event + STATUS] &= IN_WORK


@called
def wake_at(t, event, time):
    """Have an entity served at a later tick, or before if it has an earlier event."""
    if t[event + STATUS] & (IN_NEAR | IN_FAR):
        if t[event + DUE] <= time:
            return
        remove(t, event)
    bucket = bucket_of(t, time)
    if time - t[NOW] < t[WHEEL]:
        t[event + STATUS] |= IN_NEAR
        t[NEAR_COUNT] += 1
    else:
        t[event + STATUS] |= IN_FAR
        t[FAR_COUNT] += 1
    last = t[bucket + LAST]
    t[event + BEFORE] = last
    t[event + AFTER] = -1
    t[event + DUE] = time
    if last >= 0:
        t[last + AFTER] = event
    else:
        t[bucket + FIRST] = event
    t[bucket + LAST] = event


@called
def wake_due(t):
    """Have the entities served whose events are due in this tick."""
    bucket = t[BUCKETS] + (t[NOW] & (t[WHEEL] - 1)) * BUCKET_FIELDS
    event = t[bucket + FIRST]
    t[bucket + FIRST] = -1
    t[bucket + LAST] = -1
    while event >= 0:
        t[event + STATUS] &= IN_WORK
        t[NEAR_COUNT] -= 1
        wake(t, event)
        event = t[event + AFTER]


@called
def bring_near(t):
    """Put far events that are within a turn of the wheel onto it."""
    event = t[t[BUCKETS] + t[WHEEL] * BUCKET_FIELDS + FIRST]
    while event >= 0:
        following, time = t[event + AFTER], t[event + DUE]
        if time - t[NOW] < t[WHEEL]:
            remove(t, event)
            wake_at(t, event, time)
        event = following


@called
def first_far(t):
    """Return the tick of the earliest far event."""
    event = t[t[BUCKETS] + t[WHEEL] * BUCKET_FIELDS + FIRST]
    first = t[event + DUE]
    while event >= 0:
        first = min(first, t[event + DUE])
        event = t[event + AFTER]
    return first
