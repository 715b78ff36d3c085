"""The fields of a model's configuration as text, by which processes compare their models."""

import json
from collections.abc import Mapping
from typing import Any

import xxhash

# Fields that say where a configuration is from, and change no model.
_ORIGINS = frozenset({"_name_or_path", "transformers_version"})
_MOST_CHARACTERS = 200


def configuration_fields(config: Any) -> dict[str, str] | None:
    """Return the fields of a configuration as JSON, by name, so that processes can compare them.

    Configurations that build the same model with one version of `transformers` have equal fields. A
    long value is replaced by its checksum. Of no configuration the result is None.
    """
    if config is None:
        return None
    fields = _plain(config.to_dict())
    return {name: _short(value) for name, value in fields.items() if name not in _ORIGINS}


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{len(text)} characters with checksum {xxhash.xxh3_128_hexdigest(text.encode())}"


def _plain(value: Any) -> Any:
    """Return a value as plain data; of an object only its class, whose name no process changes."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, str | int | float) else type(value).__name__
