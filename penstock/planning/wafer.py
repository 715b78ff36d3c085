"""The mesh of a run on a simulated wafer: its options, and where the stages lie on it."""

from dataclasses import replace

from penstock.config import Config
from penstock.engine import plan_wafer
from penstock.planning.execution_plan import ExecutionPlan
from penstock.wafer import WaferOptions

_WAFER = "wafer"


def wafer_options(config: Config, device: str) -> WaferOptions | None:
    """Return the options of a run on a simulated wafer; None for any other device.

    Raises:
        ConfigError: a mesh without cores, or a file of parameters that cannot be used.
    """
    return WaferOptions.of(config.engine) if device == _WAFER else None


def with_wafer(plan: ExecutionPlan, options: WaferOptions | None) -> ExecutionPlan:
    """Return a plan whose engines count cycles on a mesh; the plan as it is without options.

    Raises:
        BudgetError: a stage does not fit the cores' memory; the text names the stage.
    """
    if options is None:
        return plan
    return replace(plan, plan=replace(plan.plan, wafer=plan_wafer(plan.program, options)))
