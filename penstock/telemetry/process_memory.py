"""Memory of this process as the system reports it: used, and still available."""

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import BudgetError

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_SELF_CGROUP = Path("/proc/self/cgroup")


def is_measurable() -> bool:
    """Whether the system reports resident memory; without further software only Linux does."""
    return _STATUS.exists()


def resident_bytes() -> int:
    """Return the current resident memory of this process."""
    return _field(_STATUS, "VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # `ru_maxrss` includes the peak of the process that forked this one; `VmHWM` does not.
    return _field(_STATUS, "VmHWM") or peak * (1 if sys.platform == "darwin" else 1024)


def available_bytes() -> int:
    """Return the memory that this process can still allocate without swapping or being killed.

    The result is the minimum of three values: the free memory of the machine, the rest of each
    control group, and the rest of the address space limit (`ulimit -v`).
    """
    machine = _field(_MEMINFO, "MemAvailable")
    if machine is None:
        machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = [machine, *_left_by_groups(_CGROUPS, _SELF_CGROUP)]
    limit = address_space_limit()
    if limit is not None:
        left.append(limit - address_space_bytes())
    return max(0, min(left))


def total_bytes() -> int:
    """Return the memory that this process could use if no other program used any: that of the
    machine, or the limit of a control group if it is less."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_limits_of_groups(_CGROUPS, _SELF_CGROUP)])


def address_space_limit() -> int | None:
    """Return the limit on this process's address space in bytes; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def address_space_bytes() -> int:
    """Return the current address space of this process: its memory and its reservations."""
    return _field(_STATUS, "VmSize") or resident_bytes()


def require_address_space(least_bytes: int) -> None:
    """**Raises:** `BudgetError` if the address space limit is less than `least_bytes`."""
    limit = address_space_limit()
    if limit is not None and limit < least_bytes:
        raise BudgetError(
            f"the address space of this process is limited to {limit:,} bytes (ulimit -v); the "
            f"libraries and the smallest run need {least_bytes:,}; raise that limit, or remove it "
            "and limit the run with `memory`"
        )


def _left_by_groups(root: Path, membership: Path) -> list[int]:
    """Return the remaining bytes of this process's control groups, innermost first."""
    left = [sys.maxsize]
    for folder, (most, present, cached) in _groups(root, membership):
        limit, used = _number(folder / most), _number(folder / present)
        if limit is not None and used is not None:
            # The page cache counts as used, but is reclaimed on demand.
            left.append(limit - used + (_stat(folder / "memory.stat", cached) or 0))
    return left


def _limits_of_groups(root: Path, membership: Path) -> list[int]:
    """Return the limits of this process's control groups, innermost first."""
    limits = (_number(folder / names[0]) for folder, names in _groups(root, membership))
    return [limit for limit in limits if limit is not None]


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of this process's control groups, innermost first, with the names of the
    limit, of the use, and of the page cache that can be reclaimed."""
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
            yield folder, names


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # this level is not visible to the process
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int | None:
    try:
        rows = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(rows.get(name, 0))


def _field(path: Path, name: str) -> int | None:
    """Return a field of a /proc file; the fields are in units of 1024 bytes."""
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
