"""What a model makes of held-out data: the forward sweep alone, without dropout.

The loss is the mean over all labelled tokens, perplexity its exponential, `bits_per_byte` the loss
of plain text per byte, which no tokenizer decides. Of language models, `accuracy` is the share of
labelled tokens that the model thinks most likely, given all the right ones before; of records,
`exact_match` is the share whose whole completion, its end included, is predicted so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from penstock import assembly
from penstock.config import Config
from penstock.data import IGNORED_LABEL, LanguageModelSource, RecordSource, Source
from penstock.engine import Batch, EnginePlan, TorchEngine
from penstock.errors import DataError
from penstock.models import ModelSource
from penstock.program import Program
from penstock.step_layout import Layout
from penstock.store import Store

Rows = dict[str, torch.Tensor]


@dataclass
class _Counts:
    """Sums over the micro-batches of an evaluation."""

    loss: float = 0.0
    weight: int = 0  # labelled tokens, or rows
    right_tokens: int = 0
    rows: int = 0
    right_rows: int = 0

    def add_predictions(self, labels: torch.Tensor, predictions: torch.Tensor) -> None:
        """Count what is right of `labels` [rows, tokens], and rows without anything wrong."""
        labelled = labels != IGNORED_LABEL
        right = (predictions.view_as(labels) == labels) & labelled
        self.right_tokens += int(right.sum())
        self.rows += len(labels)
        self.right_rows += int((right == labelled).all(dim=1).sum())


class Evaluator:
    """Evaluates the weights of a store; compiles what it needs at the first evaluation.

    **Arguments:** `layout` of the training, whose micro-batch, sizes and budget are used again;
    `held_out` gives the batches.
    """

    def __init__(
        self,
        config: Config,
        model: ModelSource,
        layout: Layout,
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

    def evaluate(self, batches: int) -> dict[str, float]:
        """Return the figures of the first `batches` held-out batches, by name.

        These are `loss`, `perplexity`, `tokens`; with a language model `accuracy`, and on plain
        text `bits_per_byte`; with records `exact_match` and `records`.

        **Raises:** `DataError` if they do not fill one micro-batch.
        """
        counts = _Counts()
        micro = self._layout.micro_batch
        for rows in self._held_out.evaluation_batches(micro, batches * self._config.batch.size):
            self._add(counts, assembly.to_tensors(rows))
        if counts.weight == 0:
            raise DataError("the held-out split is smaller than one micro-batch")
        loss = counts.loss / counts.weight
        found = {"loss": loss, "perplexity": _exp(loss), "tokens": counts.weight}
        if self._predicts:
            found["accuracy"] = counts.right_tokens / counts.weight
        if isinstance(self._held_out, LanguageModelSource):
            found["bits_per_byte"] = bits_per_byte(loss, self._held_out.dataset.bytes_per_token)
        if isinstance(self._held_out, RecordSource):
            found["exact_match"] = counts.right_rows / counts.rows
            found["records"] = counts.rows
        return found

    def refuse_too_little(self) -> None:
        """A held-out set that cannot fill one micro-batch must not stop a run in its middle."""
        if self._predicts:
            return  # rows that lack are filled up, and count nothing
        micro = self._layout.micro_batch
        first = next(iter(self._held_out.evaluation_batches(micro, micro)), {})
        if not first or len(next(iter(first.values()))) < micro:
            raise DataError(
                f"the held-out data has fewer rows than a micro-batch of {micro}: give more, "
                "lower batch.micro, or set evaluation.every to null"
            )

    @property
    def _predicts(self) -> bool:
        """Whether the model is a language model, whose loss is a sum over labelled tokens."""
        return self._model.loss_reduction == "sum"

    def _add(self, counts: _Counts, rows: Rows) -> None:
        engine = self._engine
        padded, weight = self._fill_up(rows, self._layout.micro_batch)
        if weight == 0:
            return
        engine.begin(Batch([padded], 0, 1, self._config.run.seed, 0))
        for stage in engine.program.stages:
            engine.load(stage.index, self._store.stream(stage.weights))
            engine.infer(stage.index)
        (loss,) = engine.losses()
        counts.weight += weight
        counts.loss += loss if self._predicts else loss * weight
        if self._predicts:
            _, predictions = engine.results()[0]
            have = rows["labels"].numel()
            counts.add_predictions(rows["labels"], predictions.cpu()[:have])

    @cached_property
    def _engine(self) -> TorchEngine:
        return TorchEngine(
            self._program(),
            EnginePlan(),
            device=self._device,
            budget_bytes=self._layout.budget_bytes,
        )

    def _program(self) -> Program:
        """Return the program that predicts; of other models that of training will mostly do."""
        if not self._predicts and not self._layout.program.draws_dropout:
            return self._layout.program
        return assembly.compile_source(
            self._model,
            micro_batch=self._layout.micro_batch,
            length=self._layout.sequence_length,
            precision=self._config.precision,
            device=self._device,
            goal="evaluate",
            slot_bytes=self._layout.slot_bytes,
        )

    def _fill_up(self, rows: Rows, micro: int) -> tuple[Rows, int]:
        """Return a whole micro-batch and what it counts; rows that are made up count nothing."""
        have = len(next(iter(rows.values())))
        if not self._predicts:
            return rows, have if have == micro else 0
        filled = {}
        for name, value in rows.items():
            padding = value[:1].expand(micro - have, *value.shape[1:]).clone()
            if name == "labels":
                padding.fill_(IGNORED_LABEL)
            filled[name] = torch.cat([value, padding])
        return filled, int((rows["labels"] != IGNORED_LABEL).sum())


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Return a loss in nats per token as bits per byte of text."""
    return loss / math.log(2) / bytes_per_token


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
