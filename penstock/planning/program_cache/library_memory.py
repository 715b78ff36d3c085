"""The memory of the libraries that a run loads, by which a process that plans knows it.

A run whose model and program are in the cache loads what this process has loaded before it asks for
its first model; what records and compiles comes after that.
"""

import functools

from penstock.planning.program_cache.digests import digest_of
from penstock.planning.program_cache.entries import read_entry, write_entry
from penstock.planning.program_cache.versions import code_digest
from penstock.telemetry import process_memory


def library_bytes(keep: bool) -> int:
    """Return the resident memory of the libraries of a run, in bytes.

    It must be called before this process asks for a model.

    **Arguments:** `keep` says that this process holds nothing but libraries, as a command does. The
    figure is then kept, so that the same plan has the same memory each time.
    """
    if not keep:
        return _resident_at_first()
    key = digest_of("libraries", code_digest())
    content = read_entry(key, "models")
    if content is not None and bytes(content).isdigit():
        return int(content)
    found = _resident_at_first()
    write_entry(key, str(found).encode(), "models")
    return found


@functools.cache
def _resident_at_first() -> int:
    return process_memory.resident_bytes()
