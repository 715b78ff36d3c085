"""Text from a trained model: the same stages, streamed once per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from penstock.engine import Batch, EnginePlan, TorchEngine
from penstock.errors import ConfigError
from penstock.program import Program

FetchWeights = Callable[[Sequence[str]], list[torch.Tensor]]


def generate_tokens(
    program: Program,
    fetch: FetchWeights,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    device: str = "cpu",
    stop: int | None = None,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Yield new token ids after `prompt`, one at a time.

    **Arguments:** `program` returns logits [1, window, vocabulary] for `input_ids`
    [1, window]; `fetch` returns weights by name; `temperature` 0 takes the likeliest token;
    `top_k` None chooses among all; `stop` ends the text and is not yielded; ids
    from `vocabulary` on (a model's vocabulary may be padded beyond the tokenizer's) are never
    chosen.

    Attention is causal, so a text shorter than the window is filled up behind; of a longer one
    the model sees the last `window` tokens.
    """
    if not prompt:
        raise ConfigError("the prompt is empty: give at least one token to go on from")
    if temperature < 0:
        raise ConfigError(f"temperature must be 0 or more, got {temperature}")
    engine = TorchEngine(program, EnginePlan(), device=device)
    generator = np.random.default_rng(seed)
    window = program.values["input_ids"].tensor.shape[1]
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        visible = tokens[-window:]
        ids = torch.zeros((1, window), dtype=torch.int64)
        ids[0, : len(visible)] = torch.tensor(visible)
        engine.begin(Batch([{"input_ids": ids}], 0, 1, 0, 0))
        for stage in program.stages:
            engine.load(stage.index, fetch(stage.weights))
            engine.infer(stage.index)
        (logits,) = engine.results()[0]
        token = _choose(logits[0, len(visible) - 1, :vocabulary], temperature, top_k, generator)
        if token == stop:
            return
        tokens.append(token)
        yield token


def _choose(
    logits: torch.Tensor, temperature: float, top_k: int | None, generator: np.random.Generator
) -> int:
    values = logits.detach().double().cpu().numpy()
    if temperature == 0:
        return int(values.argmax())
    if top_k is not None and top_k < len(values):
        values = np.where(values >= np.partition(values, -top_k)[-top_k], values, -np.inf)
    weights = np.exp((values - values.max()) / temperature)
    return int(generator.choice(len(values), p=weights / weights.sum()))
