"""Generation of tokens with a trained model: its weights are streamed once per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from penstock.config import Config
from penstock.engine import Engine
from penstock.errors import ConfigError, NonFiniteError
from penstock.models import ModelSource
from penstock.planning import (
    ExecutionPlan,
    builders,
    make_inference_engine,
    measure_current,
)
from penstock.program import Program
from penstock.store import Store
from penstock.training.next_token import FetchWeights, NextToken


def make_token_generator(
    config: Config, model: ModelSource, layout: ExecutionPlan, store: Store, device: str
) -> TokenGenerator:
    """Return a generator of tokens over the weights of a store.

    **Raises:** `ConfigError` if the model does not generate text.
    """
    if model.task != "causal_lm":
        raise ConfigError(
            f"{model.name} is trained for {model.task}; only causal language models generate text"
        )

    def make_engine(goal: Literal["prefill", "decode"], window: int) -> Engine:
        program = builders.compile_source(
            model,
            micro_batch=1,
            length=window,
            precision=config.precision,
            device=device,
            products=layout.products,
            bfloat16=layout.program.bfloat16,
            sparse=layout.program.capacities,
            goal=goal,
        )
        return make_inference_engine(layout, program)

    return TokenGenerator(
        make_engine,
        store.stream,
        config.data.sequence_length or model.max_sequence_length,
        prepare=lambda program: measure_current(layout, program, store),
        version=lambda: store.step,
        finish=store.take_traffic,
    )


class TokenGenerator:
    """Generates tokens with a model; caches the engines of each window length.

    **Arguments:** `make_engine` returns the engine of a program of incremental decoding for a
    window. `fetch` returns weights by name. `longest` is the model's largest window, None for no
    limit. `prepare` is called with each engine's program before each text, `finish` after it.
    `version` returns another number when the weights have changed.
    """

    def __init__(
        self,
        make_engine: Callable[[Literal["prefill", "decode"], int], Engine],
        fetch: FetchWeights,
        longest: int | None,
        prepare: Callable[[Program], None] = lambda program: None,
        version: Callable[[], int] = lambda: 0,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._make_engine = make_engine
        self._fetch = fetch
        self._longest = longest
        self._prepare = prepare
        self._version = version
        self._finish = finish
        self._windows: dict[int, NextToken] = {}

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
        stop: int | None = None,
        vocabulary: int | None = None,
    ) -> Iterator[int]:
        """Yield new token ids after `prompt`; arguments as for `generate_tokens`."""
        window = _power_of_two(len(prompt) + max_new_tokens)
        if self._longest is not None:
            window = min(self._longest, window)
        try:
            yield from generate_tokens(
                self._for_window(window).logits,
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                stop=stop,
                vocabulary=vocabulary,
            )
        finally:
            self._finish()

    def _for_window(self, window: int) -> NextToken:
        """Return what computes the logits of a new text; training may have changed the weights
        since the last one."""

        def make_prepared(goal: Literal["prefill", "decode"]) -> Engine:
            engine = self._make_engine(goal, window)
            self._prepare(engine.program)
            return engine

        if window not in self._windows:
            self._windows[window] = NextToken(make_prepared, self._fetch, window, self._version)
            return self._windows[window]
        following = self._windows[window]
        following.forget()
        for engine in following.engines:
            self._prepare(engine.program)
        return following


def generate_tokens(
    logits_after: Callable[[Sequence[int]], torch.Tensor],
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    stop: int | None = None,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Yield new token ids after `prompt`, one at a time.

    **Arguments:** `logits_after` returns the logits [vocabulary] of the token after a text.
    `temperature` 0 chooses the most likely token. `top_k` None samples from all tokens. `stop` ends
    the text and is not yielded. Ids from `vocabulary` on are never chosen (a model's vocabulary may
    be padded beyond the tokenizer's).

    Raises:
        ConfigError: the prompt is empty, or an option has no meaning.
        NonFiniteError: the logits of the next token are NaN or infinite.
    """
    if not prompt:
        raise ConfigError("the prompt is empty: give at least one token to start from")
    if temperature < 0:
        raise ConfigError(f"temperature must be 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be 1 or more, or None for all tokens, got {top_k}")
    generator = np.random.default_rng(seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        logits = logits_after(tokens)[:vocabulary]
        token = _choose(logits, temperature, top_k, generator)
        if token == stop:
            return
        tokens.append(token)
        yield token


def _choose(
    logits: torch.Tensor, temperature: float, top_k: int | None, generator: np.random.Generator
) -> int:
    values = logits.detach().float().cpu().numpy()
    if not np.isfinite(values.max()):  # tokens that a model rules out are -inf
        raise NonFiniteError(
            f"the largest logit of the next token is {values.max()}: the model's weights have "
            "overflowed, or its forward divides by 0; generate from an older checkpoint"
        )
    if temperature == 0:
        return int(values.argmax())
    tokens = np.arange(len(values))
    if top_k is not None and top_k < len(values):
        (tokens,) = np.nonzero(values >= np.partition(values, -top_k)[-top_k])
    chosen = values[tokens].astype(np.float64)
    weights = np.exp((chosen - chosen.max()) / temperature)
    return int(generator.choice(tokens, p=weights / weights.sum()))


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
