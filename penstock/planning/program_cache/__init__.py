"""Compiled programs on disk, so that the second start of a run traces no graph.

An entry is found by a digest of everything that determines the program (`key.py`). Only models that
the installed `transformers` builds from a configuration are cached: a user's own code can change
without any sign of it. Entries are in the user's cache folder; deleting the folder is always safe.
"""

from penstock.planning.program_cache.cached import cached_program

__all__ = ["cached_program"]
