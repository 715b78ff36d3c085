"""Presets against published parameter counts and against transformers' own fields."""

import subprocess
import sys

import pytest
from grids import quick_first

from penstock.config import Config
from penstock.config.presets import ARCHITECTURES, find_preset, preset_names, resolve_preset
from penstock.errors import ConfigError
from penstock.models import ModelSource

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-125m": (124e6, 126e6),
    "gpt3-350m": (350e6, 357e6),
    "gpt3-760m": (755e6, 765e6),
    "gpt3-1.3b": (1.29e9, 1.33e9),
    "gpt3-2.7b": (2.6e9, 2.75e9),
    "gpt3-6.7b": (6.6e9, 6.75e9),
    "gpt3-13b": (12.8e9, 13.1e9),
    "gpt3-175b": (174.5e9, 175.2e9),
    "cerebras-gpt-111m": 111_050_496,
    "cerebras-gpt-256m": (255.5e6, 256.5e6),
    "cerebras-gpt-590m": (589.5e6, 590.5e6),
    "cerebras-gpt-1.3b": (1.3e9, 1.33e9),
    "cerebras-gpt-2.7b": (2.64e9, 2.7e9),
    "cerebras-gpt-6.7b": (6.64e9, 6.7e9),
    "cerebras-gpt-13b": (12.8e9, 13.0e9),
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "tinyllama-1.1b": 1_100_048_384,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "demo-10m": (9.5e6, 11e6),
    "tiny": (0.1e6, 0.3e6),
}


QUICK = {
    "gpt2",
    "gpt3-125m",
    "cerebras-gpt-111m",
    "tinyllama-1.1b",
    "bert-base",
    "demo-10m",
    "tiny",
}


@pytest.mark.parametrize("name", quick_first(PUBLISHED, QUICK))
def test_parameter_counts_equal_the_published_counts(name: str) -> None:
    count = ModelSource.from_preset(name).parameter_count()
    published = PUBLISHED[name]
    low, high = published if isinstance(published, tuple) else (published, published)
    assert low <= count <= high
    assert find_preset(name).parameters == count


def test_every_preset_has_a_published_count() -> None:
    assert sorted(preset_names()) == sorted(PUBLISHED)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_fields_and_synonyms_exist_in_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    architecture = ARCHITECTURES[model_type]
    assert set(architecture.fields) <= set(config.to_dict())
    assert set(architecture.dropouts) <= set(architecture.fields)
    assert dict(architecture.synonyms) == dict(config.attribute_map)


def test_presets_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, penstock.config.presets as m; m.preset_names(); m.resolve_preset('gpt2');"
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_presets_accept_own_and_common_names() -> None:
    assert resolve_preset("gpt2", {"n_layer": 24}).config["n_layer"] == 24
    assert resolve_preset("gpt2", {"num_hidden_layers": 3}).config["n_layer"] == 3
    assert ModelSource.from_preset("tiny", {"n_layer": 1}).hf_config.n_layer == 1


def test_the_inner_width_follows_the_width() -> None:
    config = resolve_preset("gpt2", {"n_embd": 96}).config
    assert config["n_inner"] == 384
    config = resolve_preset("gpt2", {"n_embd": 96, "n_inner": 100}).config
    assert config["n_inner"] == 100


def test_one_key_turns_dropout_on() -> None:
    config = resolve_preset("gpt2").config
    assert config["resid_pdrop"] == config["embd_pdrop"] == config["attn_pdrop"] == 0.0
    config = resolve_preset("gpt2", {"dropout": 0.1, "embd_pdrop": 0.2}).config
    assert (config["resid_pdrop"], config["embd_pdrop"], config["attn_pdrop"]) == (0.1, 0.2, 0.1)
    config = resolve_preset("bert-base", {"dropout": 0.1}).config
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.1


def test_an_unknown_preset_names_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"no preset is called 'gpt2-xxl' \(did you mean 'gpt2-"):
        resolve_preset("gpt2-xxl")


def test_an_unknown_field_names_the_closest() -> None:
    message = r"^preset gpt2 has no field 'n_layers' \(did you mean 'n_layer'\?\); fields are "
    with pytest.raises(ConfigError, match=message):
        resolve_preset("gpt2", {"n_layers": 24})


def test_a_field_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_layer is set twice, as num_hidden_layers"):
        resolve_preset("gpt2", {"n_layer": 1, "num_hidden_layers": 2})


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="n_embd 100 is not a multiple of n_head 12"):
        resolve_preset("gpt2", {"n_embd": 100})


@pytest.mark.parametrize(
    ("preset", "changes", "inner", "shared"),
    [
        ("llama-7b", {"hidden_size": 512, "num_attention_heads": 8}, 1536, 8),
        ("llama-7b", {"num_attention_heads": 64}, 11008, 64),
        ("llama-7b", {"hidden_size": 8192}, 22016, 32),
        ("llama-70b", {"hidden_size": 1024, "num_attention_heads": 16}, 3584, 2),
        ("llama-3-8b", {"hidden_size": 5120, "num_attention_heads": 40}, 17920, 10),
        ("llama-3-8b", {"num_attention_heads": 64, "num_key_value_heads": 2}, 14336, 2),
        ("llama-7b", {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}, 96, 4),
    ],
)
def test_llama_widths_and_key_value_heads_follow(preset, changes, inner, shared):
    config = resolve_preset(preset, changes).config
    assert config["intermediate_size"] == inner
    assert config["num_key_value_heads"] == shared


@pytest.mark.parametrize("preset", ["llama-7b", "tinyllama-1.1b", "gpt2", "bert-base"])
def test_model_with_another_width_and_number_of_heads_computes(preset):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    changes = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 1}
    resolved = resolve_preset(preset, {**changes, "vocab_size": 100})
    kind = AutoModelForMaskedLM if resolved.task == "masked_lm" else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(resolved.model_type, **resolved.config))
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 100)


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        (
            "llama-7b",
            {"num_key_value_heads": 5},
            "llama-7b: num_attention_heads 32 is not a multiple of num_key_value_heads 5; set both",
        ),
        (
            "tinyllama-1.1b",
            {"num_attention_heads": 4},
            "tinyllama-1.1b: num_attention_heads 4 is not a multiple of 8, the number of heads for "
            "each key-value head of tinyllama-1.1b; set num_key_value_heads too",
        ),
        (
            "llama-7b",
            {"num_attention_heads": 24},
            "llama-7b: hidden_size 4096 is not a multiple of num_attention_heads 24; set both",
        ),
        ("gpt2", {"n_head": 0}, "gpt2: expected n_head of 1 or more, got 0"),
        ("gpt2", {"n_embd": "wide"}, "gpt2: expected n_embd of 1 or more, got 'wide'"),
        ("gpt2", {"n_layer": 0}, "gpt2: expected n_layer of 1 or more, got 0"),
        ("gpt2", {"num_hidden_layers": -2}, "gpt2: expected n_layer of 1 or more, got -2"),
        ("gpt2", {"vocab_size": 0}, "gpt2: expected vocab_size of 1 or more, got 0"),
        ("gpt2", {"n_positions": -1}, "gpt2: expected n_positions of 1 or more, got -1"),
        ("gpt2", {"n_inner": -1}, "gpt2: expected n_inner of 1 or more, got -1"),
        (
            "bert-base",
            {"num_hidden_layers": 0},
            "bert-base: expected num_hidden_layers of 1 or more, got 0",
        ),
        (
            "llama-7b",
            {"intermediate_size": 0},
            "llama-7b: expected intermediate_size of 1 or more, got 0",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(preset, changes, message):
    with pytest.raises(ConfigError) as raised:
        resolve_preset(preset, changes)
    assert str(raised.value) == message


@pytest.mark.parametrize("name", preset_names())
def test_longest_sequence_is_that_of_the_model(name):
    preset = resolve_preset(name, {})
    assert preset.longest_sequence == preset.config[preset.positions]
    small = {"n_layer": 1} if preset.model_type == "gpt2" else {"num_hidden_layers": 1}
    assert ModelSource.from_preset(name, small).max_sequence_length == preset.longest_sequence


@pytest.mark.parametrize(
    ("model", "field", "longest"),
    [
        ({"preset": "tiny"}, "n_positions", 256),
        ({"preset": "tiny", "n_positions": 100}, "n_positions", 100),
        ({"preset": "llama-7b"}, "max_position_embeddings", 4096),
    ],
)
def test_sequences_longer_than_a_preset_takes_are_refused_before_data_is_built(
    model, field, longest
):
    Config.from_mapping({"model": model, "data": {"sequence_length": longest}})
    with pytest.raises(ConfigError) as raised:
        Config.from_mapping({"model": model, "data": {"sequence_length": longest + 1}})
    assert str(raised.value).endswith(
        f"data.sequence_length: expected at most {longest}, the number of positions of "
        f"{model['preset']}, got {longest + 1}; lower it, or raise model.{field}"
    )
