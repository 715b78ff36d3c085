"""Generation of tokens with a trained model: its weights are streamed once per token."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

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
from penstock.training.forward_sweep import FetchWeights
from penstock.training.next_token import MODEL_LIMIT, NextToken
from penstock.training.sampling import Sampling


def make_token_generator(
    config: Config,
    model: ModelSource,
    layout: ExecutionPlan,
    store: Store,
    device: str,
    notice: Callable[[str], None],
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
            slot_bytes=layout.slot_bytes,
        )
        if not model.from_library:
            reason = f"{model.name} is a module of your own, whose layers may read later positions"
            program = replace(program, whole_window_reason=reason)
        return make_inference_engine(layout, program)

    longest, most = config.data.sequence_length, model.max_sequence_length
    limit = MODEL_LIMIT
    if longest is not None and longest != most:
        limit = "the data.sequence_length of the run"
        limit += "" if most is None else f" (the model has {most:,} positions)"
    return TokenGenerator(
        make_engine,
        store.stream,
        longest or most,
        vocabulary=model.vocab_size,
        prepare=lambda program: measure_current(layout, program, store),
        version=lambda: store.step,
        finish=store.take_traffic,
        notice=notice,
        limit=limit,
        settle=store.flush,
    )


def closed_error() -> ConfigError:
    """Return the error for generation after the end of a trainer."""
    return ConfigError(
        "the trainer was closed, so it generates no further token; create a new Trainer of the "
        "run, and close it after the last token"
    )


class TokenGenerator:
    """Generates tokens with a model, one text at a time: a text that is continued after another one
    of the same window length is computed anew.

    Threads may share a generator: they compute one token at a time. Each text is the same as alone,
    but in bfloat16 up to rounding, if other texts of its window came between its tokens.

    **Arguments:** `make_engine` returns the engine of a program of incremental decoding for a
    window. `fetch` returns weights by name. `longest` is the model's largest window, None for no
    limit; `vocabulary` is the number of its tokens, None if unknown. `prepare` is called with each
    engine's program before each text, `finish` after it. `version` returns another number when the
    weights have changed. `notice` is told that the beginning of a prompt is not read, and why each
    token costs the whole window, if it does, each once; `limit` says what `longest` is. `settle` is
    called before and after each sweep over the weights.
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
        notice: Callable[[str], None] = lambda text: None,
        limit: str = MODEL_LIMIT,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self._settle = settle
        self._make_engine = make_engine
        self._fetch = fetch
        self._longest = longest
        self._vocabulary = vocabulary
        self._prepare = prepare
        self._version = version
        self._finish = finish
        self._notice = notice
        self._limit = limit
        self._noticed: set[str] = set()
        self._untold: list[str] = []
        self._windows: dict[int, NextToken] = {}
        self._texts: dict[int, object] = {}  # of which a window keeps keys and values
        self._ended: list[tuple[int, object]] = []
        self._lock = threading.Lock()
        self._is_closed = False

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
        """Yield new token ids after `prompt`; the options are those of `Sampling`.

        Raises:
            ConfigError: an option or the prompt cannot be used, or the trainer was closed.
            NonFiniteError: the logits of the next token are NaN or infinite.
        """
        sampling = Sampling(max_new_tokens, temperature, top_k, seed, stop, vocabulary)
        tokens = self._checked(prompt)
        if self._is_closed:
            raise closed_error()
        return self._text(tokens, sampling)

    def close(self) -> None:
        """Release the engines; a text that is not complete ends with a `ConfigError`."""
        with self._lock:
            self._is_closed = True
            for following in self._windows.values():
                following.forget()
            self._windows.clear()

    def _text(self, prompt: list[int], sampling: Sampling) -> Iterator[int]:
        window = _power_of_two(len(prompt) + int(sampling.max_new_tokens))
        if self._longest is not None:
            window = min(self._longest, window)
        text = object()
        try:
            with self._computing():
                following = self._for_window(window)
                if len(prompt) > window:
                    self._notice_once(
                        f"the prompt is longer than {window:,} tokens, {self._limit}: only its "
                        "last ones are read, its beginning is not"
                    )

            def logits(tokens: Sequence[int]) -> torch.Tensor:
                with self._computing():
                    self._texts[window] = text
                    found = following.logits(tokens)
                    notices, self._untold = self._untold, []
                for notice in notices:
                    self._notice(notice)  # may generate, too
                return found

            yield from generate_tokens(logits, prompt, sampling)
        finally:
            self._ended.append((window, text))
            self._release_ended()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Keep other threads out while a token is computed."""
        try:
            with self._lock:
                if self._is_closed:
                    raise closed_error()
                yield
        finally:
            self._release_ended()

    def _release_ended(self) -> None:
        """Release the keys and values of texts that have ended, unless a token is being computed:
        then its thread releases them.

        The garbage collector may end a text in any thread, also in one for which the thread that
        computes a token waits. So this one must not wait in turn.
        """
        while self._ended and self._lock.acquire(blocking=False):
            try:
                window, text = self._ended.pop()
                if self._texts.get(window) is text and not self._is_closed:
                    self._windows[window].forget()
                if not self._is_closed:
                    self._finish()
            finally:
                self._lock.release()

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        """Return the tokens of a prompt as integers of Python.

        **Raises:** `ConfigError` for something else than tokens of the model.
        """
        try:
            given = list(prompt)
        except TypeError:  # no sequence
            raise _no_token_ids([prompt]) from None
        if not given:
            raise ConfigError("the prompt is empty: give at least one token to start from")
        if no_ids := [token for token in given if not _is_whole(token)]:
            raise _no_token_ids(no_ids)
        tokens = [operator.index(token) for token in given]
        wrong = [t for t in tokens if t < 0 or (self._vocabulary or t + 1) <= t]
        if wrong:
            most = "" if self._vocabulary is None else f" to {self._vocabulary - 1:,}"
            raise ConfigError(
                f"prompt: expected token ids from 0{most}, got {few([*map(str, wrong)])}; encode "
                "the text with the tokenizer of the run"
            )
        return tokens

    def _for_window(self, window: int) -> NextToken:
        """Return the source of logits for a new text in a window."""

        def make_prepared(goal: Decoding) -> Engine:
            engine = self._make_engine(goal, window)
            self._prepare(engine.program)
            return engine

        if window not in self._windows:
            self._windows[window] = NextToken(
                make_prepared,
                self._fetch,
                window,
                self._version,
                self._prepare,
                self._notice_once,
                self._limit,
                self._settle,
            )
            return self._windows[window]
        following = self._windows[window]
        for engine in following.engines:
            self._prepare(engine.program)
        return following

    def _notice_once(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            self._untold.append(text)


def _no_token_ids(given: Sequence[object]) -> ConfigError:
    return ConfigError(
        f"prompt: expected token ids, whole numbers, got {few([*map(repr, given)])}; encode a text "
        "with the tokenizer, or give it to Trainer.generate"
    )


def _is_whole(token: object) -> bool:
    """Tell whether an object of Python, NumPy or PyTorch is a whole number."""
    try:
        operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(token, bool)


def generate_tokens(
    logits_after: Callable[[Sequence[int]], torch.Tensor], prompt: Sequence[int], sampling: Sampling
) -> Iterator[int]:
    """Yield new token ids after `prompt`, one at a time.

    **Arguments:** `logits_after` returns the logits [vocabulary] of the token after a text of at
    least one token.

    **Raises:** `NonFiniteError` if the logits of the next token are NaN or infinite.
    """
    generator = np.random.default_rng(sampling.seed)
    tokens = list(prompt)
    for _ in range(sampling.max_new_tokens):
        token = _choose(logits_after(tokens)[: sampling.vocabulary], sampling, generator)
        if token == sampling.stop:
            return
        tokens.append(token)
        yield token


def _choose(logits: torch.Tensor, sampling: Sampling, generator: np.random.Generator) -> int:
    temperature, top_k = float(sampling.temperature), sampling.top_k
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
    with np.errstate(over="ignore"):  # a temperature close to 0 chooses as 0 does
        weights = np.exp((chosen - chosen.max()) / temperature)
    return int(generator.choice(tokens, p=weights / weights.sum()))


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
