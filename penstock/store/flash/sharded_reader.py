"""Read access to a sharded flash store: the readers of all shards, as one."""

import math
from contextlib import ExitStack

import numpy as np

from penstock.errors import CorruptionError
from penstock.sparsity import PackedIndex, joined
from penstock.store.flash.reader import FlashReader
from penstock.store.flash.shards import Shards, of_another_store, whole_folders
from penstock.store.flash.steps_reader import StepsReader
from penstock.store.lock import FolderLock
from penstock.store.roles import MASTER
from penstock.store.sharding import Piece, ShardMap, entry_spans


class ShardedReader(StepsReader):
    """The durable steps that all shards hold.

    Raises:
        ConfigError: a shard contains no store yet, or its format is newer.
        CorruptionError: a journal's bytes have changed, or the shards do not form a complete store.
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
            for reader in self._readers:
                if reader.store_id != shards.store_id:
                    raise of_another_store(shards, reader.folder)
            self._map = ShardMap(shards.count, self._pieces())
            self._masks: dict[tuple[int, str], PackedIndex] = {}
            super().__init__(shards.folder, shards.count, opened.pop_all())

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
                    f"{self._shards.folder}: the pieces of the shards do not cover {name!r}; "
                    "restore all shards from one copy"
                )
        return {name: tuple(pieces) for name, pieces in found.items()}

    @property
    def steps(self) -> list[int]:
        return sorted(set.intersection(*(set(reader.steps) for reader in self._readers)))

    @property
    def bytes(self) -> int:
        return sum(reader.bytes for reader in self._readers)

    @property
    def state_bytes(self) -> int:
        return sum(reader.state_bytes for reader in self._readers)

    @property
    def parameters(self) -> int:
        return sum(reader.parameters for reader in self._readers)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shards.shapes)

    @property
    def sparse(self) -> dict[str, tuple[int, ...]]:
        found = {name for reader in self._readers for name in reader.sparse}
        return {name: shape for name, shape in self._shards.shapes.items() if name in found}

    def mask_of(self, step: int, name: str) -> PackedIndex | None:
        if (step, name) not in self._masks:
            pieces = self._map.pieces[name]
            found = [self._readers[piece.shard].mask_of(step, name) for piece in pieces]
            parts = [part for part in found if part is not None]
            if not parts:
                return None
            if len(parts) < len(pieces):
                raise CorruptionError(
                    f"{self.folder}: {name!r} is sparse in {len(parts)} of {len(pieces)} shards; "
                    "restore all shards from one copy"
                )
            self._masks.clear()  # whole masks are large: one is kept
            self._masks[step, name] = joined(parts)
        return self._masks[step, name]

    def read_step(self, step: int, name: str, role: str, begin: int, end: int) -> np.ndarray:
        group = self._readers[self._map.pieces[name][0].shard].group(name, role)
        index = self.mask_of(step, name)
        spans = self._map.spans(name, begin, end, group)
        if index is not None and role != MASTER:
            spans = entry_spans(index, self._map.pieces[name], group, begin, end)
        parts = [
            self._readers[span.shard].read_step(step, name, role, span.begin, span.end)
            for span in spans
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def verify(self, step: int) -> None:
        for reader in self._readers:
            reader.verify(step)

    @property
    def has_damaged_journal(self) -> bool:
        return any(reader.has_damaged_journal for reader in self._readers)

    def repair(self) -> int:
        """As every `repair`, in all shards: roll back to the newest durable step that is intact in
        each."""
        whole = set.intersection(*(set(reader.whole_steps) for reader in self._readers))
        if not whole:
            if not any(reader.steps for reader in self._readers):
                raise self._none_durable()
            raise CorruptionError(
                f"{self.folder}: no durable step is intact in all shards; nothing was changed"
            )
        step = max(whole)
        for reader in self._readers:
            reader.go_back(step)
        self._masks.clear()
        return step
