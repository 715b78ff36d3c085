"""Calibration: this host, measured once and kept as a machine description.

A name is imported at first use: reading kept measurements needs no torch.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.calibration.host_key import HostKey
    from penstock.calibration.host_measurement import calibrate
    from penstock.calibration.kept_measurements import (
        keep,
        kept_file,
        kept_machine,
        this_host,
    )
    from penstock.calibration.repetitions import OnProgress

__all__ = [
    "HostKey",
    "OnProgress",
    "calibrate",
    "keep",
    "kept_file",
    "kept_machine",
    "this_host",
]

__getattr__ = lazily(
    __name__,
    {
        "HostKey": "host_key",
        "OnProgress": "repetitions",
        "calibrate": "host_measurement",
        "keep": "kept_measurements",
        "kept_file": "kept_measurements",
        "kept_machine": "kept_measurements",
        "this_host": "kept_measurements",
    },
)
