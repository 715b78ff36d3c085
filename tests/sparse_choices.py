"""Choices of sparse products for tests, which would else measure for seconds before every run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from penstock.engine import SparseProducts
from penstock.engine.product_choices import Measure
from penstock.sparsity import Choice, DenseTiles, SparseKernel


def kernels(shape, dtype, sparsity, tokens) -> Choice:
    """Return sparse kernels for every product."""
    return Choice(*[SparseKernel(16, panel_tokens=32 if dtype == torch.float32 else 64)] * 3)


def tiles(shape, dtype, sparsity, tokens) -> Choice:
    """Return expanded tiles for every product."""
    return Choice(*[DenseTiles(16)] * 3)


@contextlib.contextmanager
def chosen(measure: Measure = kernels) -> Iterator[None]:
    """Let new runs take the choices of `measure`, and neither measure nor take kept choices."""

    class Chosen(SparseProducts):
        def __init__(self, choices=None, ignored=None):
            super().__init__(choices, measure)

        def add(self, choices):
            """Take no choice of an earlier run."""

        def measure(self, *arguments):
            super().measure(*arguments)
            return {}  # nothing is kept

    with mock.patch("penstock.planning.product_choices.SparseProducts", Chosen):
        yield
