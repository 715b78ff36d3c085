"""Rows of entities that are served soon are brought into the processor's cache.

All cores of a mesh are active in most cycles, and a large mesh is larger than that cache. An entity
that waits in the list of work has its block fetched first, then the queues that the block names,
then the queues behind those.
"""

from penstock.kernels.compilation import called
from penstock.kernels.mesh_tables import (
    BLOCK_SIZE,
    BLOCKS,
    CORE_AT,
    CORE_ENTITIES,
    CORE_QUEUES_AT,
    CORES,
    COUNT,
    EVENT_FIELDS,
    EVENT_ROWS,
    FIRST_TASK,
    IN_COLOUR,
    LINE,
    OP,
    ORDER,
    OUT_COLOUR,
    OUT_TARGET,
    OUTPUTS,
    PC,
    QUEUE_COUNT,
    RAMP_QUEUES_AT,
    STREAM,
    TASK_QUEUE,
    TASKS,
    THREADS_AT,
    WORK_COUNT,
    WORK_FIRST,
    WORK_LIST,
    WORK_SIZE,
)
from penstock.kernels.pointers import prefetch

BLOCKS_AHEAD, QUEUES_AHEAD, TARGETS_AHEAD = 12, 7, 3
"""How many entities before its own turn an entity's rows are fetched."""


@called
def ahead(t, turns):
    """Return the number of the entity whose turn comes so many later; -1 if none does."""
    if t[WORK_COUNT] <= turns:
        return -1
    place = t[WORK_FIRST] + turns
    if place >= t[WORK_SIZE]:
        place -= t[WORK_SIZE]
    number = (t[t[WORK_LIST] + place] - t[EVENT_ROWS]) // EVENT_FIELDS
    return number if number < CORE_ENTITIES * t[CORES] else -1


@called
def fetch_block(t):
    """Fetch the part of a block that an entity needs."""
    number = ahead(t, BLOCKS_AHEAD)
    if number < 0:
        return
    block = t[BLOCKS] + number // CORE_ENTITIES * t[BLOCK_SIZE]
    which = number % CORE_ENTITIES
    if which == 0:
        prefetch(t, block)
        return
    prefetch(t, block + t[THREADS_AT] + (which - 1) * LINE)
    for place in range(block + t[CORE_AT], block + t[BLOCK_SIZE], LINE):
        prefetch(t, place)


@called
def fetch_queue(t, queue):
    """Fetch the first two lines of a queue."""
    prefetch(t, queue)
    prefetch(t, queue + LINE)


@called
def fetch_queues(t):
    """Fetch the queues of an entity."""
    number = ahead(t, QUEUES_AHEAD)
    if number < 0:
        return
    block = t[BLOCKS] + number // CORE_ENTITIES * t[BLOCK_SIZE]
    which = number % CORE_ENTITIES
    if which == 0:
        order = block + ORDER
        for place in range(order, order + min(t[block + QUEUE_COUNT], 6)):
            fetch_queue(t, t[place])
        return
    thread = block + t[THREADS_AT] + (which - 1) * LINE
    row = t[thread + PC]
    if row < 0:
        if t[thread + TASKS] > 0:
            fetch_queue(t, t[t[thread + FIRST_TASK] + TASK_QUEUE])
    elif t[row + OP] == STREAM:
        if t[row + IN_COLOUR] >= 0:
            fetch_queue(t, t[block + t[CORE_QUEUES_AT] + t[row + IN_COLOUR]])
        if t[row + OUT_COLOUR] >= 0:
            fetch_queue(t, t[block + t[RAMP_QUEUES_AT] + t[row + OUT_COLOUR]])


@called
def fetch_targets(t):
    """Fetch the queues to which a router's words go."""
    number = ahead(t, TARGETS_AHEAD)
    if number < 0 or number % CORE_ENTITIES:
        return
    block = t[BLOCKS] + number // CORE_ENTITIES * t[BLOCK_SIZE]
    order = block + ORDER
    for place in range(order, order + min(t[block + QUEUE_COUNT], 6)):
        queue = t[place]
        if t[queue + COUNT]:
            for at in range(queue, queue + 2 * t[queue + OUTPUTS], 2):
                if t[at + OUT_TARGET] >= 0:
                    fetch_queue(t, t[at + OUT_TARGET])


@called
def look_ahead(t):
    """Fetch what the entities need whose turn comes soon."""
    fetch_block(t)
    fetch_queues(t)
    fetch_targets(t)
