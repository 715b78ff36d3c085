"""Logits of the token after a text, by incremental decoding.

The keys and values of a text's positions are kept, so a further token costs one position of each
layer. They are computed anew, all positions at once, if the text is longer than the model's window
(each of its tokens then has another position), and for models whose layers keep nothing (recurrent
layers, mixtures of experts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from penstock.compiler import CACHE, POSITION
from penstock.engine import Batch, Engine, compute
from penstock.sparsity import StreamedWeight
from penstock.step_schedule import StepSchedule

FetchWeights = Callable[[Sequence[str]], Sequence[StreamedWeight]]


class NextToken:
    """Computes logits of next tokens for texts of up to `window` tokens, and the last `window`
    tokens of longer ones.

    **Arguments:** `make_engine` returns the engine of one of the two programs, whose inputs are
    `input_ids` int64 [1, window] and those of `compiler.decoding`; `fetch` returns weights by name;
    `version` returns another number when they have changed.
    """

    def __init__(
        self,
        make_engine: Callable[[Literal["prefill", "decode"]], Engine],
        fetch: FetchWeights,
        window: int,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        self._make_engine = make_engine
        self._fetch = fetch
        self._window = window
        self._version = version
        self._of_version = version()
        self._prefill = make_engine("prefill")
        self._decode: Engine | None = None
        self._tokens: list[int] = []  # whose keys and values are kept
        self._kept: list[torch.Tensor] = []

    @property
    def engines(self) -> list[Engine]:
        """The engines that exist."""
        return [self._prefill] if self._decode is None else [self._prefill, self._decode]

    def forget(self) -> None:
        """Drop the keys and values."""
        self._tokens, self._kept = [], []

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits [vocabulary] of the token after a text of at least one token."""
        # Attention is causal: padding after the text changes none of its logits.
        visible = list(tokens[-self._window :])
        if self._of_version != self._version():
            self.forget()
            self._of_version = self._version()
        if self._kept and len(tokens) <= self._window and visible[:-1] == self._tokens:
            logits, *_ = self._run(self._decoding(), visible)
        else:
            self.forget()
            logits, *self._kept = self._run(self._prefill, visible)
        self._tokens = visible
        return logits[0, -1]

    def _decoding(self) -> Engine:
        if self._decode is None:
            self._decode = self._make_engine("decode")
        return self._decode

    def _run(self, engine: Engine, visible: list[int]) -> tuple[torch.Tensor, ...]:
        ids = torch.zeros((1, self._window), dtype=torch.int64)
        ids[0, : len(visible)] = torch.tensor(visible)
        inputs = {"input_ids": ids, POSITION: torch.tensor([len(visible) - 1])}
        kept = {CACHE.format(number): value for number, value in enumerate(self._kept)}
        engine.begin(Batch([inputs], 0, 1, 0, 0, kept=kept))
        for operation in StepSchedule.forward_only(engine.program).operations:
            engine.load(operation.stage, self._fetch(operation.weights))
            compute(engine, operation)
        return engine.results()[0]
