"""The longest sequence of a model is what `transformers` computes, and one token more fails."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from penstock.models import InputSpec, ModelSource

POSITIONS = 40
ENCODER: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
}
DECODER: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
}
NUMBERED_AFTER_PADDING: dict[str, dict[str, Any]] = {
    "roberta": ENCODER,
    "roberta-prelayernorm": ENCODER,
    "xlm-roberta": ENCODER,
    "xlm-roberta-xl": ENCODER,
    "camembert": ENCODER,
    "data2vec-text": ENCODER,
    "xmod": {**ENCODER, "default_language": "en_XX"},
    "ibert": ENCODER,
    "mpnet": ENCODER,
    "esm": {**ENCODER, "mask_token_id": 5},
    "longformer": {**ENCODER, "attention_window": 8},
    "luke": {**ENCODER, "entity_vocab_size": POSITIONS, "entity_emb_size": 16},
}
NUMBERED_FROM_ZERO: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "electra": {**ENCODER, "embedding_size": 32},
    "mra": ENCODER,
    "nystromformer": {**ENCODER, "num_landmarks": 8, "segment_means_seq_len": POSITIONS},
    "yoso": ENCODER,
    "roc_bert": {
        **ENCODER,
        "pronunciation_vocab_size": POSITIONS,
        "shape_vocab_size": POSITIONS,
    },
    "opt": {**ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "biogpt": ENCODER,
    "bart": DECODER,
    "pegasus": DECODER,
    "trocr": DECODER,
}
CAUSAL = ("opt", "biogpt", "bart", "pegasus", "trocr")


def source_and_plain(family: str, fields: dict[str, Any]) -> tuple[ModelSource, torch.nn.Module]:
    """Return Penstock's source of a small model, and the model as `transformers` builds it."""
    task = "causal_lm" if family in CAUSAL else "masked_lm"
    auto = AutoModelForCausalLM if family in CAUSAL else AutoModelForMaskedLM
    source = ModelSource.from_hf_config({"model_type": family, **fields}, task=task)
    return source, auto.from_config(AutoConfig.for_model(family, **fields)).eval()


def computes(model: torch.nn.Module, tokens: int) -> bool:
    try:
        with torch.no_grad():
            model(input_ids=torch.full((1, tokens), 7))
    except (IndexError, RuntimeError):
        return False
    return True


def assert_limit_is_exact(family: str, fields: dict[str, Any], expected: int) -> None:
    source, plain = source_and_plain(family, fields)
    assert source.max_sequence_length == expected
    assert computes(plain, expected)
    assert not computes(plain, expected + 1)


@pytest.mark.parametrize("family", NUMBERED_AFTER_PADDING)
def test_positions_after_the_padding_index_shorten_the_longest_sequence(family):
    assert_limit_is_exact(family, NUMBERED_AFTER_PADDING[family], POSITIONS - 2)


@pytest.mark.parametrize("family", NUMBERED_FROM_ZERO)
def test_positions_from_zero_or_with_rows_for_an_offset_are_all_used(family):
    assert_limit_is_exact(family, NUMBERED_FROM_ZERO[family], POSITIONS)


@pytest.mark.parametrize("padding", [0, 3])
def test_padding_index_of_the_configuration_counts(padding):
    fields = {**ENCODER, "pad_token_id": padding}
    assert_limit_is_exact("roberta", fields, POSITIONS - padding - 1)


def test_table_of_tokens_with_as_many_rows_as_positions_shortens_nothing():
    fields = {**ENCODER, "vocab_size": POSITIONS, "num_key_value_heads": 2}
    source = ModelSource.from_hf_config({"model_type": "llama", **fields})
    assert source.max_sequence_length == POSITIONS


def test_model_with_rotary_positions_keeps_its_context():
    fields = {**ENCODER, "mask_token_id": 5, "position_embedding_type": "rotary"}
    source, _ = source_and_plain("esm", fields)
    assert source.max_sequence_length == POSITIONS


def test_built_module_has_the_same_limit():
    config = AutoConfig.for_model("roberta", **ENCODER)
    language_model = ModelSource.from_module(AutoModelForMaskedLM.from_config(config))
    assert language_model.max_sequence_length == POSITIONS - 2
    custom = ModelSource.from_module(
        AutoModel.from_config(config),
        inputs={"input_ids": InputSpec(("sequence_length",), torch.int64)},
        loss=lambda output: output[0].mean(),
    )
    assert custom.max_sequence_length == POSITIONS - 2
