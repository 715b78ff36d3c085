"""A folder on flash, whatever it holds, one store or shards: looked at, repaired, begun anew."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.io import durable
from penstock.store import files
from penstock.store.flash.description import JOURNAL, require_readable
from penstock.store.flash.journal import read_records
from penstock.store.flash.reader import FlashReader, bfloat16_units
from penstock.store.flash.sharded_reader import ShardedReader
from penstock.store.flash.shards import (
    SHARDS,
    Shards,
    forget,
    read_shards,
    recorded_steps,
    recorded_together,
)
from penstock.store.flash.steps_reader import StepsReader
from penstock.store.flash.version import recorded_step
from penstock.store.lock import FolderLock


def open_reader(folder: Path, despite_damage: bool = False) -> StepsReader:
    """Return the durable steps of the store in `folder`; errors are those of the readers.

    With `despite_damage`, of a damaged journal the records that are whole.
    """
    shards = read_shards(folder)
    if shards is None:
        return FlashReader(folder, despite_damage)
    return ShardedReader(shards, despite_damage)


def holds_store(folder: Path) -> bool:
    """Tell whether there is a store in `folder`, whole or in shards, whatever its state."""
    return any((folder / name).exists() for name in (JOURNAL, SHARDS))


@dataclass(frozen=True)
class Repaired:
    """The step that a store went back to, and what was discarded.

    `discarded` are the steps that were listed and are no longer; `damaged_journal` says whether
    records of the journal were unreadable, of steps that nothing can name any more.
    """

    step: int
    discarded: tuple[int, ...]
    damaged_journal: bool


def repair(folder: Path) -> Repaired:
    """Go back to the newest durable step that is whole. What is whole stays.

    Raises:
        ConfigError: there is no durable step yet.
        CorruptionError: none is whole; nothing has been changed.
        StorageError: a process has the store open for writing.
    """
    with open_reader(folder, despite_damage=True) as reader:
        before, damaged_journal = reader.steps, reader.has_damaged_journal
        step = reader.repair()
        discarded = tuple(sorted(set(before) - set(reader.steps)))
        return Repaired(step, discarded, damaged_journal)


def discard_untrained(folder: Path) -> None:
    """Forget a store in which no step was ever committed: the next one in `folder` is new.

    Raises:
        ConfigError: there is no store, its format is newer, or it has been trained.
        StorageError: a process has it open.
    """
    shards = read_shards(folder)
    if shards is not None:
        _discard_shards(shards)
        return
    with FlashReader(folder) as reader:
        _require_untrained(folder, reader.steps)
        with files.storage_errors(folder, 0):
            (folder / JOURNAL).unlink()  # without it the extents do not count
            durable.sync_folder(folder)


def _discard_shards(shards: Shards) -> None:
    """Remove all shards; some may be gone already, where a process died in here before."""
    lock = FolderLock(shards.folder, "store.flash.path")
    try:
        folders = [folder for copies in shards.copies for folder in copies]
        for folder in folders:
            _require_untrained(shards.folder, list(recorded_steps(folder)))
        with files.storage_errors(shards.folder, 0):
            there = [folder for folder in folders if folder.exists()]
            for folder in there:
                if folder.is_symlink():  # what it leads to is not ours to delete
                    raise OSError(errno.ELOOP, "a link, a folder was expected", str(folder))
            for folder in there:
                forget(folder)
            for folder in there:
                shutil.rmtree(folder)
            (shards.folder / SHARDS).unlink()  # the last: until then the folder is one of shards
    finally:
        lock.release()


def _require_untrained(folder: Path, steps: Sequence[int]) -> None:
    if any(step > 0 for step in steps):
        raise ConfigError(
            f"{folder} has been trained to step {steps[-1]}; choose another store.flash.path"
        )


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


def recorded_bfloat16(folder: Path) -> frozenset[str]:
    """Return the weights that the store in `folder` keeps as bfloat16.

    Raises:
        ConfigError: the store's format is newer.
        CorruptionError: a journal's bytes have changed.
    """
    shards = read_shards(folder)
    folders = [folder] if shards is None else [f for copies in shards.copies for f in copies]
    found: set[str] = set()
    for journal in (each / JOURNAL for each in folders if (each / JOURNAL).exists()):
        content = read_records(journal)[0][0].content
        require_readable(journal.parent, content)
        found |= bfloat16_units(journal, content)
    return frozenset(found)
