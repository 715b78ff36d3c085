"""Y = X W^T as a program: entries along rows, an AXPY on arrival, partial sums down columns.

A control word ends an output feature. Its sum then travels from core to core, each of which adds
its own. As a chain it leaves the mesh after the last row; as a ring it ends in the row of cores
that the output feature belongs to, so that outputs are divided evenly.
"""

from typing import Any

import numpy as np

from penstock.wafer.language import RECEIVE, SEND, Code, Colour, Counter, MeshRun, Part, Register
from penstock.wafer.programs.streamed import (
    EntryPlaces,
    Run,
    SimulatedProduct,
    Spread,
    entry_stream,
    kept_entries,
)


def simulate_forward(
    weight: np.ndarray, mask: np.ndarray | None, activations: np.ndarray, run: Run
) -> SimulatedProduct:
    """Return Y = X W^T [tokens, outputs] and its cycles.

    Args:
        weight: [outputs, inputs].
        mask: the entries that are kept; None: a dense weight, whose 32-bit values travel without
            indices.
        activations: [tokens, inputs].

    Raises:
        BudgetError: a core has no memory for its activations and sums.
        ConfigError: the shapes do not fit each other.
    """
    spread = Spread(kept_entries(weight, mask), len(activations), run)
    spread.check("activations", activations, spread.inputs)
    made = Forward(spread, run, weight, activations, is_indexed=mask is not None)
    done = made.program.run(run.trace)
    return SimulatedProduct(made.result(done), done.report)


_BEGIN, _PASS, _KEEP = range(3)


class Forward:
    """The program, part by part."""

    def __init__(
        self,
        spread: Spread,
        run: Run,
        weight: np.ndarray,
        activations: np.ndarray,
        *,
        is_indexed: bool,
    ) -> None:
        self.spread, options = spread, run.options
        self.program = p = run.program()
        self.is_ring = options.reduction == "ring" and run.mesh.rows > 1
        self.is_paid = options.sums == "paid"
        # One thread that computes, adds and sends: a second row is sent while it computes the next.
        self.is_alone = self.is_paid and options.accumulators == 1 and not self.is_ring
        width, words = spread.width, spread.words
        entries = entry_stream(p, spread, weight, is_indexed=is_indexed)
        self.x = p.array("activations", (spread.most_features, width), spread.features(activations))
        self.slots = options.accumulators + int(self.is_alone)
        self.acc = p.array("accumulators", (self.slots, width))
        self.y = p.array("outputs", (-(-spread.outputs // run.mesh.rows) * self.is_ring, width))
        most = p.free_bytes() // (width * p.element_bytes)
        rows = options.inbox_rows or max(1, min(spread.outputs, most))
        self.inbox = p.array("inbox", (rows, width))
        self.full, self.came = p.counter("finished sums"), p.counter("sums received")
        self.free = p.counter("free accumulators", (self.slots - 1) * words)
        self.room = p.counter("free inbox", rows * words)
        self.begun = p.counter("sums that begin to come")
        self.sums = p.colour("sums")
        self.compute(entries, is_indexed)
        mesh_row = p.cores() // run.mesh.columns
        self.phase = p.register("outputs since one ended here", -mesh_row % run.mesh.rows)
        if self.is_ring:
            self.ring()
        else:
            self.chain()

    def compute(self, entries: Colour, is_indexed: bool) -> None:
        """An AXPY per entry; a control word hands the sum over and takes the next accumulator."""
        p, spread = self.program, self.spread
        slot = p.register("slot")
        data = p.task(entries)
        places = EntryPlaces(p, entries, data, is_indexed)
        data.axpy(self.acc[slot], self.x[places.place], data.value, elements=spread.tokens)
        places.next_entry(data)
        passing = p.core.partial_sum_cycles
        for cores, is_first in ((p.cores(0), True), (p.cores(slice(1, None)), False)):
            end = p.task(entries, cores, "control", cycles=0 if self.is_alone else passing)
            if self.is_alone:
                # The sum passes on while it is added; the vector unit's time is this thread's.
                if not is_first:
                    end.wait(self.begun)
                end.work(passing)
            end.post(self.full, spread.words)
            if self.is_alone:
                end.work(p.core.elements_cycles(spread.tokens, p.element_bytes))
            end.advance(slot, modulo=self.slots)
            places.next_output(end)
            end.wait(self.free, spread.words, hinders=True)

    def chain(self) -> None:
        """Sums go down the columns and leave the mesh."""
        p, count = self.program, self.spread.outputs * self.spread.words
        top, below = p.cores(0), p.cores(slice(1, None))
        p.route(self.sums, p.cores(), "ramp", "south")
        p.route(self.sums, below, "north", "ramp")
        self.drains = [p.drain(self.sums, core, "south", count) for core in p.cores(-1).tolist()]
        every: dict[str, Any] = {
            "send": self.sums,
            "source": self.acc.all,
            "clears": True,
            "is_ring": True,
        }
        own, both = (self.full,), (self.full, self.came)
        p.main(top, SEND).stream(count, gates=own, signals=(self.free,), **every)
        self.receive(below, count)
        send = p.main(below, SEND)
        if self.is_paid and not self.is_alone:
            self.each_output(send, phases=False)
        else:
            signals = (self.free, self.room)
            send.stream(count, plus=self.inbox.all, gates=both, signals=signals, **every)

    def ring(self) -> None:
        """Sums go round the columns; the one of output o ends in row o modulo rows."""
        p, spread, rows = self.program, self.spread, self.program.mesh.rows
        p.route(self.sums, p.cores(slice(0, -1)), "ramp", "south")
        p.route(self.sums, p.cores(slice(1, None)), "north", "ramp")
        p.route(self.sums, p.cores(-1), "ramp", "north")
        p.route(self.sums, p.cores(slice(1, -1)), "south", "north")
        p.route(self.sums, p.cores(0), "south", "ramp")
        row = p.cores() // p.mesh.columns
        begun = (spread.outputs + rows - 1 - (row - 1) % rows) // rows  # that begin in a row
        count = p.register("sums to receive", (spread.outputs - begun) * spread.words)
        self.receive(p.cores(), count)
        self.each_output(p.main(thread=SEND), phases=True)

    def receive(self, cores: np.ndarray, count: int | Register) -> None:
        """Store the sums of the row of cores before in the inbox."""
        code = self.program.main(cores, RECEIVE)
        every: dict[str, Any] = {"take": self.sums, "gates": (self.room,)}
        if not self.is_alone:
            signals = (self.came,)
            code.stream(count, into=self.inbox.all, signals=signals, is_ring=True, **every)
            return
        row, pack = self.program.register("inbox row"), self.program.pack
        into, rest = self.inbox[row], self.spread.words - 1
        with code.loop(self.program.register("sum"), self.spread.outputs, cycles=0):
            code.stream(1, into=into.part(0, pack), signals=(self.came, self.begun), **every)
            if rest:
                part = into.part(pack, rest * pack)
                code.stream(rest, into=part, signals=(self.came,), **every)
            code.advance(row, modulo=self.inbox.shape[0])

    def each_output(self, send: Code, phases: bool) -> None:
        """Send, or keep, the sums one output feature after the other. In a ring a sum begins in one
        row (phase -1), ends in the row before (phase 0), and gets the core's own in all others."""
        p, spread = self.program, self.spread
        output, slot, row = (p.register(name) for name in ("output", "sum", "sum received"))
        with send.loop(output, spread.outputs, cycles=0):
            send.wait(self.full, spread.words)
            if phases:
                self.by_phase(send, slot, row)
            else:
                self.send_sum(send, slot, row, send_to=self.sums)
            send.advance(slot, modulo=self.slots)

    def by_phase(self, send: Code, slot: Register, row: Register) -> None:
        """Do a core's part in the turn of a sum."""
        p = self.program
        kind, kept = p.register("part in the turn"), p.register("output kept")
        send.set(kind, _PASS)
        for phase, part in ((0, _KEEP), (p.mesh.rows - 1, _BEGIN)):
            with send.when_equal(self.phase, phase):
                send.set(kind, part)
        with send.when_equal(kind, _BEGIN):
            self.send_sum(send, slot, None, send_to=self.sums)
        with send.when_equal(kind, _PASS):
            self.send_sum(send, slot, row, send_to=self.sums)
        with send.when_equal(kind, _KEEP):
            self.send_sum(send, slot, row, into=self.y[kept])
            send.advance(kept)
        send.advance(self.phase, modulo=p.mesh.rows)

    def send_sum(
        self,
        send: Code,
        slot: Register,
        row: Register | None,
        *,
        send_to: Colour | None = None,
        into: Part | None = None,
    ) -> None:
        """Move one sum, with the one received: added in passing, or first by the vector unit."""
        own, words = self.acc[slot], self.spread.words
        other = None if row is None else self.inbox[row]
        gates: tuple[Counter, ...] = () if other is None else (self.came,)
        signals = (self.free,) if other is None else (self.free, self.room)
        if other is not None and self.is_paid:
            send.wait(self.came, words)
            send.add(own, own, other, set_up=0.0, elements=self.spread.tokens)
            send.post(self.room, words)
            other, gates, signals = None, (), (self.free,)
        moves: dict[str, Any] = {"send": send_to, "into": into, "source": own, "plus": other}
        send.stream(words, gates=gates, signals=signals, clears=True, **moves)
        if row is not None:
            send.advance(row, modulo=self.inbox.shape[0])

    def result(self, done: MeshRun) -> np.ndarray:
        """Return Y [tokens, outputs] of a run."""
        spread, mesh = self.spread, self.program.mesh
        if not self.is_ring:
            words = [
                np.stack(done.drained(drain)[: self.program.pack], -1) for drain in self.drains
            ]
            shape = (mesh.columns, spread.outputs, spread.width)
            return spread.tokens_of(np.stack(words).reshape(shape))
        kept = done.read(self.y).reshape(mesh.rows, mesh.columns, -1, spread.width)
        columns = kept.transpose(1, 2, 0, 3).reshape(mesh.columns, -1, spread.width)
        return spread.tokens_of(columns[:, : spread.outputs])
