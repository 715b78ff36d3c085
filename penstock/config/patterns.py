"""Patterns of weight names, as `freeze`, `train` and `lora.targets` use them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from penstock.errors import ConfigError, did_you_mean, few


def matching(key: str, patterns: Iterable[str], names: Sequence[str]) -> set[str]:
    """Return the names that match any of the patterns, as in the shell, case and all.

    **Raises:** `ConfigError` for the first pattern of `key` that matches no name.
    """
    found: set[str] = set()
    for pattern in patterns:
        here = [name for name in names if fnmatchcase(name, pattern)]
        if not here:
            raise ConfigError(
                f"{key}: pattern {pattern!r} matches no weight{did_you_mean(pattern, names)}; "
                f"the model's weights are named like {few(names)}"
            )
        found.update(here)
    return found
