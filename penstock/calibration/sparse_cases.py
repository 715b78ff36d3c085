"""Products over the kept entries of a mask as cases.

A training run measures which way of a product is the fastest before its first step. Calibration
does the same, for as long as its time allows. The remaining masks use the choice of the nearest
sparsity that was measured.
"""

import functools
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from penstock.calibration.operator_cases import DTYPES
from penstock.calibration.repetitions import Case, Prepared, Quantity
from penstock.sparsity import (
    Choice,
    SparseLayout,
    choose_product,
    forward,
    input_gradient,
    weight_gradient,
)

SPARSITIES = (0.9, 0.75, 0.5, 0.95)
"""In the order in which their choices are measured."""

_SHAPE, _TOKENS = (1024, 3072), 1024  # of a usual layer: packing weighs more in smaller ones
_LITTLE = ((64, 64), 256)  # compiles all kernels: a panel of each size holds as many tokens

ChooseProduct = Callable[[tuple[int, int], torch.dtype, float, int], Choice]


class Choices:
    """The ways of the products, measured while `budget_seconds` last; the first is always."""

    def __init__(
        self,
        budget_seconds: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        choose: ChooseProduct = choose_product,
    ) -> None:
        self._left, self._clock, self._choose = budget_seconds, clock, choose
        self._known: dict[torch.dtype, dict[float, Choice]] = {}

    def of(self, dtype: torch.dtype, sparsity: float) -> Choice:
        """Return the choice for a mask, or that of the nearest sparsity."""
        known = self._known.setdefault(dtype, {})
        if sparsity not in known and (not known or self._left > 0):
            if not known:
                self._choose(_LITTLE[0], dtype, sparsity, _LITTLE[1])
            began = self._clock()
            known[sparsity] = self._choose(_SHAPE, dtype, sparsity, _TOKENS)
            self._left -= self._clock() - began
        nearest = min(known, key=lambda found: abs(found - sparsity))
        return known[nearest]


def small_choices() -> Choices:
    """Return choices that compile all kernels and measure nothing of a usual size."""

    def choose(shape: tuple[int, int], dtype: torch.dtype, sparsity: float, tokens: int) -> Choice:
        return choose_product(_LITTLE[0], dtype, sparsity, _LITTLE[1])

    return Choices(0.0, choose=choose)


def sparse_cases(choices: Choices) -> Iterator[Case]:
    """Yield the cases: forward, gradient of the inputs and gradient of the entries together."""
    for sparsity in SPARSITIES:
        for name, dtype in DTYPES.items():
            yield Case(
                Quantity("engine", "sparse product", name),
                functools.partial(_prepared, dtype, sparsity, choices),
            )


def _prepared(dtype: torch.dtype, sparsity: float, choices: Choices) -> Prepared:
    choice = choices.of(dtype, sparsity)
    rows, columns = _SHAPE
    random = np.random.default_rng(0)
    mask = random.random(_SHAPE) >= sparsity
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(mask.sum(axis=1), out=starts[1:])
    layout = SparseLayout.of(starts, np.nonzero(mask)[1].astype(np.int32), _SHAPE)
    values, x, dy = (
        torch.from_numpy(random.standard_normal(shape, dtype=np.float32)).to(dtype)
        for shape in ((layout.entries,), (_TOKENS, columns), (_TOKENS, rows))
    )

    def run() -> None:
        forward(layout, values, x, choice=choice)
        input_gradient(layout, values, dy, choice=choice)
        weight_gradient(layout, x, dy, choice=choice)

    return Prepared(run, 3 * 2 * _TOKENS * layout.entries, layout.entries / (rows * columns))
