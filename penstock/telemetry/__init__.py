"""Events of a run, and the files written from them."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.telemetry import process_memory as process_memory
    from penstock.telemetry.core_use import CoreUse as CoreUse
    from penstock.telemetry.events import (
        FIRST_STEPS as FIRST_STEPS,
        ClusterEvent as ClusterEvent,
        Compiling as Compiling,
        Evaluated as Evaluated,
        Evaluating as Evaluating,
        Event as Event,
        Finished as Finished,
        Listener as Listener,
        Notice as Notice,
        PredictedStep as PredictedStep,
        RunMeasured as RunMeasured,
        RunStarted as RunStarted,
        Saved as Saved,
        StepCycles as StepCycles,
        StepDone as StepDone,
        Stopped as Stopped,
        broadcast as broadcast,
    )
    from penstock.telemetry.metrics_writer import (
        MetricsFile as MetricsFile,
        read_metrics as read_metrics,
        reported as reported,
        stream_metrics as stream_metrics,
    )
    from penstock.telemetry.run_files import open_run_files as open_run_files
    from penstock.telemetry.run_report import RunReport as RunReport

__getattr__ = lazily(__name__, __file__)
