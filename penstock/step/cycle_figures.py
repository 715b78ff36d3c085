"""What a step reports of cycles, on a simulated wafer."""

from collections.abc import Sequence

from penstock.engine import Engine, counted_cycles
from penstock.planning import ExecutionPlan
from penstock.telemetry import StepCycles


def step_cycles(plan: ExecutionPlan, engines: Sequence[Engine]) -> StepCycles | None:
    """Return the cycles of the engines' last step; None if they count none.

    Several engines work side by side, so that the slowest counts.
    """
    wafer = plan.plan.wafer
    if wafer is None:
        return None
    counts = counted_cycles(engines)
    stages: dict[str, dict[str, dict[str, float]]] = {}
    for count in counts:
        figures = {"closed_form": count.closed_form}
        if count.simulated:
            figures["simulated"] = count.simulated
        stages.setdefault(count.stage, {})[count.sweep] = figures
    options = wafer.options
    return StepCycles(
        mesh=str(options.mesh),
        cores=options.core.name,
        clock_hz=options.core.clock_hz,
        closed_form=sum(count.closed_form for count in counts),
        simulated=sum(count.simulated for count in counts),
        stages=stages,
    )
