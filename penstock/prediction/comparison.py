"""A predicted step in the parts by which a run measures its steps."""

from penstock.calibration import was_busy
from penstock.prediction.predicted_run import Prediction
from penstock.telemetry import PredictedStep


def predicted_step(prediction: Prediction) -> PredictedStep:
    """Return the parts of a predicted step.

    Compute is the time in which the engine computes. Of the rest, updates and transfers count as
    far as nothing computes meanwhile; what remains is the wait for flash. The predicted memory is
    that of all processes, and a run measures its own: with `cluster.start` it is left out.
    """
    busy = prediction.exclusive_seconds
    compute = busy.get("compute", 0.0)
    update = busy.get("update", 0.0)
    moved = sum(busy.get(n, 0.0) for n in ("receive gradients", "weights out", "gradients in"))
    flash = prediction.flash
    is_one_process = prediction.config.cluster.start == "none"
    return PredictedStep(
        seconds=prediction.step_seconds,
        compute_seconds=compute,
        weight_seconds=moved,
        update_seconds=update,
        flash_wait_seconds=max(0.0, prediction.step_seconds - compute - update - moved),
        streamed_bytes=prediction.costs.stream_bytes,
        gradient_bytes=prediction.costs.gradient_bytes,
        flash_read_bytes=0 if flash is None else flash.read_bytes,
        flash_written_bytes=0 if flash is None else flash.written_bytes,
        peak_memory_bytes=prediction.peak_memory_bytes if is_one_process else 0,
        host_was_busy=int(was_busy(prediction.machine)),
    )
