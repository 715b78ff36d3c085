"""A Hugging Face folder as files: limits on reading, and the additional files of a model.

A folder is untrusted. Only regular files are opened (links to them are allowed, as in the cache of
`huggingface_hub`), JSON is read up to a size limit, and only JSON, text and safetensors are read.
"""

import json
import shlex
from pathlib import Path
from typing import Any, BinaryIO

from penstock.config import is_run
from penstock.errors import (
    ConfigError,
    CorruptionError,
    PenstockError,
    StorageError,
    missing_folder,
)
from penstock.io import NotPlainError, open_plain, read_plain

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files that `AutoTokenizer` may read; none of them runs code."""

_OTHER_FILES = (GENERATION_CONFIG, "LICENSE", "LICENSE.txt", "NOTICE")
MAX_JSON_BYTES = 64 << 20
"""The index of a model of a million tensors is smaller than this, and so is every known
tokenizer."""


def open_file(path: Path) -> BinaryIO:
    """Open a file of the folder for unbuffered reading.

    Raises:
        FileNotFoundError: the file does not exist.
        CorruptionError: the path is a folder, a device or a pipe.
        StorageError: the operating system refuses.
    """
    try:
        return open_plain(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from error


def cannot_read(path: Path, error: OSError) -> CorruptionError | StorageError:
    """Return the error for a file that cannot be read."""
    if isinstance(error, NotPlainError):
        return CorruptionError(f"{path}: {error.strerror}")
    return StorageError(f"{path}: cannot read it: {error.strerror}; check the file and the disk")


def read_bytes(path: Path, most_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a small file; errors are those of `open_file`."""
    try:
        return read_plain(path, most_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise cannot_read(path, error) from error


def read_json(path: Path, what: str, error: type[PenstockError] = ConfigError) -> dict[str, Any]:
    """Return the object in a JSON file; `what` describes the file in messages.

    Raises:
        FileNotFoundError: the file does not exist.
        error: the content is not JSON, or not an object.
    """
    try:
        content = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as problem:
        raise error(f"cannot read {path} as {what}: {problem}") from None
    if not isinstance(content, dict):
        raise error(
            f"cannot read {path} as {what}: expected a JSON object, it holds a "
            f"{type(content).__name__}"
        )
    return content


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the existing files of the folder's tokenizer."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def other_files(folder: Path) -> list[Path]:
    """Return the files of a model besides configuration, tokenizer and weights."""
    return [folder / name for name in _OTHER_FILES if (folder / name).is_file()]


def refuse_unreadable(folder: Path) -> None:
    """Raise `ConfigError` unless the path is a folder that may contain a model in safetensors."""
    if folder.is_file():
        raise ConfigError(f"{folder}: expected the folder of a model, it is a file")
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder; a model must be on this machine: "
            f"{missing_folder(str(folder))}"
        )


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the content of a `config.json`, given as its path or as the folder of it.

    Raises:
        ConfigError: no such file, or not JSON.
    """
    path = path / CONFIG if path.is_dir() else path
    try:
        return read_json(path, "a Hugging Face config")
    except FileNotFoundError:
        if is_run(run := path.parent):
            raise ConfigError(
                f"{run}: expected a Hugging Face folder, got a run; `penstock export "
                f"{shlex.quote(str(run))} OUT` writes its model to the folder OUT: give OUT instead"
            ) from None
        raise ConfigError(
            f"expected a Hugging Face config.json at {path}, there is no such file"
        ) from None
