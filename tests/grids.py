"""Grids of parameters: every value in the suite, every combination in `make soak`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def thinned(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the axes' values; those that bring no new value are slow.

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
            marks=() if tuple(place for place, _ in case) in quick else pytest.mark.slow,
        )
        for case in cases
    ]
