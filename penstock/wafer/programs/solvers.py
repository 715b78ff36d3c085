"""Conjugate gradients and BiCGStab for a 7-point stencil, each core with a line of cells.

Dot products are summed over all cores by a tree of stars; every core then has the same scalars.
The methods are those of Hestenes and Stiefel (1952) and van der Vorst (1992); the layout is that of
Rocki et al. (SC 2020), who solved such a system on 600 x 595 cores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError, did_you_mean
from penstock.wafer.language import SEND, Code, MeshProgram, Part
from penstock.wafer.mesh import MeshReport
from penstock.wafer.parameters import CoreParameters, Mesh
from penstock.wafer.programs.stencil import Stencil, grid_shape
from penstock.wafer.programs.tree import TreeReduce, by_role


@dataclass(frozen=True)
class _Solver:
    """What the code of one core is made of."""

    code: Code
    core: int
    stencil: Stencil
    tree: TreeReduce
    part: Callable[[str], Part]

    def apply(self, y: str, x: str) -> None:
        self.stencil.emit(self.code, self.core, self.part(y), self.part(x))

    def dot(self, cell: str, x: str, y: str) -> None:
        into, drain = self.part(cell), self.code.core.drain_cycles
        self.code.dot(into, self.part(x), self.part(y), after=drain)
        self.tree.emit(self.code, self.core, into)

    def add(self, y: str, x: str, a: str, factor: float = 1.0) -> None:
        self.code.axpy(self.part(y), self.part(x), self.part(a), factor=factor)

    def divide(self, cell: str, a: str, b: str) -> None:
        self.code.cells("divide", self.part(cell), self.part(a), self.part(b))

    def multiply(self, cell: str, a: str, b: str) -> None:
        self.code.cells("multiply", self.part(cell), self.part(a), self.part(b))

    def copy(self, y: str, x: str) -> None:
        self.code.scale(self.part(y), self.part(x))


def _conjugate_gradients(s: _Solver, iterations: int, program: MeshProgram) -> None:
    s.copy("p", "r")
    s.dot("rr", "r", "r")
    with s.code.loop(program.register("iteration"), iterations):
        s.apply("q", "p")
        s.dot("pq", "p", "q")
        s.divide("alpha", "rr", "pq")
        s.add("x", "p", "alpha")
        s.add("r", "q", "alpha", -1.0)
        s.dot("new rr", "r", "r")
        s.divide("beta", "new rr", "rr")
        s.copy("rr", "new rr")
        s.code.linear(s.part("p"), s.part("r"), s.part("p"), s.part("beta"))


def _bicgstab(s: _Solver, iterations: int, program: MeshProgram) -> None:
    s.copy("p", "r")
    s.copy("first r", "r")
    s.dot("rho", "first r", "r")
    with s.code.loop(program.register("iteration"), iterations):
        s.apply("v", "p")
        s.dot("rv", "first r", "v")
        s.divide("alpha", "rho", "rv")
        s.add("r", "v", "alpha", -1.0)
        s.apply("t", "r")
        s.dot("ts", "t", "r")
        s.dot("tt", "t", "t")
        s.divide("omega", "ts", "tt")
        s.add("x", "p", "alpha")
        s.add("x", "r", "omega")
        s.add("r", "t", "omega", -1.0)
        s.dot("new rho", "first r", "r")
        s.divide("beta", "new rho", "rho")
        s.divide("ratio", "alpha", "omega")
        s.multiply("beta", "beta", "ratio")
        s.copy("rho", "new rho")
        s.add("p", "v", "omega", -1.0)
        s.code.linear(s.part("p"), s.part("r"), s.part("p"), s.part("beta"))


_METHODS = {
    "cg": (_conjugate_gradients, 1, ("x", "r", "p", "q"), ("rr", "new rr", "pq", "alpha", "beta")),
    "bicgstab": (
        _bicgstab,
        2,
        ("x", "r", "p", "first r", "v", "t"),
        ("rho", "new rho", "rv", "alpha", "ts", "tt", "omega", "beta", "ratio"),
    ),
}


def simulate_solver(
    method: str,
    right: np.ndarray,
    coefficients: Sequence[float],
    core: CoreParameters,
    iterations: int,
) -> tuple[np.ndarray, MeshReport]:
    """Return the solution after some iterations from zero on, and the report; 32-bit numbers.

    Args:
        method: `cg`, for symmetric positive definite stencils, or `bicgstab`.
        right: right-hand side [rows, columns, cells].
        coefficients: of the stencil, as `Stencil` takes them.

    Raises:
        ConfigError: an unknown method, no iterations, or another shape.
    """
    if method not in _METHODS:
        raise ConfigError(
            f"solver: expected {' or '.join(_METHODS)}, got {method!r}"
            f"{did_you_mean(method, _METHODS)}"
        )
    if iterations < 1:
        raise ConfigError(f"solver: expected iterations from 1 up, got {iterations}")
    write, applications, vectors, scalars = _METHODS[method]
    rows, columns, cells = grid_shape(right)
    p = MeshProgram(Mesh(rows, columns), core, element_bytes=4)
    arrays = {name: p.array(name, cells) for name in vectors}
    arrays |= {name: p.array(name, 1) for name in scalars}
    p.load(arrays["r"], p.cores(), right.reshape(-1, cells))
    parts = {name: array.all for name, array in arrays.items()}
    stencil, tree = Stencil(p, cells, coefficients), TreeReduce(p)
    for example, members in by_role(p, lambda place: (stencil.role(place), tree.role(place))):
        stencil.send(p.main(members, SEND), example, applications * iterations)
        solver = _Solver(p.main(members), example, stencil, tree, parts.__getitem__)
        write(solver, iterations, p)
    run = p.run()
    return run.read(arrays["x"]).reshape(right.shape), run.report
