"""Calibration: this host, measured once and kept as a machine description.

A name is imported at first use: reading kept measurements needs no torch.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.calibration.host_key import HostKey, kept_file
    from penstock.calibration.host_measurement import calibrate
    from penstock.calibration.kept_measurements import (
        MOST_MEASUREMENTS,
        is_kept,
        keep,
        kept_machine,
        this_host,
    )
    from penstock.calibration.measured_runs import (
        ENOUGH_RUNS,
        MeasuredRun,
        accuracy_of,
        keep_run,
        kept_runs,
        runs_file,
    )
    from penstock.calibration.repetitions import OnProgress

__all__ = [
    "ENOUGH_RUNS",
    "MOST_MEASUREMENTS",
    "HostKey",
    "MeasuredRun",
    "OnProgress",
    "accuracy_of",
    "calibrate",
    "is_kept",
    "keep",
    "keep_run",
    "kept_file",
    "kept_machine",
    "kept_runs",
    "runs_file",
    "this_host",
]

__getattr__ = lazily(
    __name__,
    {
        "ENOUGH_RUNS": "measured_runs",
        "HostKey": "host_key",
        "MOST_MEASUREMENTS": "kept_measurements",
        "MeasuredRun": "measured_runs",
        "OnProgress": "repetitions",
        "accuracy_of": "measured_runs",
        "calibrate": "host_measurement",
        "is_kept": "kept_measurements",
        "keep": "kept_measurements",
        "keep_run": "measured_runs",
        "kept_file": "host_key",
        "kept_machine": "kept_measurements",
        "kept_runs": "measured_runs",
        "runs_file": "measured_runs",
        "this_host": "kept_measurements",
    },
)
