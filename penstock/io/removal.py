"""Removal of a file or a folder."""

import shutil
from pathlib import Path


def remove(path: Path) -> None:
    """Delete a folder or a file, if it exists; a link is deleted, its target is not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
