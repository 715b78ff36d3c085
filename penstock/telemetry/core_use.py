"""How much of this machine's cores other programs use, and its hypervisor gives to others.

Source: the first line of `/proc/stat` (proc_stat(5)), in ticks since the machine started.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE, _STOLEN = (3, 4), 7  # fields: idle and waiting for a disk; given to other virtual machines
_LEAST_TICKS = 100  # of all cores: of a shorter time, the roundings of the fields are a share


def _tick_seconds() -> float:
    return 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CoreUse:
    """Seconds of all cores together: all time, the time in which they computed, of it that of this
    process, and the time that the hypervisor has given to others."""

    total: float
    busy: float
    own: float
    stolen: float

    @classmethod
    def now(cls, stat: Path = _STAT) -> CoreUse | None:
        """Return the use until now; None if the system does not report it."""
        try:
            name, *fields = stat.read_text().splitlines()[0].split()
            ticks = [int(field) for field in fields[:8]]
        except (OSError, IndexError, ValueError):
            return None
        if name != "cpu" or len(ticks) <= _STOLEN:
            return None
        own = resource.getrusage(resource.RUSAGE_SELF)
        total, stolen = sum(ticks), ticks[_STOLEN]
        busy = total - stolen - sum(ticks[field] for field in _IDLE)
        seconds = _tick_seconds()
        return cls(total * seconds, busy * seconds, own.ru_utime + own.ru_stime, stolen * seconds)

    @classmethod
    def shares(cls, before: CoreUse | None) -> tuple[float, float]:
        """Return `shares_since` of the use until now; 0 if the system does not report it."""
        now = cls.now()
        return (0.0, 0.0) if before is None or now is None else now.shares_since(before)

    def shares_since(self, before: CoreUse) -> tuple[float, float]:
        """Return the shares of the cores' time since then of other programs, and of others on the
        hypervisor; 0 if the time is too short for its ticks to tell."""
        total = self.total - before.total
        if total < _LEAST_TICKS * _tick_seconds():
            return 0.0, 0.0
        others = (self.busy - before.busy) - (self.own - before.own)
        return max(0.0, others / total), (self.stolen - before.stolen) / total
