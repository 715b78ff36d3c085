"""What this process has open or mapped, of the files that a test names.

All descriptors, or all resident memory, are changed by other threads at any time; what a test has
made itself is found by its name.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path


def open_files(name: str | Path) -> list[str]:
    """Return the open files of this process in whose paths `name` occurs.

    Files without a name any more are listed by the one that they had.
    """
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in found if str(name) in path)


def mapped_files(name: str | Path) -> list[str]:
    """Return the mapped files of this process in whose paths `name` occurs, once per mapping."""
    return [path for path, _ in _mappings() if str(name) in path]


def resident_bytes_of_files(name: str | Path) -> int:
    """Return how much of mapped files in whose paths `name` occurs is resident."""
    return sum(resident for path, resident in _mappings() if str(name) in path)


def _mappings() -> Iterator[tuple[str, int]]:
    """Yield the path and the resident bytes of each mapping."""
    path = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)", line):
            path = head[1]
        elif line.startswith("Rss:"):
            yield path, int(line.split()[1]) * 1024
