"""Looking at a store in shards on flash, as `FlashReader` looks at one store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType

import numpy as np

from penstock.errors import CorruptionError
from penstock.store.content_hash import hash_weights
from penstock.store.flash.reader import FlashReader, none_durable
from penstock.store.flash.shards import Shards, whole_folders
from penstock.store.lock import FolderLock
from penstock.store.masters import PIECE_ELEMENTS
from penstock.store.roles import MASTER
from penstock.store.sharding import Piece, ShardMap


class ShardedReader:
    """The durable steps that all shards hold, newest last. A context manager.

    Raises:
        ConfigError: a shard holds no store yet, or its format is newer.
        CorruptionError: a journal's bytes have changed, or the shards do not make up a whole.
        StorageError: a process has the store open for writing.
    """

    def __init__(self, shards: Shards, despite_damage: bool = False) -> None:
        self._shards = shards
        with ExitStack() as opened:
            lock = FolderLock(shards.folder, "store.flash.path")
            opened.callback(lock.release)
            self._readers = [
                opened.enter_context(FlashReader(folder, despite_damage))
                for folder in whole_folders(shards)
            ]
            self._map = ShardMap(shards.count, self._pieces())
            self._opened = opened.pop_all()

    def _pieces(self) -> dict[str, tuple[Piece, ...]]:
        found: dict[str, list[Piece]] = {name: [] for name in self._shards.shapes}
        for number, reader in enumerate(self._readers):
            for name, (begin, end) in reader.pieces.items():
                found.setdefault(name, []).append(Piece(number, begin, end))
        for name, pieces in found.items():
            pieces.sort(key=lambda piece: piece.begin)
            ends = [0, *(piece.end for piece in pieces)]
            shape = self._shards.shapes.get(name)
            if (
                shape is None
                or not pieces
                or any(p.begin != end for p, end in zip(pieces, ends, strict=False))
                or ends[-1] != math.prod(shape)
            ):
                raise CorruptionError(
                    f"{self._shards.folder}: the shards' pieces do not make up {name!r}; restore "
                    "all shards from one copy"
                )
        return {name: tuple(pieces) for name, pieces in found.items()}

    def __enter__(self) -> ShardedReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.close()

    @property
    def shards(self) -> int:
        """In how many parts the store is held."""
        return self._shards.count

    @property
    def steps(self) -> list[int]:
        """The durable steps that all shards hold, oldest first."""
        return sorted(set.intersection(*(set(reader.steps) for reader in self._readers)))

    @property
    def newest(self) -> int:
        """The newest durable step.

        Raises:
            ConfigError: there is none yet.
        """
        if not self.steps:
            raise none_durable(self._shards.folder)
        return self.steps[-1]

    @property
    def bytes(self) -> int:
        """What the extents take on flash."""
        return sum(reader.bytes for reader in self._readers)

    @property
    def state_bytes(self) -> int:
        """Weights and state of one step."""
        return sum(reader.state_bytes for reader in self._readers)

    @property
    def parameters(self) -> int:
        return sum(reader.parameters for reader in self._readers)

    @property
    def weights(self) -> int:
        """How many weights there are."""
        return len(self._shards.shapes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight, by name, in the order of the stages."""
        return dict(self._shards.shapes)

    def flush(self) -> None:
        """What is durable awaits nothing."""

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return elements `begin` to `end` of a weight after the newest step (`FlashReader`)."""
        return self._read(self.newest, name, role, begin, end)

    def _read(self, step: int, name: str, role: str, begin: int, end: int) -> np.ndarray:
        group = self._readers[self._map.pieces[name][0].shard].group(name, role)
        parts = [
            self._readers[span.shard].version(step).read(name, role, span.begin, span.end)
            for span in self._map.spans(name, begin, end, group)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def verify(self, step: int) -> None:
        """Read every byte of a durable step, in all shards (`FlashReader.verify`)."""
        for reader in self._readers:
            reader.verify(step)

    def content_hash(self, step: int) -> str:
        """Return the hash of all weights after a durable step: that of one store with these."""

        def pieces(name: str, elements: int) -> Iterator[memoryview]:
            for begin in range(0, elements, PIECE_ELEMENTS):
                end = min(begin + PIECE_ELEMENTS, elements)
                yield self._read(step, name, MASTER, begin, end).data

        return hash_weights(
            (name, shape, pieces(name, math.prod(shape)))
            for name, shape in sorted(self._shards.shapes.items())
        )

    def repair(self) -> int:
        """Go back to the newest durable step that is whole in all shards; return it.

        Raises:
            ConfigError: there is no durable step yet.
            CorruptionError: none is whole in all of them; nothing has been changed.
        """
        whole = set.intersection(*(set(reader.whole_steps) for reader in self._readers))
        if not whole:
            if not any(reader.steps for reader in self._readers):
                raise none_durable(self._shards.folder)
            raise CorruptionError(
                f"{self._shards.folder}: no durable step is whole in all shards; restore it from "
                "an export"
            )
        step = max(whole)
        for reader in self._readers:
            reader.go_back(step)
        return step
