"""Vectors that are divided over the cores: y += a x, and a dot product that every core gets."""

import numpy as np

from penstock.errors import ConfigError
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


def _check_lengths(x: np.ndarray, y: np.ndarray) -> None:
    if x.ndim != 1 or x.shape != y.shape or not len(x):
        raise ConfigError(
            f"vectors: expected two of one length from 1 up, got the shapes {list(x.shape)} and "
            f"{list(y.shape)}"
        )


def simulate_axpy(
    a: float,
    x: np.ndarray,
    y: np.ndarray,
    mesh: Mesh,
    core: CoreParameters,
    *,
    element_bytes: int = 4,
) -> tuple[np.ndarray, MeshReport]:
    """Return y + a x and the report; errors as of `simulate_dot`."""
    _check_lengths(x, y)
    p = MeshProgram(mesh, core, element_bytes=element_bytes)
    ones, others = divide(p, "x", x), divide(p, "y", y)
    p.main().axpy(others.all, ones.all, a, after=core.drain_cycles)
    run = p.run()
    return run.read(others).ravel()[: len(y)].copy(), run.report


def simulate_dot(
    x: np.ndarray, y: np.ndarray, mesh: Mesh, core: CoreParameters, *, element_bytes: int = 4
) -> tuple[np.ndarray, MeshReport]:
    """Return the dot product as every core has it [cores], summed in 32 bits, and the report.

    Raises:
        ConfigError: the vectors differ in length, or are empty.
    """
    _check_lengths(x, y)
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
