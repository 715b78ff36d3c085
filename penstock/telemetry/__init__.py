"""Events of a run, and the files written from them."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.telemetry.events import (
        ClusterEvent,
        Evaluated,
        Event,
        Finished,
        Listener,
        Notice,
        PredictedStep,
        RunMeasured,
        RunStarted,
        Saved,
        StepCycles,
        StepDone,
        Stopped,
        broadcast,
    )
    from penstock.telemetry.metrics_writer import (
        MetricsFile,
        read_metrics,
        reported,
        stream_metrics,
    )
    from penstock.telemetry.run_files import open_run_files
    from penstock.telemetry.run_report import RunReport

__all__ = [
    "ClusterEvent",
    "Evaluated",
    "Event",
    "Finished",
    "Listener",
    "MetricsFile",
    "Notice",
    "PredictedStep",
    "RunMeasured",
    "RunReport",
    "RunStarted",
    "Saved",
    "StepCycles",
    "StepDone",
    "Stopped",
    "broadcast",
    "open_run_files",
    "process_memory",
    "read_metrics",
    "reported",
    "stream_metrics",
]

__getattr__ = lazily(
    __name__,
    {
        "ClusterEvent": "events",
        "Evaluated": "events",
        "Event": "events",
        "Finished": "events",
        "Listener": "events",
        "MetricsFile": "metrics_writer",
        "Notice": "events",
        "PredictedStep": "events",
        "RunMeasured": "events",
        "RunReport": "run_report",
        "RunStarted": "events",
        "Saved": "events",
        "StepCycles": "events",
        "StepDone": "events",
        "Stopped": "events",
        "broadcast": "events",
        "open_run_files": "run_files",
        "read_metrics": "metrics_writer",
        "reported": "metrics_writer",
        "stream_metrics": "metrics_writer",
    },
)
