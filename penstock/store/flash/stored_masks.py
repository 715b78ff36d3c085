"""The masks of sparse weights on flash: their places, and what a journal record says about them.

A mask is written in its compact form when it has changed, to the next of its own places. A record
names the place of every mask, and has its checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from penstock.errors import CorruptionError
from penstock.kernels.memory import allocate
from penstock.sparsity import PackedIndex, compact_bytes, empty_index, index_from_compact
from penstock.store.flash.journal import REPAIR, Record
from penstock.store.flash.layout import FlashLayout, Unit
from penstock.store.flash.medium import ALIGNMENT_BYTES, ExtentFile
from penstock.store.masks import Masks

CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class MaskHistory:
    """The number of updates up to a step, and the numbers of updates at the changes of each mask,
    by weight."""

    updates: int
    changes: Mapping[str, Sequence[int]]


def history_of(masks: Masks) -> MaskHistory | None:
    """Return the history of a store's masks, all of whose updates are applied; None if it says
    nothing: no weight is sparse, and every step has updated weights.

    A shard without sparse weights has a history if steps change masks in other shards instead of
    updating weights.
    """
    if not masks.names and masks.updates == masks.step:
        return None
    return MaskHistory(masks.updates, {name: masks.changes(name) for name in masks.names})


@dataclass(frozen=True)
class _Stored:
    """A mask on flash: its place, its length there, and its checksum."""

    place: int
    size: int
    checksum: bytes
    index: PackedIndex | None = None


class StoredMasks:
    """The present place of every mask; updated when a mask is written."""

    def __init__(self, layout: FlashLayout, file: ExtentFile) -> None:
        self._units = layout.sparse
        self._file = file
        self._masks = {unit.index: _Stored(0, 0, bytes(CHECKSUM_BYTES)) for unit in self._units}
        self._is_sealed = {unit.index: True for unit in self._units}
        # As `history_of`; that of the last record that was restored.
        changes = {unit.names[0]: () for unit in self._units}
        self.history = MaskHistory(0, changes) if changes else None

    def index(self, unit: Unit) -> PackedIndex:
        """Return the mask of a sparse weight; one without entries before the first is written."""
        index = self._masks[unit.index].index
        return empty_index(unit.sizes[0], unit.origins[0]) if index is None else index

    @property
    def checksums(self) -> bytes:
        """The checksums of all masks, in the order of the units."""
        return b"".join(self._masks[unit.index].checksum for unit in self._units)

    def record(self, history: MaskHistory | None) -> dict[str, Any]:
        """Return a record's entries for the masks; their places are not overwritten from then on.

        Without sparse weights there are none, and no `history`.
        """
        if history is None:
            return {}
        if not self._units:
            return {"updates": history.updates}
        self._is_sealed = dict.fromkeys(self._is_sealed, True)
        # Most masks change at the same steps: equal lists are written once.
        changes = [*dict.fromkeys(tuple(history.changes[u.names[0]]) for u in self._units)]
        number = {each: at for at, each in enumerate(changes)}
        masks = {}
        for unit in self._units:
            name, mask = unit.names[0], self._masks[unit.index]
            at = number[tuple(history.changes[name])]
            masks[name] = [mask.place, mask.size, self.index(unit).kept, at]
        return {"updates": history.updates, "changes": [*map(list, changes)], "masks": masks}

    def restore(self, record: Record) -> None:
        """Become the masks that a record describes.

        Raises:
            CorruptionError: the record does not fit the layout, or the bytes of a mask have
                changed.
        """
        content, count = record.content, len(self._units)
        if not count and "updates" not in content:
            self.history = None
            return
        checks = record.blob[len(record.blob) - count * CHECKSUM_BYTES :]
        found, lists = content.get("masks", {}), content.get("changes", [])
        updates = content.get("updates", 0)
        changes: dict[str, Sequence[int]] = {}
        fits = is_history(lists, updates, content.get("step"))
        is_mapping = isinstance(found, dict)
        if not fits or not is_mapping or [*found] != [u.names[0] for u in self._units]:
            raise self._mismatch(record)
        for number, unit in enumerate(self._units):
            entry = found[unit.names[0]]
            if not _is_entry(entry, unit, len(lists)):
                raise self._mismatch(record)
            place, size, kept, at = entry
            changes[unit.names[0]] = lists[at]
            check = checks[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]
            index = self._decoded(unit, kept, self._read(unit, place, size, check))
            self._masks[unit.index] = _Stored(place, size, check, index)
        self._is_sealed = dict.fromkeys(self._is_sealed, True)
        self.history = MaskHistory(updates, changes)

    def resume(self, masks: Masks, step: int) -> None:
        """Give a store its masks after step `step`, the last that was restored."""
        indices = {unit.names[0]: self.index(unit) for unit in self._units}
        history = MaskHistory(step, {}) if self.history is None else self.history
        masks.resume(step, history.updates, indices, history.changes)

    def _mismatch(self, record: Record) -> CorruptionError:
        return CorruptionError(
            f"{self._file.path}: the masks in the journal's record of step "
            f"{record.content.get('step')} do not match the store"
        )

    def _decoded(self, unit: Unit, kept: int, data: np.ndarray) -> PackedIndex:
        try:
            return index_from_compact(data.tobytes(), unit.sizes[0], kept, unit.origins[0])
        except CorruptionError as error:
            raise CorruptionError(
                f"{self._file.path}: the mask of {unit.names[0]}: {error}"
            ) from error

    def _read(self, unit: Unit, place: int, size: int, expected: bytes) -> np.ndarray:
        offset = unit.mask_offset(place)
        data = allocate(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        self._file.read(offset, data)
        found = xxhash.xxh3_128_digest(data[:size].data)
        if found != expected:
            raise CorruptionError(
                f"{self._file.path}: damaged in bytes {offset:,} to {offset + size:,}, which hold "
                f"the mask of {unit.names[0]}: expected checksum {expected.hex()}, got "
                f"{found.hex()}; {REPAIR}"
            )
        return data[:size]

    def verify(self) -> None:
        """Read every mask; raise `CorruptionError` at the first one that has changed."""
        for unit in self._units:
            mask = self._masks[unit.index]
            self._read(unit, mask.place, mask.size, mask.checksum)

    def places_behind(self, newest: StoredMasks) -> int:
        """Return how many changes ago these masks were written; 0 for `newest`."""
        behind = (
            (newest._masks[u.index].place - self._masks[u.index].place) % u.places
            for u in self._units
        )
        return max(behind, default=0)

    def next_place(self, unit: Unit) -> int:
        """Return the next place of a mask; no record names that place."""
        place = self._masks[unit.index].place
        return (place + 1) % unit.places if self._is_sealed[unit.index] else place

    def write(self, unit: Unit, index: PackedIndex, put: Callable[[int, np.ndarray], None]) -> int:
        """Write a mask to its next place by `put`; return the number of bytes."""
        compact, place = compact_bytes(index), self.next_place(unit)
        data = allocate(-(-len(compact) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        data[: len(compact)] = np.frombuffer(compact, np.uint8)
        put(unit.mask_offset(place), data)
        check = xxhash.xxh3_128_digest(compact)
        self._masks[unit.index] = _Stored(place, len(compact), check, index)
        self._is_sealed[unit.index] = False
        return data.nbytes


def is_history(lists: Any, updates: Any, step: Any) -> bool:
    """Return whether a record has lists of rising numbers of updates, of which `updates` and `step`
    are the last."""
    if not isinstance(lists, list) or not all(isinstance(each, list) for each in lists):
        return False
    for numbers in ([0, *each, updates, step] for each in [*lists, []]):
        if any(type(number) is not int for number in numbers) or numbers != sorted(numbers):
            return False
    return True


def _is_entry(entry: Any, unit: Unit, lists: int) -> bool:
    """Whether a record describes a mask: its place, size and entries, and which list is its own."""
    if not isinstance(entry, list) or [type(number) for number in entry] != [int] * 4:
        return False
    place, size, kept, at = entry
    return (
        0 <= place < unit.places
        and 0 < size <= unit.mask_room
        and 0 <= kept <= unit.capacity  # a shard's part may have none
        and 0 <= at < lists
    )
