"""Masks of sparse weights, of the kinds that are hard on a product, and exact references."""

from __future__ import annotations

import numpy as np
import scipy.sparse
import torch

from penstock.sparsity import SparseLayout

KINDS = ("random", "empty rows", "full rows", "one entry", "no entry", "power law", "dense")


def mask_of(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """A mask of bool `[rows, columns]`."""
    generator = np.random.default_rng(seed)
    rows, columns = shape
    mask = generator.random(shape) < 0.2
    if kind == "empty rows":
        mask[generator.random(rows) < 0.5] = False
        mask[:, generator.random(columns) < 0.5] = False
    elif kind == "full rows":
        mask[generator.random(rows) < 0.2] = True
        mask[:, 0] = True
    elif kind in ("one entry", "no entry"):
        mask[:] = False
        mask[generator.integers(rows), generator.integers(columns)] = kind == "one entry"
    elif kind == "power law":
        share = 1 / np.arange(1, rows + 1)
        mask = generator.random(shape) < generator.permutation(share)[:, None]
    elif kind == "dense":
        mask[:] = True
    return mask


def layout_of(mask: np.ndarray) -> SparseLayout:
    """The layout of a mask."""
    matrix = scipy.sparse.csr_array(mask)
    return SparseLayout.of(
        matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), mask.shape
    )


def random_tensor(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Normal numbers, rounded to the type."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).to(dtype)


def exact(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's values in float64."""
    return tensor.double().numpy()


def exact_matrix(mask: np.ndarray, values: torch.Tensor) -> scipy.sparse.csr_array:
    """The weight in float64: SciPy's own, of the mask and the values."""
    matrix = scipy.sparse.csr_array(mask.astype(np.float64))
    matrix.data[:] = exact(values)
    return matrix


def assert_close(
    found: torch.Tensor, expected: np.ndarray, magnitude: np.ndarray, terms: int
) -> None:
    """Compare with an exact result, within what rounding may do.

    Args:
        magnitude: the same sums over absolute values: an error of float32 sums is at most their
            number of terms times 2^-24 of this.
    """
    bound = (terms + 2) * 2.0**-24 * magnitude + 1e-37
    if found.dtype == torch.bfloat16:
        bound = bound + 2.0**-8 * np.abs(expected)
    error = np.abs(exact(found) - expected)
    worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
    assert (error <= bound).all(), (worst, exact(found)[worst], expected[worst], bound[worst])
