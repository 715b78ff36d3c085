"""Looking at a flash store without opening it for training: what it holds, whether it is whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from penstock.errors import ConfigError, CorruptionError
from penstock.store import files
from penstock.store.flash.description import require_readable
from penstock.store.flash.journal import Record, begin_anew, read_records, whole_records
from penstock.store.flash.layout import FlashLayout
from penstock.store.flash.medium import ExtentFile
from penstock.store.flash.store import EXTENTS, JOURNAL
from penstock.store.flash.version import Version, recorded_step
from penstock.store.lock import FolderLock
from penstock.store.roles import Role

MOST_BLOCK_ELEMENTS = 1 << 28
"""A block is read whole, so a journal that was made up may not ask for more than this."""


class FlashReader:
    """The durable steps of the store in `folder`, newest last. A context manager.

    With `despite_damage`, those whose record is whole, though the journal's bytes have changed.

    Raises:
        ConfigError: there is no store, or its format is newer.
        CorruptionError: the journal's bytes have changed.
        StorageError: a process has it open for writing.
    """

    def __init__(self, folder: Path, despite_damage: bool = False) -> None:
        self.folder = folder
        self._journal = folder / JOURNAL
        if not os.path.lexists(self._journal):
            raise ConfigError(f"{folder}: no store on flash here yet")
        self._versions: dict[int, Version] = {}
        self._lock = FolderLock(folder, "store.flash.path")
        try:
            read = whole_records if despite_damage else _read_records
            self._first, *self._records = read(self._journal)
            first = self._first
            require_readable(folder, first.content)
            self._layout = _layout(self._journal, first.content)
            self._keep = first.content["keep_steps"]
            self._steps = [recorded_step(self._journal, record)[0] for record in self._records]
            self._file = ExtentFile(folder / EXTENTS, self._layout.file_bytes, create=False)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> FlashReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        self._lock.release()

    @property
    def steps(self) -> list[int]:
        """The durable steps whose extents are still there, oldest first."""
        return self._steps[-self._keep :]

    @property
    def newest(self) -> int:
        """The newest durable step.

        Raises:
            ConfigError: there is none yet.
        """
        if not self._steps:
            raise none_durable(self.folder)
        return self._steps[-1]

    @property
    def bytes(self) -> int:
        """What the extents take on flash."""
        return self._layout.file_bytes

    @property
    def shards(self) -> int:
        """In how many parts the store is held."""
        return 1

    @property
    def parameters(self) -> int:
        return sum(sum(unit.sizes) for unit in self._layout.units)

    @property
    def weights(self) -> int:
        """How many weights there are."""
        return sum(len(unit.names) for unit in self._layout.units)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight, by name, in the order of the stages."""
        return {
            name: shape
            for unit in self._layout.units
            for name, shape in zip(unit.names, unit.shapes, strict=True)
        }

    @property
    def pieces(self) -> dict[str, tuple[int, int]]:
        """Which elements of every weight it holds, as begin and end: all, but for a shard."""
        return {
            name: (origin, origin + size)
            for unit in self._layout.units
            for name, origin, size in zip(unit.names, unit.origins, unit.sizes, strict=True)
        }

    def group(self, name: str, role: str) -> int:
        """Return how many elements of a weight share a value of a role."""
        return self._layout.unit(name).role(role).group

    def flush(self) -> None:
        """What is durable awaits nothing."""

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return elements `begin` to `end` of a weight after the newest durable step, float32.

        Raises:
            CorruptionError: some bytes have changed, with the place and both checksums.
        """
        return self.version(self.newest).read(name, role, begin, end)

    @property
    def state_bytes(self) -> int:
        """Weights and state of one step."""
        return sum(unit.place_bytes for unit in self._layout.units)

    def verify(self, step: int) -> None:
        """Read every byte of a durable step.

        Raises:
            CorruptionError: some have changed, with the place and both checksums.
        """
        self.version(step).verify()

    def content_hash(self, step: int) -> str:
        """Return the hash of all weights after a durable step."""
        return self.version(step).content_hash()

    def repair(self) -> int:
        """Go back to the newest durable step that is whole; return it.

        What is listed then is whole, and stays so: older steps go whose places have been used
        again, or are the next to be.

        Raises:
            ConfigError: there is no durable step yet, and nothing is damaged.
            CorruptionError: none is whole; nothing has been changed.
        """
        if not self.whole_steps:
            if not self._records:
                read_records(self._journal)  # raises where the journal is damaged
                raise none_durable(self.folder)
            raise CorruptionError(
                f"{self.folder}: no durable step is whole; restore it from an export"
            )
        return self.go_back(self.whole_steps[-1])

    @property
    def whole_steps(self) -> list[int]:
        """The durable steps of which every byte is as it was written, oldest first."""
        return [recorded_step(self._journal, record)[0] for record in self._whole_records]

    def go_back(self, step: int) -> int:
        """Make one of `whole_steps` the newest; return it.

        Of those before, the ones stay whose places are not the next to be written.
        """
        whole: list[Record] = []
        for record in reversed(self._whole_records):
            if recorded_step(self._journal, record)[0] > step:
                continue
            newest = self._version_of(whole[-1] if whole else record)
            if self._version_of(record).places_behind(newest) > len(whole):
                break
            whole.insert(0, record)
        if whole != self._records[-self._keep :] or self._is_damaged():
            with files.storage_errors(self.folder, 0):
                begin_anew(self._journal, [self._first, *whole], "journal.drop")
        self._records = whole
        self._steps = [recorded_step(self._journal, record)[0] for record in whole]
        self._versions.clear()
        return self._steps[-1]

    @cached_property
    def _whole_records(self) -> list[Record]:
        whole: list[Record] = []
        for record in reversed(self._records):
            if len(whole) < self._keep and self._is_whole(record):
                whole.insert(0, record)
        return whole

    def _is_damaged(self) -> bool:
        try:
            read_records(self._journal)
        except CorruptionError:
            return True
        return False

    def _is_whole(self, record: Record) -> bool:
        try:
            self._version_of(record).verify()
        except CorruptionError:
            return False
        return True

    def version(self, step: int) -> Version:
        """Return the state of a durable step, to be read piece by piece."""
        if step not in self._versions:
            # A step that was restored over itself has two records; the later one counts.
            later = self._steps[::-1].index(step)
            self._versions[step] = self._version_of(self._records[-1 - later])
        return self._versions[step]

    def _version_of(self, record: Record) -> Version:
        version = Version(self._layout, self._file)
        version.restore(record)
        return version


def none_durable(folder: Path) -> ConfigError:
    """Return the error to raise where weights have not been loaded to the end."""
    return ConfigError(f"{folder}: no durable step yet; start the run again")


def _read_records(journal: Path) -> list[Record]:
    return read_records(journal)[0]


def _layout(journal: Path, content: Mapping[str, Any]) -> FlashLayout:
    """Return what a journal's first record describes, which need not be sound."""
    try:
        keep, block = content["keep_steps"], content["block_elements"]
        _require_count(keep, 1, 2**31)
        _require_count(block, 1, MOST_BLOCK_ELEMENTS)
        for unit in content["units"]:
            for name, shape in unit["weights"].items():
                name.encode()  # half a surrogate pair is text in JSON, and nowhere else
                _require_count(len(shape), 0, 64)
                for length in shape:
                    _require_count(length, 0, 2**63)
            for name, origin in unit.get("origins", {}).items():
                _require_count(origin, 0, 2**63)
                _ = unit["weights"][name]
            for role in unit["roles"]:
                _require_count(role["group"], 1, MOST_BLOCK_ELEMENTS)
                _ = Role(role["name"], role["dtype"]).torch  # one of the types that there are
        return FlashLayout.from_description(content["units"], keep, block)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(
            f"{journal}: its first record does not describe a store ({str(error)[:200]})"
        ) from error


def _require_count(found: object, least: int, most: int) -> None:
    if type(found) is not int or not least <= found <= most:
        raise ValueError(f"{least} to {most} was expected, {str(found)[:40]} came")
