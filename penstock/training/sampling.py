"""The options of generation: how many tokens, and how each is chosen; checked on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from penstock.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How the tokens after a prompt are chosen.

    `temperature` 0 chooses the most likely token. `top_k` None samples from all tokens. `stop` ends
    the text and is not yielded; None for no end. Ids from `vocabulary` on are never chosen (a
    model's vocabulary may be padded beyond the tokenizer's); None for all ids.

    **Raises:** `ConfigError` for an option without meaning.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = 50
    seed: int = 0
    stop: int | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        _require_whole("max_new_tokens", self.max_new_tokens, 0, "give the number of tokens")
        if not _is_temperature(self.temperature):
            raise ConfigError(
                f"temperature: expected a finite number from 0 up, got {self.temperature!r}; give "
                "0 for the most likely token, 1 for the model's own probabilities"
            )
        if self.top_k is not None:
            _require_whole("top_k", self.top_k, 1, "give None to sample from all tokens")
        _require_whole("seed", self.seed, 0, "give another seed")
        if self.stop is not None:
            _require_whole("stop", self.stop, 0, "give a token id, or None for no end")
        if self.vocabulary is not None:
            _require_whole("vocabulary", self.vocabulary, 1, "give None for all ids")


def _is_temperature(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return 0 <= float(value) < math.inf
    except OverflowError:
        return False


def _require_whole(name: str, value: Any, least: int, remedy: str) -> None:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not (is_whole and value >= least):
        raise ConfigError(
            f"{name}: expected a whole number from {least} up, got {value!r}; {remedy}"
        )
