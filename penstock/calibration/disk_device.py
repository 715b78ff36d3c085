"""A name of the device that a folder is on: rates of one disk say nothing of another."""

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_IDENTIFIERS = Path("/dev/disk/by-uuid")


def device_of(folder: Path) -> str:
    """Return a name of the device of a folder's file system, the same after a reboot if possible.

    It is the identifier of the file system on a block device, since the system numbers block
    devices anew at each start; else the mount's source, for example that of a network file system,
    with the mount point, because sources such as `tmpfs` name no device; without a table of mounts
    the device number.
    """
    device = os.stat(folder).st_dev
    found = _mount_of(folder.resolve())
    if found is None:
        return f"device {os.major(device)}:{os.minor(device)}"
    point, source = found
    if not source.startswith("/dev/"):
        return f"{source} at {point}"
    identifier = _identifier_of(Path(source))
    return source if identifier is None else f"file system {identifier}"


def _mount_of(folder: Path) -> tuple[str, str] | None:
    """Return mount point and source of a folder's file system; None without a table of mounts."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return None
    found: dict[Path, tuple[str, str]] = {}
    for line in lines:  # a later mount hides an earlier one at the same place
        mount, _, file_system = line.partition(" - ")
        point, source = (_unescaped(part) for part in (mount.split()[4], file_system.split()[1]))
        found[Path(point)] = point, source
    return next((found[place] for place in (folder, *folder.parents) if place in found), None)


def _unescaped(text: str) -> str:
    r"""Return a field of the table with its characters, such as `\040` for a space."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _identifier_of(source: Path) -> str | None:
    """Return the identifier of the file system on a block device; None where none is known."""
    try:
        number = os.stat(source).st_rdev
        names = sorted(_IDENTIFIERS.iterdir())
        return next((name.name for name in names if os.stat(name).st_rdev == number), None)
    except OSError:
        return None
