"""The tokens of sample `index` of step `step`: a pure function of (seed, step, index).

Sample number n = step * global_batch + index is place n mod W of epoch n div W. The W windows of
the split are permuted by (seed, epoch). There is therefore no state: a run resumes at any step, on
any number of engines, and each engine requests the indices that it owns.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from penstock.constants import IGNORED_LABEL
from penstock.data.dataset import TokenDataset
from penstock.data.permutation import key_of, mix, permute
from penstock.errors import DataError

Batch = dict[str, np.ndarray]

# Random streams that must not share keys.
_ORDER, _OFFSET, _CHOICE, _MASK_KIND, _WORD = range(5)


class Source(Protocol):
    """The interface of training data; any class with these methods can be used.

    If a class also has the attribute `samples_per_epoch`, epochs are counted.
    """

    def batch(self, step: int, indices: Sequence[int], global_batch: int) -> Batch:
        """Return rows `indices` of the global batch of `step`, each field [len(indices), ...].

        Equal arguments give equal arrays, and a row depends only on its own index. The caller
        copies the arrays before the next call, so their memory may be used again. Any error that
        is raised here or below ends the run, which resumes at its last committed step.
        """

    def evaluation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield at most `limit` rows in a fixed order, `batch_size` at a time; the last batch may
        be smaller."""

    def describe(self) -> str:
        """Return a one-line description for users."""


def sample_places(
    step: int, indices: Sequence[int], global_batch: int, rows: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the number, the epoch and the row of samples `indices` of a step.

    Args:
        step: counted from 0.
        indices: each in [0, global_batch).
        global_batch: samples in a step.
        rows: number of rows in an epoch; each occurs once.
        seed: determines the order.

    Returns:
        three arrays int64 [len(indices)]: sample number, epoch, row in [0, rows).

    Raises:
        DataError: the step is negative or an index is outside the global batch.
    """
    index = np.asarray(indices, dtype=np.int64).reshape(-1)
    if step < 0 or (index.size and not 0 <= index.min() <= index.max() < global_batch):
        raise DataError(
            f"expected a step from 0 and indices in [0, {global_batch}), the global batch; got "
            f"step {step} and indices {list(indices)}"
        )
    number = step * global_batch + index
    epoch, place = number // rows, number % rows
    row = np.empty_like(place)
    for one in np.unique(epoch):
        here = epoch == one
        row[here] = permute(place[here], rows, key_of(seed, _ORDER, int(one)))
    return number, epoch, row


def evaluation_rows(count: int, batch_size: int, limit: int | None) -> Iterator[np.ndarray]:
    """Yield the numbers of at most `limit` of `count` rows in order, `batch_size` at a time."""
    if batch_size < 1 or (limit is not None and limit < 1):
        raise DataError(
            f"expected a batch size and a limit of 1 or more; got {batch_size} and {limit}"
        )
    stop = count if limit is None else min(count, limit)
    for start in range(0, stop, batch_size):
        yield np.arange(start, min(stop, start + batch_size))


class _Windows:
    """Windows of one split; they do not overlap, and `extra` tokens after each are read too."""

    def __init__(self, dataset: TokenDataset, split: str, length: int, extra: int) -> None:
        tokens = dataset.tokens(split)
        if length < 1:
            raise DataError(f"a sequence length must be 1 or more, got {length}")
        if tokens < length + extra:
            raise DataError(
                f"split {split!r} of data set {dataset.path} has {tokens} tokens, one sequence of "
                f"{length} needs {length + extra}; shorten the sequences or add text"
            )
        self.count = (tokens - extra) // length
        self._slack = tokens - extra - self.count * length
        self._dataset, self._split = dataset, split
        self._length, self._extra = length, extra

    def read(self, windows: np.ndarray, epochs: np.ndarray | None, seed: int) -> np.ndarray:
        """Return int64 [len(windows), length + extra]; without epochs, windows begin at the split's
        start.

        The tokens left over at the end of the split vary: each epoch begins at its own offset.
        """
        rows = np.empty((len(windows), self._length + self._extra), dtype=np.int64)
        for number, window in enumerate(windows.tolist()):
            start = window * self._length
            if epochs is not None:
                start += key_of(seed, _OFFSET, int(epochs[number])) % (self._slack + 1)
            rows[number] = self._dataset.read(self._split, start, start + rows.shape[1])
        return rows


class LanguageModelSource:
    """Windows of a split for a model that predicts the next token.

    Args:
        dataset: contains the tokens.
        split: "train" or "validation".
        sequence_length: T, tokens that the model sees at once.
        seed: determines the order.

    Attributes:
        windows_per_epoch: number of samples in which every window occurs once.

    Raises:
        DataError: there is no such split, or it is shorter than T + 1 tokens.
    """

    def __init__(
        self, dataset: TokenDataset, split: str, sequence_length: int, seed: int = 0
    ) -> None:
        self.dataset = dataset
        self.split = split
        self.sequence_length = sequence_length
        self.seed = seed
        self.vocab_size = dataset.vocab_size
        self._windows = _Windows(dataset, split, sequence_length, extra=1)
        self.windows_per_epoch = self._windows.count

    def batch(self, step: int, indices: Sequence[int], global_batch: int) -> Batch:
        """Return `input_ids` and `labels`, the next tokens, both int64 [len(indices), T]."""
        _, epoch, row = sample_places(
            step, indices, global_batch, self.windows_per_epoch, self.seed
        )
        return self._shifted(self._windows.read(row, epoch, self.seed))

    def evaluation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield the split's windows in order, at most `limit` of them.

        The last batch may have fewer rows than `batch_size`. Tokens at the end of the split that do
        not fill a window are skipped.
        """
        for rows in evaluation_rows(self.windows_per_epoch, batch_size, limit):
            yield self._shifted(self._windows.read(rows, None, self.seed))

    def describe(self) -> str:
        """Return a one-line description for users."""
        return _describe(self.dataset, self.split, self.windows_per_epoch, self.sequence_length)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in which every window occurs once."""
        return self.windows_per_epoch

    @staticmethod
    def _shifted(tokens: np.ndarray) -> Batch:
        return {
            "input_ids": np.ascontiguousarray(tokens[:, :-1]),
            "labels": np.ascontiguousarray(tokens[:, 1:]),
        }


class MaskedLanguageModelSource:
    """Windows of a split for a model that restores masked tokens, as BERT was trained.

    In every window 15% of the tokens (rounded, at least one; never an end of document) are
    predicted: 80% of them become the mask token, 10% a random token, 10% stay as they are. Source:
    J. Devlin et al., "BERT", NAACL 2019, section 3.1.

    Args:
        dataset, split, sequence_length, seed: as for LanguageModelSource.
        mask_token_id: may be outside the data set's vocabulary; the model's vocabulary must then
            include it.
        mask_share: share of the tokens to predict.

    Attributes:
        windows_per_epoch: number of samples in which every window occurs once.

    Raises:
        DataError: there is no such split, or it is shorter than T tokens.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        split: str,
        sequence_length: int,
        mask_token_id: int,
        seed: int = 0,
        mask_share: float = 0.15,
    ) -> None:
        if mask_token_id < 0 or not 0 < mask_share <= 1:
            raise DataError(
                f"expected a mask token id from 0 and a mask share in (0, 1]; got {mask_token_id} "
                f"and {mask_share}"
            )
        self.dataset = dataset
        self.split = split
        self.sequence_length = sequence_length
        self.mask_token_id = mask_token_id
        self.mask_share = mask_share
        self.seed = seed
        self.vocab_size = max(dataset.vocab_size, mask_token_id + 1)
        self._windows = _Windows(dataset, split, sequence_length, extra=0)
        self.windows_per_epoch = self._windows.count

    def batch(self, step: int, indices: Sequence[int], global_batch: int) -> Batch:
        """Return `input_ids`, `attention_mask` (ones), `labels`, all int64 [len(indices), T].

        Labels are -100 if nothing is predicted. A window gets a new mask in every epoch.
        """
        number, epoch, row = sample_places(
            step, indices, global_batch, self.windows_per_epoch, self.seed
        )
        return self._masked(self._windows.read(row, epoch, self.seed), number, self.seed)

    def evaluation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield the split's windows in order, each with the same mask every time."""
        evaluation = key_of(self.seed, 1)
        for rows in evaluation_rows(self.windows_per_epoch, batch_size, limit):
            yield self._masked(self._windows.read(rows, None, self.seed), rows, evaluation)

    def describe(self) -> str:
        """Return a one-line description for users."""
        line = _describe(self.dataset, self.split, self.windows_per_epoch, self.sequence_length)
        return f"{line}, {self.mask_share:.0%} masked"

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in which every window occurs once."""
        return self.windows_per_epoch

    def _masked(self, tokens: np.ndarray, numbers: np.ndarray, seed: int) -> Batch:
        eligible = tokens != self.dataset.end_of_document  # [rows, T]
        wanted = np.maximum(1, np.rint(self.mask_share * eligible.sum(axis=1)))
        choice = self._random(numbers, seed, _CHOICE)
        choice[~eligible] = np.iinfo(np.uint64).max
        rank = choice.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        chosen = (rank < wanted[:, None]) & eligible
        mask_kind = self._random(numbers, seed, _MASK_KIND) % np.uint64(10)
        word = self._random(numbers, seed, _WORD) % np.uint64(self.dataset.vocab_size)
        inputs = np.where(chosen & (mask_kind < 8), self.mask_token_id, tokens)
        inputs = np.where(chosen & (mask_kind == 8), word.astype(np.int64), inputs)
        return {
            "input_ids": inputs,
            "attention_mask": np.ones_like(tokens),
            "labels": np.where(chosen, tokens, IGNORED_LABEL),
        }

    def _random(self, numbers: np.ndarray, seed: int, stream: int) -> np.ndarray:
        """Random bits that depend only on (seed, stream, number, position), uint64 [rows, T]."""
        keys = [key_of(seed, stream, number) for number in numbers.tolist()]
        positions = np.arange(self.sequence_length, dtype=np.uint64)
        counter = (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return mix(np.array(keys, dtype=np.uint64).reshape(-1, 1) + counter)


class ArraySource:
    """Rows of arrays in memory, for any model.

    Args:
        arrays: by field name, each [rows, ...]; batches have the same fields.
        seed: determines the order.

    Attributes:
        rows: number of rows; every row occurs once in so many samples.

    Raises:
        DataError: there are no arrays, no rows, or not equally many.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], seed: int = 0) -> None:
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.seed = seed
        scalars = [name for name, array in self.arrays.items() if array.ndim == 0]
        lengths = {name: len(a) for name, a in self.arrays.items() if a.ndim}
        if scalars or len(set(lengths.values())) != 1 or 0 in lengths.values():
            shapes = ", ".join(f"{name} {array.shape}" for name, array in self.arrays.items())
            raise DataError(
                "arrays must have equally many rows, at least one, in their first dimension; got "
                f"{shapes or 'no arrays'}"
            )
        self.rows = next(iter(lengths.values()))

    def batch(self, step: int, indices: Sequence[int], global_batch: int) -> Batch:
        """Return the rows of the samples, each field [len(indices), ...]."""
        _, _, row = sample_places(step, indices, global_batch, self.rows, self.seed)
        return {name: array[row] for name, array in self.arrays.items()}

    def evaluation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield the rows in order, at most `limit`; the last batch may be smaller."""
        for rows in evaluation_rows(self.rows, batch_size, limit):
            yield {name: array[rows] for name, array in self.arrays.items()}

    def describe(self) -> str:
        """Return a one-line description for users."""
        fields = ", ".join(
            f"{name} {array.dtype}{list(array.shape[1:])}" for name, array in self.arrays.items()
        )
        return f"{self.rows} rows in memory: {fields}"

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in which every row occurs once."""
        return self.rows

    def __repr__(self) -> str:
        return f"<ArraySource: {self.describe()}, seed {self.seed}>"


def _describe(dataset: TokenDataset, split: str, windows: int, length: int) -> str:
    return (
        f"{split} split of {dataset.path}: {dataset.tokens(split):,} tokens of a vocabulary of "
        f"{dataset.vocab_size}, {windows:,} windows of {length}"
    )
