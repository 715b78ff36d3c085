"""Named models as plain data.

A preset is a Hugging Face architecture (`model_type`) and the fields of its configuration, so that
any of them can be overridden by name and a trained model loads with `from_pretrained`. Imports
neither torch nor transformers: the command line lists and checks presets before either is needed.

Dropout is 0 in every preset, where some of the papers had 0.1: one-pass pretraining on more text
than the model can memorise does not overfit, and today's models are trained without. `dropout: 0.1`
sets every dropout of the architecture at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class PresetArchitecture:
    """The configurable values: `fields` by name, `synonyms` for some of them, and the
    `dropouts`."""

    task: str
    fields: tuple[str, ...]
    dropouts: tuple[str, ...]
    synonyms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """A model by name. `parameters` is the exact number of trainable values, ties counted once."""

    name: str
    model_type: str
    task: str
    config: Mapping[str, Any]
    parameters: int
    source: str

    @property
    def sequence_length(self) -> int:
        """The longest sequence that the model takes, in tokens."""
        architecture = ARCHITECTURES[self.model_type]
        name = "max_position_embeddings"
        return int(self.config[architecture.synonyms.get(name, name)])


@dataclass(frozen=True)
class ResolvedPreset:
    """A preset with overrides applied: all that is needed to build the model."""

    name: str
    model_type: str
    task: str
    config: Mapping[str, Any]

    @property
    def positions(self) -> str:
        """The field of `config` with the number of positions."""
        return "n_positions" if "n_positions" in self.config else "max_position_embeddings"

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens of a sequence; None if the field is no number."""
        value = self.config.get(self.positions)
        return value if type(value) is int else None


ARCHITECTURES: dict[str, PresetArchitecture] = {
    "gpt2": PresetArchitecture(
        task="causal_lm",
        fields=(
            "vocab_size",
            "n_positions",
            "n_embd",
            "n_layer",
            "n_head",
            "n_inner",
            "activation_function",
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "layer_norm_epsilon",
            "initializer_range",
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
            "reorder_and_upcast_attn",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "tie_word_embeddings",
        ),
        dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        synonyms={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    "llama": PresetArchitecture(
        task="causal_lm",
        fields=(
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "max_position_embeddings",
            "initializer_range",
            "rms_norm_eps",
            "rope_parameters",
            "attention_bias",
            "attention_dropout",
            "mlp_bias",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "tie_word_embeddings",
        ),
        dropouts=("attention_dropout",),
    ),
    "bert": PresetArchitecture(
        task="masked_lm",
        fields=(
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "hidden_act",
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "max_position_embeddings",
            "type_vocab_size",
            "initializer_range",
            "layer_norm_eps",
            "pad_token_id",
            "tie_word_embeddings",
        ),
        dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
}

_GPT2_PAPER = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners"
_GPT3_PAPER = "Brown et al. 2020, Language Models are Few-Shot Learners, table 2.1"
_CEREBRAS_PAPER = "Dey et al. 2023, Cerebras-GPT (arXiv:2304.03208), table 1"
_LLAMA2_PAPER = "Touvron et al. 2023, Llama 2"
_BERT_PAPER = "Devlin et al. 2018, BERT"


def _gpt2(
    name: str,
    layers: int,
    width: int,
    heads: int,
    parameters: int,
    source: str,
    *,
    positions: int,
    vocabulary: int = 50257,
    activation: str = "gelu_new",
) -> Preset:
    config = {
        "vocab_size": vocabulary,
        "n_positions": positions,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": 4 * width,
        "activation_function": activation,
    }
    return _preset(name, "gpt2", config, parameters, source)


def _llama(
    name: str,
    layers: int,
    width: int,
    heads: int,
    parameters: int,
    source: str,
    *,
    inner: int,
    positions: int,
    key_value_heads: int | None = None,
    vocabulary: int = 32000,
    rope_theta: float = 10000.0,
) -> Preset:
    config = {
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads or heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
    }
    return _preset(name, "llama", config, parameters, source)


def _bert(name: str, layers: int, width: int, heads: int, parameters: int) -> Preset:
    config = {
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return _preset(name, "bert", config, parameters, _BERT_PAPER)


def _preset(
    name: str, model_type: str, config: dict[str, Any], parameters: int, source: str
) -> Preset:
    architecture = ARCHITECTURES[model_type]
    config.update(dict.fromkeys(architecture.dropouts, 0.0))
    return Preset(name, model_type, architecture.task, config, parameters, source)


def _cerebras(name: str, layers: int, width: int, heads: int, parameters: int) -> Preset:
    # Exact GELU, learned positions, dense attention, standard parametrisation.
    return _gpt2(
        f"cerebras-gpt-{name}",
        layers,
        width,
        heads,
        parameters,
        _CEREBRAS_PAPER,
        positions=2048,
        activation="gelu",
    )


def _gpt3(name: str, layers: int, width: int, heads: int, parameters: int) -> Preset:
    # Where GPT-3 alternates dense and locally banded attention, all layers here are dense.
    return _gpt2(f"gpt3-{name}", layers, width, heads, parameters, _GPT3_PAPER, positions=2048)


# fmt: off
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in [
        # For tests and demonstrations; vocabularies to be set to the tokenizer's.
        _gpt2("tiny", 3, 64, 4, 199_232, "this project", positions=256, vocabulary=512),
        _gpt2("demo-10m", 5, 384, 6, 10_642_560, "this project", positions=512, vocabulary=4096),
        # name, layers, width, heads, parameters
        _gpt2("gpt2", 12, 768, 12, 124_439_808, _GPT2_PAPER, positions=1024),
        _gpt2("gpt2-medium", 24, 1024, 16, 354_823_168, _GPT2_PAPER, positions=1024),
        _gpt2("gpt2-large", 36, 1280, 20, 774_030_080, _GPT2_PAPER, positions=1024),
        _gpt2("gpt2-xl", 48, 1600, 25, 1_557_611_200, _GPT2_PAPER, positions=1024),
        _gpt3("125m", 12, 768, 12, 125_226_240),
        _gpt3("350m", 24, 1024, 16, 355_871_744),
        _gpt3("760m", 24, 1536, 16, 760_300_032),
        # The table says 24 heads of 128, which is 3072 and not the width of 2048: 16 heads of 128.
        _gpt3("1.3b", 24, 2048, 16, 1_315_723_264),
        _gpt3("2.7b", 32, 2560, 32, 2_651_553_280),
        _gpt3("6.7b", 32, 4096, 32, 6_658_404_352),
        # The table says width 5140, but 40 heads of 128 are 5120.
        _gpt3("13b", 40, 5120, 40, 12_853_386_240),
        _gpt3("175b", 96, 12288, 96, 174_604_259_328),
        _cerebras("111m", 10, 768, 12, 111_050_496),
        _cerebras("256m", 14, 1088, 17, 255_977_024),
        _cerebras("590m", 18, 1536, 12, 590_310_912),
        _cerebras("1.3b", 24, 2048, 16, 1_315_723_264),
        _cerebras("2.7b", 32, 2560, 32, 2_651_553_280),
        _cerebras("6.7b", 32, 4096, 32, 6_658_404_352),
        _cerebras("13b", 40, 5120, 40, 12_853_386_240),
        _llama("llama-7b", 32, 4096, 32, 6_738_415_616, _LLAMA2_PAPER,
               inner=11008, positions=4096),
        _llama("llama-13b", 40, 5120, 40, 13_015_864_320, _LLAMA2_PAPER,
               inner=13824, positions=4096),
        _llama("llama-70b", 80, 8192, 64, 68_976_648_192, _LLAMA2_PAPER,
               inner=28672, positions=4096, key_value_heads=8),
        _llama("llama-3-8b", 32, 4096, 32, 8_030_261_248, "Grattafiori et al. 2024, Llama 3",
               inner=14336, positions=8192, key_value_heads=8, vocabulary=128256,
               rope_theta=500000.0),
        _llama("tinyllama-1.1b", 22, 2048, 32, 1_100_048_384, "Zhang et al. 2024, TinyLlama",
               inner=5632, positions=2048, key_value_heads=4),
        _bert("bert-base", 12, 768, 12, 109_514_298),
        _bert("bert-large", 24, 1024, 16, 335_174_458),
    ]
}
# fmt: on


def preset_names() -> list[str]:
    """Return the names of all presets, families together, small to large."""
    return list(PRESETS)


def find_preset(name: str) -> Preset:
    """Return the preset called `name`.

    Raises:
        ConfigError: there is none; the message names the closest.
    """
    preset = PRESETS.get(name)
    if preset is None:
        hint = did_you_mean(name, PRESETS)
        raise ConfigError(
            f"no preset is called {name!r}{hint}; presets are {', '.join(PRESETS)}; other models "
            "need hf_config or factory"
        )
    return preset


def resolve_preset(name: str, overrides: Mapping[str, Any] | None = None) -> ResolvedPreset:
    """Return the configuration of preset `name` with fields replaced by `overrides`.

    An override may use the architecture's own name for a field, the name that most Hugging Face
    models use for it (`num_hidden_layers` for GPT-2's `n_layer`), or `dropout` for every dropout at
    once. Unless it is given, the inner width keeps the preset's ratio to the width (of a Llama
    rounded up to a multiple of 256). Unless the number of key-value heads is given, each keeps the
    preset's number of heads.

    Raises:
        ConfigError: an unknown preset or field, a field that is given twice, or widths and heads
            that do not fit together.
    """
    preset = find_preset(name)
    architecture = ARCHITECTURES[preset.model_type]
    given = _canonical(preset, architecture, overrides or {})
    config = _with_shapes(preset, given)
    if preset.model_type == "gpt2" and "eos_token_id" not in given:
        # GPT-2's <|endoftext|>, unless another vocabulary has no such token.
        token = 50256 if config["vocab_size"] > 50256 else None
        config["eos_token_id"] = token
        config.setdefault("bos_token_id", token)
    return ResolvedPreset(preset.name, preset.model_type, preset.task, config)


_SHAPE_FIELDS = {
    "gpt2": ("n_embd", "n_inner", "n_head"),
    "llama": ("hidden_size", "intermediate_size", "num_attention_heads"),
    "bert": ("hidden_size", "intermediate_size", "num_attention_heads"),
}
# As `multiple_of` in the code of Llama 1 and 2; the other families have exactly four times the
# width.
_INNER_MULTIPLE = {"llama": 256}
_KEY_VALUE_HEADS = "num_key_value_heads"
_COUNTS = ("num_hidden_layers", "vocab_size", "max_position_embeddings")


def _own_names(preset: Preset, names: Sequence[str]) -> list[str]:
    synonyms = ARCHITECTURES[preset.model_type].synonyms
    return [synonyms.get(name, name) for name in names]


def _with_shapes(preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration, with the inner width and key-value heads that follow from the width
    and the heads."""
    width, inner, heads = _SHAPE_FIELDS[preset.model_type]
    before, config = preset.config, {**preset.config, **given}
    counts = (width, heads, _KEY_VALUE_HEADS, inner, *_own_names(preset, _COUNTS))
    for name in counts:
        value = config.get(name, 1)
        is_derived = name in (_KEY_VALUE_HEADS, inner) and value is None
        if not is_derived and (type(value) is not int or value < 1):
            raise ConfigError(f"{preset.name}: expected {name} of 1 or more, got {value!r}")
    if inner not in given and config[width] != before[width]:
        multiple = _INNER_MULTIPLE.get(preset.model_type, 1)
        exact = config[width] * before[inner]
        config[inner] = multiple * -(-exact // (multiple * before[width]))
    if _KEY_VALUE_HEADS in before and _KEY_VALUE_HEADS not in given:
        each = before[heads] // before[_KEY_VALUE_HEADS]
        if config[heads] % each:
            raise ConfigError(
                f"{preset.name}: {heads} {config[heads]} is not a multiple of {each}, the number "
                f"of heads for each key-value head of {preset.name}; set {_KEY_VALUE_HEADS} too"
            )
        config[_KEY_VALUE_HEADS] = config[heads] // each
    _require_divisible(preset.name, config, width, heads)
    return config


def _require_divisible(name: str, config: Mapping[str, Any], width: str, heads: str) -> None:
    """Refuse heads that do not divide the width, or are not divided by the key-value heads."""
    if config[width] % config[heads]:
        raise ConfigError(
            f"{name}: {width} {config[width]} is not a multiple of {heads} {config[heads]}; "
            "set both"
        )
    shared = config.get(_KEY_VALUE_HEADS)
    if shared is not None and config[heads] % shared:
        raise ConfigError(
            f"{name}: {heads} {config[heads]} is not a multiple of {_KEY_VALUE_HEADS} {shared}; "
            "set both"
        )


def _canonical(
    preset: Preset, architecture: PresetArchitecture, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Overrides by the architecture's own names; a single dropout outranks `dropout`."""
    known = [*architecture.fields, *architecture.synonyms, "dropout"]
    given: dict[str, Any] = {}
    for key, value in overrides.items():
        if key not in known:
            raise ConfigError(
                f"preset {preset.name} has no field {key!r}{did_you_mean(key, known)}; fields are "
                f"{', '.join(known)}"
            )
        canonical = architecture.synonyms.get(key, key)
        if canonical in given:
            raise ConfigError(f"{canonical} is set twice, as {key} and by its other name; keep one")
        given[canonical] = value
    if "dropout" in given:
        given = {**dict.fromkeys(architecture.dropouts, given.pop("dropout")), **given}
    return given
