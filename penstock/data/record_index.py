"""Positions of the records of a split: for each its first token, the end of its prompt, its end.

Entries are read on demand, so an index may be larger than memory. Besides the checksum, each entry
is validated against the rules of the format: a record has a prompt and a completion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.data.integrity import CheckedFile
from penstock.data.manifest import INDEX_ENTRY_BYTES, ShardRecord, advice_for
from penstock.errors import CorruptionError, DataError

_ENTRY_BYTES = INDEX_ENTRY_BYTES["records"]
_BLOCK = 2**16  # entries in memory at once during a scan of the whole index


@dataclass(frozen=True)
class RecordSpans:
    """Positions of consecutive records in a split, each int64 [records].

    A record is tokens `start` to `end`. Its prompt ends, and its completion begins, at `border`.
    """

    start: np.ndarray
    border: np.ndarray
    end: np.ndarray

    @property
    def inputs(self) -> np.ndarray:
        """Number of tokens that a model reads per record: all but the last, which is only
        predicted."""
        return self.end - self.start - 1

    @property
    def labels(self) -> np.ndarray:
        """Number of tokens that a model predicts per record: the completion and its end."""
        return self.end - self.border


class RecordIndex:
    """The index of one split of a data set of records.

    Args:
        folder: the folder of the data set.
        shards: the shards of the split, in order.
        chunk_bytes: bytes per checksum.
    """

    def __init__(self, folder: Path, shards: Sequence[ShardRecord], chunk_bytes: int) -> None:
        self._folder = folder
        self._shards = shards
        self._tokens = sum(shard.tokens for shard in shards)
        self._files = [CheckedFile(folder, shard.index, chunk_bytes) for shard in shards]
        # [shards + 1]: the first record that ends in each shard, and the end.
        self._firsts = np.cumsum([0, *(shard.documents for shard in shards)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def spans(self, first: int, stop: int) -> RecordSpans:
        """Return the positions of records `first` to `stop`.

        Raises:
            DataError: there are fewer records.
            CorruptionError: a chunk of the index fails its checksum, or an entry breaks the rules.
        """
        if not 0 <= first <= stop <= len(self):
            raise DataError(f"expected records from 0 to {len(self)}, got {first} to {stop}")
        before = max(0, first - 1)  # a record begins at the end of the previous record
        entries = self._entries(before, stop)
        ends = entries[:, 0]
        starts = np.concatenate([[0] if first == 0 else [], ends[:-1]]).astype(np.int64)
        own = entries[first - before :]
        spans = RecordSpans(starts, starts + own[:, 1], own[:, 0])
        # The order matters: an entry beyond 2^63 is negative here, and sums may overflow.
        right = (own[:, 1] > 0) & (own[:, 0] <= self._tokens) & (starts >= 0)
        right &= (own[:, 1] < own[:, 0]) & (spans.border > starts) & (spans.border < spans.end)
        if not right.all():
            number = first + int(right.argmin())
            shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
            raise CorruptionError(
                f"{self._folder / self._shards[shard].index.file} breaks the format: record "
                f"{number} of the split must have at least one token of prompt and one of "
                f"completion, within the {self._tokens} tokens of the split; "
                f"{advice_for(self._folder)}"
            )
        return spans

    def blocks(self) -> Iterator[RecordSpans]:
        """Yield the positions of all records in order, a bounded number at a time."""
        for first in range(0, len(self), _BLOCK):
            yield self.spans(first, min(first + _BLOCK, len(self)))

    def longest(self) -> int:
        """Return the maximum number of tokens that a model reads of a record."""
        return max((int(spans.inputs.max()) for spans in self.blocks()), default=0)

    def _entries(self, first: int, stop: int) -> np.ndarray:
        """Return (end, tokens of the prompt) of records `first` to `stop`, int64 [n, 2]."""
        parts = [np.empty((0, 2), dtype=np.int64)]
        number = int(np.searchsorted(self._firsts, first, side="right")) - 1
        while first < stop:
            base, until = int(self._firsts[number]), min(stop, int(self._firsts[number + 1]))
            data = self._files[number].read(
                (first - base) * _ENTRY_BYTES, (until - base) * _ENTRY_BYTES
            )
            parts.append(data.view("<u8").astype(np.int64).reshape(-1, 2))
            first, number = until, number + 1
        return np.concatenate(parts)
