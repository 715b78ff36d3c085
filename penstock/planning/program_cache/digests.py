"""Digests of texts, and values whose texts are the same in every process."""

import hashlib
from collections.abc import Mapping
from typing import Any


def digest_of(*parts: str) -> str:
    """Return a digest of texts."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(f"{len(part)}\0{part}".encode())
    return digest.hexdigest()


def in_order(value: Any) -> Any:
    """Return a value whose text does not depend on the order of its elements."""
    if isinstance(value, Mapping):
        return sorted(value.items())
    return sorted(value) if isinstance(value, set | frozenset) else value
