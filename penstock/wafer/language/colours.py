"""Colours and their routes: which way words take through the routers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import MeshError, did_you_mean
from penstock.kernels.mesh_tables import COLOURS, PORTS, RAMP
from penstock.wafer.mesh import SIDES
from penstock.wafer.parameters import Mesh

_STEPS = ((-1, 0), (0, 1), (1, 0), (0, -1))  # north, east, south, west


@dataclass(frozen=True)
class Colour:
    """A colour: words of it keep their order on every link."""

    number: int
    name: str


def side_number(side: str) -> int:
    """Return the port of a side.

    Raises:
        MeshError: there is none of that name.
    """
    if side not in SIDES:
        raise MeshError(
            f"side: expected {', '.join(SIDES)}, got {side!r}{did_you_mean(side, SIDES)}"
        )
    return SIDES.index(side)


def opposite(side: int) -> int:
    """Return the side across a link."""
    return (side + 2) % 4


def neighbour(mesh: Mesh, core: int, side: int) -> int:
    """Return the core beside a core, or -1 beyond the edge."""
    row, column = divmod(core, mesh.columns)
    row, column = row + _STEPS[side][0], column + _STEPS[side][1]
    if 0 <= row < mesh.rows and 0 <= column < mesh.columns:
        return row * mesh.columns + column
    return -1


def neighbours(mesh: Mesh, cores: np.ndarray, side: int) -> np.ndarray:
    """Return the core beside each of some cores, or -1 beyond the edge."""
    rows, columns = np.divmod(cores, mesh.columns)
    rows, columns = rows + _STEPS[side][0], columns + _STEPS[side][1]
    is_inside = (rows >= 0) & (rows < mesh.rows) & (columns >= 0) & (columns < mesh.columns)
    return np.where(is_inside, rows * mesh.columns + columns, -1)


class Routes:
    """The routes of all colours: at a router, from one side to some others.

    Attributes:
        outputs: for each colour an array [cores, PORTS]: a bit for each side to which words go that
            arrive from a side, 0 where no route takes them.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.colours: list[Colour] = []
        self.outputs: list[np.ndarray] = []
        self.joined: list[np.ndarray] = []

    def colour(self, name: str) -> Colour:
        """Return a new colour.

        Raises:
            MeshError: the mesh has no more.
        """
        if len(self.colours) == COLOURS:
            raise MeshError(f"colours: expected at most {COLOURS}, got one more, {name!r}")
        self.colours.append(Colour(len(self.colours), name))
        self.outputs.append(np.zeros((self.mesh.cores, PORTS), np.uint8))
        self.joined.append(np.zeros(self.mesh.cores, np.uint8))
        return self.colours[-1]

    def add(
        self,
        colour: Colour,
        cores: Iterable[int],
        arrives: str,
        leaves: Sequence[str],
        *,
        joins: bool = False,
    ) -> None:
        """Route words of a colour that arrive from one side to others, at some routers.

        Args:
            joins: whether other routes of the colour that join may share the outputs.

        Raises:
            MeshError: the router has another route for them, or another writer of an output.
        """
        side = side_number(arrives)
        bits = sum(1 << output for output in {side_number(name) for name in leaves})
        places = core_numbers(self.mesh, cores)
        table = self.outputs[colour.number]
        repeated = np.ones(len(places), bool)
        repeated[np.unique(places, return_index=True)[1]] = False
        taken = (table[places, side] != 0) | repeated
        wrong_sides = not bits or bool(bits >> side & 1)
        written = np.bitwise_or.reduce(table[places], axis=1) & bits
        joined = self.joined[colour.number]
        if joins:
            written &= ~joined[places]
        wrong = np.flatnonzero(taken | wrong_sides | (written != 0))
        if len(wrong):
            first = int(wrong[0])
            where = f"{self._place(int(places[first]))}, colour {colour.name!r}"
            where += ", before the first cycle"
            if taken[first]:
                raise MeshError(
                    f"{where}: expected one route from {arrives}, got two; join their outputs"
                )
            if wrong_sides:
                raise MeshError(
                    f"{where}: expected a route from {arrives} to other sides, got "
                    f"{', '.join(leaves) or 'none'}"
                )
            output = _lowest(int(written[first]))
            other = int(np.flatnonzero(table[places[first]] >> output & 1)[0])
            raise MeshError(
                f"{where}: two writers of the link to the {SIDES[output]}, words from "
                f"{SIDES[other]} and from {arrives}; give one of them another colour"
            )
        table[places, side] = bits
        if joins:
            joined[places] |= np.uint8(bits)

    def check_loops(self) -> None:
        """Refuse routes on which a word would never arrive.

        Raises:
            MeshError: a route comes back to its beginning.
        """
        for colour, table in zip(self.colours, self.outputs, strict=True):
            sources, targets = self._links(table)
            waiting = np.bincount(targets, minlength=table.size)  # links that lead to a place
            done = np.flatnonzero(waiting == 0)
            order = np.argsort(sources, kind="stable")
            ends = np.searchsorted(sources[order], np.arange(table.size + 1))
            while len(done):  # places that no word reaches again, from the beginnings on
                counts = ends[done + 1] - ends[done]
                skipped = np.repeat(np.cumsum(counts) - counts, counts)
                links = order[np.repeat(ends[done], counts) + np.arange(counts.sum()) - skipped]
                np.subtract.at(waiting, targets[links], 1)
                reached = np.unique(targets[links])
                done = reached[waiting[reached] == 0]
            if not waiting.any():
                continue
            loop = _loop(sources, targets, waiting > 0)
            raise MeshError(
                f"{self._place(min(loop) // PORTS)}, colour {colour.name!r}, before the first "
                f"cycle: the route loops, over {len(loop)} links; end it at a core"
            )

    def _links(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places, core and side in one number, between which routes of a colour take
        words over a link."""
        sources, targets = [], []
        for output in range(RAMP):
            cores, sides = np.nonzero(table >> output & 1)
            beside = neighbours(self.mesh, cores, output)
            inside = beside >= 0
            to = beside * PORTS + opposite(output)
            is_routed = inside & (table.ravel()[to * inside] != 0)
            sources.append((cores * PORTS + sides)[is_routed])
            targets.append(to[is_routed])
        return np.concatenate(sources), np.concatenate(targets)

    def _place(self, core: int) -> str:
        return f"core ({core // self.mesh.columns}, {core % self.mesh.columns})"


def core_numbers(mesh: Mesh, cores: Iterable[int]) -> np.ndarray:
    """Return the numbers of some cores as an array.

    Raises:
        MeshError: the mesh has no such core.
    """
    found = np.asarray(cores, np.int64).ravel()
    wrong = found[(found < 0) | (found >= mesh.cores)]
    if len(wrong):
        raise MeshError(
            f"core: expected a number from 0 to {mesh.cores - 1} on a mesh of {mesh}, got "
            f"{int(wrong[0])}"
        )
    return found


def _loop(sources: np.ndarray, targets: np.ndarray, left: np.ndarray) -> list[int]:
    """Return the places of a loop; `left` are those that it, or one like it, leads to."""
    within = left[sources] & left[targets]
    before = dict(zip(targets[within].tolist(), sources[within].tolist(), strict=True))
    at, seen = min(before), set[int]()
    while at not in seen:  # each has one before it that is left
        seen.add(at)
        at = before[at]
    loop = [at]
    while (at := before[loop[-1]]) != loop[0]:
        loop.append(at)
    return loop


def _lowest(bits: int) -> int:
    """Return the number of the lowest bit."""
    return (bits & -bits).bit_length() - 1
