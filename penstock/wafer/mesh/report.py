"""What a simulation shows: cycles, the states of cores, the words of links, the depth of queues."""

from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError
from penstock.kernels import mesh_tables as tables
from penstock.kernels.mesh_tables import MeshTables
from penstock.wafer.mesh.labels import SIDES, Labels
from penstock.wafer.mesh.ticks import Ticks


@dataclass(frozen=True)
class TraceOptions:
    """How the beginning of a run is recorded: `windows` of `cycles` each, and no more.

    Memory is windows * cores * 32 bytes.

    Raises:
        ConfigError: one of them is not a whole number from 1 up.
    """

    windows: int = 200
    cycles: int = 10

    def __post_init__(self) -> None:
        for name in ("windows", "cycles"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"trace: expected {name} from 1 up, got {value!r}")


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
    per_cycle = ticks.per_cycle
    total = int(t.clock[tables.NOW])
    own = _link_words(t, labels).reshape(*shape, tables.PORTS)
    edge_words = int((t.feeds[:, tables.FEED_NEXT] - t.feeds[:, tables.FEED_START]).sum())
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
        edge_words=edge_words,
        queues=_depths(t, labels),
        words_entered=entered,
        words_delivered=delivered,
        hops=int(own.sum()) + edge_words,
        events=int(t.clock[tables.EVENTS]) + int(t.clock[tables.EVENT_TURNS]) * tables.EVENT_TURN,
        trace=_trace(t, labels, ticks),
    )


def _link_words(t: MeshTables, labels: Labels) -> np.ndarray:
    """Return the words that left each router [cores, PORTS]: those of all queues routed there."""
    found = np.zeros(labels.mesh.cores * tables.PORTS, np.int64)
    first, size = int(t.integers[tables.BLOCKS]), int(t.clock[tables.BLOCK_SIZE])
    most = (int(t.clock[tables.WORDS_AT]) - tables.OUT_LINK) // 2
    for output in range(most):
        rows = t.queues[t.queues[:, tables.OUTPUTS] > output]
        cores, ports = np.divmod(
            rows[:, tables.OUT_LINK + 2 * output].astype(np.int64) - first, size
        )
        np.add.at(found, cores * tables.PORTS + ports, rows[:, tables.PASSED])
    return found


def _depths(t: MeshTables, labels: Labels) -> tuple[QueueDepth, ...]:
    columns = labels.mesh.columns
    sides = (*SIDES, "core")
    found = np.concatenate((labels.queues, t.queues[:, [tables.GREATEST, tables.PASSED]]), axis=1)
    return tuple(
        QueueDepth(
            core // columns, core % columns, labels.colours[colour], sides[side], most, words
        )
        for core, colour, side, most, words in found.tolist()
    )


def _words_by_colour(t: MeshTables, labels: Labels) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many words entered and left the network of routers, by colour."""
    _, colours, sides = labels.queues.T
    count = len(labels.colours)
    passed = t.queues[:, tables.PASSED]
    entered, delivered = (
        np.bincount(colours[sides == side], passed[sides == side], count)
        for side in (tables.RAMP, tables.PORTS)
    )
    queue_of = (t.feeds[:, tables.FEED_QUEUE] - int(t.integers[tables.QUEUES])) // int(
        t.clock[tables.QUEUE_SIZE]
    )
    np.add.at(
        entered,
        colours[queue_of],
        t.feeds[:, tables.FEED_NEXT] - t.feeds[:, tables.FEED_START],
    )
    np.add.at(
        delivered,
        t.sinks[:, tables.SINK_COLOUR],
        t.sinks[:, tables.SINK_NEXT] - t.sinks[:, tables.SINK_START],
    )
    return (
        dict(zip(labels.colours, entered.astype(int).tolist(), strict=True)),
        dict(zip(labels.colours, delivered.astype(int).tolist(), strict=True)),
    )


def _trace(t: MeshTables, labels: Labels, ticks: Ticks) -> MeshTrace | None:
    span = int(t.clock[tables.TRACE_TICKS])
    if not span:
        return None
    shape = (len(t.trace_states), labels.mesh.rows, labels.mesh.columns)
    return MeshTrace(
        cycles=span // ticks.per_cycle,
        states=t.trace_states.reshape(*shape, 3) / span,
        links=t.trace_links.reshape(*shape, tables.PORTS).copy(),
    )
