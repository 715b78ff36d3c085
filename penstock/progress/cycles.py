"""Cycles on a simulated wafer-scale engine, as text."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.progress.figures import show_count, show_duration
from penstock.telemetry import RunMeasured, StepCycles


def step_cycles_text(cycles: StepCycles) -> str:
    """Return the cycles of a step, their sources, and their time on the wafer."""
    parts = _by_source(cycles.closed_form, cycles.simulated)
    return f"{parts}; {_time(cycles.closed_form + cycles.simulated, cycles.clock_hz)}"


def largest_stage_text(cycles: StepCycles) -> str:
    """Return the stage and sweep that takes the most cycles of a step, with its share."""
    totals = {
        (stage, sweep): sum(figures.values())
        for stage, sweeps in cycles.stages.items()
        for sweep, figures in sweeps.items()
    }
    stage, sweep = max(totals, key=totals.__getitem__)
    way = "forward and backward" if sweep == "turn" else sweep
    most = totals[stage, sweep]
    return f"most in {stage} {way}: {show_count(most)}, {most / sum(totals.values()):.0%}"


def cycle_lines(run: RunMeasured) -> list[str]:
    """Return the cycles of a step on a wafer-scale engine, and where they come from; nothing for
    other devices."""
    closed, simulated = (
        each / run.steps for each in (run.closed_form_cycles, run.simulated_cycles)
    )
    if not closed + simulated or not run.clock_hz:
        return []
    parts, time = _by_source(closed, simulated), _time(closed + simulated, run.clock_hz)
    return [f"a step's cycles on the wafer: {parts}; {time}"]


def _by_source(closed: float, simulated: float) -> str:
    parts: Mapping[str, float] = {"closed form": closed, "simulated": simulated}
    shown = [f"{each:,.0f} {source}" for source, each in parts.items() if each]
    if len(shown) > 1:
        shown = [f"{closed + simulated:,.0f}", f"of which {shown[0]}", shown[1]]
    return ", ".join(shown)


def _time(cycles: float, clock_hz: float) -> str:
    seconds = cycles / clock_hz
    shown = show_duration(seconds) if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    return f"{shown} at {clock_hz / 1e9:g} GHz"
