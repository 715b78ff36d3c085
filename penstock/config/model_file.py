"""The Hugging Face config.json that `model.hf_config` names, read once when a run starts.

The run then keeps its content: its record, its workers and its exports do not read the file again.
"""

import json
from pathlib import Path
from typing import Any

from penstock.config.model import HuggingFaceConfigModel
from penstock.config.root import Config
from penstock.io import read_plain

_FILE_NAME = "config.json"
_MOST_BYTES = 64 << 20


def with_model_file(config: Config) -> Config:
    """Return the configuration with the content of the file that `model.hf_config` names.

    A configuration without such a file is returned as it is. So is one whose file cannot be used,
    which `ModelSource.from_hf_config` reports.
    """
    if not isinstance(config.model, HuggingFaceConfigModel):
        return config
    if not isinstance(config.model.hf_config, str):
        return config
    fields = read_model_file(config.model.hf_config)
    if fields is None:
        return config
    return config.model_copy(update={"model": HuggingFaceConfigModel(hf_config=fields)})


def read_model_file(place: str) -> dict[str, Any] | None:
    """Return the content of a config.json, given by its path or its folder; None if it cannot be
    used."""
    path = Path(place)
    try:
        path = path / _FILE_NAME if path.is_dir() else path
        fields = json.loads(read_plain(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and "model_type" in fields else None
