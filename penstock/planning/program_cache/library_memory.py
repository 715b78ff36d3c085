"""The memory of the libraries that a run loads, by which a process that plans knows it.

A run whose model and program are in the cache loads what this process has loaded before it asks for
its first model; what records and compiles comes after that.
"""

import functools

from penstock.planning.program_cache.digests import digest_of
from penstock.planning.program_cache.entries import read_entry, write_entry
from penstock.planning.program_cache.versions import code_digest
from penstock.telemetry import process_memory

# Modules that only a run loads, the model from the cache, the opened data set: measured as 11 to 13
# MiB of a run in one process, the same command planned and trained.
_MORE_OF_A_RUN_BYTES = 16 << 20


def library_bytes(keep: bool) -> int:
    """Return the resident memory of the libraries of a run, in bytes.

    It must be called before this process asks for a model.

    **Arguments:** `keep` says that this process holds nothing but libraries, as a command does, and
    fewer of them than a run. The figure is then kept with the bytes that a run has besides, so that
    the same plan has the same memory each time, and not less than training counts.
    """
    if not keep:
        return _resident_at_first()
    key = digest_of("libraries", code_digest())
    content = read_entry(key, "models")
    if content is not None and bytes(content).isdigit():
        return int(content)
    found = _resident_at_first() + _MORE_OF_A_RUN_BYTES
    write_entry(key, str(found).encode(), "models")
    return found


@functools.cache
def _resident_at_first() -> int:
    return process_memory.resident_bytes()
