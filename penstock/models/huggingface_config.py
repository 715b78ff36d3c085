"""From a Hugging Face configuration to a function that builds the model."""

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError, PenstockError, did_you_mean
from penstock.models.deferred import Deferred, record
from penstock.models.folder import CONFIG, read_model_config
from penstock.models.one_scan import scanned_once

with scanned_once():
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        PreTrainedModel,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

_TASKS: dict[str, tuple[Any, Any]] = {
    "causal_lm": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    "masked_lm": (AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING),
}


def read_config(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return the configuration as a dict, from a dict, a `config.json`, or the folder of one.

    Raises:
        ConfigError: no such file, not JSON, or no `model_type` in it.
    """
    if isinstance(config, Mapping):
        fields, origin = dict(config), "the model config"
    else:
        path = Path(config)
        fields = read_model_config(path)
        origin = str(path / CONFIG if path.is_dir() else path)
    refuse_unknown_type(fields, origin)
    return fields


def refuse_unknown_type(fields: Mapping[str, Any], origin: str) -> None:
    """Raise `ConfigError` unless `transformers` knows the model type of a configuration.

    **Arguments:** `origin` is the configuration's name in messages.
    """
    model_type = fields.get("model_type")
    if model_type is None:
        raise ConfigError(f"{origin} has no model_type; add for example model_type: gpt2")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{origin}: transformers knows no model_type {model_type!r}"
            f"{did_you_mean(str(model_type), CONFIG_MAPPING.keys())}"
        )


def make_config(
    fields: Mapping[str, Any], overrides: Mapping[str, Any], tensors: int | None = None
) -> Any:
    """Return the `PreTrainedConfig` for a config dict with some fields replaced.

    `tensors` is the number of tensors in the model's folder: it limits the number of layers.

    Raises:
        ConfigError: a field of `overrides` that this kind of model does not have, inconsistent
            values, or a model that was quantised.
    """
    model_type = fields["model_type"]
    cls = CONFIG_MAPPING[model_type]
    synonyms = dict(cls.attribute_map)
    known = {*cls().to_dict(), *synonyms} - {"model_type"}
    for name in overrides:
        if name not in known and name not in fields:
            raise ConfigError(f"{model_type} has no field {name!r}{did_you_mean(name, known)}")
    # The library may change values within the configuration.
    merged = {
        **copy.deepcopy(dict(fields)),
        **{synonyms.get(name, name): value for name, value in overrides.items()},
    }
    del merged["model_type"]
    if merged.get("quantization_config") is not None:
        raise ConfigError(
            f"this {model_type} is quantised (it has a quantization_config), which cannot be "
            "trained on; take the original, or dequantise it with the tool that created it"
        )
    _refuse_too_many(model_type, merged)
    _refuse_too_few(model_type, merged, synonyms)
    try:
        config = AutoConfig.for_model(model_type, **merged)
    except Exception as error:  # validators of transformers raise many error classes
        raise ConfigError(f"{model_type} refuses this configuration: {error}") from error
    layers = getattr(config, "num_hidden_layers", None)
    if tensors is not None and isinstance(layers, int) and layers > tensors:
        raise ConfigError(
            f"config.json asks for {layers:,} layers, the files hold {tensors:,} tensors; they are "
            "of different models"
        )
    return config


def config_of(module: nn.Module) -> Any:
    """Return the configuration of a model of `transformers`; None for another module."""
    return module.config if isinstance(module, PreTrainedModel) else None


# Far deeper than any known network; a layer takes some 50 ms to trace.
MOST_LAYERS = 4096
_MOST = {"layer": MOST_LAYERS, "block": MOST_LAYERS, "expert": 1 << 16, "label": 1 << 20}
_COUNT = re.compile(r"(?:^|_)(layer|block|expert|label)s?$")


def _refuse_too_many(model_type: str, fields: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a number of parts that could not be built in reasonable time.

    `transformers` builds lists of that length even for the configuration alone.
    """
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _refuse_too_many(model_type, value)
        counted = _COUNT.search(name) if isinstance(name, str) else None
        if counted and isinstance(value, int) and value > _MOST[counted[1]]:
            raise ConfigError(
                f"{model_type}: {name} is {value:,}, at most {_MOST[counted[1]]:,} can be built "
                "and traced in reasonable time; for a larger model use wider layers"
            )


_AT_LEAST_ONE = (
    "num_hidden_layers",
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
    "intermediate_size",
    "n_inner",
)


def _refuse_too_few(
    model_type: str, fields: Mapping[str, Any], synonyms: Mapping[str, str]
) -> None:
    """Raise `ConfigError` for a model without layers, or a size below 1."""
    for common in _AT_LEAST_ONE:
        for name in dict.fromkeys((common, synonyms.get(common, common))):
            value = fields.get(name)
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{model_type}: expected {name} of 1 or more, got {value!r}")


def find_task(config: Any) -> str:
    """Return the task of a configuration: `causal_lm` or `masked_lm`.

    Raises:
        ConfigError: `transformers` has neither kind of model for it.
    """
    architectures = " ".join(getattr(config, "architectures", None) or [])
    if "ForMaskedLM" in architectures:
        return "masked_lm"
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    if causal and ("CausalLM" in architectures or "LMHead" in architectures):
        return "causal_lm"
    if masked and not getattr(config, "is_decoder", False):
        return "masked_lm"
    if causal:
        return "causal_lm"
    raise ConfigError(
        f"transformers has no causal or masked language model for {config.model_type}; define its "
        "loss and its inputs: loss, inputs and targets of ModelSource.from_module or of model: "
        "{factory: package.module:function}"
    )


def builder(config: Any, task: str) -> Callable[[], nn.Module]:
    """Return the function that builds the model in training mode.

    Weights are float32 whatever type the config names (the store keeps masters in float32).
    Attention is PyTorch's fused attention if the architecture supports it.

    Raises:
        ConfigError: `transformers` has no such model for this task.
    """
    auto_class, mapping = _TASKS[task]
    if type(config) not in mapping:
        raise ConfigError(f"transformers has no {task} model for {config.model_type}")
    model_class = mapping[type(config)]
    if isinstance(model_class, (list, tuple)):
        model_class = model_class[0]
    attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"

    def build() -> nn.Module:
        model = auto_class.from_config(config, dtype=torch.float32, attn_implementation=attention)
        return model.train()

    return build


def recorded(config: Any, task: str) -> Deferred:
    """Record the model of a configuration that may be invalid.

    Raises:
        ConfigError: `transformers` cannot build it.
    """
    try:
        return record(builder(config, task))
    except PenstockError:
        raise
    except OSError:  # an error of an import inside, unrelated to the configuration
        raise
    except Exception as error:
        raise ConfigError(
            f"transformers cannot build a {config.model_type} of this configuration: "
            f"{type(error).__name__}: {error}"
        ) from error
