"""A 7-point stencil: each core has a line of cells along z, its neighbours those beside it."""

from collections.abc import Sequence

import numpy as np

from penstock.errors import ConfigError
from penstock.wafer.language import SEND, Code, MeshProgram, Part, neighbour
from penstock.wafer.mesh import SIDES, MeshReport
from penstock.wafer.parameters import CoreParameters, Mesh
from penstock.wafer.programs.tree import by_role

_ACROSS = {"east": "west", "west": "east", "north": "south", "south": "north"}


class Stencil:
    """Colours and routes of the exchange; `emit` adds one application to a core's code.

    Args:
        coefficients: of the cell itself, then of its neighbours to the north, east, south, west,
            and below and above it along z. What is beyond the mesh is zero.
    """

    def __init__(self, program: MeshProgram, cells: int, coefficients: Sequence[float]) -> None:
        if len(coefficients) != 7 or cells < 2:
            raise ConfigError(
                f"stencil: expected 7 coefficients and 2 cells or more along z, got "
                f"{len(coefficients)} and {cells}"
            )
        p = self.program = program
        self.coefficients, self.cells = coefficients, cells
        self.source = p.array("source", cells)
        self.beside = p.array("line beside", cells)
        self.ready = p.counter("lines to send")
        self.colours = {}
        for side in _ACROSS:
            colour = self.colours[side] = p.colour(f"lines to the {side}")
            senders = [core for core in range(p.mesh.cores) if side in self.role(core)]
            takers = [core for core in range(p.mesh.cores) if _ACROSS[side] in self.role(core)]
            p.route(colour, np.array(senders, int), "ramp", side)
            p.route(colour, np.array(takers, int), _ACROSS[side], "ramp")

    def role(self, core: int) -> tuple[str, ...]:
        """Return the sides on which a core has neighbours."""
        mesh = self.program.mesh
        return tuple(
            side for number, side in enumerate(SIDES[:4]) if neighbour(mesh, core, number) >= 0
        )

    def send(self, code: Code, core: int, times: int) -> None:
        """Add to the thread that sends: its line to all neighbours, so many times."""
        with code.loop(self.program.register("application"), times, cycles=0.0):
            code.wait(self.ready)
            for side in self.role(core):
                code.send(self.source.all, self.colours[side])

    def emit(self, code: Code, core: int, y: Part, x: Part) -> None:
        """Add y = the stencil of x; the core's thread that sends does its part."""
        own, north, east, south, west, below, above = self.coefficients
        last = self.cells - 1
        code.scale(self.source.all, x)
        code.post(self.ready)
        code.scale(y, x, own)
        code.axpy(y.part(1, last), x.part(0, last), below)
        code.axpy(y.part(0, last), x.part(1, last), above)
        weights = {"north": north, "east": east, "south": south, "west": west}
        for side in self.role(core):
            code.receive(self.beside.all, self.colours[_ACROSS[side]])
            code.axpy(y, self.beside.all, weights[side])


def grid_shape(values: np.ndarray) -> tuple[int, int, int]:
    """Return the rows, columns and cells of a grid.

    Raises:
        ConfigError: it has another number of dimensions.
    """
    if values.ndim != 3:
        raise ConfigError(
            f"stencil: expected values [rows, columns, cells], got the shape {list(values.shape)}"
        )
    rows, columns, cells = values.shape
    return rows, columns, cells


def simulate_stencil(
    values: np.ndarray,
    coefficients: Sequence[float],
    core: CoreParameters,
    *,
    times: int = 1,
    element_bytes: int = 4,
) -> tuple[np.ndarray, MeshReport]:
    """Return the stencil of values [rows, columns, cells], applied so many times, and the report.

    The mesh has as many rows and columns as the values.

    Raises:
        ConfigError: another shape, or no application.
    """
    if times < 1:
        raise ConfigError(f"stencil: expected applications from 1 up, got {times}")
    rows, columns, cells = grid_shape(values)
    p = MeshProgram(Mesh(rows, columns), core, element_bytes=element_bytes)
    x = p.array("x", cells, values.reshape(-1, cells))
    y = p.array("y", cells)
    stencil = Stencil(p, cells, coefficients)
    for example, cores in by_role(p, stencil.role):
        stencil.send(p.main(cores, SEND), example, times)
        code = p.main(cores)
        with code.loop(p.register("time"), times):
            stencil.emit(code, example, y.all, x.all)
            code.scale(x.all, y.all)
    run = p.run()
    return run.read(x).reshape(values.shape), run.report
