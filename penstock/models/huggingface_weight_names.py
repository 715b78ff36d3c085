"""Maps tensors of a Hugging Face folder to weights and buffers of a model.

Checkpoints use the tensor names of the code that wrote them. `transformers` has the table of later
renames, splits and merges; it is used here as `from_pretrained` uses it. Two cases are errors
instead of warnings: a missing weight, and a tensor that nothing uses.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from penstock.errors import ConfigError, did_you_mean
from penstock.models.weight_files import FLOATS, StoredTensor
from penstock.models.weight_origins import Converted, Direct, Origin
from penstock.name_patterns import matches

_SHOWN = 5
_LEFT_OUT = re.compile(
    # Buffers that older versions of transformers saved and newer ones compute.
    r"(^|\.)position_ids$|rotary_emb\.inv_freq$|(^|\.)(attn|attention)\.(masked_)?bias$"
    # Heads of BERT's second task, in every published checkpoint of the family.
    r"|(^|\.)pooler\.dense\.(weight|bias)$|^cls\.seq_relationship\.(weight|bias)$"
)


def match(
    tensors: Mapping[str, StoredTensor],
    module: Any,
    aliases: Mapping[str, str],
    *,
    folder: Path,
    ignore: Sequence[str] = (),
) -> dict[str, Origin]:
    """Return the origin of each weight of a model, and of each buffer that the folder has.

    Args:
        tensors: the tensors of the folder.
        module: the `transformers` model, its tensors with or without memory.
        aliases: further names of tied weights, and the listed name of each.
        folder: named in messages.
        ignore: patterns of tensors that the model may leave unused.

    Returns:
        The origins by name (for tied weights the first name), direct or converted.

    Raises:
        ConfigError: missing weights, unused tensors, or wrong shapes or types.
    """
    state = dict(module.state_dict())
    direct, converted, unused = _assign(tensors, module, state)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found: dict[str, Origin] = {
        name: one for one in converted for name in one.targets if name in state
    }
    parameters = {aliases.get(name, name) for name, _ in module.named_parameters()}
    for name, sources in direct.items():
        if len(sources) > 1 or name in found:
            raise ConfigError(
                f"{folder}: {' and '.join(sources)} both are {name} in the model; keep one of them"
            )
        is_weight = aliases.get(name, name) in parameters
        _check(folder, sources[0], tensors[sources[0]], name, state[name], is_weight)
        found[name] = Direct(sources[0])
    for alias, name in aliases.items():
        _tie(found, alias, name)
    missing = [name for name in shapes if name in parameters and name not in found]
    surplus = _surplus(unused, module, ignore)
    if missing:
        raise ConfigError(_missing(folder, missing, surplus, module))
    if surplus:
        raise ConfigError(
            f"{folder}: {_listed(surplus, 'tensor')} that {type(module).__name__} does not have; "
            f"to ignore them, set model.ignore: [{', '.join(_patterns(surplus))}]"
        )
    return found


def _assign(
    tensors: Mapping[str, StoredTensor], module: Any, state: dict[str, Any]
) -> tuple[dict[str, list[str]], list[Converted], list[str]]:
    """Assign every tensor of the folder to a weight, as `from_pretrained` does."""
    transforms = get_model_conversion_mapping(module)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = module.base_model_prefix
    direct: dict[str, list[str]] = {}
    groups: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
    unused: list[str] = []
    for tensor in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(tensor, renamings, converters, prefix, state)
        if name not in state and tensor in state:
            name, pattern = rename_source_key(tensor, [], [], prefix, state)
        if name not in state:
            unused.append(tensor)
        elif pattern is None:
            direct.setdefault(name, []).append(tensor)
        else:
            groups.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, tensor))
    made = []
    for first, (converter, parts) in groups.items():
        head = converter.target_patterns[0]
        targets = [first.replace(head, target) for target in converter.target_patterns]
        made.append(Converted(converter, first, tuple(parts), tuple(dict.fromkeys(targets))))
    return direct, made, unused


def _check(
    folder: Path,
    tensor: str,
    stored: StoredTensor,
    name: str,
    wanted: torch.Tensor,
    is_weight: bool,
) -> None:
    """Refuse a stored tensor that cannot be the weight or buffer `name`.

    `WeightFiles.read_buffer` compares the types of buffers.
    """
    extent = stored.extent
    where = f"{folder / stored.file}: {tensor!r}"
    if is_weight and extent.dtype not in FLOATS:
        raise ConfigError(
            f"{where} is stored as {extent.dtype}, expected one of {', '.join(FLOATS)}; a "
            "quantised checkpoint must be dequantised first, with the tool that created it"
        )
    if extent.shape != tuple(wanted.shape):
        raise ConfigError(
            f"{where} is {list(extent.shape)}, {name} in the model is {list(wanted.shape)}; "
            "config.json and weights are of different models"
        )


def _tie(found: dict[str, Origin], alias: str, name: str) -> None:
    """Let a tied weight use any of its names that the folder contains."""
    other = found.pop(alias, None)
    if other is None:
        return
    here = found.setdefault(name, other)
    if isinstance(here, Direct) and isinstance(other, Direct) and here is not other:
        found[name] = Direct(here.tensor, (*here.also, other.tensor))


def _surplus(unused: Iterable[str], module: Any, ignore: Sequence[str]) -> list[str]:
    """Return the tensors that neither known conventions nor the user's patterns explain."""
    known = [_LEFT_OUT.pattern, *(module._keys_to_ignore_on_load_unexpected or ())]
    expected = re.compile("|".join(f"(?:{pattern})" for pattern in known))
    computed = {name for name, _ in module.named_buffers()}
    return [
        tensor
        for tensor in unused
        if tensor not in computed
        and expected.search(tensor) is None
        and not matches(tensor, ignore)
    ]


def _missing(folder: Path, missing: list[str], surplus: list[str], module: Any) -> str:
    text = (
        f"{folder}: {_listed(missing, 'weight')} of {type(module).__name__} not in its files"
        f"{did_you_mean(missing[0], surplus)}"
    )
    made_for = ", ".join(getattr(module.config, "architectures", None) or [])
    if surplus:
        return (
            f"{text}; {_listed(surplus, 'tensor')} in its files are not used; are they of another "
            "model?"
        )
    if made_for and made_for != type(module).__name__:
        return f"{text}; it was saved from {made_for}, which lacks them"
    return f"{text}; download the folder again, or save the complete model"


def _listed(names: Sequence[str], what: str) -> str:
    shown = ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''} ({shown})"


def _patterns(names: Iterable[str]) -> list[str]:
    """Return patterns that match these names; whole modules if there are many names."""
    names = list(names)
    if len(names) <= _SHOWN:
        return names
    return list(dict.fromkeys(f"{name.rpartition('.')[0] or name}.*" for name in names))[:_SHOWN]
