"""The processor of this machine, by which libraries choose their code."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass, field
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_AVX512 = {"avx512bw", "avx512vl", "avx512dq"}


@dataclass(frozen=True)
class Processor:
    """A processor by its instruction set and its vendor.

    `vendor` is the processor's own identifier ("GenuineIntel"); empty if it has none; None if the
    system does not report it. `has_avx512` tells whether an x86 processor has the parts of AVX-512
    that the libraries of matrix products use, `multiplies_bfloat16` whether oneDNN has products of
    bfloat16 matrices for it: on x86 with AVX-512 or AVX-NE-CONVERT.
    """

    architecture: str
    vendor: str | None
    has_avx512: bool = field(default=True, kw_only=True)
    multiplies_bfloat16: bool = field(default=True, kw_only=True)

    @property
    def is_x86(self) -> bool:
        return self.architecture in ("x86_64", "AMD64")

    @property
    def prefers_onednn(self) -> bool:
        """Whether oneDNN multiplies float32 matrices faster than MKL, which uses AVX-512 on Intel's
        processors only."""
        is_other_vendor = self.is_x86 and self.vendor not in (None, "GenuineIntel")
        return is_other_vendor and self.has_avx512

    @classmethod
    def here(cls) -> Processor:
        """Return the processor of this machine."""
        return _here()


@functools.cache
def _here() -> Processor:
    has_avx512, multiplies_bfloat16 = _instruction_sets(_CPUINFO)
    return Processor(
        platform.machine(),
        _vendor(_CPUINFO),
        has_avx512=has_avx512,
        multiplies_bfloat16=multiplies_bfloat16,
    )


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of this machine's processor, as the system reports it."""
    return _field(cpuinfo, "model name") or platform.processor() or platform.machine()


def _vendor(cpuinfo: Path) -> str | None:
    return _field(cpuinfo, "vendor_id")


def _instruction_sets(cpuinfo: Path) -> tuple[bool, bool]:
    """Return whether the processor has AVX-512, and whether oneDNN multiplies bfloat16 on it; True
    where the system does not say."""
    features = set((_field(cpuinfo, "flags") or "").split())  # which only x86 reports
    has_avx512 = not features or features >= _AVX512
    return has_avx512, has_avx512 or "avx_ne_convert" in features


def _field(cpuinfo: Path, name: str) -> str | None:
    """Return a field of the first core; empty if it has none, None without such a file."""
    if not cpuinfo.exists():
        return None
    for line in cpuinfo.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
