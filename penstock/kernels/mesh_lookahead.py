"""What entities that are served soon need is brought into the processor's cache meanwhile.

Nearly all cores of a mesh are active in each cycle, and the tables of a large one exceed the cache
of a processor core. An entity's part of its block is fetched some turns before its own, and a few
turns later the queues that a router's block names. This changes no result.
"""

from penstock.kernels.compilation import called, inlined
from penstock.kernels.mesh_tables import (
    BLOCK_SIZE,
    BLOCKS,
    CORE_AT,
    CORE_ENTITIES,
    CORES,
    EVENT_FIELDS,
    EVENT_ROWS,
    LINE,
    ORDER,
    QUEUE_COUNT,
    THREADS_AT,
    WORK_COUNT,
    WORK_FIRST,
    WORK_LIST,
    WORK_SIZE,
)
from penstock.kernels.pointers import prefetch

_BLOCK_TURNS, _QUEUE_TURNS = 10, 4  # a few hundred nanoseconds
_MOST_QUEUES = 6  # of a router that are fetched


@inlined
def entity_after(t, turns):
    """Return the number of the entity that is served so many turns later."""
    place = t[WORK_FIRST] + turns
    if place >= t[WORK_SIZE]:
        place -= t[WORK_SIZE]
    return (t[t[WORK_LIST] + place] - t[EVENT_ROWS]) // EVENT_FIELDS


@inlined
def fetch_block(t, number):
    """Fetch the lines of its block that an entity needs."""
    core, which = number // CORE_ENTITIES, number % CORE_ENTITIES
    if core < t[CORES]:
        block = t[BLOCKS] + core * t[BLOCK_SIZE]
        if which == 0:
            prefetch(t, block)
        else:
            prefetch(t, block + t[THREADS_AT] + (which - 1) * LINE)
            prefetch(t, block + t[CORE_AT])
            prefetch(t, block + t[CORE_AT] + LINE)


@inlined
def fetch_queues(t, number):
    """Fetch the queues of a router, whose block has come."""
    core = number // CORE_ENTITIES
    if number % CORE_ENTITIES == 0 and core < t[CORES]:
        block = t[BLOCKS] + core * t[BLOCK_SIZE]
        order = block + ORDER
        for place in range(order, order + min(t[block + QUEUE_COUNT], _MOST_QUEUES)):
            prefetch(t, t[place])
            prefetch(t, t[place] + LINE)


@called
def look_ahead(t):
    """Fetch what two of the entities need whose turns come soon."""
    if t[WORK_COUNT] > _BLOCK_TURNS:
        fetch_block(t, entity_after(t, _BLOCK_TURNS))
        fetch_queues(t, entity_after(t, _QUEUE_TURNS))
