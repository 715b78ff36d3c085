"""Generation of tokens with a trained model: its weights are streamed once per token."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from penstock.compiler import Decoding
from penstock.config import Config
from penstock.engine import Engine
from penstock.errors import ConfigError, NonFiniteError, few
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

    Only models that `transformers` builds are decoded incrementally. Code of the user's may be
    causal as a whole while a layer reads later positions (summaries of blocks, prefix masks), which
    the analysis of single operators does not find: it computes the window for each token.

    **Raises:** `ConfigError` if the model does not generate text.
    """
    if model.task != "causal_lm":
        raise ConfigError(
            f"{model.name} is trained for {model.task}; only causal language models generate text"
        )

    def make_engine(goal: Decoding, window: int) -> Engine:
        program = builders.compile_source(
            model,
            micro_batch=1,
            length=window,
            precision=config.precision,
            device=device,
            products=layout.products,
            bfloat16=layout.program.bfloat16,
            sparse=layout.program.capacities,
            goal=goal if model.from_library else "whole_window",
        )
        return make_inference_engine(layout, program)

    return TokenGenerator(
        make_engine,
        store.stream,
        config.data.sequence_length or model.max_sequence_length,
        vocabulary=model.vocab_size,
        prepare=lambda program: measure_current(layout, program, store),
        version=lambda: store.step,
        finish=store.take_traffic,
    )


class TokenGenerator:
    """Generates tokens with a model, one text at a time: a text that is continued after another one
    of the same window length is computed anew.

    **Arguments:** `make_engine` returns the engine of a program of incremental decoding for a
    window. `fetch` returns weights by name. `longest` is the model's largest window, None for no
    limit; `vocabulary` is the number of its tokens, None if unknown. `prepare` is called with each
    engine's program before each text, `finish` after it. `version` returns another number when the
    weights have changed.
    """

    def __init__(
        self,
        make_engine: Callable[[Decoding, int], Engine],
        fetch: FetchWeights,
        longest: int | None,
        *,
        vocabulary: int | None = None,
        prepare: Callable[[Program], None] = lambda program: None,
        version: Callable[[], int] = lambda: 0,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._make_engine = make_engine
        self._fetch = fetch
        self._longest = longest
        self._vocabulary = vocabulary
        self._prepare = prepare
        self._version = version
        self._finish = finish
        self._windows: dict[int, NextToken] = {}

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
        stop: int | None = None,
        vocabulary: int | None = None,
    ) -> Iterator[int]:
        """Yield new token ids after `prompt`; arguments and errors as of `generate_tokens`.

        A token of the prompt that the model does not have is a `ConfigError` too.
        """
        prompt = self._checked(prompt)
        following: NextToken | None = None
        window = _power_of_two(len(prompt) + max_new_tokens)
        if self._longest is not None:
            window = min(self._longest, window)
        try:
            following = self._for_window(window)
            yield from generate_tokens(
                following.logits,
                prompt,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                stop=stop,
                vocabulary=vocabulary,
            )
        finally:
            if following is not None:
                following.forget()
            self._finish()

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens of a prompt as integers of Python.

        **Raises:** `ConfigError` for something else than tokens of the model.
        """
        if len(prompt) == 0:
            raise ConfigError("the prompt is empty: give at least one token to start from")
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise ConfigError(
                f"expected token ids, whole numbers, got {few([*map(repr, prompt)])}"
            ) from None
        wrong = [t for t in tokens if t < 0 or (self._vocabulary or t + 1) <= t]
        if wrong:
            most = "" if self._vocabulary is None else f" to {self._vocabulary - 1:,}"
            raise ConfigError(f"expected token ids from 0{most}, got {few([*map(str, wrong)])}")
        return tokens

    def _for_window(self, window: int) -> NextToken:
        """Return the source of logits for a new text in a window."""

        def make_prepared(goal: Decoding) -> Engine:
            engine = self._make_engine(goal, window)
            self._prepare(engine.program)
            return engine

        if window not in self._windows:
            self._windows[window] = NextToken(
                make_prepared, self._fetch, window, self._version, self._prepare
            )
            return self._windows[window]
        following = self._windows[window]
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
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be 0 or more, got {max_new_tokens}")
    if not 0 <= temperature < math.inf:
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
