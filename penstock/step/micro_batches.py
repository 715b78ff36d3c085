"""The rows of a step, divided over engines: each engine gets only its own micro-batches."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from penstock.collectives import partition
from penstock.data import IGNORED_LABEL, Source
from penstock.engine import Rows
from penstock.errors import DataError, PenstockError
from penstock.models import ModelSource


@dataclass(frozen=True)
class EngineRows:
    """The rows of one engine in a step: the numbers of its micro-batches, and all their rows."""

    numbers: range
    rows: Rows


class Batches:
    """Draws the batches of a run.

    Args:
        source: returns the rows.
        size: rows of a step.
        micro_batch: rows of a micro-batch.
    """

    def __init__(self, model: ModelSource, source: Source, size: int, micro_batch: int) -> None:
        self._model, self._source = model, source
        self._size, self._micro_batch = size, micro_batch
        self.micro_batches = size // micro_batch

    def parts(self, step: int, engines: int) -> list[EngineRows]:
        """Return the rows of each engine in the step after `step` commits.

        Raises:
            DataError: the source failed, or returned something other than rows.
        """
        return [
            EngineRows(numbers, self._draw(step, numbers))
            for numbers in partition(self.micro_batches, engines)
        ]

    def micro_batch(self, step: int, number: int) -> Rows:
        """Return the rows of one micro-batch of the step after `step` commits."""
        return self._draw(step, range(number, number + 1))

    def _draw(self, step: int, numbers: range) -> Rows:
        indices = range(numbers.start * self._micro_batch, numbers.stop * self._micro_batch)
        with failure_of_source(f"rows of step {step + 1}"):
            given = self._source.batch(step, indices, self._size)
        rows = to_tensors(given)
        for name, value in rows.items():
            if len(value) != len(indices):
                raise DataError(
                    f"expected {len(indices)} rows of {name!r} from the source, got {len(value)}; "
                    "`batch` must return a row per index"
                )
        refuse_unknown_tokens(self._model, rows, f"in step {step + 1}")
        return rows

    def loss_scale(self, step: int, parts: Sequence[EngineRows]) -> float:
        """Return the factor from the sum of the micro-batches' losses to the step's loss.

        Raises:
            DataError: the batch has no labels, or no token of it has a label.
        """
        if self._model.loss_reduction == "mean":
            return 1.0 / self.micro_batches
        if any("labels" not in part.rows for part in parts):
            given = ", ".join(parts[0].rows) or "nothing"
            raise DataError(
                f"the batch lacks 'labels', the token that each position should predict "
                f"({IGNORED_LABEL}: none); the source gave {given}"
            )
        count = sum(int((part.rows["labels"] != IGNORED_LABEL).sum()) for part in parts)
        if count == 0:
            raise DataError(f"step {step + 1}: no token of the batch has a label")
        return 1.0 / count


def refuse_unknown_tokens(model: ModelSource, rows: Rows, where: str) -> None:
    """Refuse tokens that are not in the vocabulary of a language model.

    In an engine such a token would be an error that names neither step nor field.

    Raises:
        DataError: a token of the inputs, or a label that is not ignored, is out of range.
    """
    size = model.vocab_size
    if model.task == "custom" or size is None:
        return
    for name in ("input_ids", "labels"):
        if name not in rows or rows[name].is_floating_point() or not rows[name].numel():
            continue
        tokens = rows[name]
        if name == "labels":
            tokens = tokens.where(tokens != IGNORED_LABEL, 0)
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < size:
                raise DataError(
                    f"{name!r} of the source has token {token} {where}: the model's vocabulary "
                    f"has the tokens 0 to {size - 1}"
                )


@contextmanager
def failure_of_source(wanted: str) -> Iterator[None]:
    """Raise any error of a source as a `DataError`, whose cause is that error.

    A source is the user's code, which fails in its own ways. Errors of Penstock's own sources, such
    as `CorruptionError`, are raised as they are, with `is_from_source`.
    """
    try:
        yield
    except PenstockError as error:
        error.is_from_source = True
        raise
    except Exception as error:
        reason = ": ".join(filter(None, (type(error).__name__, str(error))))
        raise DataError(f"the source failed to give {wanted}: {reason}") from error


def to_tensors(batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return a batch's arrays as tensors in memory of their own: a source may return the same
    memory for the rows of another engine, or memory that must not be written.

    **Raises:** `DataError` if `batch` is not a mapping of arrays, or PyTorch lacks an array's type.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            "the source's `batch` must return a mapping of names to arrays, got a "
            f"{type(batch).__name__}"
        )
    try:
        copies = {n: np.array(array, order="C", ndmin=1) for n, array in batch.items()}
        return {name: torch.from_numpy(array) for name, array in copies.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"the source gave an array that PyTorch cannot take: {error}") from None
