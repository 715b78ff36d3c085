"""Looking at a flash store without opening it for training: what it holds, whether it is whole."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np

from penstock.errors import ConfigError, CorruptionError
from penstock.store.flash.description import require_readable
from penstock.store.flash.journal import Journal, Record, read_records
from penstock.store.flash.layout import FlashLayout
from penstock.store.flash.medium import ExtentFile
from penstock.store.flash.store import EXTENTS, JOURNAL
from penstock.store.flash.version import Version
from penstock.store.lock import FolderLock


class FlashReader:
    """The durable steps of the store in `folder`, newest last. A context manager.

    Raises:
        ConfigError: there is no store, or its format is newer.
        CorruptionError: the journal's bytes have changed.
        StorageError: a process has it open for writing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        journal = folder / JOURNAL
        if not journal.exists():
            raise ConfigError(f"{folder}: no store on flash here yet")
        self._newest: Version | None = None
        self._lock = FolderLock(folder, "stop it")
        try:
            self._first, *self._steps = read_records(journal)[0]
            content = self._first.content
            require_readable(folder, content)
            try:
                self._layout = FlashLayout.from_description(
                    content["units"], content["keep_steps"], content["block_elements"]
                )
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CorruptionError(
                    f"{journal}: its first record does not describe a store ({error!r})"
                ) from error
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
        return [int(record.content["step"]) for record in self._kept]

    @property
    def _kept(self) -> list[Record]:
        return self._steps[-int(self._first.content["keep_steps"]) :]

    @property
    def bytes(self) -> int:
        """What the extents take on flash."""
        return self._layout.file_bytes

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

    def flush(self) -> None:
        """What is durable awaits nothing."""

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return elements `begin` to `end` of a weight after the newest durable step, float32.

        Raises:
            CorruptionError: some bytes have changed, with the place and both checksums.
        """
        if self._newest is None:
            self._newest = self._version(self.steps[-1])
        return self._newest.read(name, role, begin, end)

    @property
    def state_bytes(self) -> int:
        """Weights and state of one step."""
        return sum(unit.place_bytes for unit in self._layout.units)

    def verify(self, step: int) -> None:
        """Read every byte of a durable step.

        Raises:
            CorruptionError: some have changed, with the place and both checksums.
        """
        self._version(step).verify()

    def content_hash(self, step: int) -> str:
        """Return the hash of all weights after a durable step."""
        return self._version(step).content_hash()

    def _version(self, step: int) -> Version:
        version = Version(self._layout, self._file)
        version.restore(next(r for r in self._kept if r.content["step"] == step))
        return version


def repair(folder: Path) -> int:
    """Go back to the newest durable step that is whole; return it. What is whole stays.

    Raises:
        CorruptionError: none is whole.
    """
    journal = Journal(folder / JOURNAL, to_the_damage=True)
    try:
        while len(journal.records) > 1:
            with FlashReader(folder) as reader:
                step = reader.steps[-1]
                try:
                    reader.verify(step)
                except CorruptionError:
                    whole = False
                else:
                    whole = True
            if whole:
                return step
            journal.drop_last()
    finally:
        journal.close()
    raise CorruptionError(f"{folder}: no durable step is whole; restore it from an export")
