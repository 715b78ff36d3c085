"""Families of `transformers` beyond those of `tiny_models`: each trains as in plain PyTorch.

What makes them different is in the models: ALiBi and other positions, sliding windows, parallel
blocks, logits that are scaled or capped, shared layers, heads that norm first.
"""

from typing import Any

import pytest
import torch
from grids import quick_first
from plain_training import Recipe, assert_same_training, streamed
from tiny_models import Case, _masked_texts, _texts, _token_loss
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from penstock.data import build_dataset
from penstock.models import ModelSource
from penstock.training.trainer import Trainer

TOKENS = {"vocab_size": 96, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SIZES = {
    **TOKENS,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
DRY = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DRY_ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CAUSAL: dict[str, dict[str, Any]] = {
    "bloom": {**TOKENS, "n_layer": 2, "hidden_size": 32, "n_head": 4, **DRY},
    "gpt_neox": {**SIZES, **DRY},
    "falcon": {**SIZES, **DRY, "alibi": True, "multi_query": False},
    "mistral": {**GROUPED, "sliding_window": 6},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 6},
    "phi3": {**GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "stablelm": {**GROUPED, **DRY},
    "cohere": {**GROUPED, "attention_dropout": 0.0, "logit_scale": 0.5},
    "granite": {**GROUPED, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "olmo2": GROUPED,
}
MASKED: dict[str, dict[str, Any]] = {
    "distilbert": {
        "vocab_size": 96,
        "n_layers": 2,
        "dim": 32,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "roberta": {**SIZES, **DRY_ENCODER, "pad_token_id": 1},
    "modernbert": {**SIZES, "local_attention": 6, "num_hidden_layers": 4},
    "albert": {**SIZES, **DRY_ENCODER, "embedding_size": 16, "pad_token_id": 0},
}
COMMON = ("bloom", "gemma2", "granite", "distilbert")


def family_case(family: str) -> Case:
    masked = family in MASKED
    fields = {**(MASKED if masked else CAUSAL)[family]}
    auto = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    task = "masked_lm" if masked else "causal_lm"
    return Case(
        family,
        lambda: auto.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32),
        lambda seed: ModelSource.from_hf_config({"model_type": family, **fields}, task=task),
        _token_loss,
        _masked_texts if masked else _texts,
    )


@pytest.mark.parametrize(
    "family",
    [
        *quick_first(COMMON, ["gemma2"]),
        *(pytest.param(f, marks=pytest.mark.slow) for f in (*CAUSAL, *MASKED) if f not in COMMON),
    ],
)
def test_a_family_trains_as_in_plain_pytorch(family, tmp_path):
    case = family_case(family)
    settings = {"name": "sgd", "momentum": 0.9}
    recipe = Recipe(steps=5, learning_rate=0.1, optimizer=settings)
    assert_same_training(
        streamed(case, recipe, tmp_path),
        case,
        recipe,
        lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=0.9),
    )


def test_roberta_trains_on_the_longest_sequence_by_default(tmp_path):
    """Its positions begin after the padding index: 64 of them are 62 tokens."""
    (tmp_path / "text.txt").write_text("water flows over the weir. " * 100)
    build_dataset([tmp_path / "text.txt"], "bytes", tmp_path / "set")
    trainer = Trainer(
        {
            "model": {
                "hf_config": {"model_type": "roberta", **MASKED["roberta"], "vocab_size": 258}
            },
            "data": {"path": str(tmp_path / "set")},
            "batch": {"size": 2},
            "engine": {"threads": 1, "device": "cpu"},
            "run": {"dir": str(tmp_path / "run"), "steps": 1},
            "evaluation": {"every": None},
            "checkpoint": {"every": None},
        }
    )
    trainer.train()
    assert trainer.program.values["input_ids"].tensor.shape == (2, 62)
