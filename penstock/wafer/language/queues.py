"""The queues of a program: one per route of a router, one per core and colour that it takes; and
how they are joined."""

import numpy as np

from penstock.errors import MeshError
from penstock.kernels import mesh_tables as tables
from penstock.kernels.mesh_tables import MeshTables
from penstock.wafer.language.colours import Routes, neighbours, opposite
from penstock.wafer.language.layout import Layout
from penstock.wafer.mesh import SIDES

_TO_CORE = tables.PORTS  # the side of a queue between router and core


class Queues:
    """Which queues there are and who takes their words.

    Attributes:
        consumers: thread of each core that takes a colour [cores, colours]; -1 where none does.
        senders: thread of each core that sends a colour [cores, colours]; -1 where none does.
        numbers: of the queues [cores, colours, PORTS + 1], by side; -1 where there is none.
        places: core, colour and side of each queue [queues, 3]; those of a core follow each other.
    """

    def __init__(self, routes: Routes, layout: Layout) -> None:
        self.routes, self.layout, self.mesh = routes, layout, routes.mesh
        colours = len(routes.colours)
        self.sinks = {
            (sink.colour, sink.core, sink.side): number for number, sink in enumerate(layout.sinks)
        }
        self.consumers = np.full((self.mesh.cores, colours), -1, np.int64)
        self.senders = np.full((self.mesh.cores, colours), -1, np.int64)
        self.outputs = np.zeros((self.mesh.cores, colours, tables.PORTS), np.uint8)
        for number, table in enumerate(routes.outputs):
            self.outputs[:, number] = table
        for placed in layout.codes:
            takes = placed.code.takes | ({placed.colour} if placed.colour >= 0 else set())
            for colour in sorted(takes):
                self._claim(self.consumers, placed.cores, colour, placed.code.thread, "take")
        for placed in layout.codes:
            for colour in sorted(placed.code.sends):
                self._check_sent(placed.cores, colour)
                self._claim(self.senders, placed.cores, colour, placed.code.thread, "send")
        self._check_tasks()
        has = np.concatenate((self.outputs != 0, (self.consumers >= 0)[:, :, None]), axis=2)
        self.places = np.argwhere(has)
        self.numbers = np.full(has.shape, -1, np.int64)
        self.numbers[has] = np.arange(len(self.places))

    # --- checks -----------------------------------------------------------------------------------

    def _claim(
        self, table: np.ndarray, cores: np.ndarray, colour: int, thread: int, verb: str
    ) -> None:
        """Note which thread of some cores takes or sends a colour: one alone may."""
        before = table[cores, colour]
        wrong = np.flatnonzero((before >= 0) & (before != thread))
        if len(wrong):
            what = "take its words" if verb == "take" else "send it"
            raise MeshError(
                f"{self._where(int(cores[wrong[0]]), colour)}: two threads {what}; let one of them "
                "do it"
            )
        table[cores, colour] = thread

    def _check_sent(self, cores: np.ndarray, colour: int) -> None:
        missing = cores[self.outputs[cores, colour, tables.RAMP] == 0]
        if len(missing):
            raise MeshError(
                f"{self._where(int(missing[0]), colour)}: the core sends it, but no route takes it "
                "from the ramp"
            )

    def _check_tasks(self) -> None:
        """Refuse tasks that no word can start."""
        arrives = np.any(self.outputs >> tables.RAMP & 1, axis=2)  # [cores, colours]
        for placed in self.layout.codes:
            if placed.colour < 0:
                continue
            wrong = placed.cores[~arrives[placed.cores, placed.colour]]
            if len(wrong):
                raise MeshError(
                    f"{self._where(int(wrong[0]), placed.colour)}: the core has a task for it, but "
                    "no route takes it to the core; add the ramp to the route"
                )

    def _where(self, core: int, colour: int) -> str:
        place = f"core ({core // self.mesh.columns}, {core % self.mesh.columns})"
        return f"{place}, colour {self.routes.colours[colour].name!r}, before the first cycle"

    # --- tables -----------------------------------------------------------------------------------

    @property
    def most_in_router(self) -> int:
        """The queues of the router that has most."""
        return int((self.outputs != 0).sum(axis=(1, 2)).max(initial=0))

    @property
    def most_outputs(self) -> int:
        """The outputs of the route that has most."""
        bits = (self.outputs[..., None] >> np.arange(tables.PORTS, dtype=np.uint8)) & 1
        return int(bits.sum(axis=-1).max(initial=0))

    def fill(self, t: MeshTables) -> None:
        """Write the queues, and for each core which of them are its router's and which its own."""
        cores, colours, sides = self.places.T
        rows = t.queues
        rows[:, tables.NUMBER] = np.arange(len(rows))
        is_own = sides == _TO_CORE
        threads = self.consumers[cores, colours]
        rows[:, tables.CONSUMER] = event_of(t, cores, np.where(is_own, 1 + threads, 0))
        rows[:, tables.CONSUMER_THREAD] = np.where(is_own, thread_of(t, cores, threads), -1)
        rows[:, tables.UPSTREAM] = self._upstream(t)
        self._fill_outputs(t)
        self._fill_blocks(t)

    def _upstream(self, t: MeshTables) -> np.ndarray:
        """Return the event of what fills each queue; streams at edges are added later."""
        cores, colours, sides = self.places.T
        found = np.full(len(cores), -1, np.int64)
        for side in range(tables.RAMP):
            beside = neighbours(self.mesh, cores, side)
            chosen = (sides == side) & (beside >= 0)
            found[chosen] = event_of(t, beside[chosen], 0)
        sender = self.senders[cores, colours]
        chosen = (sides == tables.RAMP) & (sender >= 0)
        found[chosen] = event_of(t, cores[chosen], 1 + sender[chosen])
        chosen = sides == _TO_CORE
        found[chosen] = event_of(t, cores[chosen], 0)
        return found

    def _fill_outputs(self, t: MeshTables) -> None:
        """Write the links and the targets of routes, in the order of sides."""
        chosen = np.flatnonzero(self.places[:, 2] < tables.PORTS)
        cores, colours, sides = self.places[chosen].T
        bits = self.outputs[cores, colours, sides]
        slots = np.zeros(len(chosen), np.int64)
        for output in range(tables.PORTS):
            has = np.flatnonzero(bits >> output & 1)
            rows, slot = chosen[has], slots[has]
            t.queues[rows, tables.OUT_LINK + 2 * slot] = (
                block_of(t, cores[has]) + tables.LINK_FREE + output
            )
            t.queues[rows, tables.OUT_TARGET + 2 * slot] = self._targets(
                t, cores[has], colours[has], output
            )
            slots[has] += 1
        t.queues[chosen, tables.OUTPUTS] = slots

    def _targets(
        self, t: MeshTables, cores: np.ndarray, colours: np.ndarray, output: int
    ) -> np.ndarray:
        """Return the queues behind an output, or drains."""
        if output == tables.RAMP:
            numbers = self.numbers[cores, colours, _TO_CORE]
        else:
            beside = neighbours(self.mesh, cores, output)
            numbers = self.numbers[beside, colours, opposite(output)]
        found = np.where(numbers >= 0, queue_of(t, numbers), tables.NOWHERE)
        if output != tables.RAMP:
            for place in np.flatnonzero(beside < 0).tolist():
                found[place] = -2 - self._sink(int(colours[place]), int(cores[place]), output)
        return found

    def _sink(self, colour: int, core: int, side: int) -> int:
        if (colour, core, side) not in self.sinks:
            raise MeshError(
                f"{self._where(core, colour)}: the route leaves the mesh to the {SIDES[side]} "
                "without a drain; add one or end the route"
            )
        return self.sinks[(colour, core, side)]

    def _fill_blocks(self, t: MeshTables) -> None:
        """Write the queues of each router in order of colour and side, and those of each core."""
        cores, colours, sides = self.places.T
        numbers = np.arange(len(cores))
        is_routed = sides < tables.PORTS
        counts = np.bincount(cores[is_routed], minlength=self.mesh.cores)
        starts = np.cumsum(counts) - counts
        turn = np.arange(int(is_routed.sum())) - starts[cores[is_routed]]
        t.blocks[:, tables.QUEUE_COUNT] = counts
        t.blocks[cores[is_routed], tables.ORDER + turn] = queue_of(t, numbers[is_routed])
        for side, at in (
            (_TO_CORE, tables.CORE_QUEUES_AT),
            (tables.RAMP, tables.RAMP_QUEUES_AT),
        ):
            chosen = sides == side
            t.blocks[cores[chosen], int(t.clock[at]) + colours[chosen]] = queue_of(
                t, numbers[chosen]
            )


def event_of(t: MeshTables, cores: np.ndarray, which: np.ndarray | int) -> np.ndarray:
    """Return the events of cores' routers (0) or threads (from 1 on)."""
    first = int(t.integers[tables.EVENT_ROWS])
    return first + (cores * tables.CORE_ENTITIES + which) * tables.EVENT_FIELDS


def block_of(t: MeshTables, cores: np.ndarray) -> np.ndarray:
    """Return the places of cores' blocks."""
    return int(t.integers[tables.BLOCKS]) + cores * int(t.clock[tables.BLOCK_SIZE])


def thread_of(t: MeshTables, cores: np.ndarray, which: np.ndarray | int) -> np.ndarray:
    """Return the places of cores' threads."""
    return block_of(t, cores) + int(t.clock[tables.THREADS_AT]) + which * tables.LINE


def queue_of(t: MeshTables, numbers: np.ndarray) -> np.ndarray:
    """Return the places of queues."""
    return int(t.integers[tables.QUEUES]) + numbers * int(t.clock[tables.QUEUE_SIZE])
