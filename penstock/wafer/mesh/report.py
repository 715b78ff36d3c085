"""What a simulation shows: cycles, the states of cores, the words of links, the depth of queues."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.kernels import mesh_tables as tables
from penstock.kernels.mesh_tables import MeshTables
from penstock.wafer.mesh.labels import SIDES, Labels
from penstock.wafer.mesh.ticks import Ticks


@dataclass(frozen=True)
class TraceOptions:
    """How the beginning of a run is recorded: `windows` of `cycles` each, and no more.

    Memory is windows * cores * 32 bytes.
    """

    windows: int = 200
    cycles: int = 10


@dataclass(frozen=True, eq=False)
class MeshTrace:
    """The beginning of a run in windows of equal length.

    Attributes:
        cycles: of a window.
        states: shares of a window [windows, rows, columns, 3], busy, starved and blocked.
        links: words that left each router [windows, rows, columns, 5]: north, east, south, west,
            and to the core.
    """

    cycles: int
    states: np.ndarray
    links: np.ndarray


@dataclass(frozen=True)
class QueueDepth:
    """The greatest number of words that a queue held, with those on their way to it.

    Attributes:
        side: from which its words come, or `core` for the queue between router and core.
    """

    row: int
    column: int
    colour: str
    side: str
    greatest: int
    words: int


@dataclass(frozen=True, eq=False)
class MeshReport:
    """The result of a simulation, in cycles and words. Every number in it is simulated.

    Attributes:
        cycles: from the first event to the last.
        busy, starved, blocked: cycles of each core's compute thread [rows, columns]; their sum is
            `cycles`. Starved cores wait for words or have nothing to do, blocked ones wait for
            room.
        link_words: words that left each router [rows, columns, 5]: north, east, south, west, and
            to the core.
        edge_words: words that entered at the edges.
        link_occupancy: shares of the cycles in which the links were in use, shaped as link_words.
        queues: of all routers and cores.
        words_entered: by feeds and by cores, by colour.
        words_delivered: to cores and to drains, by colour.
        hops: words times links.
        events: times that a router, thread or stream was served.
    """

    cycles: float
    busy: np.ndarray
    starved: np.ndarray
    blocked: np.ndarray
    link_words: np.ndarray
    link_occupancy: np.ndarray
    edge_words: int
    queues: tuple[QueueDepth, ...]
    words_entered: dict[str, int]
    words_delivered: dict[str, int]
    hops: int
    events: int
    trace: MeshTrace | None

    @property
    def greatest_depth(self) -> int:
        """The greatest number of words in any queue."""
        return max((queue.greatest for queue in self.queues), default=0)

    @property
    def busy_share(self) -> float:
        """The share of all cores' cycles in which they computed."""
        return float(self.busy.mean() / self.cycles) if self.cycles else 0.0


def make_report(t: MeshTables, labels: Labels, ticks: Ticks) -> MeshReport:
    """Return the report of a simulation that has ended."""
    shape = (labels.mesh.rows, labels.mesh.columns)
    cores = labels.mesh.cores
    per_cycle = ticks.per_cycle
    total = int(t.clock[tables.NOW])
    own = (
        t.links[: cores * tables.PORTS, tables.LINK_WORDS]
        .reshape(*shape, tables.PORTS)
        .astype(np.int64)
    )
    occupancy = own * int(t.clock[tables.WORD_TICKS]) / max(1, total)
    states = [
        t.cores[:, field].reshape(shape) / per_cycle
        for field in range(tables.STATE_SUMS, tables.STATE_SUMS + 3)
    ]
    entered, delivered = _words_by_colour(t, labels)
    return MeshReport(
        cycles=total / per_cycle,
        busy=states[0],
        starved=states[1],
        blocked=states[2],
        link_words=own,
        link_occupancy=occupancy,
        edge_words=int(t.links[cores * tables.PORTS :, tables.LINK_WORDS].sum()),
        queues=_depths(t, labels),
        words_entered=entered,
        words_delivered=delivered,
        hops=int(t.links[:, tables.LINK_WORDS].sum()),
        events=int(t.clock[tables.EVENTS]) + int(t.clock[tables.EVENT_TURNS]) * tables.EVENT_TURN,
        trace=_trace(t, labels, ticks),
    )


def _depths(t: MeshTables, labels: Labels) -> tuple[QueueDepth, ...]:
    columns = labels.mesh.columns
    sides = (*SIDES, "core")
    return tuple(
        QueueDepth(
            row=core // columns,
            column=core % columns,
            colour=labels.colours[colour],
            side=sides[side],
            greatest=greatest,
            words=words,
        )
        for core, colour, side, greatest, words in t.queues[
            :,
            [
                tables.QUEUE_CORE,
                tables.QUEUE_COLOUR,
                tables.QUEUE_INPUT,
                tables.GREATEST,
                tables.PASSED,
            ],
        ].tolist()
    )


def _words_by_colour(t: MeshTables, labels: Labels) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many words entered and left the network of routers, by colour."""
    entered = dict.fromkeys(labels.colours, 0)
    delivered = dict.fromkeys(labels.colours, 0)
    colour_of, side_of = t.queues[:, tables.QUEUE_COLOUR], t.queues[:, tables.QUEUE_INPUT]
    for number, name in enumerate(labels.colours):
        passed = t.queues[:, tables.PASSED] * (colour_of == number)
        entered[name] = int(passed[side_of == tables.RAMP].sum())
        delivered[name] = int(passed[side_of == tables.PORTS].sum())
    for feed in t.feeds:
        colour = int(t.queues[feed[tables.FEED_QUEUE], tables.QUEUE_COLOUR])
        entered[labels.colours[colour]] += int(feed[tables.FEED_NEXT] - feed[tables.FEED_START])
    for sink in t.sinks:
        colour = int(sink[tables.SINK_COLOUR])
        delivered[labels.colours[colour]] += int(sink[tables.SINK_NEXT] - sink[tables.SINK_START])
    return entered, delivered


def _trace(t: MeshTables, labels: Labels, ticks: Ticks) -> MeshTrace | None:
    span = int(t.clock[tables.TRACE_TICKS])
    if not span:
        return None
    shape = (len(t.trace_states), labels.mesh.rows, labels.mesh.columns)
    own = t.trace_links[:, : labels.mesh.cores * tables.PORTS]
    return MeshTrace(
        cycles=span // ticks.per_cycle,
        states=t.trace_states.reshape(*shape, 3) / span,
        links=own.reshape(*shape, tables.PORTS).copy(),
    )
