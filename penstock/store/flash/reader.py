"""Read access to a flash store without opening it for training: its content and its integrity."""

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError, CorruptionError
from penstock.sparsity import PackedIndex
from penstock.store import files
from penstock.store.flash.description import EXTENTS, JOURNAL, require_readable
from penstock.store.flash.journal import Record, read_records, rewrite_journal, whole_records
from penstock.store.flash.layout import FlashLayout
from penstock.store.flash.medium import ExtentFile
from penstock.store.flash.steps_reader import StepsReader
from penstock.store.flash.unit_description import described_format
from penstock.store.flash.version import Version, recorded_step
from penstock.store.lock import FolderLock
from penstock.store.roles import Role
from penstock.weight_formats import BFLOAT16

MOST_BLOCK_ELEMENTS = 1 << 28
"""A block is read completely into memory, so a forged journal may not ask for more than this."""

_SECTOR_BYTES = 512  # the unit of `st_blocks`

MOST_CAPACITY, MOST_SPARSE_ELEMENTS = 1 << 32, 1 << 36
"""The same for a mask, whose size follows from these."""


class FlashReader(StepsReader):
    """The durable steps of the single store, or the single shard, in `folder`.

    With `despite_damage`, the steps whose record is intact, although the journal's bytes have
    changed.

    Raises:
        ConfigError: there is no store, or its format is newer.
        CorruptionError: the journal's bytes have changed.
        StorageError: a process has the store open for writing.
    """

    def __init__(self, folder: Path, despite_damage: bool = False) -> None:
        self._journal = folder / JOURNAL
        if not os.path.lexists(self._journal):
            raise ConfigError(f"{folder}: no store on flash here yet")
        self._versions: dict[int, Version] = {}
        with ExitStack() as opened:
            lock = FolderLock(folder, "store.flash.path")
            opened.callback(lock.release)
            read = whole_records if despite_damage else _read_records
            self._first, *self._records = read(self._journal)
            first = self._first
            require_readable(folder, first.content)
            self._layout = _layout(self._journal, first.content)
            self._keep = first.content["keep_steps"]
            self._steps = [recorded_step(self._journal, record)[0] for record in self._records]
            self._file = ExtentFile(folder / EXTENTS, self._layout.file_bytes, create=False)
            opened.callback(self._file.close)
            super().__init__(folder, 1, opened.pop_all())

    @property
    def steps(self) -> list[int]:
        return self._steps[-self._keep :]

    @property
    def bytes(self) -> int:
        if not self._layout.sparse:
            return self._layout.file_bytes
        allocated = _SECTOR_BYTES * os.stat(self.folder / EXTENTS).st_blocks
        return min(self._layout.file_bytes, allocated)

    @property
    def parameters(self) -> int:
        return sum(sum(unit.sizes) for unit in self._layout.units)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._layout.shapes

    @property
    def pieces(self) -> dict[str, tuple[int, int]]:
        """The elements of every weight in this store, as begin and end; all of them unless it is a
        shard."""
        return {
            name: (origin, origin + size)
            for unit in self._layout.units
            for name, origin, size in zip(unit.names, unit.origins, unit.sizes, strict=True)
        }

    @property
    def store_id(self) -> object:
        """The store that this shard belongs to, as far as the journal says."""
        return self._first.content.get("store")

    def group(self, name: str, role: str) -> int:
        """Return how many elements of a weight share a value of a role."""
        return self._layout.unit(name).role(role).group

    def read_step(self, step: int, name: str, role: str, begin: int, end: int) -> np.ndarray:
        return self.version(step).read(name, role, begin, end)

    @property
    def state_bytes(self) -> int:
        return sum(unit.place_bytes + unit.mask_room for unit in self._layout.units)

    def mask_of(self, step: int, name: str) -> PackedIndex | None:
        return self.version(step).mask(name)

    @property
    def sparse(self) -> dict[str, tuple[int, ...]]:
        return {unit.names[0]: unit.shapes[0] for unit in self._layout.sparse}

    def verify(self, step: int) -> None:
        self.version(step).verify()

    def repair(self) -> int:
        """As every `repair`: the steps listed afterwards are intact.

        Older steps are removed if their places have been reused, or are the next to be written.
        """
        if not self.whole_steps:
            if not self._records:
                read_records(self._journal)  # raises if the journal is damaged
                raise self._none_durable()
            raise CorruptionError(f"{self.folder}: no durable step is intact; nothing was changed")
        return self.go_back(self.whole_steps[-1])

    @property
    def whole_steps(self) -> list[int]:
        """The durable steps whose bytes are all unchanged, oldest first."""
        return [recorded_step(self._journal, record)[0] for record in self._whole_records]

    def go_back(self, step: int) -> int:
        """Make one of `whole_steps` the newest; return it.

        Earlier steps stay if their places are not the next to be written.
        """
        whole: list[Record] = []
        for record in reversed(self._whole_records):
            if recorded_step(self._journal, record)[0] > step:
                continue
            newest = self._version_of(whole[-1] if whole else record)
            if self._version_of(record).places_behind(newest) > len(whole):
                break
            whole.insert(0, record)
        if whole != self._records[-self._keep :] or self.has_damaged_journal:
            with files.storage_errors(self.folder, 0):
                rewrite_journal(self._journal, [self._first, *whole], "journal.drop")
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

    @property
    def has_damaged_journal(self) -> bool:
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
        """Return the state of a durable step, to be read in pieces."""
        if step not in self._versions:
            # A step that was restored over itself has two records; the later record counts.
            later = self._steps[::-1].index(step)
            self._versions[step] = self._version_of(self._records[-1 - later])
        return self._versions[step]

    def _version_of(self, record: Record) -> Version:
        version = Version(self._layout, self._file)
        version.restore(record)
        return version


def _read_records(journal: Path) -> list[Record]:
    return read_records(journal)[0]


def _layout(journal: Path, content: Mapping[str, Any]) -> FlashLayout:
    """Return the description in a journal's first record; the description may be invalid."""
    try:
        keep, block = content["keep_steps"], content["block_elements"]
        _require_count(keep, 1, 2**31)
        _require_count(block, 1, MOST_BLOCK_ELEMENTS)
        for unit in content["units"]:
            for name, shape in unit["weights"].items():
                name.encode()  # JSON can contain half a surrogate pair, UTF-8 cannot
                _require_count(len(shape), 0, 64)
                for length in shape:
                    _require_count(length, 0, 2**63)
            for name, origin in unit.get("origins", {}).items():
                _require_count(origin, 0, 2**63)
                _ = unit["weights"][name]
            _require_capacity(unit)
            for role in unit["roles"]:
                _require_count(role["group"], 1, MOST_BLOCK_ELEMENTS)
                _ = Role(role["name"], role["dtype"]).torch  # one of the known types
        return FlashLayout.from_description(content["units"], keep, block)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(
            f"{journal}: its first record does not describe a store ({str(error)[:200]})"
        ) from error


def _require_capacity(unit: Mapping[str, Any]) -> None:
    """Check that a sparse weight, and no other, has room for some of its elements, and is alone."""
    capacity = unit.get("capacity", 0)
    if not described_format(unit).is_sparse:
        _require_count(capacity, 0, 0)
        return
    (shape,) = unit["weights"].values()
    _require_count(math.prod(shape), 1, MOST_SPARSE_ELEMENTS)
    _require_count(capacity, 1, min(math.prod(shape), MOST_CAPACITY))


def _require_count(found: object, least: int, most: int) -> None:
    if type(found) is not int or not least <= found <= most:
        raise ValueError(f"expected {least} to {most}, got {str(found)[:40]}")


def bfloat16_units(journal: Path, content: Mapping[str, Any]) -> set[str]:
    """Return the weights that are bfloat16 according to a journal's first record.

    Raises:
        CorruptionError: the record does not describe a store.
    """
    units = _layout(journal, content).units
    return {name for unit in units if unit.format is BFLOAT16 for name in unit.names}
