"""Small models of every family, built the plain way: the reference that tests compare with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_LAYERS = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320}
_GPT = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 320, "n_positions": 64}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
_ROTARY = {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT, **_NO_TOKENS},
    "gptj": {**_GPT, **_NO_TOKENS, "rotary_dim": 8},
    "opt": {
        **_LAYERS,
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 64,
    },
    "llama": {**_LAYERS, **_ROTARY},
    "qwen3": {**_LAYERS, **_ROTARY},
    "bert": {**_LAYERS, "intermediate_size": 128, "max_position_embeddings": 64},
}
DROPOUT_OFF = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gptj": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def fields(family: str) -> dict[str, Any]:
    """The Hugging Face configuration of a small model, dropout off."""
    return {"model_type": family, **FAMILIES[family], **DROPOUT_OFF.get(family, {})}


def plain_builder(family: str) -> Callable[[], nn.Module]:
    """What a user of transformers would write."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    auto_class = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    settings = {key: value for key, value in fields(family).items() if key != "model_type"}
    config = AutoConfig.for_model(family, **settings)
    return lambda: auto_class.from_config(config, dtype=torch.float32)
