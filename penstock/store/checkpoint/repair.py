"""Going back to the newest intact checkpoint of a run whose newer ones are damaged.

The list no longer names a damaged folder, so that it is no checkpoint. The folder is not deleted:
it gets the prefix `damaged-`. If a crash undoes that, it is a folder that the list does not name.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError, CorruptionError
from penstock.store.checkpoint.index import Index, read_index, write_index
from penstock.store.checkpoint.load import verify_checkpoint
from penstock.store.checkpoint.state import STATE_NAME
from penstock.store.files import storage_errors

_PREFIX = "damaged-"


@dataclass(frozen=True)
class RepairedCheckpoints:
    """What a repair did: the newest intact checkpoint, and the new folders of the damaged ones."""

    newest: Path
    set_aside: tuple[Path, ...]


def repair_checkpoints(checkpoints: Path) -> RepairedCheckpoints:
    """Remove damaged and missing checkpoints from the list of a run, which must not be training.

    A checkpoint that was the best is the best no longer if it is damaged.

    Raises:
        ConfigError: there is no checkpoint.
        CorruptionError: the list is damaged, or no checkpoint is intact; nothing was changed.
        StorageError: the operating system refuses to write.
    """
    index = read_index(checkpoints)
    if not index.folders:
        raise ConfigError(f"{checkpoints}: no checkpoint yet, so there is nothing to repair")
    intact = tuple(name for name in index.folders if _is_intact(checkpoints / name))
    if not intact:
        raise CorruptionError(
            f"{checkpoints}: no checkpoint is intact; nothing was changed; restore the folder from "
            "a copy"
        )
    set_aside = []
    if intact != index.folders:
        best = index.best if index.best in intact else None
        with storage_errors(checkpoints, 0):
            write_index(checkpoints, Index(intact, best, index.retired))
            for name in index.folders:
                if name not in intact and (checkpoints / name).exists():
                    set_aside.append(_set_aside(checkpoints / name))
    return RepairedCheckpoints(checkpoints / intact[-1], tuple(set_aside))


def _is_intact(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except CorruptionError:
        return False
    except ConfigError:
        if (folder / STATE_NAME).exists():
            raise  # a newer release wrote it
        return False
    return True


def _set_aside(folder: Path) -> Path:
    """Rename a damaged folder to a name that no other has."""
    number, place = 0, folder.with_name(_PREFIX + folder.name)
    while place.exists():
        number += 1
        place = folder.with_name(f"{_PREFIX}{folder.name}-{number}")
    os.rename(folder, place)
    return place
