"""The processor of this machine, by which libraries choose their code."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Processor:
    """A processor by its instruction set and its vendor.

    `vendor` is the processor's own identifier ("GenuineIntel"); empty if it has none; None if the
    system does not report it.
    """

    architecture: str
    vendor: str | None

    @property
    def is_x86(self) -> bool:
        return self.architecture in ("x86_64", "AMD64")

    @classmethod
    def here(cls) -> Processor:
        """Return the processor of this machine."""
        return _here()


@functools.cache
def _here() -> Processor:
    return Processor(platform.machine(), _vendor(_CPUINFO))


def _vendor(cpuinfo: Path) -> str | None:
    if not cpuinfo.exists():
        return None
    for line in cpuinfo.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "vendor_id":
            return value.strip()
    return ""
