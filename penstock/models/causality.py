"""Refuses a causal language model in which a token sees later tokens.

The label of a position is the next token of the input. If attention reaches later tokens, the model
can copy its labels: the loss falls, and the model has learnt nothing. Many encoders of
`transformers` (BERT, RoBERTa, XLM) are such models unless a field of their configuration says
otherwise, so a list of names would not do.

The check computes logits of a few tokens with real numbers, with two values of the last token, and
compares the logits before it. A model of up to 16 million values is computed itself; of a larger
model of `transformers`, a small one with the same class and a smaller configuration is computed. A
model that cannot be computed in either way is not refused.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import logging

from penstock.errors import ConfigError
from penstock.models.origin import WeightSource
from penstock.models.task_losses import Logits

MOST_VALUES = 16 << 20
"""A model with more weights is not computed; 64 MiB in float32."""

_TOKENS = 8
# Seen later tokens change the logits of a new model by 2e-3 of the largest logit and more (all
# families of transformers 5.24); rounding, in experts with other tokens, by up to 2e-7.
_LARGEST_ROUNDING = 1e-4

# Fields that decide whether a token sees later tokens, and the value with which it does not.
_SWITCHES = {
    "is_decoder": True,
    "causal": True,
    "is_causal": True,
    "use_bidirectional_attention": False,
}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SMALL = {
    **dict.fromkeys((*_DEPTHS, "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "dim", "embedding_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_head", "rotary_dim"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_inner", "ffn_dim", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def refuse_later_tokens(logits: nn.Module, origin: WeightSource, config: Any) -> None:
    """Raise if tokens of a causal language model see later tokens.

    Args:
        logits: maps `input_ids` to logits, on fake tensors; it contains the module of `origin`.
        origin: of the model.
        config: the `transformers` configuration, or None.

    Raises:
        ConfigError: logits depend on later tokens.
    """
    module = origin.module
    if _values(module) <= MOST_VALUES:
        sees_later = _sees_later(lambda: _real_twin(logits, origin), config)
    else:
        sees_later = _instance_sees_later(module, config)
    if sees_later:
        raise ConfigError(
            f"{type(module).__name__}: expected a causal language model, found one whose logits "
            f"depend on later tokens, so that it would copy its labels; {_advice(module, config)}"
        )


def _advice(module: nn.Module, config: Any) -> str:
    if config is None:
        return "hide later tokens in its forward, or give a loss of your own with task: custom"
    found = []
    for name, value in _SWITCHES.items():
        if getattr(config, name, value) != value:
            changed = copy.deepcopy(config)
            setattr(changed, name, value)
            if _instance_sees_later(module, changed) is False:
                found.append(f"set {name}: {str(value).lower()} in its configuration")
                break
    masked = getattr(MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None), "__name__", "")
    if masked.endswith("ForMaskedLM"):
        found.append(f"train the masked language model (architectures: [{masked}])")
    return ", or ".join(found or ["take another architecture"])


def _instance_sees_later(module: nn.Module, config: Any) -> bool | None:
    """Return whether tokens of a new model of a module's class see later ones; None if unknown."""
    if not isinstance(module, PreTrainedModel):
        return None
    for made in _small_configs(config, _values(module) <= MOST_VALUES):
        build = functools.partial(_instance, type(module), made, config)
        found = _sees_later(build, made)
        if found is not None:
            return found
    return None


def _instance(kind: type[PreTrainedModel], config: Any, original: Any) -> nn.Module:
    """Return a new model of a configuration as a function from token ids to logits."""
    with torch.device("meta"):
        size = _values(kind(copy.deepcopy(config)))
    if size > MOST_VALUES:
        raise ValueError(f"expected at most {MOST_VALUES} values, found {size}")
    attention = getattr(original, "_attn_implementation", None)
    model = kind._from_config(config, dtype=torch.float32, attn_implementation=attention)
    return Logits(model, hugging_face=True, options={"use_cache": False})


def _small_configs(config: Any, is_small: bool) -> Iterator[Any]:
    """Yield a narrow configuration, and one that is only less deep; a small one itself before."""
    if is_small:
        yield copy.deepcopy(config)
    fields = config.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "dtype"):
        fields.pop(name, None)
    depths = {name: size for name, size in _SMALL.items() if "layer" in name}
    for sizes in (_SMALL, {**depths, "vocab_size": _SMALL["vocab_size"]}):
        with contextlib.suppress(Exception):  # sizes that do not fit together; errors of many kinds
            yield type(config)(**_reduced(fields, sizes))


def _reduced(fields: Mapping[Any, Any], sizes: Mapping[str, int]) -> dict[Any, Any]:
    """Return fields of a configuration with smaller sizes; lists by layer are cut to its depth."""
    layers = next((fields[n] for n in _DEPTHS if isinstance(fields.get(n), int)), None)
    reduced: dict[Any, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            value = _reduced(value, sizes)
        elif name in sizes and type(value) is int:
            value = min(value, sizes[name])
        elif isinstance(value, list) and len(value) == layers:
            value = value[: min(layers, _SMALL["num_hidden_layers"])]
        elif str(name).endswith("token_id") and type(value) is int:
            value = min(value, 1)
        reduced[name] = value
    return reduced


def _real_twin(logits: nn.Module, origin: WeightSource) -> nn.Module:
    """Return a copy of `logits` with real tensors."""
    names = {**origin.names.parameters, **origin.names.buffers}
    memo: dict[int, Any] = {}
    for name, value in origin.materialise(0, names):
        is_weight = isinstance(names[name], nn.Parameter)
        memo[id(names[name])] = nn.Parameter(value, False) if is_weight else value.clone()
    return copy.deepcopy(logits, memo)


def _sees_later(build: Callable[[], nn.Module], config: Any) -> bool | None:
    """Return whether logits depend on a later token; None if the model cannot be computed."""
    with _quietly(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            model = build().eval()
            found = model(input_ids=_rows(model, config))  # [3, tokens, vocabulary]
        except Exception:  # of foreign code, some of which works only at the model's real size
            return None
    before = found[:, :-1].float()
    largest = _LARGEST_ROUNDING * before.abs().max()
    if not bool(torch.isfinite(before).all()) or bool(
        (before[0] - before[1]).abs().max() > largest
    ):
        return None  # equal rows differ: the model is random
    return bool((before[0] - before[2]).abs().max() > largest)


def _rows(model: nn.Module, config: Any) -> torch.Tensor:
    """Return token ids [3, tokens]: two equal rows, and one with another last token."""
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None:
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        vocabulary = min(table.num_embeddings for table in tables)
    special = {getattr(config, f"{n}_token_id", None) for n in ("pad", "bos", "eos", "mask")}
    plain = torch.tensor([i for i in range(min(vocabulary, 64)) if i not in special])
    longest = getattr(config, "max_position_embeddings", None)
    tokens = min(_TOKENS, longest) if isinstance(longest, int) and longest > 0 else _TOKENS
    row = plain[torch.randint(0, len(plain), (tokens,))]
    rows = row.repeat(3, 1)
    rows[2, -1] = plain[(int((plain == row[-1]).nonzero()) + len(plain) // 2) % len(plain)]
    return rows


def _values(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.parameters())


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Show no warning: the model itself gives its warnings where it is built."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        logging.warning_once.cache_clear()  # what was not shown counts as not said
