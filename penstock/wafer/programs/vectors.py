"""Vectors that are divided over the cores: y += a x, and a dot product that every core gets."""

from __future__ import annotations

import numpy as np

from penstock.wafer.language import Array, MeshProgram
from penstock.wafer.mesh import MeshReport
from penstock.wafer.parameters import CoreParameters, Mesh
from penstock.wafer.programs.tree import TreeReduce, by_role


def divide(p: MeshProgram, name: str, values: np.ndarray) -> Array:
    """Place equal parts of a vector on all cores, zeros after its end."""
    each = p.padded(-(-len(values) // p.mesh.cores))
    full = np.zeros(each * p.mesh.cores, np.float32)
    full[: len(values)] = values
    return p.array(name, each, full.reshape(p.mesh.cores, each))


def simulate_axpy(
    a: float,
    x: np.ndarray,
    y: np.ndarray,
    mesh: Mesh,
    core: CoreParameters,
    *,
    element_bytes: int = 4,
) -> tuple[np.ndarray, MeshReport]:
    """Return y + a x and the report."""
    p = MeshProgram(mesh, core, element_bytes=element_bytes)
    ones, others = divide(p, "x", x), divide(p, "y", y)
    p.main().axpy(others.all, ones.all, a, after=core.drain_cycles)
    run = p.run()
    return run.read(others).ravel()[: len(y)].copy(), run.report


def simulate_dot(
    x: np.ndarray, y: np.ndarray, mesh: Mesh, core: CoreParameters, *, element_bytes: int = 4
) -> tuple[np.ndarray, MeshReport]:
    """Return the dot product as every core has it [cores], summed in 32 bits, and the report."""
    p = MeshProgram(mesh, core, element_bytes=element_bytes)
    ones, others = divide(p, "x", x), divide(p, "y", y)
    total = p.array("total", 1, element_bytes=4)
    tree = TreeReduce(p)
    for example, cores in by_role(p, tree.role):
        code = p.main(cores)
        code.dot(total.all, ones.all, others.all, after=core.drain_cycles)
        tree.emit(code, example, total.all)
    run = p.run()
    return run.read(total)[:, 0], run.report
