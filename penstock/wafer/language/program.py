"""A program for the mesh: data on cores, routes of colours, tasks of words, streams at edges."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import BudgetError, MeshError, did_you_mean
from penstock.kernels import mesh_tables as tables
from penstock.kernels.mesh_tables import MeshTables
from penstock.wafer.language.arrays import Array, Counter, Register
from penstock.wafer.language.code import COMPUTE, Code
from penstock.wafer.language.colours import Colour, Routes, core_numbers, side_number
from penstock.wafer.language.layout import Feed, Layout, Placed, Sink
from penstock.wafer.language.lower import lower
from penstock.wafer.mesh import KINDS, SIDES, MeshReport, Ticks, TraceOptions
from penstock.wafer.parameters import CoreParameters, Mesh

Place = int | slice | Sequence[int] | None
_MOST_CYCLES = 10**12


@dataclass(frozen=True, eq=False)
class Drain:
    """Words that leave the mesh at one place."""

    number: int


@dataclass(frozen=True, eq=False)
class MeshRun:
    """A program that has run: its report, its memory and what left the mesh."""

    report: MeshReport
    _tables: MeshTables = field(repr=False)

    def read(self, array: Array) -> np.ndarray:
        """Return an array of all its cores, [cores, *shape] of float32."""
        cells = self._tables.memory[array.cores, array.base : array.base + array.size]
        return cells.reshape(len(array.cores), *array.shape)

    def drained(self, drain: Drain) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what left: first and second number of each word, and whether it is a control
        word."""
        sink = self._tables.sinks[drain.number]
        words = self._tables.sink_words[sink[tables.SINK_START] : sink[tables.SINK_NEXT]]
        numbers = words.view(np.float32)
        return (
            numbers[:, tables.FIRST_NUMBER],
            numbers[:, tables.SECOND_NUMBER],
            words[:, tables.KIND] == tables.CONTROL,
        )


class MeshProgram:
    """A program while it is written.

    Args:
        mesh: the cores.
        core: their costs.
        element_bytes: of activations; a word holds two elements of 16 bits or one of 32.
        rounds: whether results of 16 bits are rounded to 16 bits; by default they are. Otherwise
            all numbers are of 32 bits, and only cycles and memory are those of `element_bytes`.
    """

    def __init__(
        self,
        mesh: Mesh,
        core: CoreParameters,
        *,
        element_bytes: int = 2,
        rounds: bool | None = None,
    ) -> None:
        if element_bytes not in (2, 4):
            raise MeshError(f"element_bytes: expected 2 or 4, got {element_bytes!r}")
        self.mesh, self.core = mesh, core
        self.element_bytes = element_bytes
        self.pack = 2 if element_bytes == 2 else 1
        self.rounds = element_bytes == 2 if rounds is None else rounds
        self.ticks = Ticks.of(core)
        self.routes = Routes(mesh)
        self._used_bytes = np.zeros(mesh.cores, np.int64)
        self._top = np.full(mesh.cores, tables.THREADS, np.int64)
        self._layout = Layout()

    # --- places -----------------------------------------------------------------------------------

    def cores(self, rows: Place = None, columns: Place = None) -> np.ndarray:
        """Return the numbers of the cores in some rows and columns, in order.

        Raises:
            MeshError: the mesh has no such row or column. Slices are cut to the mesh.
        """
        every = np.arange(self.mesh.cores).reshape(self.mesh.rows, self.mesh.columns)
        for axis, place in enumerate((rows, columns)):
            if place is None:
                continue
            try:
                chosen = np.arange(every.shape[axis])[place]
            except IndexError:
                raise MeshError(
                    f"{('row', 'column')[axis]}: expected a number from 0 to "
                    f"{every.shape[axis] - 1} on a mesh of {self.mesh}, got {place}"
                ) from None
            every = np.take(every, np.atleast_1d(chosen), axis=axis)
        return every.ravel()

    def _place(self, core: int) -> str:
        return f"core ({core // self.mesh.columns}, {core % self.mesh.columns})"

    # --- data -------------------------------------------------------------------------------------

    def padded(self, elements: int) -> int:
        """Return a number of elements that fills words."""
        return -(-elements // self.pack) * self.pack

    def free_bytes(self, cores: np.ndarray | None = None) -> int:
        """Return the memory that the fullest of some cores has left."""
        chosen = self._used_bytes if cores is None else self._used_bytes[cores]
        return self.core.usable_bytes - int(chosen.max())

    def array(
        self,
        name: str,
        shape: tuple[int, ...] | int,
        values: np.ndarray | None = None,
        *,
        cores: np.ndarray | None = None,
        element_bytes: int | None = None,
    ) -> Array:
        """Place an array on some cores, or on all.

        Args:
            values: of all those cores, [cores, *shape] or what broadcasts to it; zero if not given.

        Raises:
            BudgetError: a core has no memory for it.
        """
        shape = (shape,) if isinstance(shape, int) else shape
        chosen = self.cores() if cores is None else core_numbers(self.mesh, cores)
        width = self.element_bytes if element_bytes is None else element_bytes
        size = math.prod(shape)
        needed = self._used_bytes[chosen] + size * width
        if len(chosen) and needed.max() > self.core.usable_bytes:
            fullest = int(np.argmax(needed))
            raise BudgetError(
                f"{self._place(int(chosen[fullest]))}: array {name!r} needs {size * width:,} bytes "
                f"beside {int(needed[fullest]) - size * width:,} of other arrays; a core has "
                f"{self.core.usable_bytes:,} for data; take a larger mesh or fewer tokens"
            )
        self._used_bytes[chosen] = needed
        base = int(self._top[chosen].max()) if len(chosen) else tables.THREADS
        self._top[chosen] = base + size
        made = Array(name, shape, chosen, base, width)
        if values is not None:
            self.load(made, chosen, values)
        return made

    def load(self, array: Array, cores: np.ndarray, values: np.ndarray) -> None:
        """Give an array first values on some cores, [cores, *shape] or what broadcasts to it.

        Raises:
            MeshError: one of the cores does not have the array.
        """
        missing = np.setdiff1d(cores, array.cores)
        if len(missing):
            raise MeshError(
                f"{self._place(int(missing[0]))}: array {array.name!r} gets values there, but is "
                "not on that core; place it there too"
            )
        full = np.broadcast_to(np.asarray(values, np.float32), (len(cores), *array.shape))
        if array.element_bytes == 2:
            full = self.rounded(full)
        self._layout.values.append((array, cores, full.reshape(len(cores), array.size)))

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Return numbers as memory and words of `element_bytes` hold them."""
        full = np.asarray(values, np.float32)
        return full.astype(np.float16).astype(np.float32) if self.rounds else full

    def register(self, name: str, values: np.ndarray | int = 0) -> Register:
        """Give every core a register, with one value for all or one for each."""
        full = self._of_cores(f"register {name!r}", values)
        self._layout.registers.append(full)
        return Register(tables.THREADS + len(self._layout.registers) - 1, name)

    def counter(self, name: str, start: np.ndarray | int = 0) -> Counter:
        """Give every core a counter."""
        full = self._of_cores(f"counter {name!r}", start)
        self._layout.counters.append(full)
        self._layout.counter_names.append(name)
        return Counter(len(self._layout.counters) - 1, name)

    def _of_cores(self, what: str, values: np.ndarray | int) -> np.ndarray:
        """Return a whole number for each core.

        Raises:
            MeshError: one has more than 32 bits.
        """
        full = np.broadcast_to(np.asarray(values, np.int64), (self.mesh.cores,))
        if full.min() < -(1 << 31) or full.max() >= 1 << 31:
            raise MeshError(
                f"{what}: expected numbers of 32 bits, got {full.min():,} to {full.max():,}"
            )
        return full

    # --- words ------------------------------------------------------------------------------------

    def colour(self, name: str) -> Colour:
        """Return a new colour, of which there are 24."""
        return self.routes.colour(name)

    def route(
        self,
        colour: Colour,
        cores: np.ndarray,
        arrives: str,
        leaves: Sequence[str] | str,
        *,
        joins: bool = False,
    ) -> None:
        """Route words of a colour at some routers, from one side to one or several others.

        Args:
            joins: whether routes from several sides, all of which join, may share these outputs.
                Words of one side keep their order; those of different sides come as they arrive.
        """
        sides = [leaves] if isinstance(leaves, str) else leaves
        self.routes.add(colour, cores, arrives, sides, joins=joins)

    def main(self, cores: np.ndarray | None = None, thread: int = COMPUTE) -> Code:
        """Return the code with which a thread of some cores begins, to be filled in."""
        code = Code(self.core, thread, self.rounds, self.pack)
        chosen = self.cores() if cores is None else core_numbers(self.mesh, cores)
        self._layout.codes.append(Placed(code, chosen, -1, 0))
        return code

    def task(
        self,
        colour: Colour,
        cores: np.ndarray | None = None,
        kind: str = "data",
        *,
        thread: int = COMPUTE,
        cycles: float | None = None,
    ) -> Code:
        """Return the code that a word of a colour starts, to be filled in.

        Args:
            kind: of the words, data or control.
            cycles: before the first instruction, by default `task_cycles`.

        Raises:
            MeshError: there is no such kind.
        """
        if kind not in KINDS:
            raise MeshError(
                f"kind: expected {' or '.join(KINDS)}, got {kind!r}{did_you_mean(kind, KINDS)}"
            )
        code = Code(self.core, thread, self.rounds, self.pack)
        code.work(self.core.task_cycles if cycles is None else cycles)
        chosen = self.cores() if cores is None else core_numbers(self.mesh, cores)
        self._layout.codes.append(Placed(code, chosen, colour.number, KINDS.index(kind)))
        return code

    def feed(
        self,
        colour: Colour,
        core: int,
        side: str,
        first: np.ndarray,
        second: np.ndarray | None = None,
        controls: np.ndarray | None = None,
        *,
        from_host: bool = True,
    ) -> None:
        """Let words enter at the edge of the mesh.

        Args:
            core: at the edge.
            side: of that core, from which they come.
            first, second: numbers in the words; the second is an index for tasks.
            controls: booleans, which words are control words.
            from_host: whether the host's links carry them.

        Raises:
            MeshError: no route takes the words, another stream of the colour enters there, or the
                arguments differ in length.
        """
        count = len(first)
        given = (first, np.zeros(count) if second is None else second)
        numbers = tuple(np.asarray(values, np.float32) for values in given)
        kinds = np.zeros(count, bool) if controls is None else np.asarray(controls, bool)
        port = self._edge(core, side)
        if any(values.shape != (count,) for values in (*numbers, kinds)):
            shapes = [list(values.shape) for values in (*numbers, kinds)]
            raise MeshError(
                f"{self._place(core)}, colour {colour.name!r}: expected a first and a second "
                f"number and a kind for each word, got the shapes {shapes}"
            )
        if not self.routes.outputs[colour.number][core, port]:
            raise MeshError(
                f"{self._place(core)}, colour {colour.name!r}, before the first cycle: a stream "
                f"enters from the {side}, where no route takes it; add the route before it"
            )
        for other in self._layout.feeds:
            if (other.colour, other.core, other.side) == (colour.number, core, port):
                raise MeshError(
                    f"{self._place(core)}, colour {colour.name!r}, before the first cycle: two "
                    f"streams enter from the {side}; join their words or give one another colour"
                )
        self._layout.feeds.append(Feed(colour.number, core, port, numbers, kinds, from_host))

    def drain(
        self, colour: Colour, core: int, side: str, words: int, *, to_host: bool = False
    ) -> Drain:
        """Take words of a colour out at the edge of the mesh: exactly so many.

        Raises:
            MeshError: not a number of words, or the colour has a drain there already.
        """
        port = self._edge(core, side)
        where = f"{self._place(core)}, colour {colour.name!r}, before the first cycle"
        if words < 0:
            raise MeshError(f"{where}: expected a drain of 0 words or more, got {words}")
        for other in self._layout.sinks:
            if (other.colour, other.core, other.side) == (colour.number, core, port):
                raise MeshError(f"{where}: two drains to the {side}; let one take all words")
        self._layout.sinks.append(Sink(colour.number, core, port, words, to_host))
        return Drain(len(self._layout.sinks) - 1)

    def _edge(self, core: int, side: str) -> int:
        port = side_number(side)
        core_numbers(self.mesh, [core])
        row, column = divmod(int(core), self.mesh.columns)
        ends = (row == 0, column == self.mesh.columns - 1, row == self.mesh.rows - 1, column == 0)
        if port == tables.RAMP or not ends[port]:
            raise MeshError(
                f"{self._place(core)}: expected an edge of the mesh to the {SIDES[port]}, got a "
                "core within it"
            )
        return port

    # --- running ----------------------------------------------------------------------------------

    def run(self, trace: TraceOptions | None = None, most_cycles: int = _MOST_CYCLES) -> MeshRun:
        """Check the program, simulate it and return what it did.

        Raises:
            MeshError: a mistake of the program, with core, colour and cycle.
        """
        from penstock.wafer.mesh import run_tables

        made, labels = lower(
            self.mesh,
            self.core,
            self.ticks,
            self.routes,
            self._layout,
            int(self._top.max()),
            trace,
            most_cycles,
        )
        return MeshRun(run_tables(made, labels, self.ticks), made)
