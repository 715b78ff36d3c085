"""What the planner predicts of a run on this host, and what becomes of the prediction.

Predictions need the measurements of `penstock calibrate`. Training never makes them: they would
delay its first step.
"""

import datetime

from penstock.calibration import HostKey, MeasuredRun, keep_run, kept_machine
from penstock.config import Config
from penstock.engine import target_of
from penstock.errors import PenstockError, StorageError
from penstock.planning import ExecutionPlan
from penstock.prediction import predict, predicted_step
from penstock.telemetry import FIRST_STEPS, PredictedStep, RunMeasured

LEAST_STEPS = FIRST_STEPS + 10
"""The time of a shorter run is no sample of the accuracy: the median of few steps is not usual."""


def predicted_here(config: Config, layout: ExecutionPlan) -> PredictedStep | None:
    """Return the prediction of a step on this host.

    None without measurements of this host, and for runs that other machines or devices compute, or
    the simulator of a mesh.
    """
    is_elsewhere = target_of(layout.device).has_own_memory or config.cluster.has_other_hosts
    wafer = layout.plan.wafer
    is_simulated = wafer is not None and wafer.options.cycles == "simulated"
    if is_elsewhere or is_simulated or config.engine.devices is not None:
        return None
    try:
        machine = kept_machine(HostKey.here())
        return None if machine is None else predicted_step(predict(config, layout, machine))
    except PenstockError:  # damaged, or no disk was measured: `penstock plan` says so
        return None


def keep_measured(model: str, measured: RunMeasured) -> str | None:
    """Keep what was measured of a run beside what was predicted, for the accuracy of predictions.

    **Returns:** a sentence for the user, if it could not be kept.
    """
    predicted = measured.predicted
    if predicted is None or measured.steps < LEAST_STEPS:
        return None
    run = MeasuredRun(
        date=datetime.date.today().isoformat(),
        model=model,
        predicted_seconds=predicted.seconds,
        seconds=measured.usual_step_seconds,
        predicted_bytes=predicted.peak_memory_bytes,
        peak_bytes=measured.peak_rss_bytes,
    )
    try:
        keep_run(run, HostKey.here())
    except StorageError as error:
        return f"the accuracy of the prediction was not recorded: {error}"
    return None
