"""`key=value` overrides: `optimizer.learning_rate=3e-4 engines=4`."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from penstock.config.document import NumberTooLarge, parse_scalar
from penstock.config.problems import Origin
from penstock.errors import ConfigError


def apply_overrides(
    data: Mapping[str, Any], overrides: Sequence[str], origin: Origin
) -> dict[str, Any]:
    """Return a copy of `data` with each override set, recording in `origin` where it came from.

    A section that the file lacks is created; `model.n_layer=4` on `model: gpt2` keeps the preset.
    Raises `ConfigError` if an override is not `key=value`, or its path passes through a plain
    value.
    """
    merged: dict[str, Any] = copy.deepcopy(dict(data))
    for text in overrides:
        key, equals, value_text = text.partition("=")
        keys = key.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(
                f"command line: {text}: expected key=value, for example engine.memory=4GiB"
            )
        try:
            value = parse_scalar(value_text)
        except NumberTooLarge as error:
            raise ConfigError(f"command line: {key}: {error.problem}") from None
        except (yaml.YAMLError, RecursionError):
            raise ConfigError(
                f"command line: {text}: {value_text!r} is not valid YAML; quote it for the shell"
            ) from None
        _set(merged, keys, value, text)
        origin.overridden[tuple(keys)] = text
    return merged


def _set(root: dict[str, Any], keys: list[str], value: Any, text: str) -> None:
    if keys[0] == "model" and len(keys) > 1 and isinstance(root.get("model"), str):
        root["model"] = {"preset": root["model"]}
    place = root
    for depth, key in enumerate(keys[:-1]):
        inner = place.get(key)
        if inner is None:
            inner = place[key] = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"command line: {text}: {'.'.join(keys[: depth + 1])} is {inner!r}, which has no "
                f"key {keys[depth + 1]!r}; set {'.'.join(keys[: depth + 1])} as a whole"
            )
        place = inner
    place[keys[-1]] = value
