"""The two products of backward as programs: rows of dY come down the columns of cores.

dX = dY W: the same entries as in forward; each adds a multiple of its output feature's row of dY to
the gradient of its input feature, which stays in the core. dW = dY^T X at the entries of the mask:
the indices enter, each starts a dot product over the tokens of a core, and the sums over the
columns of cores leave at the end of the row, in order.
"""

import numpy as np

from penstock.wafer.language import RECEIVE, SEND, Colour, Counter, MeshProgram, Part, Register
from penstock.wafer.programs.streamed import (
    EntryPlaces,
    Run,
    SimulatedProduct,
    Spread,
    entry_stream,
    gradient_stream,
    kept_entries,
)


def simulate_data_gradient(
    weight: np.ndarray, mask: np.ndarray | None, gradients: np.ndarray, run: Run
) -> SimulatedProduct:
    """Return dX = dY W [tokens, inputs] and its cycles.

    Args:
        weight: [outputs, inputs].
        mask: the entries that are kept; None: a dense weight, whose 32-bit values travel without
            indices.
        gradients: dY [tokens, outputs].
    """
    spread = Spread(kept_entries(weight, mask), len(gradients), run)
    spread.check("gradients", gradients, spread.outputs)
    p = run.program()
    is_indexed = mask is not None
    entries = entry_stream(p, spread, weight, last_control=False, is_indexed=is_indexed)
    dx = p.array("gradients of inputs", (spread.most_features, spread.width))
    data = p.task(entries)
    places = EntryPlaces(p, entries, data, is_indexed)
    rows = run.options.broadcast_rows
    row = broadcast_rows(p, spread, entries, gradients, rows, places)
    data.axpy(dx[places.place], row, data.value, elements=spread.tokens)
    places.next_entry(data)
    done = p.run(run.trace)
    return SimulatedProduct(spread.from_features(done.read(dx)), done.report)


def simulate_weight_gradient(
    mask: np.ndarray, activations: np.ndarray, gradients: np.ndarray, run: Run
) -> SimulatedProduct:
    """Return dW = dY^T X [outputs, inputs] at a mask's entries, zero elsewhere, and its cycles.

    Args:
        activations: [tokens, inputs].
        gradients: dY [tokens, outputs].
    """
    spread = Spread(mask, len(activations), run)
    spread.check("activations", activations, spread.inputs)
    spread.check("gradients", gradients, spread.outputs)
    p, columns = run.program(), run.mesh.columns
    entries = entry_stream(p, spread, None, last_control=False)
    x = p.array("activations", (spread.most_features, spread.width), spread.features(activations))
    row = broadcast_rows(p, spread, entries, gradients, run.options.broadcast_rows)
    results = p.array("dot products", (run.options.accumulators, 1), element_bytes=4)
    ready, free = p.counter("dot products"), p.counter("free results", run.options.accumulators - 1)
    place = p.register("result")
    data = p.task(entries)
    set_up = p.core.vector_cycles + run.options.reduction_cycles
    data.dot(results[place], row, x[data.index], set_up=set_up, elements=spread.tokens)
    data.post(ready)
    data.advance(place, modulo=run.options.accumulators)
    data.wait(free, hinders=True)
    sums = p.colour("sums")
    p.route(sums, p.cores(), "ramp", "east")
    p.route(sums, p.cores(None, slice(1, None)), "west", "ramp")
    counts = np.bincount(spread.rows, weights=mask.sum(axis=0), minlength=run.mesh.rows)
    count = p.register("entries", np.repeat(counts.astype(np.int64), columns))
    for cores, taken in ((p.cores(None, 0), None), (p.cores(None, slice(1, None)), sums)):
        p.main(cores, SEND).stream(
            count,
            take=taken,
            source=results.all,
            send=sums,
            gates=(ready,),
            signals=(free,),
            pack=1,
            is_ring=True,
        )
    ends = p.cores(None, -1).tolist()
    drains = [
        p.drain(sums, core, "east", int(words), to_host=True)
        for core, words in zip(ends, counts, strict=True)
    ]
    done = p.run(run.trace)
    found = np.zeros(mask.shape, np.float32)
    for mesh_row, drain in enumerate(drains):
        found[spread.entries(mesh_row)] = done.drained(drain)[0]
    return SimulatedProduct(found, done.report)


def broadcast_rows(
    p: MeshProgram,
    spread: Spread,
    entries: Colour,
    gradients: np.ndarray,
    rows: int,
    places: EntryPlaces | None = None,
) -> Part:
    """Have every core receive the rows of dY, of which it holds some; return the one that belongs
    to the entries that come now. A control word goes on to the next."""
    held = p.array("rows of dY", (rows, spread.width))
    came: Counter = p.counter("rows of dY received")
    room = p.counter("free rows of dY", rows * spread.words)
    slot: Register = p.register("row of dY")
    p.main(thread=RECEIVE).stream(
        spread.outputs * spread.words,
        take=gradient_stream(p, spread, gradients),
        into=held.all,
        gates=(room,),
        signals=(came,),
        is_ring=True,
    )
    p.main().wait(came, spread.words)
    following = p.task(entries, kind="control")
    following.post(room, spread.words)
    following.advance(slot, modulo=rows)
    if places is not None:
        places.next_output(following)
    following.wait(came, spread.words)
    return held[slot]
