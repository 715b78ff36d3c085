"""The published programs of few cores: forms of a loop, and a relay."""

from collections.abc import Callable

import numpy as np

from penstock.errors import ConfigError, did_you_mean
from penstock.wafer.language import RECEIVE, Code, MeshProgram, Part
from penstock.wafer.mesh import MeshReport
from penstock.wafer.parameters import CoreParameters, Mesh


def _one(code: Code, y: Part, x: Part, program: MeshProgram) -> None:
    code.axpy(y, x, 0.5, after=code.core.drain_cycles)


def _repeated(code: Code, y: Part, x: Part, program: MeshProgram, *, cycles: float) -> None:
    with code.loop(program.register("call"), 256, cycles=cycles):
        code.axpy(y.part(0, 16), x.part(0, 16), 0.5)
    code.work(code.core.drain_cycles)


def _while_loop(code: Code, y: Part, x: Part, program: MeshProgram) -> None:
    _repeated(code, y, x, program, cycles=code.core.loop_cycles)


def _mapped(code: Code, y: Part, x: Part, program: MeshProgram) -> None:
    _repeated(code, y, x, program, cycles=0.0)


def _nested(code: Code, y: Part, x: Part, program: MeshProgram) -> None:
    with (
        code.loop(program.register("outer"), 16),
        code.loop(program.register("inner"), 16, cycles=0.0),
    ):
        code.axpy(y.part(0, 16), x.part(0, 16), 0.5)
    code.work(code.core.drain_cycles)


def _beside(code: Code, y: Part, x: Part, program: MeshProgram) -> None:
    elements = (514 - 2 - round(code.core.vector_cycles)) * code.core.simd_half
    code.axpy(y.part(0, elements), x.part(0, elements), 0.5, after=2.0)
    scalar = program.main(thread=RECEIVE)
    with scalar.loop(program.register("scalar"), 514, cycles=0.0):
        scalar.work(scalar.core.scalar_cycles)


LOOP_FORMS: dict[str, Callable[[Code, Part, Part, MeshProgram], None]] = {
    "one operation on 4,096": _one,
    "256 on 16, while loop": _while_loop,
    "256 on 16, @map": _mapped,
    "16 x 16 on 16, nested loops": _nested,
    "operation beside scalar work": _beside,
}
"""The forms by the names of their published rows."""


def simulate_loop_form(name: str, core: CoreParameters) -> tuple[np.ndarray, MeshReport]:
    """Return y after the operations y += x / 2 of a form of loop on one core, and the report.

    x is 1 and y 0 at first; 16-bit cycles and 32-bit numbers.
    """
    if name not in LOOP_FORMS:
        known = ", ".join(repr(known) for known in LOOP_FORMS)
        raise ConfigError(
            f"loop form: expected {known}, got {name!r}{did_you_mean(name, LOOP_FORMS)}"
        )
    p = MeshProgram(Mesh(1, 1), core, rounds=False)
    y, x = p.array("y", 4096), p.array("x", 4096, np.ones(4096))
    LOOP_FORMS[name](p.main(), y.all, x.all, p)
    run = p.run()
    return run.read(y)[0], run.report


def simulate_relay(
    words: np.ndarray, cores: int, core: CoreParameters
) -> tuple[np.ndarray, MeshReport]:
    """Return what the last core has after words went from core to core, and the report.

    Each core stores all of them before it sends them on.

    Args:
        words: numbers of 32 bits [words].
        cores: that receive them; one more sends them first.
    """
    if cores < 1 or not len(words):
        raise ConfigError(
            f"relay: expected words and cores from 1 up, got {len(words)} and {cores}"
        )
    p = MeshProgram(Mesh(1, cores + 1), core, element_bytes=4)
    first, last = p.cores(0, 0), p.cores(0, cores)
    store = p.array("words", len(words), element_bytes=4)
    colour = p.colour("relay")
    p.route(colour, p.cores(0, slice(0, -1)), "ramp", "east")
    p.route(colour, p.cores(0, slice(1, None)), "west", "ramp")
    p.load(store, first, words)
    p.main(first).send(store.all, colour)
    middle = p.main(p.cores(0, slice(1, -1)))
    end = p.main(last)
    for code in (middle, end):
        code.receive(store.all, colour)
        code.work(core.drain_cycles)
    middle.send(store.all, colour)
    run = p.run()
    return run.read(store)[-1], run.report
