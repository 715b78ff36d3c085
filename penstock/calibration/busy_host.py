"""Whether other work ran on the host while it was measured, as the spread of its rates shows."""

import math

from penstock.machines import MachineDescription, RateCurve

BUSY_SPREAD = 1.0
"""Beyond it the fastest repetition was more than twice as fast as the median: other work has slowed
most repetitions, and the median is not the rate of an idle host."""


def curves_of(machine: MachineDescription) -> list[RateCurve]:
    """Return all rate curves of a machine."""
    curves = [*machine.engine.rates, *machine.store.rates]
    for part in (machine.store.flash, machine.processes):
        curves += part.rates if part is not None else ()
    return curves


def was_busy(machine: MachineDescription) -> bool:
    """Return whether the host was busy while it was measured."""
    return any(curve.spread > BUSY_SPREAD for curve in curves_of(machine))


def busy_note(machine: MachineDescription) -> str | None:
    """Return a sentence for the user if the host was busy while it was measured."""
    if not was_busy(machine):
        return None
    worst = max(curves_of(machine), key=lambda curve: curve.spread)
    named = " ".join(part for part in (worst.work, worst.dtype, worst.layout) if part != "any")
    return (
        "the host was busy while it was measured: the fastest measurement of "
        f"{named} was more than {math.floor(2 * worst.spread)} times as fast as the median, and "
        "predictions from them can be far off. Run `penstock calibrate --forget` when the host is "
        "idle"
    )
