"""Colours and their routes: which way words take through the routers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import MeshError, did_you_mean
from penstock.kernels.mesh_tables import COLOURS, RAMP
from penstock.wafer.mesh.labels import SIDES
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


class Routes:
    """The routes of all colours: at a router, from one side to some others."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.colours: list[Colour] = []
        self.outputs: dict[tuple[int, int, int], tuple[int, ...]] = {}  # colour, core, input
        self._writers: dict[tuple[int, int, int], int] = {}  # colour, core, output: input

    def colour(self, name: str) -> Colour:
        """Return a new colour.

        Raises:
            MeshError: the mesh has no more.
        """
        if len(self.colours) == COLOURS:
            raise MeshError(f"colours: expected at most {COLOURS}, got one more, {name!r}")
        self.colours.append(Colour(len(self.colours), name))
        return self.colours[-1]

    def add(
        self, colour: Colour, cores: Iterable[int], arrives: str, leaves: Sequence[str]
    ) -> None:
        """Route words of a colour that arrive from one side to others, at some routers.

        Raises:
            MeshError: the router has another route for them, or another writer of an output.
        """
        side = side_number(arrives)
        outputs = tuple(sorted({side_number(name) for name in leaves}))
        for core in np.asarray(cores).ravel().tolist():
            where = f"{self._place(core)}, colour {colour.name!r}, before the first cycle"
            key = (colour.number, core, side)
            if key in self.outputs:
                raise MeshError(
                    f"{where}: expected one route from {arrives}, got two; join their outputs"
                )
            if not outputs or side in outputs:
                raise MeshError(
                    f"{where}: expected a route from {arrives} to other sides, got "
                    f"{', '.join(leaves) or 'none'}"
                )
            for output in outputs:
                other = self._writers.setdefault((colour.number, core, output), side)
                if other != side:
                    raise MeshError(
                        f"{where}: two writers of the link to the {SIDES[output]}, words from "
                        f"{SIDES[other]} and from {arrives}; give one of them another colour"
                    )
            self.outputs[key] = outputs

    def check_loops(self) -> None:
        """Refuse routes on which a word would never arrive.

        Raises:
            MeshError: a route comes back to its beginning.
        """
        done: set[tuple[int, int, int]] = set()
        for start in self.outputs:
            path: list[tuple[int, int, int]] = []
            on_path: set[tuple[int, int, int]] = set()
            stack = [(start, False)]
            while stack:
                node, is_left = stack.pop()
                if is_left:
                    on_path.discard(path.pop())
                    done.add(node)
                    continue
                if node in on_path:
                    colour, core, _ = node
                    length = len(path) - path.index(node)
                    raise MeshError(
                        f"{self._place(core)}, colour {self.colours[colour].name!r}, before the "
                        f"first cycle: the route loops, over {length} links; end it at a core"
                    )
                if node in done or node not in self.outputs:
                    continue
                path.append(node)
                on_path.add(node)
                stack.append((node, True))
                stack.extend((following, False) for following in self._following(node))

    def _following(self, node: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        colour, core, _ = node
        found = []
        for output in self.outputs[node]:
            if output != RAMP:
                beside = neighbour(self.mesh, core, output)
                if beside >= 0:
                    found.append((colour, beside, opposite(output)))
        return found

    def _place(self, core: int) -> str:
        return f"core ({core // self.mesh.columns}, {core % self.mesh.columns})"
