"""The journal's first record: which format a store has, and what it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.store.flash.layout import FlashLayout

FORMAT = "penstock-flash"
VERSION = 2


def describe(layout: FlashLayout, block_elements: int, keep_steps: int) -> dict[str, Any]:
    """Return the record's content."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "block_elements": block_elements,
        "keep_steps": keep_steps,
        "units": layout.described(),
    }


def require_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a store that was made for something else, naming what differs."""
    require_readable(folder, found)
    for key in wanted:
        if found.get(key) != wanted[key]:
            raise ConfigError(
                f"{folder} holds the state of another model or optimizer ({key} differs); choose "
                "another store.flash.path, or go back to what it was made with"
            )


def require_readable(folder: Path, found: Mapping[str, Any]) -> None:
    """Refuse a journal's first record that is not of this format, or of a newer one."""
    if found.get("format") != FORMAT:
        raise ConfigError(f"{folder}: not a Penstock store; choose another store.flash.path")
    version = found.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        raise ConfigError(
            f"{folder}: its format has version {version}, this Penstock reads {VERSION}; "
            "open it with " + ("a newer one" if newer else "the one that made it")
        )
