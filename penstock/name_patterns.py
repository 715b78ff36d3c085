"""Patterns of weight names, as `freeze`, `train`, `lora.targets` and optimizer groups use them."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from penstock.errors import ConfigError, did_you_mean, few


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a weight's name matches a shell pattern; case-sensitive."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def matching(key: str, patterns: Iterable[str], names: Sequence[str]) -> set[str]:
    """Return the names that match any of the patterns.

    **Raises:** `ConfigError` for the first pattern of `key` that matches no name.
    """
    found: set[str] = set()
    for pattern in patterns:
        here = [name for name in names if matches(name, [pattern])]
        if not here:
            raise ConfigError(
                f"{key}: pattern {pattern!r} matches no weight{closest(pattern, names)}; "
                f"the model's weights are named like {few(names)}"
            )
        found.update(here)
    return found


def closest(pattern: str, names: Sequence[str]) -> str:
    """Return a suggestion: a name, or for `*.name` the end of a name."""
    if not pattern.startswith("*."):
        return did_you_mean(pattern, names)
    ends = {
        f"*.{'.'.join(parts[first:])}"
        for parts in (name.split(".") for name in names)
        for first in range(1, len(parts))
    }
    return did_you_mean(pattern, sorted(ends))
