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


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of this machine's processor, as the system reports it."""
    return _field(cpuinfo, "model name") or platform.processor() or platform.machine()


def _vendor(cpuinfo: Path) -> str | None:
    return _field(cpuinfo, "vendor_id")


def _field(cpuinfo: Path, name: str) -> str | None:
    """Return a field of the first core; empty if it has none, None without such a file."""
    if not cpuinfo.exists():
        return None
    for line in cpuinfo.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
