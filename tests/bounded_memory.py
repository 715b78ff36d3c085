"""A limit on the memory of this process, within which a test has to get by."""

import contextlib
import resource
from pathlib import Path


@contextlib.contextmanager
def bounded_memory(more_bytes=1 << 30):
    """Let the process take at most so much more than it has: beyond, allocations fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now_bytes = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
