"""Kernels of sparse products: they write what they should, and nothing beside it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numba
import numpy as np
import pytest
import scipy.sparse
import torch

from penstock.kernels import sparse_products
from penstock.kernels.pair_code import has_bfloat16_dot
from penstock.kernels.sparse_expansion import bitmap_of, collect, expand, expand_marked
from penstock.kernels.sparse_products import BlockedCsr, entry_gradient, gather, multiply
from penstock.kernels.sparse_vector_product import multiply_vector
from penstock.sparsity.layout import Rows

GUARD = 100
NONE = np.empty(0, np.int32)


def guarded(length: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """An array with 100 elements before and behind the part that may be written."""
    whole = np.full(length + 2 * GUARD, 77, dtype)
    return whole, whole[GUARD : GUARD + length]


def assert_untouched(whole: np.ndarray) -> None:
    assert (whole[:GUARD] == 77).all()
    assert (whole[-GUARD:] == 77).all()


def numbers(seed: int, length: int, dtype: type) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if dtype == np.uint16:
        return generator.integers(0, 1 << 16, length).astype(np.uint16)
    return generator.standard_normal(length).astype(dtype)


def dense_matrix(rows: int, columns: int) -> BlockedCsr:
    """All entries of a matrix, in one cell."""
    return BlockedCsr(
        (rows, columns),
        columns,
        rows,
        np.array([0, rows]),
        np.arange(rows, dtype=np.int32),
        np.arange(rows + 1, dtype=np.int32) * np.int32(columns),
        np.tile(np.arange(columns, dtype=np.uint16), rows),
        np.arange(rows * columns, dtype=np.int32),
    )


def banded_matrix(rows: int, columns: int, band_rows: int, block_columns: int) -> BlockedCsr:
    """All entries of a matrix, in bands of rows and blocks of columns."""
    layout = Rows(
        (rows, columns),
        np.arange(rows + 1, dtype=np.int64) * columns,
        np.tile(np.arange(columns, dtype=np.int32), rows),
        NONE,
    )
    return layout.blocked(block_columns, band_rows)


# Tokens, rows, columns, rows of a band: whole panels and tails, with and without squares of 16;
# two threads share the only panel, or have one each.
PRODUCTS = [
    (32, 5, 7, 5),
    (33, 37, 70, 16),
    (45, 513, 7, 100),
    (97, 513, 70, 513),
    (97, 37, 70, 5),
]


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("tokens", "rows", "columns", "band_rows"), PRODUCTS)
def test_a_product_writes_its_outputs_only(tokens, rows, columns, band_rows, threads, dtype):
    matrix = banded_matrix(rows, columns, band_rows, 32)
    x = (np.arange(columns * tokens) % 5).astype(np.float32)
    values = np.arange(rows * columns, dtype=np.float32) % 4
    bias = np.arange(rows, dtype=np.float32) % 7
    expected = x.reshape(tokens, columns) @ values.reshape(rows, columns).T + bias
    if dtype == np.uint16:  # whole numbers of up to 8 bits are exact in bfloat16
        x, expected = (x.view(np.uint32) >> 16).astype(np.uint16), rounded(expected)
    whole, out = guarded(rows * tokens, dtype)
    with threads_of(threads):
        multiply(matrix, values[matrix.positions], x, out, panel_tokens=32, bias=bias)
    found = out if dtype == np.float32 else (out.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(found.reshape(tokens, rows), expected)
    assert_untouched(whole)


def rounded(exact: np.ndarray) -> np.ndarray:
    """Numbers rounded to bfloat16, as float32."""
    return torch.from_numpy(exact).bfloat16().float().numpy()


@contextlib.contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Let kernels use so many threads."""
    before = numba.get_num_threads()
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    try:
        yield
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize(
    ("dtype", "bfloat16"), [(np.float32, "unpacked"), (np.uint16, "unpacked"), (np.uint16, "dots")]
)
@pytest.mark.parametrize("interleaved", [2, 3, 4])
def test_interleaved_rows_change_no_bit(interleaved, dtype, bfloat16, monkeypatch):
    """The segments of a cell have from none to many entries, also equally many, and their number is
    no multiple of the interleaved rows."""
    if bfloat16 == "dots" and not has_bfloat16_dot():
        pytest.skip("this processor has no dot product of bfloat16")
    generator = np.random.default_rng(interleaved)
    mask = generator.random((53, 90)) < np.minimum(1, generator.pareto(1, (53, 1)) / 5)
    mask[7:12] = False
    starts = np.concatenate([[0], np.cumsum(mask.sum(axis=1))])
    layout = Rows(mask.shape, starts, np.nonzero(mask)[1].astype(np.int32), NONE)
    matrix = layout.blocked(40, 23)
    x = numbers(1, 70 * 90, np.float32)
    weights = gather(numbers(2, starts[-1], np.float32), matrix.positions, "unpacked")
    if dtype == np.uint16:
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
    if bfloat16 == "dots":
        weights = (weights.view(np.uint32) >> 16).astype(np.uint16)
    results = []
    for rows in (1, interleaved):
        monkeypatch.setattr(sparse_products, "interleaved_rows", lambda _, rows=rows: rows)
        out = np.empty(70 * 53, dtype)
        multiply(matrix, weights, x, out, panel_tokens=64, bfloat16=bfloat16)
        results.append(out)
    assert results[0].any()
    np.testing.assert_array_equal(*results)


def test_the_gradient_of_no_tokens_is_zero():
    none = np.empty(0, np.float32)
    found = entry_gradient(dense_matrix(5, 7), none, none, panel_tokens=32)
    np.testing.assert_array_equal(found, np.zeros(35, np.float32))


@pytest.mark.parametrize("count", [1, 2, 6, 15, 16, 17, 18, 63, 64, 65, 200])
def test_gradients_of_any_number_of_entries(count):
    matrix = dense_matrix(1, count)
    x, dy = numbers(1, count * 32, np.float32), numbers(2, 32, np.float32)
    found = entry_gradient(matrix, x, dy, panel_tokens=32)
    expected = x.reshape(32, count).astype(np.float64).T @ dy
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "bfloat16"), [(np.float32, "unpacked"), (np.uint16, "unpacked"), (np.uint16, "dots")]
)
@pytest.mark.parametrize("count", [2, 4, 5, 6, 7])
def test_an_entry_has_the_same_gradient_at_any_place_in_a_row(count, dtype, bfloat16):
    """Four entries, two or one are multiplied together."""
    if bfloat16 == "dots" and not has_bfloat16_dot():
        pytest.skip("this processor has no dot product of bfloat16")
    x, dy = numbers(1, 64 * count, np.float32), numbers(2, 64, np.float32)
    if dtype == np.uint16:
        x, dy = ((array.view(np.uint32) >> 16).astype(np.uint16) for array in (x, dy))
    together = entry_gradient(dense_matrix(1, count), x, dy, panel_tokens=64, bfloat16=bfloat16)
    columns = np.ascontiguousarray(x.reshape(64, count).T)
    single = [
        entry_gradient(dense_matrix(1, 1), column, dy, panel_tokens=64, bfloat16=bfloat16)
        for column in columns
    ]
    assert together.all()
    np.testing.assert_array_equal(together, np.concatenate(single))


@pytest.mark.parametrize("patterns", [[0x7F800001, 0x7FC00000], [0x3F808000, 0x3F818000]])
def test_outputs_are_rounded_to_bfloat16_as_elsewhere(patterns):
    """Ties to even; a NaN stays a NaN. The sum of one entry of value 1 and a bias."""
    matrix = dense_matrix(2, 1)
    bias = np.array(patterns, np.uint32).view(np.float32)
    out = np.empty(64, np.uint16)
    multiply(
        matrix, np.zeros(2, np.float32), np.zeros(32, np.uint16), out, panel_tokens=32, bias=bias
    )
    expected = [0x7FC0, 0x7FC0] if patterns[0] == 0x7F800001 else [0x3F80, 0x3F82]
    assert set(out[::2].tolist()) == {expected[0]}
    assert set(out[1::2].tolist()) == {expected[1]}


def test_a_product_of_other_arrays_is_refused():
    matrix, x = dense_matrix(5, 7), np.zeros(7 * 32, np.float32)
    values, out = np.zeros(35, np.float32), np.zeros(160, np.float32)
    with pytest.raises(ValueError, match=r"values: expected shape \[35\], got \[34\]"):
        multiply(matrix, values[1:], x, out, panel_tokens=32)
    with pytest.raises(ValueError, match=r"out: expected float32, got uint16"):
        multiply(matrix, values, x, out.astype(np.uint16), panel_tokens=32)
    with pytest.raises(ValueError, match=r"x: expected shape \[224\], got \[225\]"):
        multiply(matrix, values, np.zeros(225, np.float32), out, panel_tokens=32)
    with pytest.raises(ValueError, match=r"panel_tokens: expected a multiple of 32, got 16"):
        multiply(matrix, values, x.astype(np.uint16), out.astype(np.uint16), panel_tokens=16)
    with pytest.raises(ValueError, match=r"bias: expected shape \[5\], got \[4\]"):
        multiply(matrix, values, x, out, panel_tokens=32, bias=np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"dy: expected shape \[160\], got \[96\]"):
        entry_gradient(matrix, x, out[64:], panel_tokens=32)


@pytest.mark.parametrize("method", ["unpacked", "dots"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_values_are_gathered_as_a_product_takes_them(dtype, method):
    values = numbers(1, 40_000, dtype)
    positions = np.random.default_rng(2).permutation(values.size).astype(np.int32)
    found = gather(values, positions, method)
    if dtype == np.uint16 and method == "dots":
        assert found.dtype == np.uint16
        np.testing.assert_array_equal(found, values[positions])
        return
    bits = values.view(np.uint32) if dtype == np.float32 else values.astype(np.uint32) << 16
    np.testing.assert_array_equal(found.view(np.uint32), bits[positions])


def random_rows(seed: int, rows: int, columns: int) -> scipy.sparse.csr_array:
    matrix = scipy.sparse.random_array(
        (rows, columns), density=0.3, format="csr", rng=np.random.default_rng(seed)
    )
    matrix.sort_indices()
    matrix.data[:] = numbers(seed, matrix.nnz, np.float32)
    return matrix


@pytest.mark.parametrize("band", [range(40), range(3, 4), range(10, 35), range(39, 40)])
def test_a_band_is_expanded_and_collected(band):
    matrix = random_rows(1, 40, 23)
    starts, columns = matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32)
    values = matrix.data.astype(np.float32)
    whole, tile = guarded(len(band) * 23, np.float32)
    expand(starts, columns, values, NONE, 23, band, tile)
    expected = matrix.toarray()[band.start : band.stop]
    np.testing.assert_array_equal(tile.reshape(expected.shape), expected)
    assert_untouched(whole)
    order = np.random.default_rng(3).permutation(values.size).astype(np.int32)
    elsewhere = np.empty_like(values)
    elsewhere[order] = values
    expand(starts, columns, elsewhere, order, 23, band, tile)
    np.testing.assert_array_equal(tile.reshape(expected.shape), expected)
    kept = np.full(values.size, -1, np.float32)
    collect(starts, columns, 23, band, tile, kept)
    inside = slice(starts[band.start], starts[band.stop])
    np.testing.assert_array_equal(kept[inside], values[inside])
    assert (np.delete(kept, np.r_[inside]) == -1).all()


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 100])
def test_a_band_is_expanded_by_a_bitmap_as_without(width, dtype):
    matrix = random_rows(width, 40, width)
    starts, columns = matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32)
    values, bitmap = numbers(7, columns.size, dtype), bitmap_of(starts, columns, width)
    for band in (range(40), range(10, 35)):
        whole, tile = guarded(len(band) * width, dtype)
        expand_marked(starts, columns, bitmap, values, width, band, tile)
        expected = np.zeros_like(tile)
        expand(starts, columns, values, NONE, width, band, expected)
        np.testing.assert_array_equal(tile, expected)
        assert_untouched(whole)


def test_a_band_that_is_not_in_the_matrix_is_refused():
    starts, columns = np.array([0, 1, 1]), np.zeros(1, np.int32)
    tile, values = np.zeros(4, np.float32), np.zeros(1, np.float32)
    for band in (range(3), range(1, 1), range(0, 2, 2)):
        with pytest.raises(ValueError, match=r"band: expected consecutive rows of 0 to 2, got"):
            expand(starts, columns, values, NONE, 2, band, tile)


@pytest.mark.parametrize("given", [0, 3, 76, 78])
def test_one_token_of_another_width_than_the_matrix_is_refused(given):
    starts, columns = np.array([0, 1]), np.array([76], np.int32)
    x = np.ones(given, np.float32)
    with pytest.raises(ValueError, match=rf"x: expected shape \[77\], got \[{given}\]"):
        multiply_vector(starts, columns, np.ones(1, np.float32), 77, x)


@pytest.mark.parametrize("given", [1, 76, 78])
def test_tile_of_another_width_than_the_matrix_is_refused(given):
    starts, columns = np.array([0, 1, 2]), np.array([76, 0], np.int32)
    values, tile = np.ones(2, np.float32), np.zeros(2 * given, np.float32)
    bitmap, band = bitmap_of(starts, columns, 77), range(2)
    refused = pytest.raises(ValueError, match=rf"tile: expected shape \[154\], got \[{2 * given}\]")
    with refused:
        expand(starts, columns, values, NONE, 77, band, tile)
    with refused:
        expand_marked(starts, columns, bitmap, values, 77, band, tile)
    with refused:
        collect(starts, columns, 77, band, tile, values)


OTHER_PROCESSOR = """
import numpy as np, torch
from penstock.kernels.pair_code import has_bfloat16_dot
from penstock.sparsity import Choice, SparseKernel, forward, input_gradient, weight_gradient
from sparse_masks import layout_of, mask_of, random_tensor
assert not has_bfloat16_dot()
for dtype in (torch.float32, torch.bfloat16):
    mask = mask_of("power law", (37, 83), 1)
    layout, choice = layout_of(mask), Choice(*3 * [SparseKernel(16)])
    values, x, dy = (random_tensor(s, dtype, *n) for s, n in
                     enumerate([(layout.entries,), (45, 83), (45, 37)]))
    weight = np.zeros(mask.shape)
    weight[mask] = values.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for found, expected in (
        (forward(layout, values, x, choice=choice), x.double().numpy() @ weight.T),
        (input_gradient(layout, values, dy, choice=choice), dy.double().numpy() @ weight),
        (weight_gradient(layout, x, dy, choice=choice), (dy.double().T @ x.double()).numpy()[mask]),
    ):
        np.testing.assert_allclose(found.double().numpy(), expected, tolerance, 20 * tolerance)
print("agrees")
"""


@pytest.mark.long
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names a processor of this architecture")
def test_products_compiled_for_a_processor_with_avx2_alone(tmp_path):
    environment = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+sse4.2,+bmi2",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESSOR],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "agrees", done.stderr
