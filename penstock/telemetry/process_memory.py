"""What the system says of memory: what this process has of it, and what it may still take."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from penstock.errors import BudgetError

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_SELF_CGROUP = Path("/proc/self/cgroup")


def is_measurable() -> bool:
    """Whether the system says what is resident now; without more software, only Linux does."""
    return _STATUS.exists()


def resident_bytes() -> int:
    """Return the memory that this process has now."""
    return _field(_STATUS, "VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the most memory that this process has ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # A process inherits the peak of the one that forked it in `ru_maxrss`, not in `VmHWM`.
    return _field(_STATUS, "VmHWM") or peak * (1 if sys.platform == "darwin" else 1024)


def available_bytes() -> int:
    """Return what this process may still take without swapping or being killed.

    That is the least of what the machine has, what each of its control groups leaves, and what a
    limit on its address space leaves (`ulimit -v`).
    """
    machine = _field(_MEMINFO, "MemAvailable")
    if machine is None:
        machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = [machine, *_left_by_groups(_CGROUPS, _SELF_CGROUP)]
    limit = address_space_limit()
    if limit is not None:
        left.append(limit - address_space_bytes())
    return max(0, min(left))


def address_space_limit() -> int | None:
    """Return the bytes of address space that this process may have; None where nothing limits."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def address_space_bytes() -> int:
    """Return the address space that this process has now: its memory, and what it has reserved."""
    return _field(_STATUS, "VmSize") or resident_bytes()


def require_address_space(least_bytes: int) -> None:
    """**Raises:** `BudgetError` where a limit allows less than that."""
    limit = address_space_limit()
    if limit is not None and limit < least_bytes:
        raise BudgetError(
            f"this process may have {limit:,} bytes of address space (ulimit -v); the libraries "
            f"and the smallest run need {least_bytes:,}; raise that limit, or remove it and set "
            "`memory` to what the process may take"
        )


def _left_by_groups(root: Path, membership: Path) -> list[int]:
    """Return the bytes that the control groups of this process leave, innermost first."""
    left = [sys.maxsize]
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = Path(path.lstrip("/"))
        for folder in (top / inner, *(top / parent for parent in inner.parents)):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                # What is only cached counts as used there, and goes when it is asked for.
                left.append(limit - used + (_stat(folder / "memory.stat", names[2]) or 0))
    return left


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # this level is not ours to see
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int | None:
    try:
        rows = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(rows.get(name, 0))


def _field(path: Path, name: str) -> int | None:
    """Return a field of a file of /proc, which are in units of 1024 bytes."""
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
