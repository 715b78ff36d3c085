"""Rows of several sequences, told apart by `position_ids`: attention stays within each sequence.

The reference is `transformers` itself, called with the same arguments outside of any graph.
"""

from typing import Any

import numpy as np
import pytest
import torch
from grids import quick_first
from plain_training import Recipe, assert_same_training, streamed
from tiny_models import IGNORED, LENGTH, ROWS, Case, language_model
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from penstock.models import InputSpec, ModelSource

TOKENS = InputSpec(("sequence_length",), torch.int64)
SIZES = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "gpt2": {
        "vocab_size": 96,
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mistral": {**SIZES, "sliding_window": 5},
    "gemma2": {**SIZES, "sliding_window": 5},  # a sliding and a full layer, eager attention
    "llama4_text": {  # chunked layers and a full one
        **SIZES,
        "intermediate_size_mlp": 48,
        "num_hidden_layers": 4,
        "num_local_experts": 1,
        "interleave_moe_layer_step": 8,
        "attention_chunk_size": 6,
        "attn_temperature_tuning": False,
    },
}
UNTOKENED = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def positions(seed: int, packed: bool) -> np.ndarray:
    """Position ids int64 [ROWS, LENGTH]; of packed rows every fourth holds one sequence only."""
    random = np.random.default_rng([seed, 13])
    rows = np.tile(np.arange(LENGTH), (ROWS, 1))
    if packed:
        for row in range(ROWS):
            if row % 4:
                for start in sorted(random.integers(1, LENGTH, size=row % 4)):
                    rows[row, start:] = np.arange(LENGTH - start)
    return rows


def mean_token_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """A user's loss [] of a model's output and labels [rows, tokens]."""
    return F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def packed_case(build: Any, packed: bool, position_input: str = "position_ids") -> Case:
    def source(seed: int) -> ModelSource:
        torch.manual_seed(seed)
        return ModelSource.from_module(
            build().train(),
            loss=mean_token_loss,
            inputs={"input_ids": TOKENS, position_input: TOKENS},
            targets={"labels": TOKENS},
        )

    return Case(
        "packed",
        build,
        source,
        lambda model, rows: mean_token_loss(
            model(**{n: v for n, v in rows.items() if n != "labels"}), rows["labels"]
        ),
        lambda seed: {
            **language_model("llama").arrays(seed),
            position_input: positions(seed, packed),
        },
        summed=False,
    )


def builder(family: str, **changes: Any) -> Any:
    fields = {**FAMILIES[family], **UNTOKENED, "use_cache": False, **changes}
    return lambda: AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **fields), dtype=torch.float32
    )


@pytest.mark.parametrize("family", quick_first(FAMILIES, ["gemma2"]))
def test_position_ids_separate_sequences_of_packed_rows(family, tmp_path):
    case, recipe = packed_case(builder(family), packed=True), Recipe(steps=6)
    assert_same_training(streamed(case, recipe, tmp_path), case, recipe)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_position_ids_of_one_sequence_rows_change_nothing(family, tmp_path):
    case, recipe = packed_case(builder(family), packed=False), Recipe(steps=6)
    assert_same_training(streamed(case, recipe, tmp_path), case, recipe)


@pytest.mark.long
def test_position_ids_are_ignored_where_transformers_ignores_them(tmp_path):
    """With a cache `transformers` takes no notice of packed rows, in training too."""
    case, recipe = packed_case(builder("llama", use_cache=True), packed=True), Recipe(steps=5)
    assert_same_training(streamed(case, recipe, tmp_path), case, recipe)


class CountsFromBoundaries(LlamaForCausalLM):
    """A user's model, which makes its positions from an input of another name."""

    def forward(self, input_ids: torch.Tensor, counted: torch.Tensor) -> Any:
        return super().forward(input_ids, position_ids=counted + 0)


@pytest.mark.long
def test_position_ids_computed_by_the_model_separate_sequences(tmp_path):
    config = AutoConfig.for_model("llama", **{**SIZES, **UNTOKENED, "use_cache": False})
    case = packed_case(lambda: CountsFromBoundaries(config), True, "counted")
    assert_same_training(streamed(case, Recipe(steps=5), tmp_path), case, Recipe(steps=5))


class AlwaysTwo(LlamaForCausalLM):
    """A user's model whose rows always hold two sequences of equal length."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        position_ids = torch.arange(LENGTH) % (LENGTH // 2)
        output = super().forward(input_ids, position_ids=position_ids.unsqueeze(0))
        return mean_token_loss(output, labels)


@pytest.mark.long
def test_constant_position_ids_separate_sequences(tmp_path):
    config = AutoConfig.for_model("llama", **{**SIZES, **UNTOKENED, "use_cache": False})

    def source(seed: int) -> ModelSource:
        torch.manual_seed(seed)
        return ModelSource.from_module(AlwaysTwo(config).train(), task="custom")

    case = Case(
        "two",
        lambda: AlwaysTwo(config),
        source,
        lambda model, rows: model(**rows),
        language_model("llama").arrays,
        summed=False,
    )
    assert_same_training(streamed(case, Recipe(steps=5), tmp_path), case, Recipe(steps=5))
