"""Cycles on a simulated wafer-scale engine, as text."""

from penstock.progress.figures import show_count, show_duration
from penstock.telemetry import RunMeasured, StepCycles


def step_cycles_text(cycles: StepCycles) -> str:
    """Return the cycles of a step, their sources, and their time on the wafer."""
    total = cycles.closed_form + cycles.simulated
    sources = "closed form"
    if cycles.simulated:
        sources = f"{cycles.simulated / total:.0%} simulated, the rest closed form"
    return f"{show_count(total)}, {sources}   {show_cycle_time(total, cycles.clock_hz)}"


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
    by_source = {
        "closed form": run.closed_form_cycles / run.steps,
        "simulated": run.simulated_cycles / run.steps,
    }
    total = sum(by_source.values())
    if not total or not run.clock_hz:
        return []
    parts = [f"{each:,.0f} {source}" for source, each in by_source.items() if each]
    if len(parts) > 1:
        parts = [f"{total:,.0f}", f"of which {parts[0]}", parts[1]]
    time = show_cycle_time(total, run.clock_hz)
    return [f"a step's cycles on the wafer: {', '.join(parts)}; {time}"]


def show_cycle_time(cycles: float, clock_hz: float) -> str:
    """Return the time of some cycles, such as `1.07 ms at 1.1 GHz`."""
    seconds = cycles / clock_hz
    shown = show_duration(seconds) if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
    return f"{shown} at {clock_hz / 1e9:g} GHz"
