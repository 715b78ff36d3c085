"""A run's copy of the small files of its Hugging Face folder, so that the folder may be deleted."""

import itertools
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from penstock.errors import CorruptionError, StorageError
from penstock.io import durable
from penstock.models.folder import (
    CONFIG,
    MAX_JSON_BYTES,
    other_files,
    read_bytes,
    read_json,
    tokenizer_files,
)

KEPT = "model"
"""Folder within a run's folder: the small files of the Hugging Face folder."""
BUFFERS = "buffers.safetensors"
"""File beside them: the buffers of the folder (`stored_buffers.py`)."""
CHECKSUMS = "checksums.json"
"""File beside them: the checksum of each. Runs of older releases have none."""

_ADVICE = "restore the file from a copy, or from the folder that the run started from"


def config_files(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the file of a configuration by its name."""
    return {CONFIG: json.dumps(fields, indent=2).encode() + b"\n"}


def keep_small_files(folder: Path, kept: Path, read: Mapping[str, bytes] | None = None) -> None:
    """Copy configuration, tokenizer and similar files into `kept`, with their checksums.

    Args:
        folder: the Hugging Face folder.
        kept: replaced by the copy.
        read: files of the folder that were read before, by name, which are not read again, and
            the file of the buffers (`stored_buffers.py`).

    Raises:
        StorageError: the operating system refuses to read or write.
    """
    read = read or {}
    checksums = {}
    try:
        with durable.new_folder(kept) as staging:
            copied = [folder / CONFIG, *tokenizer_files(folder), *other_files(folder)]
            copies = ((path.name, read_bytes(path)) for path in copied if path.name not in read)
            for name, content in itertools.chain(copies, read.items()):
                checksums[name] = xxhash.xxh3_128_hexdigest(content)
                durable.write_file(staging / name, content)
            sealed = {"files": checksums, "checksum": _checksum_of(checksums)}
            text = json.dumps(sealed, indent=1) + "\n"
            durable.write_file(staging / CHECKSUMS, text.encode())
            shutil.rmtree(kept, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"{kept}: cannot write it: {error.strerror}; choose another with run.dir=FOLDER"
        ) from error


def verify_kept(kept: Path) -> int:
    """Compare the copied files with their checksums; return the number of files that have one.

    Raises:
        CorruptionError: a file is missing or has changed since it was copied.
        StorageError: the operating system refuses to read.
    """
    path = kept / CHECKSUMS
    try:
        sealed = read_json(path, "the checksums of the model's files", CorruptionError)
    except FileNotFoundError:
        return 0
    checksums = sealed.get("files")
    if not isinstance(checksums, dict) or _checksum_of(checksums) != sealed.get("checksum"):
        raise CorruptionError(f"{path} does not match its checksum; {_ADVICE}")
    for name, expected in checksums.items():
        try:
            content = read_bytes(kept / name, sys.maxsize if name == BUFFERS else MAX_JSON_BYTES)
        except FileNotFoundError:
            raise CorruptionError(f"{kept / name} is missing; {_ADVICE}") from None
        actual = xxhash.xxh3_128_hexdigest(content)
        if actual != expected:
            raise CorruptionError(
                f"{kept / name} is corrupt between byte 0 and {len(content)}: checksum {actual}, "
                f"expected {expected}; {_ADVICE}"
            )
    return len(checksums)


def _checksum_of(checksums: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(checksums, sort_keys=True).encode())
