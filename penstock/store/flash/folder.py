"""A folder on flash that contains one store or shards: inspection, repair and removal."""

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

    With `despite_damage`, the intact records of a damaged journal are used.
    """
    shards = read_shards(folder)
    if shards is None:
        return FlashReader(folder, despite_damage)
    return ShardedReader(shards, despite_damage)


def holds_store(folder: Path) -> bool:
    """Return whether the folder contains a store, in one part or in shards, in any state."""
    return any((folder / name).exists() for name in (JOURNAL, SHARDS))


@dataclass(frozen=True)
class Repaired:
    """The step to which a store was rolled back, and the discarded steps.

    `discarded` are the steps that were listed and no longer are. `damaged_journal` says whether
    records of the journal were unreadable; the steps of these records are unknown.
    """

    step: int
    discarded: tuple[int, ...]
    damaged_journal: bool


def repair(folder: Path) -> Repaired:
    """Roll back to the newest intact durable step. Intact steps stay.

    Raises:
        ConfigError: there is no durable step yet.
        CorruptionError: no step is intact; nothing has been changed.
        StorageError: a process has the store open for writing.
    """
    with open_reader(folder, despite_damage=True) as reader:
        before, damaged_journal = reader.steps, reader.has_damaged_journal
        step = reader.repair()
        discarded = tuple(sorted(set(before) - set(reader.steps)))
        return Repaired(step, discarded, damaged_journal)


def discard_untrained(folder: Path) -> None:
    """Remove a store in which no step was ever committed, so that the next store in `folder` is
    new.

    Raises:
        ConfigError: there is no store, its format is newer, or it has been trained.
        StorageError: a process has the store open.
    """
    shards = read_shards(folder)
    if shards is not None:
        _discard_shards(shards)
        return
    with FlashReader(folder) as reader:
        _require_untrained(folder, reader.steps)
        with files.storage_errors(folder, 0):
            (folder / JOURNAL).unlink()  # without the journal the extents are unused
            durable.sync_folder(folder)


def _discard_shards(shards: Shards) -> None:
    """Remove all shards. Some may be missing, if a process died during an earlier removal."""
    lock = FolderLock(shards.folder, "store.flash.path")
    try:
        folders = [folder for copies in shards.copies for folder in copies]
        for folder in folders:
            _require_untrained(shards.folder, list(recorded_steps(folder)))
        with files.storage_errors(shards.folder, 0):
            there = [folder for folder in folders if folder.exists()]
            for folder in there:
                if folder.is_symlink():  # the target of a link is not ours to delete
                    raise OSError(errno.ELOOP, "expected a folder, got a link", str(folder))
            for folder in there:
                forget(folder)
            for folder in there:
                shutil.rmtree(folder)
            (shards.folder / SHARDS).unlink()  # last: until then the folder is a sharded store
    finally:
        lock.release()


def _require_untrained(folder: Path, steps: Sequence[int]) -> None:
    if any(step > 0 for step in steps):
        raise ConfigError(
            f"{folder} has been trained to step {steps[-1]}; choose another store.flash.path"
        )


def recorded_extra(folder: Path) -> dict[str, Any] | None:
    """Return the data kept with the last durable step in `folder`; None if there is no step.

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
