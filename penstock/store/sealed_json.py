"""JSON files that contain a checksum of their own content, since tables of checksums can also be
corrupted.

The file is `{"checksum": xxh3_128 of the content, "content": ...}`. The checksum covers a canonical
form of the content, so white space and the order of keys do not matter.
"""

import json
from pathlib import Path
from typing import Any

import xxhash

from penstock.errors import CorruptionError, StorageError
from penstock.io import NotPlainError, read_plain

MAX_BYTES = 256 << 20
"""Larger files are rejected unread: the table of a model of 10^12 weights takes some 70 MB."""


def seal(content: dict[str, Any]) -> bytes:
    """Return the bytes of a sealed file with this content."""
    sealed = {"checksum": _checksum(content), "content": content}
    return json.dumps(sealed, indent=1).encode()


def unseal(path: Path) -> dict[str, Any]:
    """Read a sealed file and return its content.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptionError: the file is too large, has another form, or does not match its checksum.
        StorageError: the operating system could not read it.
    """
    try:
        data = read_plain(path, MAX_BYTES)
    except FileNotFoundError:
        raise
    except NotPlainError as error:
        raise CorruptionError(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot read it: {error.strerror}") from error
    try:
        match json.loads(data):
            case {"checksum": str(expected), "content": dict(content)}:
                found = _checksum(content)
                if not data.isascii() or b"\\u" in data:
                    # JSON can contain half a surrogate pair; UTF-8 cannot.
                    json.dumps(content, ensure_ascii=False).encode()
            case _:
                raise _broken(path, "it has no checksum or no content")
    except (ValueError, RecursionError) as error:  # both parsing and formatting recurse
        raise _broken(path, f"it is not JSON: {error}") from error
    if found != expected:
        raise _broken(path, f"expected checksum {expected} of its content, got {found}")
    return content


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def _broken(path: Path, what: str) -> CorruptionError:
    return CorruptionError(f"{path}: {what}; the file has changed since it was written")
