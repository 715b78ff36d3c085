"""Calibration: this host, measured once and kept as a machine description.

A name is imported at first use: reading kept measurements needs no torch.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.calibration.busy_host import (
        BUSY_SPREAD as BUSY_SPREAD,
        busy_note as busy_note,
        curves_of as curves_of,
        was_busy as was_busy,
    )
    from penstock.calibration.disk_device import device_of as device_of
    from penstock.calibration.host_key import (
        KEY as KEY,
        HostKey as HostKey,
        kept_file as kept_file,
    )
    from penstock.calibration.host_measurement import calibrate as calibrate
    from penstock.calibration.kept_measurements import (
        MOST_MEASUREMENTS as MOST_MEASUREMENTS,
        is_kept as is_kept,
        keep as keep,
        kept_machine as kept_machine,
        measuring_time as measuring_time,
        require_writable as require_writable,
        this_host as this_host,
    )
    from penstock.calibration.measured_runs import (
        ENOUGH_RUNS as ENOUGH_RUNS,
        MeasuredRun as MeasuredRun,
        accuracy_of as accuracy_of,
        keep_run as keep_run,
        kept_runs as kept_runs,
        runs_file as runs_file,
    )

__getattr__ = lazily(__name__, __file__)
