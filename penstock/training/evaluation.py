"""Evaluation of a model on held-out data: the forward sweep alone, every module in eval mode.

For language models the loss is the mean over all labelled tokens; for other models it is the mean
over the rows. `perplexity` is the exponential of a language model's loss. `bits_per_byte` is the
loss of plain text per byte of the held-out split, which does not depend on a tokenizer. `accuracy`
is the share of labelled tokens that the model ranks first, given the correct tokens before. For
records, `exact_match` is the share whose whole completion, end token included, is predicted
correctly.

`bits_per_byte` is left out if the data set does not contain the text bytes of the held-out split.
The text bytes of all splits together would give a wrong figure: training text and held-out text may
have different bytes per token.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass

import numpy as np
import torch

from penstock.config import Config
from penstock.data import (
    IGNORED_LABEL,
    ArraySource,
    LanguageModelSource,
    MaskedLanguageModelSource,
    RecordSource,
    Source,
)
from penstock.engine import Batch, Engine
from penstock.errors import CompileError, DataError
from penstock.models import ModelSource
from penstock.planning import (
    ExecutionPlan,
    builders,
    make_inference_engine,
    measure_current,
)
from penstock.program import Program
from penstock.step import failure_of_source, refuse_unknown_tokens, to_tensors
from penstock.store import Store
from penstock.training.forward_sweep import sweep_forward

Rows = dict[str, torch.Tensor]

# The sources whose evaluation yields `samples_per_epoch` rows. Others may count anything by it.
_COUNTED = (ArraySource, LanguageModelSource, MaskedLanguageModelSource, RecordSource)


@dataclass
class _Counts:
    """Sums over the micro-batches of an evaluation."""

    loss: float = 0.0
    weight: int = 0  # labelled tokens, or rows
    right_tokens: int = 0
    rows: int = 0
    right_rows: int = 0

    def add_predictions(self, labels: torch.Tensor, predictions: torch.Tensor) -> None:
        """Count correct predictions of `labels` [rows, tokens], and rows without an error."""
        labelled = labels != IGNORED_LABEL
        right = (predictions.view_as(labels) == labels) & labelled
        self.right_tokens += int(right.sum())
        self.rows += len(labels)
        self.right_rows += int((right == labelled).all(dim=1).sum())


class Evaluator:
    """Evaluates the weights of a store; compiles its programs at the first evaluation.

    **Arguments:** `layout` of the training, whose micro-batch, sizes and budget are reused.
    `held_out` returns the batches.
    """

    def __init__(
        self,
        config: Config,
        model: ModelSource,
        layout: ExecutionPlan,
        store: Store,
        held_out: Source,
        device: str,
    ) -> None:
        self._config = config
        self._model = model
        self._layout = layout
        self._store = store
        self._held_out = held_out
        self._device = device
        self._engines: dict[int, Engine] = {}

    def evaluate(
        self,
        batches: int,
        should_stop: Callable[[], bool] = lambda: False,
        on_batch: Callable[[int, int], None] = lambda batch, batches: None,
    ) -> dict[str, float]:
        """Return the metrics of the first `batches` held-out batches, by name.

        The metrics are `loss` and `tokens`, or `rows` of a model without tokens. A language model
        adds `perplexity` and `accuracy`, plain text adds `bits_per_byte` (unless an older release
        built the data set) and `held_out_tokens`, those of all held-out batches, records add
        `exact_match`, `records` and `held_out_records`.

        `on_batch` is called before each batch with its number from 1 and the number of batches,
        which is the upper bound `batches` for a source of the user's own.

        **Raises:** `DataError` if the batches are empty, or their source fails; `InterruptedError`
        if `should_stop`, which is asked before every micro-batch, returns true. Its argument is the
        number of micro-batches before.
        """
        counts = _Counts()
        micro, size = self._layout.micro_batch, self._config.batch.size
        total = batches
        if isinstance(self._held_out, _COUNTED):
            total = min(batches, math.ceil(self._held_out.samples_per_epoch / size))
        for number, batch in enumerate(self._batches(micro, batches * size)):
            if should_stop():
                raise InterruptedError(number)
            if number * micro % size == 0:
                place = number * micro // size + 1
                on_batch(place, max(place, total))
            if rows := to_tensors(batch):
                self._add(counts, rows)
        if counts.weight == 0:
            what = "labelled tokens" if self._predicts else "rows"
            raise DataError(f"the held-out data has no {what}: there is nothing to evaluate")
        loss = counts.loss / counts.weight
        found = {"loss": loss, "tokens" if self._predicts else "rows": counts.weight}
        if self._predicts:
            found["perplexity"] = _exp(loss)
            found["accuracy"] = counts.right_tokens / counts.weight
        if self._predicts and isinstance(self._held_out, LanguageModelSource):
            source = self._held_out
            found["held_out_tokens"] = source.windows_per_epoch * source.sequence_length
            dataset, split = source.dataset, source.split
            text_bytes = dataset.text_bytes(split)
            if text_bytes:
                bytes_per_token = text_bytes / dataset.tokens(split)
                found["bits_per_byte"] = bits_per_byte(loss, bytes_per_token)
        if self._predicts and isinstance(self._held_out, RecordSource):
            found["exact_match"] = counts.right_rows / counts.rows
            found["records"] = counts.rows
            found["held_out_records"] = self._held_out.records
        return found

    def check(self) -> None:
        """Refuse errors that would stop a run at its first evaluation.

        **Raises:** `DataError` for held-out data without a row or a source that fails,
        `CompileError` for a model of the user's own that cannot be evaluated.
        """
        micro = self._layout.micro_batch
        first = next(self._batches(micro, micro), {})
        if not first or _row_count(first) == 0:
            raise DataError(
                "the held-out data has no rows: give some, or set evaluation.every to null"
            )
        if not self._predicts:
            self._engine(_row_count(first))

    def _batches(self, size: int, limit: int) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield at most `limit` held-out rows, `size` at a time."""
        with failure_of_source("held-out rows"):
            yield from self._held_out.evaluation_batches(size, limit)

    @property
    def _predicts(self) -> bool:
        """Whether the model is a language model, whose loss is a sum over labelled tokens."""
        return self._model.loss_reduction == "sum"

    def _add(self, counts: _Counts, rows: Rows) -> None:
        refuse_unknown_tokens(self._model, rows, "in the held-out rows")
        weight = _labelled(rows) if self._predicts else _row_count(rows)
        if weight == 0:
            return
        whole = _filled_up(rows, self._layout.micro_batch) if self._predicts else rows
        engine = self._engine(_row_count(whole))
        engine.begin(Batch([whole], 0, 1, self._config.run.seed, 0))
        store = self._store
        (loss,) = sweep_forward(engine, store.stream, store.flush, engine.losses)
        counts.weight += weight
        counts.loss += loss if self._predicts else loss * weight
        if self._predicts:
            _, predictions = engine.results()[0]
            have = rows["labels"].numel()
            counts.add_predictions(rows["labels"], predictions.cpu()[:have])

    def _engine(self, rows: int) -> Engine:
        """Return an engine for micro-batches of so many rows: a full one, or the remainder."""
        if rows not in self._engines:
            self._engines[rows] = make_inference_engine(self._layout, self._program(rows))
        engine = self._engines[rows]
        measure_current(self._layout, engine.program, self._store)
        return engine

    def _program(self, rows: int) -> Program:
        """Return the program in eval mode; the training program if eval mode changes nothing."""
        try:
            return builders.compile_source(
                self._model,
                micro_batch=rows,
                length=self._layout.sequence_length,
                precision=self._config.precision,
                device=self._device,
                products=self._layout.products,
                bfloat16=self._layout.program.bfloat16,
                sparse=self._layout.program.capacities,
                goal="evaluate",
                slot_bytes=self._layout.slot_bytes,
                known=self._layout.program,
            )
        except CompileError as error:
            raise CompileError(
                f"in eval mode, with {rows} rows, as held-out data is evaluated: {error}"
            ) from error


def _filled_up(rows: Rows, micro: int) -> Rows:
    """Return a full micro-batch; padding rows have no labels and are not counted."""
    filled = {}
    for name, value in rows.items():
        padding = value[:1].expand(micro - len(value), *value.shape[1:]).clone()
        if name == "labels":
            padding.fill_(IGNORED_LABEL)
        filled[name] = torch.cat([value, padding])
    return filled


def _labelled(rows: Rows) -> int:
    return int((rows["labels"] != IGNORED_LABEL).sum())


def _row_count(rows: Mapping[str, Sized]) -> int:
    return len(next(iter(rows.values())))


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Return a loss in nats per token as bits per byte of text."""
    return loss / math.log(2) / bytes_per_token


def _exp(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)  # of NaN, NaN
