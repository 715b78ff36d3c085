"""Compiled programs on disk, so that the second start of a run traces no graph.

An entry is found by a digest of everything that determines the program (`key.py`). Only models that
the installed `transformers` builds from a configuration are cached: a user's own code can change
without any sign of it. Entries are in the user's cache folder; deleting the folder is always safe.

Models are kept beside the programs (`remembered.py`), so that a process which finds both imports no
`transformers`. The weights of a Hugging Face folder are never kept. Plans and tables need no
graphs: outlines of programs are kept too (`outlined.py`).
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.planning.program_cache.cached import cached_program as cached_program
    from penstock.planning.program_cache.entries import (
        read_entry as read_entry,
        remove_entries as remove_entries,
        remove_entry as remove_entry,
        write_entry as write_entry,
    )
    from penstock.planning.program_cache.key import Request as Request
    from penstock.planning.program_cache.library_memory import library_bytes as library_bytes
    from penstock.planning.program_cache.outlined import OutlinedModels as OutlinedModels
    from penstock.planning.program_cache.remembered import (
        remembered_folder as remembered_folder,
        remembered_model as remembered_model,
    )
    from penstock.planning.program_cache.versions import code_digest as code_digest

__getattr__ = lazily(__name__, __file__)
