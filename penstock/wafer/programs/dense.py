"""Dense products: two matrices that go round a square mesh, and a matrix times a vector."""

from dataclasses import replace

import numpy as np

from penstock.errors import ConfigError
from penstock.wafer.language import RECEIVE, SEND, Array, Counter, MeshProgram
from penstock.wafer.mesh import MeshReport
from penstock.wafer.parameters import CoreParameters, Mesh
from penstock.wafer.programs.all_reduce import ring_routes


def simulate_dense_product(
    a: np.ndarray,
    b: np.ndarray,
    mesh: Mesh,
    core: CoreParameters,
    *,
    element_bytes: int = 2,
    rounds: bool | None = None,
) -> tuple[np.ndarray, MeshReport]:
    """Return C = A B and the report; blocks of A go round rows, of B round columns (Cannon 1969).

    Args:
        a: [n, k], b: [k, m]; n, k and m divide by the side of the mesh, which is a square.
    """
    side, (n, k), m = mesh.rows, a.shape, b.shape[1]
    if mesh.rows != mesh.columns or n % side or k % side or m % side or k != b.shape[0]:
        raise ConfigError(
            f"dense product: expected a square mesh whose side divides all sizes, got {mesh} for "
            f"{n} x {k} times {b.shape[0]} x {m}"
        )
    p = MeshProgram(mesh, core, element_bytes=element_bytes, rounds=rounds)
    rows, inner, width = n // side, k // side, m // side
    if rows * inner % p.pack or width % p.pack:
        raise ConfigError("dense product: expected blocks with an even number of 16-bit elements")
    # Core (r, c) begins with the blocks (r, r + c) of A, columns first, and (r + c, c) of B.
    place = np.arange(mesh.cores)
    r, c = place // side, place % side
    s = (r + c) % side
    a_blocks = a.reshape(side, rows, side, inner).transpose(0, 2, 3, 1)[r, s]
    b_blocks = b.reshape(side, inner, side, width).transpose(0, 2, 1, 3)[s, c]
    ones = p.array("A", 2 * inner * rows)
    others = p.array("B", (2 * inner, width))
    p.load(ones, p.cores(), _first_half(a_blocks.reshape(mesh.cores, -1)))
    p.load(others, p.cores(), _first_half(b_blocks))
    out = p.array("C", (rows, width))
    step, line, row = p.register("step"), p.register("line"), p.register("row")
    element, b_row = p.register("element of A"), p.register("row of B")
    came = p.counter("blocks received", 1)
    done = p.counter("blocks used")
    code = p.main()
    with code.loop(step, side):
        code.wait(came)
        with code.loop(line, inner):
            with code.loop(row, rows, cycles=0.0):
                code.axpy(out[row], others[b_row], ones[element])
                code.advance(element, modulo=ones.size)
            code.advance(b_row, modulo=2 * inner)
        code.post(done)
    if side > 1:
        _shift_blocks(p, ones, others, came, done)
    run = p.run()
    found = run.read(out).reshape(side, side, rows, width).transpose(0, 2, 1, 3)
    return found.reshape(n, m).copy(), run.report


def _first_half(blocks: np.ndarray) -> np.ndarray:
    """Return blocks with room for another behind each."""
    return np.concatenate((blocks, np.zeros_like(blocks)), axis=1)


def _shift_blocks(p: MeshProgram, ones: Array, others: Array, came: Counter, done: Counter) -> None:
    """Send blocks on and receive the next into the other half, while the core computes."""
    halves = [replace(array, shape=(2, array.size // 2)) for array in (ones, others)]
    ways = (("columns", "A"), ("rows", "B"))
    colours = [ring_routes(p, axis, name, is_back=True) for axis, name in ways]
    sent = p.counter("blocks sent")
    may_send = p.counter("blocks to send", 1)
    own, following = p.register("half sent"), p.register("half received", 1)
    for thread in (SEND, RECEIVE):
        code = p.main(thread=thread)
        with code.loop(p.register("shift"), p.mesh.rows - 1, cycles=0):
            if thread == SEND:
                code.wait(may_send)
                for half, colour in zip(halves, colours, strict=True):
                    code.send(half[own], colour)
                code.post(sent)
                code.advance(own, modulo=2)
            else:
                for half, colour in zip(halves, colours, strict=True):
                    code.receive(half[following], colour)
                code.post(came)
                code.post(may_send)
                code.advance(following, modulo=2)
                code.wait(done, hinders=True)  # its block is used and sent: room for the next
                code.wait(sent, hinders=True)


def simulate_matrix_vector(
    weight: np.ndarray,
    vector: np.ndarray,
    mesh: Mesh,
    core: CoreParameters,
    *,
    element_bytes: int = 2,
    rounds: bool | None = None,
) -> tuple[np.ndarray, MeshReport]:
    """Return W x and the report: W stays in the cores, x enters from the north.

    Each element of x starts an AXPY with a column of W, which reads every weight once; a control
    word starts the sum along the row of cores, which leaves to the east.

    Args:
        weight: [outputs, inputs]; the mesh divides both.
    """
    outputs, inputs = weight.shape
    if outputs % mesh.rows or inputs % mesh.columns or len(vector) != inputs:
        raise ConfigError(
            f"matrix-vector: expected a mesh that divides {outputs} x {inputs} and as many numbers "
            f"as inputs, got {mesh} and {len(vector)}"
        )
    p = MeshProgram(mesh, core, element_bytes=element_bytes, rounds=rounds)
    rows, columns = outputs // mesh.rows, inputs // mesh.columns
    width = p.padded(rows)
    blocks = weight.reshape(mesh.rows, rows, mesh.columns, columns).transpose(0, 2, 3, 1)
    held = np.zeros((mesh.cores, columns, width), np.float32)
    held[:, :, :rows] = blocks.reshape(mesh.cores, columns, rows)
    w, y = p.array("weight", (columns, width), held), p.array("sums", width)
    x, sums = p.colour("vector"), p.colour("sums")
    p.route(x, p.cores(slice(0, -1)), "north", ("south", "ramp"))
    p.route(x, p.cores(-1), "north", "ramp")
    ends = np.arange(columns + 1) == columns
    for column in range(mesh.columns):
        numbers = np.append(vector[column * columns : (column + 1) * columns], 0.0)
        p.feed(
            x, column, "north", p.rounded(numbers), np.arange(columns + 1), ends, from_host=False
        )
    task = p.task(x)
    task.axpy(y.all, w[task.index], task.value, elements=rows)
    p.route(sums, p.cores(), "ramp", "east")
    p.route(sums, p.cores(None, slice(1, None)), "west", "ramp")
    p.task(x, p.cores(None, 0), "control").send(y.all, sums)
    following = p.task(x, p.cores(None, slice(1, None)), "control")
    following.receive_add_send(y.all, sums, sums)
    drains = [p.drain(sums, end, "east", width // p.pack) for end in p.cores(None, -1).tolist()]
    run = p.run()
    words = [np.stack(run.drained(drain)[: p.pack], -1).ravel()[:rows] for drain in drains]
    return np.concatenate(words), run.report
