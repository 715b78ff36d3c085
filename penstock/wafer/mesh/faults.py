"""What went wrong in a simulation, in words: where, with which colour, in which cycle."""

from collections.abc import Iterator

import numpy as np

from penstock.errors import MeshError, few
from penstock.kernels import mesh_tables as tables
from penstock.kernels.mesh_tables import MeshTables
from penstock.wafer.mesh.labels import KINDS, SIDES, THREAD_NAMES, Labels
from penstock.wafer.mesh.ticks import Ticks


def check_run(t: MeshTables, labels: Labels, ticks: Ticks) -> None:
    """Raise what a simulation ended with, if it did not end well.

    Raises:
        MeshError: a fault of the program, or a deadlock.
    """
    fault = int(t.clock[tables.FAULT])
    if fault:
        raise MeshError(_fault_text(t, labels, ticks, fault))
    waiting = list(_waiting(t, labels, ticks))
    if waiting:
        cycle = t.clock[tables.NOW] / ticks.per_cycle
        raise MeshError(
            f"deadlock in cycle {cycle:,.10g}: nothing can move any more; {few(waiting, 4)}"
        )


def _fault_text(t: MeshTables, labels: Labels, ticks: Ticks, fault: int) -> str:
    clock = t.clock
    core, colour = int(clock[tables.FAULT_CORE]), int(clock[tables.FAULT_COLOUR])
    row, value = int(clock[tables.FAULT_ROW]), int(clock[tables.FAULT_VALUE])
    instruction = (row - int(t.integers[tables.CODE])) // tables.CODE_FIELDS
    if fault in (tables.NO_ROUTE, tables.SINK_FULL):
        colour = int(labels.queues[queue_number(t, row), 1])
    when = f"cycle {t.clock[tables.NOW] / ticks.per_cycle:,.10g}"
    if fault == tables.NO_ROUTE:
        router, port = divmod(core, tables.PORTS)
        if port == tables.RAMP:
            return (
                f"{labels.core(router)}, {labels.colour(colour)}, {when}: a word goes to the core, "
                "which has no task and no receive for that colour; add one or take the ramp out "
                "of the route"
            )
        columns = labels.mesh.columns
        beside = router + (-columns, 1, columns, -1)[port]
        return (
            f"{labels.core(beside)}, {labels.colour(colour)}, {when}: a word arrives from the "
            f"{SIDES[(port + 2) % 4]}, where no route takes it; route the colour there or end the "
            f"route of {labels.core(router)} before"
        )
    where = f"{labels.core(core)}"
    if fault == tables.NO_TASK:
        return (
            f"{where}, {labels.colour(colour)}, {when}: a {KINDS[row]} word arrives that no task "
            f"takes; give the colour a {KINDS[row]} task or do not send such words"
        )
    if fault == tables.BAD_ADDRESS:
        what = labels.instructions[instruction]
        return (
            f"{where}, {when}: {what} begins at element {value}, outside its array; "
            "check the index that the word carries"
        )
    if fault == tables.ENDLESS_TASK:
        return (
            f"{where}, {when}: a task runs a million instructions without taking time, at "
            f"{labels.instructions[instruction]}; its loop never ends"
        )
    if fault == tables.SINK_FULL:
        return (
            f"{where}, {labels.colour(colour)}, {when}: more words leave the mesh than the drain "
            "expects; correct its number of words"
        )
    if fault == tables.ENDLESS_TICK:
        return (
            f"{where}, {when}: threads wake each other without taking time, again and again; let "
            "one of their instructions take a cycle"
        )
    if int(clock[tables.LAST_TICK]) == tables.MOST_TICKS:
        most = tables.MOST_TICKS // ticks.per_cycle
        return (
            f"{when}: the program is still running; a run has at most {most:,} cycles of "
            f"{ticks.per_cycle} ticks"
        )
    return f"{when}: the program is still running; give most_cycles a larger value"


def _waiting(t: MeshTables, labels: Labels, ticks: Ticks) -> Iterator[str]:
    """Yield what waits although nothing can happen any more."""
    threads = t.threads
    for core, which in np.argwhere(threads[:, :, tables.PC] >= 0).tolist():
        row = threads[core, which]
        on = int(row[tables.WAIT_ON])
        what = {
            tables.FOR_WORD: lambda on=on: f"a word of {labels.colour(on)}",
            tables.FOR_ROOM: lambda on=on: f"room to send {labels.colour(on)}",
            tables.FOR_COUNTER: lambda on=on: f"counter {labels.counters[on]!r}",
        }[int(row[tables.WAITS])]()
        yield (
            f"{labels.core(core)} ({THREAD_NAMES[which]}) waits for {what} since cycle "
            f"{row[tables.SINCE] / ticks.per_cycle:,.10g}"
        )
    for feed in np.flatnonzero(t.feeds[:, tables.FEED_NEXT] < t.feeds[:, tables.FEED_END]).tolist():
        core, colour, _ = labels.queues[queue_number(t, int(t.feeds[feed, tables.FEED_QUEUE]))]
        left = int(t.feeds[feed, tables.FEED_END] - t.feeds[feed, tables.FEED_NEXT])
        yield (
            f"the stream of {labels.colour(int(colour))} into {labels.core(int(core))} has {left} "
            "words that found no room"
        )
    held = np.flatnonzero(t.queues[:, tables.COUNT] > 0)
    for number in held[np.argsort(labels.queues[held, 1], kind="stable")].tolist():
        core, colour, _ = labels.queues[number]
        count = int(t.queues[number, tables.COUNT])
        yield f"{count} words of {labels.colour(int(colour))} wait at {labels.core(int(core))}"
    unfilled = t.sinks[:, tables.SINK_NEXT] < t.sinks[:, tables.SINK_END]
    for number in np.flatnonzero(unfilled).tolist():
        sink = t.sinks[number]
        yield f"drain {number} still expects {sink[tables.SINK_END] - sink[tables.SINK_NEXT]} words"


def queue_number(t: MeshTables, place: int) -> int:
    """Return the number of the queue at a place of the tables."""
    return (place - int(t.integers[tables.QUEUES])) // int(t.clock[tables.QUEUE_SIZE])
