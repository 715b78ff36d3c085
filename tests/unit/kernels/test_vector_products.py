"""Products with one token, dense and sparse: exact to rounding, the same for any thread count."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import scipy.sparse

from penstock.kernels.sparse_vector_product import multiply_vector
from penstock.kernels.vector_products import multiply_columns, multiply_rows

GUARD = 100
SIZES = [(1, 1), (3, 33), (5, 64), (17, 200), (70, 1), (100, 77), (333, 129), (1025, 2050)]
FORMS = {"rows": multiply_rows, "columns": multiply_columns}


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def values_of(matrix):
    """Return the numbers of bfloat16 patterns, or the matrix itself."""
    if matrix.dtype != np.uint16:
        return matrix
    return (matrix.astype(np.uint32) << 16).view(np.float32)


def matrix_of(shape, dtype):
    made = numbers(1, *shape)
    return made if dtype == np.float32 else (made.view(np.uint32) >> 16).astype(np.uint16)


def product(form, matrix, x, bias=None):
    """Return the product; nothing beside its memory may be written."""
    count = matrix.shape[0] if form == "rows" else matrix.shape[1]
    whole = np.full(count + 2 * GUARD, 77, np.float32)
    out = whole[GUARD : GUARD + count]
    FORMS[form](matrix.reshape(-1), x, out, bias)
    assert (whole[:GUARD] == 77).all()
    assert (whole[-GUARD:] == 77).all()
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_product_is_exact_to_rounding(inputs, outputs, form, dtype):
    shape = (outputs, inputs) if form == "rows" else (inputs, outputs)
    matrix, x, bias = matrix_of(shape, dtype), numbers(2, inputs), numbers(3, outputs)
    exact = values_of(matrix).astype(np.float64)
    exact = exact if form == "rows" else exact.T
    size = np.abs(exact) @ np.abs(x) + np.abs(bias)
    found = product(form, matrix, x, bias)
    assert (np.abs(found - (exact @ x + bias)) <= 2**-20 * size).all()
    np.testing.assert_allclose(
        product(form, matrix, x), exact @ x, rtol=0, atol=2**-20 * size.max()
    )


@pytest.mark.parametrize("form", FORMS)
def test_threads_decide_no_bit(form):
    matrix, x = matrix_of((700, 700), np.float32), numbers(2, 700)
    threads = numba.get_num_threads()
    found = []
    try:
        for count in range(1, threads + 1):
            numba.set_num_threads(count)
            found.append(product(form, matrix, x).tobytes())
    finally:
        numba.set_num_threads(threads)
    assert len(set(found)) == 1


@pytest.mark.parametrize("form", FORMS)
def test_infinities_and_nans_are_those_of_the_inputs(form):
    matrix, x = matrix_of((40, 40), np.float32), numbers(2, 40)
    matrix[3, 5], matrix[7, 8] = np.inf, np.nan
    found = product(form, matrix, x)
    exact = matrix @ x if form == "rows" else x @ matrix
    np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(exact))


@pytest.mark.parametrize("form", FORMS)
def test_wrong_sizes_are_refused(form):
    x, out = numbers(2, 6), np.empty(7, np.float32)
    with pytest.raises(ValueError, match=r"matrix: expected shape \[42\], got \[41\]"):
        FORMS[form](numbers(1, 41), x, out)
    with pytest.raises(ValueError, match=r"bias: expected shape \[7\], got \[6\]"):
        FORMS[form](numbers(1, 42), x, out, numbers(3, 6))
    with pytest.raises(ValueError, match="x: expected float32, got float64"):
        FORMS[form](numbers(1, 42), x.astype(np.float64), out)


def sparse_matrix(rows, columns, seed=4):
    """Return a matrix with empty rows, full rows and rows of any number of entries."""
    generator = np.random.default_rng(seed)
    keep = generator.random((rows, columns)) < generator.random((rows, 1))
    keep[::5] = False
    keep[1::7] = True
    made = scipy.sparse.csr_array(np.where(keep, numbers(5, rows, columns), 0))
    made.sort_indices()
    return made


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_sparse_product_is_exact_to_rounding(rows, columns, transposed, dtype):
    matrix = sparse_matrix(rows, columns)
    values = matrix.data
    if dtype == np.uint16:
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
        matrix.data[:] = values_of(values)
    starts, places = matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32)
    exact = matrix.astype(np.float64)
    exact = exact.T if transposed else exact
    outputs, inputs = exact.shape
    x, bias = numbers(2, inputs), numbers(3, outputs)
    size = abs(exact) @ np.abs(x) + np.abs(bias)
    for of_bias in (bias, None):
        found = multiply_vector(starts, places, values, columns, x, of_bias, transposed=transposed)
        expected = exact @ x + (0 if of_bias is None else bias)
        assert (np.abs(found - expected) <= 2**-20 * size).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_threads_decide_no_bit_of_a_sparse_product(transposed):
    matrix = sparse_matrix(700, 700)
    starts, places = matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32)
    x, threads = numbers(2, 700), numba.get_num_threads()
    found = set()
    try:
        for count in range(1, threads + 1):
            numba.set_num_threads(count)
            made = multiply_vector(starts, places, matrix.data, 700, x, transposed=transposed)
            found.add(made.tobytes())
    finally:
        numba.set_num_threads(threads)
    assert len(found) == 1
