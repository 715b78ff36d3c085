"""The machine that a figure was measured on: processor, cores, memory, disk, versions, load."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

_MATRIX_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # what decides how fast products are


def describe_machine(folder: str | Path | None = None) -> dict[str, Any]:
    """Return the machine as plain data.

    Args:
        folder: where the benchmark reads and writes, so that its disk is named too.
    """
    described = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "torch": _version("torch"),
        "load": [round(load, 1) for load in os.getloadavg()],
    }
    return described if folder is None else described | {"disk": disk_of(folder)}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name, and what tells it from others of that name.

    A virtual machine's processor is often named by its family alone.
    """
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name", platform.machine())
    numbers = [f"{what} {fields[key]}" for what, key in _NUMBERS.items() if key in fields]
    flags = fields.get("flags", "").split()
    return "; ".join([name, *numbers, *(flag for flag in _MATRIX_FLAGS if flag in flags)])


_NUMBERS = {"family": "cpu family", "model": "model", "stepping": "stepping"}


def memory_bytes() -> int:
    """Return the memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def disk_of(folder: str | Path) -> str:
    """Return the file system that a folder is on and the device under it, as the system names them.

    An empty text where the system does not tell.
    """
    folder = Path(folder).resolve()
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    found: tuple[int, str] = (-1, "")
    for line in lines:
        before, _, after = line.partition(" - ")
        numbers, mounted = before.split()[2], Path(before.split()[4].replace("\\040", " "))
        kind, device = after.split()[:2]
        if folder.is_relative_to(mounted) and len(mounted.parts) > found[0]:
            found = len(mounted.parts), " ".join([kind, "on", device, *_model(numbers)])
    return found[1]


def _model(numbers: str) -> list[str]:
    """Return the model of a block device, where it says one."""
    device = Path("/sys/dev/block") / numbers
    for place in (device, device / ".."):  # a partition's disk is above it
        try:
            return [f"({(place / 'device' / 'model').read_text().strip()})"]
        except OSError:
            continue
    return []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
