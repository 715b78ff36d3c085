"""The memory that is planned for a sparse product, against what the product really allocates."""

from __future__ import annotations

import numba
import pytest
import torch
from grids import thinned
from real_allocations import arrays_allocated, peak_allocated_bytes
from sparse_masks import layout_of, mask_of, random_tensor

from penstock.sparsity import (
    Choice,
    SparseKernel,
    forward,
    input_gradient,
    product_bytes,
    weight_gradient,
)
from penstock.sparsity.product_choice import panel_sizes
from penstock.sparsity.product_memory import tile_bytes

SHAPE = (150, 500)
OBJECTS = 8 << 10  # Python objects, such as arrays without their data


@pytest.fixture(autouse=True)
def _all_threads():
    before = numba.get_num_threads()
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    yield
    numba.set_num_threads(before)


def apart(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same numbers whose rows are not contiguous."""
    wide = torch.zeros(x.shape[0], x.shape[1] + 3, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


# One panel, which threads share, and panels of their own.
@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "is_contiguous", "tokens"),
    thinned([torch.float32, torch.bfloat16], [True, False], [30, 300], others=pytest.mark.long),
)
def test_products_allocate_at_most_what_is_counted(dtype, is_contiguous, tokens):
    rows, columns = SHAPE
    layout = layout_of(mask_of("random", SHAPE, 1))
    panel = panel_sizes(dtype, tokens)[-1]
    choice = Choice(*3 * [SparseKernel(64, 40, panel)])
    values, bias = (random_tensor(s, dtype, n) for s, n in ((1, layout.entries), (2, rows)))
    x, dy = random_tensor(3, dtype, tokens, columns), random_tensor(4, dtype, tokens, rows)
    if not is_contiguous:
        x, dy = apart(x), apart(dy)
    # The product's own need, without a tile that another product has left, and its result.
    counted = product_bytes(rows * columns, rows + columns, layout.entries, tokens, dtype)
    counted -= tile_bytes(rows * columns, rows + columns, dtype)
    row_bytes = tokens * dtype.itemsize
    products = {
        "forward": (lambda: forward(layout, values, x, bias, choice=choice), row_bytes * rows),
        "input gradient": (
            lambda: input_gradient(layout, values, dy, choice=choice),
            row_bytes * columns,
        ),
        "weight gradient": (lambda: weight_gradient(layout, x, dy, choice=choice), 0),
    }
    for name, (product, result) in products.items():
        product()  # compiles, and makes the order of the entries
        allocated = arrays_allocated(product) + peak_allocated_bytes(product)
        least = panel * min(SHAPE) * dtype.itemsize
        assert least < allocated <= counted + result + OBJECTS, name
