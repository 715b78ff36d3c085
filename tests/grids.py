"""Grids of parameters: every value in `make test`, every combination in longer suites."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def quick_first(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return the values; those that are not quick are in `make test-long`."""
    return [pytest.param(v, marks=() if v in quick else pytest.mark.long) for v in values]


def quick_combinations(*axes: Iterable[Any], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """Return all combinations of the axes' values; those not quick are in `make test-long`."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.long)
        for case in itertools.product(*axes)
    ]


def thinned(*axes: Collection[Any], others: Any = pytest.mark.slow) -> list[Any]:
    """Return all combinations of the axes' values; `others` marks those that bring no new value.

    As many are quick as the longest axis has values: the i-th takes the i-th of each, round and
    round; of two axes of the same length the second is shifted by one from round to round.
    """
    shifts = [sum(len(other) == len(axis) for other in axes[:i]) for i, axis in enumerate(axes)]
    quick = {
        tuple(
            (number + shift * (number // len(axis))) % len(axis)
            for axis, shift in zip(axes, shifts, strict=True)
        )
        for number in range(max(map(len, axes)))
    }
    cases = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(
            *(value for _, value in case),
            marks=() if tuple(place for place, _ in case) in quick else others,
        )
        for case in cases
    ]


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of three axes of the same length.

    Those with a new value are in `make test`, a Latin square with every pair of values is in
    `make test-long`, and the others are slow.
    """
    first, *others = axes
    if len(axes) != 3 or any(len(axis) != len(first) for axis in others):
        raise ValueError(f"expected three axes of one length, got {[*map(len, axes)]}")
    found = []
    for places in itertools.product(range(len(first)), repeat=3):
        is_quick, is_long = len(set(places)) == 1, sum(places) % len(first) == 0
        marks = () if is_quick else pytest.mark.long if is_long else pytest.mark.slow
        found.append(
            pytest.param(
                *(axis[place] for axis, place in zip(axes, places, strict=True)), marks=marks
            )
        )
    return found
