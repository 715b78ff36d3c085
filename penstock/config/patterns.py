"""Patterns of weight names, as `freeze` and `optimizer.groups` use them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from penstock.errors import ConfigError, did_you_mean


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a weight's name matches a pattern, as in the shell, case and all."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def require_matches(key: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise `ConfigError` naming the first pattern of `key` that matches no weight at all."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise ConfigError(
                f"{key}: pattern {pattern!r} matches none of the {len(names)} weights"
                f"{did_you_mean(pattern, names)}; they are named like {shown}"
            )
