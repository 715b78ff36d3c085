"""Runs a test also with updates that are made before the commit: rightly, in vain, and both.

Every guess then speculates, and to its end, whatever the time allows (`store/flash/guesses.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from grids import quick_first

MODES = ("off", "on", "wrong", "mixed:4")
"""No guesses, right ones, wrong ones, and by a seed: right, right in part, wrong, wrong."""

QUICK_OFF = quick_first(MODES, ["off"])
"""For tests that take long with each of them."""

_FIXTURE = "speculated"


def thin_modes(items: Iterable[pytest.Item]) -> None:
    """Move most of the product of modes and other parameters from `make test-long` to `slow`.

    Of a test with the fixture `speculated`, each combination of the other parameters keeps one
    mode, in rotation, besides those in `make test`. Each mode is kept for at least one combination.
    """
    tests: dict[str, dict[str, dict[int, pytest.Function]]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        mode = item.callspec.params.get(_FIXTURE)
        if mode is None or item.get_closest_marker("slow"):
            continue
        others = item.callspec.id.split("-")
        others.remove(mode)
        cases = tests.setdefault(item.nodeid.split("[")[0], {})
        cases.setdefault("-".join(others), {})[MODES.index(mode)] = item
    for cases in tests.values():
        _thin(list(cases.values()))


def _thin(cases: list[dict[int, pytest.Function]]) -> None:
    """Mark as slow what a test need not run: `cases` has the items of each combination by mode."""
    kept = set()
    for number, case in enumerate(cases):
        modes = [mode for mode, item in case.items() if item.get_closest_marker("long")]
        kept.update((number, mode) for mode in case if mode not in modes)
        if modes:  # shifted by one in each round, or a shorter axis would see the same modes
            kept.add((number, modes[(number + number // len(modes)) % len(modes)]))
    for mode in {mode for case in cases for mode in case} - {mode for _, mode in kept}:
        kept.add((mode % len(cases), mode))
    for number, case in enumerate(cases):
        for mode, item in case.items():
            if (number, mode) not in kept:
                item.add_marker(pytest.mark.slow)
