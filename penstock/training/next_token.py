"""Logits of the token after a text, by incremental decoding.

The keys and values of a text's positions are kept, so a further token costs one position of each
layer. All positions are computed for every token if the text is longer than the model's window
(each of its tokens then has another position), for models whose layers keep nothing (recurrent
layers, mixtures of experts, modules of one's own), and where the engine has no memory for keys and
values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from penstock.compiler import CACHE, POSITION, Decoding
from penstock.engine import Batch, Engine
from penstock.errors import BudgetError
from penstock.program import Program
from penstock.training.forward_sweep import FetchWeights, sweep_forward

_SLOW = "every token computes the whole window, which is slow, because"
MODEL_LIMIT = "the most that the model reads"
"""What the longest window is, unless the run has shorter sequences."""


class NextToken:
    """Computes logits of next tokens for texts of up to `window` tokens, and the last `window`
    tokens of longer ones.

    **Arguments:** `make_engine` returns the engine of one of the programs, whose inputs are
    `input_ids` int64 [1, window] and those of `compiler.decoding`; `fetch` returns weights by name;
    `version` returns another number when they have changed. `prepare` is then called with the
    program of each engine. `notice` is told why all positions are computed for every token;
    `limit` says what the longest window is. `settle` is called before and after each sweep over
    the weights.
    """

    def __init__(
        self,
        make_engine: Callable[[Decoding], Engine],
        fetch: FetchWeights,
        window: int,
        version: Callable[[], int] = lambda: 0,
        prepare: Callable[[Program], None] = lambda program: None,
        notice: Callable[[str], None] = lambda text: None,
        limit: str = MODEL_LIMIT,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self._make_engine = make_engine
        self._fetch, self._settle = fetch, settle
        self._window = window
        self._version = version
        self._prepare = prepare
        self._notice = notice
        self._limit = limit
        self._of_version = version()
        self._prefill = make_engine("prefill")
        self._keeps_nothing = False
        self._decode: Engine | None = None
        self._has_told_length = False
        self._tokens: list[int] = []  # whose keys and values are kept
        self._kept: list[torch.Tensor] = []

    @property
    def engines(self) -> list[Engine]:
        """The engines that exist."""
        return [self._prefill] if self._decode is None else [self._prefill, self._decode]

    def forget(self) -> None:
        """Release the keys and values."""
        self._tokens, self._kept = [], []
        for engine in self.engines:
            engine.release()

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits [vocabulary] of the token after a text of at least one token."""
        # Attention is causal: padding after the text changes none of its logits.
        visible = list(tokens[-self._window :])
        if self._of_version != self._version():
            self.forget()
            self._of_version = self._version()
            for engine in self.engines:
                self._prepare(engine.program)
        try:
            return self._next(visible, is_whole=len(tokens) <= self._window)
        except BudgetError as error:
            if self._keeps_nothing or self._prefill.program.whole_window_reason:
                raise
            self.forget()
            self._prefill, self._decode = self._make_engine("whole_window"), None
            self._keeps_nothing = True
            logits = self._next(visible, is_whole=False)
            self._notice(f"{_SLOW} the engine has no memory for keys and values: {error}")
            return logits

    def _next(self, visible: list[int], *, is_whole: bool) -> torch.Tensor:
        """Return the logits after a text, or after the end of one if it is not whole."""
        reason = self._prefill.program.whole_window_reason
        if self._kept and is_whole and visible[:-1] == self._tokens:
            logits, *_ = self._run(self._decoding(), visible)
        else:
            outgrows = bool(self._kept) and visible[:-1] == self._tokens[1:]
            if self._kept:
                self.forget()
            logits, *self._kept = self._run(self._prefill, visible)
            if reason:
                self._notice(f"{_SLOW} the model cannot be decoded incrementally: {reason}")
            elif not is_whole and not self._keeps_nothing:
                self._tell_length(outgrows)
        self._tokens = visible
        return logits[0, -1]

    def _tell_length(self, outgrows: bool) -> None:
        """Say once that a text is longer than the window, which it `outgrows` or did at once."""
        if self._has_told_length:
            return
        self._has_told_length = True
        self._notice(
            f"{'from here on ' * outgrows}{_SLOW} the text is longer than {self._window:,} tokens"
            f"{f', {self._limit}' * outgrows}: {'its beginning is no longer read, and ' * outgrows}"
            "with each new token the last ones get other positions"
        )

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
        return sweep_forward(engine, self._fetch, self._settle, engine.results)[0]
