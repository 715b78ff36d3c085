"""Training rows of prompts with completions: one record per row, with the loss on the completion
only.

The inputs of a row are all tokens of a record except the last; each position predicts the next
token.
Labels of the prompt's tokens and of the padding are ignored. The padding needs no mask: a causal
model's positions see only earlier positions, so no position with a label sees padding.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.constants import IGNORED_LABEL
from penstock.data.dataset import TokenDataset
from penstock.data.record_index import RecordSpans
from penstock.data.sampling import Batch, evaluation_rows, sample_places
from penstock.errors import DataError


class RecordSource:
    """The records of a split, for a model that predicts the next token.

    If a record is longer than a row, the beginning of its prompt is cut; the completion is never
    cut. A record is skipped if its completion leaves no space for one token of the prompt.

    Args:
        dataset: contains the records.
        split: "train" or "validation".
        sequence_length: T, tokens that the model sees at once.
        seed: determines the order.

    Attributes:
        records: number of records in use: the samples of an epoch, each record once.
        shortened: number of records whose prompt is cut.
        left_out: number of skipped records.
        padding: share of the tokens of all rows that is padding.

    Raises:
        DataError: there is no such split, or no record of it fits.
        CorruptionError: the split's index is damaged.
    """

    def __init__(
        self, dataset: TokenDataset, split: str, sequence_length: int, seed: int = 0
    ) -> None:
        if sequence_length < 1:
            raise DataError(f"a sequence length must be 1 or more, got {sequence_length}")
        self.dataset = dataset
        self.split = split
        self.sequence_length = sequence_length
        self.seed = seed
        self.vocab_size = dataset.vocab_size
        self._index = dataset.records(split)
        self.shortened = 0
        left_out = [np.empty(0, dtype=np.int64)]
        read = first = longest = 0
        for spans in self._index.blocks():
            fits = spans.labels <= sequence_length
            left_out.append(first + np.flatnonzero(~fits))
            self.shortened += int((spans.inputs[fits] > sequence_length).sum())
            read += int(spans.inputs[fits].clip(max=sequence_length).sum())
            longest = max(longest, int(spans.labels.max()))
            first += len(fits)
        # Only the list of skipped records is held, which is usually empty.
        skipped = np.concatenate(left_out)
        self._gaps = skipped - np.arange(len(skipped))
        self.left_out = len(skipped)
        self.records = len(self._index) - self.left_out
        if not self.records:
            raise DataError(
                f"split {split!r} of data set {dataset.path} has no record whose completion fits "
                f"sequences of {sequence_length} tokens, the longest needs {longest}; raise "
                "data.sequence_length"
            )
        self.padding = 1 - read / (self.records * sequence_length)

    def batch(self, step: int, indices: Sequence[int], global_batch: int) -> Batch:
        """Return `input_ids` and `labels`, the next tokens, both int64 [len(indices), T].

        Labels are -100 if the next token belongs to the prompt or the padding.
        """
        _, _, rows = sample_places(step, indices, global_batch, self.records, self.seed)
        return self._rows(rows)

    def evaluation_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield the split's records in their order, at most `limit` of them.

        The last batch may have fewer rows than `batch_size`.
        """
        for rows in evaluation_rows(self.records, batch_size, limit):
            yield self._rows(rows)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in which every record in use occurs once."""
        return self.records

    def describe(self) -> str:
        """Return a one-line description for users."""
        return (
            f"{self.split} split of {self.dataset.path}: {self.records:,} records in rows of "
            f"{self.sequence_length} tokens, {self.padding:.0%} of them padding"
        )

    def warnings(self) -> list[str]:
        """Return a sentence for each kind of record that is cut or skipped."""
        total, where = len(self._index), f"{self.split} split"
        found = []
        if self.shortened:
            found.append(
                f"{where}: {self.shortened:,} of {total:,} records are longer than "
                f"{self.sequence_length} tokens; their prompts are shortened at the beginning"
            )
        if self.left_out:
            found.append(
                f"{where}: {self.left_out:,} of {total:,} records are not used: their completions "
                f"alone need more than {self.sequence_length} tokens; raise data.sequence_length "
                "to train on them"
            )
        return found

    def _rows(self, rows: np.ndarray) -> Batch:
        shape = (len(rows), self.sequence_length)
        inputs = np.full(shape, self.dataset.end_of_document, dtype=np.int64)
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        for place, row in enumerate(rows.tolist()):
            record = row + int(np.searchsorted(self._gaps, row, side="right"))
            self._fill(inputs[place], labels[place], self._index.spans(record, record + 1))
        return {"input_ids": inputs, "labels": labels}

    def _fill(self, inputs: np.ndarray, labels: np.ndarray, spans: RecordSpans) -> None:
        end, border = int(spans.end[0]), int(spans.border[0])
        start = max(int(spans.start[0]), end - 1 - self.sequence_length)
        tokens = self.dataset.read(self.split, start, end).astype(np.int64)
        inputs[: len(tokens) - 1] = tokens[:-1]
        labels[border - start - 1 : len(tokens) - 1] = tokens[border - start :]
