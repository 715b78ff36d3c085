"""Text generation with a trained model: its weights are streamed once per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from penstock.config import Config
from penstock.data import TokenDataset, Tokenizer
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


def make_writer(
    config: Config,
    model: ModelSource,
    layout: ExecutionPlan,
    store: Store,
    dataset: TokenDataset | None,
    device: str,
) -> TextGenerator:
    """Return a text generator over the weights of a store.

    **Raises:** `ConfigError` if the model does not generate text, or has no tokenizer.
    """
    if model.task != "causal_lm":
        raise ConfigError(
            f"{model.name} is trained for {model.task}; only causal language models generate text"
        )
    if dataset is None:
        raise ConfigError("generate needs the data set's tokenizer; this run has none")

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

    return TextGenerator(
        make_engine,
        store.stream,
        dataset.tokenizer(),
        config.data.sequence_length or model.max_sequence_length,
        prepare=lambda program: measure_current(layout, program, store),
    )


class TextGenerator:
    """Generates text with a model; caches the engines of each window length.

    **Arguments:** `make_engine` returns the engine of a program of incremental decoding for a
    window. `fetch` returns weights by name. `longest` is the model's largest window, None for no
    limit. `prepare` is called with each engine's program before each text.
    """

    def __init__(
        self,
        make_engine: Callable[[Literal["prefill", "decode"], int], Engine],
        fetch: FetchWeights,
        tokenizer: Tokenizer,
        longest: int | None,
        prepare: Callable[[Program], None] = lambda program: None,
    ) -> None:
        self._make_engine = make_engine
        self._fetch = fetch
        self._tokenizer = tokenizer
        self._longest = longest
        self._prepare = prepare
        self._windows: dict[int, NextToken] = {}

    def write(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        seed: int,
    ) -> Iterator[str]:
        """Yield the text after `prompt` piece by piece, whole characters only."""
        tokenizer = self._tokenizer
        encoded = tokenizer.encode_batch([prompt])[0].tolist()
        tokens = encoded or [tokenizer.end_of_document]
        window = _power_of_two(len(tokens) + max_new_tokens)
        if self._longest is not None:
            window = min(self._longest, window)
        following = self._for_window(window)
        text = _ContinuedText(tokenizer, encoded)
        for token in generate_tokens(
            following.logits,
            tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            stop=tokenizer.end_of_document,
            vocabulary=tokenizer.vocab_size,
        ):
            if piece := text.add(token):
                yield piece

    def _for_window(self, window: int) -> NextToken:
        """Return what computes the logits of a new text; training may have changed the weights
        since the last one."""

        def make_prepared(goal: Literal["prefill", "decode"]) -> Engine:
            engine = self._make_engine(goal, window)
            self._prepare(engine.program)
            return engine

        if window not in self._windows:
            self._windows[window] = NextToken(make_prepared, self._fetch, window)
            return self._windows[window]
        following = self._windows[window]
        following.forget()
        for engine in following.engines:
            self._prepare(engine.program)
        return following


class _ContinuedText:
    """The text of tokens that continue `prompt`, whole characters only.

    The decoders of SentencePiece tokenizers remove the space before the first word of a text, so a
    token is decoded together with the tokens before it. The tokens of the last piece suffice: the
    work per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before = list(prompt)
        self._text_before = tokenizer.decode(prompt) if prompt else ""
        self._tokens: list[int] = []  # of the piece that is not complete

    def add(self, token: int) -> str:
        """Return the piece of text that a token completes; empty if there is none."""
        self._tokens.append(token)
        text = self._tokenizer.decode([*self._before, *self._tokens])
        if text.endswith("\ufffd"):  # the token ends within a character
            return ""
        piece = text.removeprefix(self._text_before)
        if not text.startswith(self._text_before):  # bytes that are not UTF-8 change those before
            piece = self._tokenizer.decode(self._tokens)
        if piece:
            self._before, self._tokens = self._tokens, []
            self._text_before = self._tokenizer.decode(self._before)
        return piece


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
    values = logits.detach().double().cpu().numpy()
    if not np.isfinite(values.max()):  # tokens that a model rules out are -inf
        raise NonFiniteError(
            f"the largest logit of the next token is {values.max()}: the model's weights have "
            "overflowed, or its forward divides by 0; generate from an older checkpoint"
        )
    if temperature == 0:
        return int(values.argmax())
    if top_k is not None and top_k < len(values):
        values = np.where(values >= np.partition(values, -top_k)[-top_k], values, -np.inf)
    weights = np.exp((values - values.max()) / temperature)
    return int(generator.choice(len(values), p=weights / weights.sum()))


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
