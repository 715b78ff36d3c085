"""All-reduce of a vector over all cores: by a tree, or by rings along rows and then columns."""

from dataclasses import replace
from typing import Literal

import numpy as np

from penstock.errors import ConfigError
from penstock.wafer.closed_form import ReduceAlgorithm
from penstock.wafer.language import SEND, Array, Code, Colour, MeshProgram
from penstock.wafer.mesh import MeshReport
from penstock.wafer.parameters import CoreParameters, Mesh
from penstock.wafer.programs.tree import TreeReduce, by_role


def simulate_tree_all_reduce(
    values: np.ndarray,
    mesh: Mesh,
    core: CoreParameters,
    root: Literal["centre", "corner"] = "centre",
    algorithm: ReduceAlgorithm | None = None,
) -> tuple[np.ndarray, MeshReport]:
    """Return what every core has of the sums [cores, elements], 32 bits, and the report.

    Its cycles are those of `all_reduce_cycles` with the same arguments.

    Args:
        values: of the cores [cores, elements].
        root, algorithm: as for `TreeReduce`.

    Raises:
        ConfigError: a star of more than one element.
    """
    p = MeshProgram(mesh, core, element_bytes=4)
    vector = p.array("vector", values.shape[1], values)
    tree = TreeReduce(p, values.shape[1], root, algorithm)
    for example, cores in by_role(p, tree.role):
        tree.emit(p.main(cores), example, vector.all)
    run = p.run()
    return run.read(vector), run.report


def simulate_ring_all_reduce(
    values: np.ndarray, mesh: Mesh, core: CoreParameters
) -> tuple[np.ndarray, MeshReport]:
    """Return what every core has of the sums [cores, elements], 32 bits, and the report.

    The elements are cut into as many parts as a ring has cores. In as many steps less one each core
    adds its part of a step to what comes, and in as many again the finished parts go round.

    Args:
        values: of the cores [cores, elements]; elements divide by rows and by columns.
    """
    elements = values.shape[1]
    if elements % mesh.columns or elements % mesh.rows:
        raise ConfigError(
            f"all-reduce: expected elements that divide by {mesh.rows} rows and {mesh.columns} "
            f"columns, got {elements}; add zeros"
        )
    p = MeshProgram(mesh, core, element_bytes=4)
    flat = p.array("vector", elements, values)
    places = np.arange(mesh.cores)
    code, send = p.main(), p.main(thread=SEND)
    if mesh.columns > 1:
        _ring(p, code, send, flat, places % mesh.columns, "columns")
    if mesh.rows > 1:
        _ring(p, code, send, flat, places // mesh.columns, "rows")
    run = p.run()
    return run.read(flat), run.report


def ring_routes(p: MeshProgram, axis: str, name: str, *, is_back: bool = False) -> Colour:
    """Route a colour from each core to the next of its row (`columns`) or column (`rows`), and from
    the last to the first; `is_back`: to the one before, and from the first to the last."""
    colour = p.colour(name)
    ahead, behind = ("east", "west") if axis == "columns" else ("south", "north")
    places: list[slice | int] = [slice(0, -1), slice(1, None), -1, slice(1, -1), 0]
    if is_back:
        ahead, behind = behind, ahead
        places = [slice(1, None), slice(0, -1), 0, slice(1, -1), -1]
    ways = (("ramp", ahead), (behind, "ramp"), ("ramp", behind), (ahead, behind), (ahead, "ramp"))
    for place, (arrives, leaves) in zip(places, ways, strict=True):
        cores = p.cores(None, place) if axis == "columns" else p.cores(place)
        p.route(colour, cores, arrives, leaves)
    return colour


def _ring(
    p: MeshProgram, code: Code, send: Code, flat: Array, place: np.ndarray, axis: str
) -> None:
    """Add the steps of one ring; all cores run the same code, from a part of their own on."""
    length = p.mesh.columns if axis == "columns" else p.mesh.rows
    parts = replace(flat, shape=(length, flat.size // length))
    colour = ring_routes(p, axis, f"ring of {axis}")
    sent = p.register("part sent", place)
    got = p.register("part received", (place - 1) % length)
    step, turn = p.register("step"), p.register("step sent")
    may_send = p.counter(f"parts to send along {axis}")
    with send.loop(turn, 2 * (length - 1), cycles=0):
        send.wait(may_send)
        send.send(parts[sent], colour, pack=1)
        send.advance(sent, length - 1, modulo=length)
    for adds in (True, False):  # first sums of parts, then finished parts go round
        with code.loop(step, length - 1):
            code.post(may_send)
            code.receive(parts[got], colour, adds=adds, pack=1)
            code.work(code.core.drain_cycles)
            code.advance(got, length - 1, modulo=length)
