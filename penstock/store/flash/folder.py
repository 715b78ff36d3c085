"""A folder on flash, whatever it holds, one store or shards: looked at, repaired, begun anew."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.store import files
from penstock.store.flash.journal import read_records
from penstock.store.flash.reader import FlashReader
from penstock.store.flash.sharded_reader import ShardedReader
from penstock.store.flash.shards import SHARDS, read_shards, recorded_together
from penstock.store.flash.store import JOURNAL
from penstock.store.flash.version import recorded_step


def open_reader(folder: Path, to_the_damage: bool = False) -> FlashReader | ShardedReader:
    """Return the durable steps of the store in `folder`; errors are those of the readers.

    With `to_the_damage`, of a damaged journal what is before the damage.
    """
    shards = read_shards(folder)
    if shards is None:
        return FlashReader(folder, to_the_damage)
    return ShardedReader(shards, to_the_damage)


def repair(folder: Path) -> int:
    """Go back to the newest durable step that is whole; return it. What is whole stays.

    Raises:
        ConfigError: there is no durable step yet.
        CorruptionError: none is whole; nothing has been changed.
        StorageError: a process has the store open for writing.
    """
    with open_reader(folder, to_the_damage=True) as reader:
        return reader.repair()


def discard_untrained(folder: Path) -> None:
    """Forget a store in which no step was ever committed: the next one in `folder` is new.

    Raises:
        ConfigError: there is no store, its format is newer, or it has been trained.
        StorageError: a process has it open.
    """
    shards = read_shards(folder)
    with open_reader(folder) as reader:
        if any(step > 0 for step in reader.steps):
            raise ConfigError(
                f"{folder} has been trained to step {reader.steps[-1]}; choose another "
                "store.flash.path"
            )
        with files.storage_errors(folder, 0):
            if shards is None:
                (folder / JOURNAL).unlink()  # without it the extents do not count
            else:
                for shard in shards.folders:  # while there is one, the folder is one of shards
                    shutil.rmtree(shard)
                (folder / SHARDS).unlink()
            files.sync_folder(folder)


def recorded_extra(folder: Path) -> dict[str, Any] | None:
    """Return what was kept with the last durable step in `folder`; None where there is none.

    Raises:
        CorruptionError: the journal's bytes have changed.
    """
    shards = read_shards(folder)
    if shards is not None:
        return recorded_together(shards)
    journal = folder / JOURNAL
    if not journal.exists():
        return None
    records, _ = read_records(journal)
    return recorded_step(journal, records[-1])[1] if len(records) > 1 else None
