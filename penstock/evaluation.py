"""The mean loss on held-out data: the forward sweep alone, without dropout."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from penstock import assembly
from penstock.config import Config
from penstock.data import IGNORED_LABEL, Source
from penstock.engine import Batch, EnginePlan, TorchEngine
from penstock.errors import DataError
from penstock.models import ModelSource
from penstock.program import Program
from penstock.store import Store


class Evaluator:
    """Evaluates the weights of a store; compiles what it needs at the first evaluation.

    **Arguments:** `layout` of the training, whose micro-batch, program (where it draws no
    dropout) and budget are used again; `held_out` gives the batches.
    """

    def __init__(
        self,
        config: Config,
        model: ModelSource,
        layout: assembly.Layout,
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
        """Return loss, perplexity and tokens of the first `batches` held-out batches.

        **Raises:** `DataError` if they do not fill one micro-batch.
        """
        engine, micro = self._engine, self._layout.micro_batch
        total, count = 0.0, 0
        for rows in self._held_out.evaluation_batches(micro, batches * self._config.batch.size):
            padded, weight = self._fill_up(assembly.to_tensors(rows), micro)
            if weight == 0:
                continue
            engine.begin(Batch([padded], 0, 1, self._config.run.seed, 0))
            for stage in engine.program.stages:
                engine.load(stage.index, self._store.stream(stage.weights))
                engine.infer(stage.index)
            (loss,) = engine.losses()
            total += loss if self._model.loss_reduction == "sum" else loss * weight
            count += weight
        if count == 0:
            raise DataError("the held-out split is smaller than one micro-batch")
        loss = total / count
        return {"loss": loss, "perplexity": _exp(loss), "tokens": count}

    def refuse_too_little(self) -> None:
        """A held-out set that cannot fill one micro-batch must not stop a run in its middle."""
        if self._model.loss_reduction != "mean":
            return  # rows that lack are filled up, and count nothing
        micro = self._layout.micro_batch
        first = next(iter(self._held_out.evaluation_batches(micro, micro)), {})
        if not first or len(next(iter(first.values()))) < micro:
            raise DataError(
                f"the held-out data has fewer rows than a micro-batch of {micro}: give more, "
                "lower batch.micro, or set evaluation.every to null"
            )

    @cached_property
    def _engine(self) -> TorchEngine:
        return TorchEngine(
            self._program(),
            EnginePlan(),
            device=self._device,
            budget_bytes=self._layout.budget_bytes,
        )

    def _program(self) -> Program:
        """Return the program without dropout, which is the one of training where there is none."""
        if not self._layout.program.draws_dropout:
            return self._layout.program
        return assembly.compile_source(
            self._model,
            micro_batch=self._layout.micro_batch,
            length=assembly.sequence_length(self._config, self._model),
            precision=self._config.precision,
            device=self._device,
            goal="evaluate",
        )

    def _fill_up(
        self, rows: dict[str, torch.Tensor], micro: int
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Return a whole micro-batch and what it counts; rows that are made up count nothing."""
        have = len(next(iter(rows.values())))
        if self._model.loss_reduction == "mean":
            return rows, have if have == micro else 0
        filled = {}
        for name, value in rows.items():
            padding = value[:1].expand(micro - have, *value.shape[1:]).clone()
            if name == "labels":
                padding.fill_(IGNORED_LABEL)
            filled[name] = torch.cat([value, padding])
        return filled, int((rows["labels"] != IGNORED_LABEL).sum())


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
