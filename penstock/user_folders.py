"""The folders of a user in which Penstock keeps files between runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for files that can be made again: compiled kernels, and measurements of
    this host. It may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "penstock"
