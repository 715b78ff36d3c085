"""The products of sparse weights against SciPy in float64, over masks, types, tokens and ways."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sparse_masks import (
    KINDS,
    assert_close,
    exact,
    exact_matrix,
    layout_of,
    mask_of,
    random_tensor,
)

from penstock.kernels.pair_code import has_bfloat16_dot
from penstock.sparsity import (
    Choice,
    DenseTiles,
    SparseKernel,
    entries_of,
    forward,
    input_gradient,
    max_building_bytes,
    max_layout_bytes,
    to_dense,
    weight_gradient,
)

TYPES = [torch.float32, torch.bfloat16]


def sparse(block: int, band: int | None = None, panel: int = 32, bfloat16="unpacked") -> Choice:
    return Choice(*3 * [SparseKernel(block, band, panel, bfloat16)])


def expanded(band: int) -> Choice:
    return Choice(*3 * [DenseTiles(band)])


CHOICES = {
    "one block": sparse(1024),
    "blocks": sparse(16),
    "narrow blocks and bands": sparse(7, 5),
    "expanded": expanded(9),
}


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


class Case:
    """A weight, activations, and the three products of them in float64."""

    def __init__(self, kind: str, shape, tokens: int, dtype: torch.dtype, seed: int = 0) -> None:
        rows, columns = shape
        self.mask = mask_of(kind, shape, seed)
        self.layout = layout_of(self.mask)
        self.values = random_tensor(seed + 1, dtype, self.layout.entries)
        self.x = random_tensor(seed + 2, dtype, tokens, columns)
        self.dy = random_tensor(seed + 3, dtype, tokens, rows)
        self.bias = random_tensor(seed + 4, dtype, rows)

    def products(self, choice: Choice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            forward(self.layout, self.values, self.x, self.bias, choice=choice),
            input_gradient(self.layout, self.values, self.dy, choice=choice),
            weight_gradient(self.layout, self.x, self.dy, choice=choice),
        )

    def check(self, choice: Choice) -> None:
        matrix, x, dy, bias = (
            exact_matrix(self.mask, self.values), exact(self.x), exact(self.dy), exact(self.bias)
        )  # fmt: skip
        size, rows, columns = abs(matrix), *self.mask.shape
        y, dx, dw = self.products(choice)
        assert y.dtype == dx.dtype == self.x.dtype
        assert dw.dtype == torch.float32
        magnitude = (size @ abs(x).T).T + abs(bias)
        is_rounded = any(
            isinstance(p, DenseTiles) for p in (choice.forward, choice.weight_gradient)
        )
        is_rounded = is_rounded and self.x.dtype == torch.bfloat16
        if is_rounded:
            magnitude = magnitude * 2**15 / (columns + 2)  # bias may be added to a rounded sum
        assert_close(y, (matrix @ x.T).T + bias, magnitude, columns)
        assert_close(dx, (matrix.T @ dy.T).T, (size.T @ abs(dy).T).T, rows)
        gradient, magnitude = (dy.T @ x)[self.mask], (abs(dy).T @ abs(x))[self.mask]
        if is_rounded:
            dw = dw.bfloat16()  # which it is already, as that of a dense product
        assert_close(dw, gradient, magnitude, len(x))


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_every_kind_of_mask(kind, dtype, name):
    Case(kind, (37, 83), 45, dtype).check(CHOICES[name])


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 31, 64, 100, 257])
def test_products_of_any_number_of_tokens(tokens, dtype, name):
    Case("random", (70, 33), tokens, dtype, seed=tokens).check(CHOICES[name])


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (64, 128), (256, 16)])
@pytest.mark.parametrize("dtype", TYPES)
def test_products_of_extreme_shapes(shape, dtype):
    for name in ("blocks", "expanded"):
        Case("random", shape, 40, dtype, seed=5).check(CHOICES[name])


def test_panels_of_more_tokens():
    Case("random", (70, 133), 150, torch.float32).check(sparse(48, panel=128))


@pytest.mark.skipif(not has_bfloat16_dot(), reason="this processor has no dot product of bfloat16")
@pytest.mark.parametrize("kind", KINDS)
def test_products_by_the_dot_product_of_bfloat16(kind):
    case = Case(kind, (37, 83), 77, torch.bfloat16)
    for block in (1024, 16):
        case.check(sparse(block, bfloat16="dots"))


@pytest.mark.skipif(not has_bfloat16_dot(), reason="this processor has no dot product of bfloat16")
@pytest.mark.parametrize("block", [1024, 16, 7])
def test_dot_products_add_entry_after_entry(block):
    """They have the bits of the sums that are made one entry at a time."""
    case = Case("random", (70, 133), 100, torch.bfloat16)
    by_dots = case.products(sparse(block, panel=64, bfloat16="dots"))
    one_by_one = case.products(sparse(block, panel=64))
    for a, b in zip(by_dots[:2], one_by_one[:2], strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.skipif(not has_bfloat16_dot(), reason="this processor has no dot product of bfloat16")
@pytest.mark.parametrize("block", [1, 3, 4])
def test_dot_products_keep_the_sign_of_zero(block):
    case = Case("dense", (1, 4), 32, torch.bfloat16)
    case.values, case.x = -torch.ones_like(case.values), torch.zeros_like(case.x)
    case.bias = torch.full_like(case.bias, -0.0)
    assert case.products(sparse(block, bfloat16="dots"))[0].signbit().all()


@pytest.mark.skipif(not has_bfloat16_dot(), reason="this processor has no dot product of bfloat16")
@pytest.mark.parametrize("column", [4, 18])
def test_dot_products_keep_tokens_apart(column):
    """With 19 columns in blocks of 16 the last one is not one of a pair."""
    case = Case("dense", (9, 19), 70, torch.bfloat16)
    expected = case.products(sparse(16, bfloat16="dots"))[0]
    case.x[33, column] = torch.inf
    found = case.products(sparse(16, bfloat16="dots"))[0]
    others = torch.arange(70) != 33
    assert torch.equal(found[others], expected[others])
    assert found[33].isinf().all()


def test_a_processor_without_the_dot_product_refuses_it(monkeypatch):
    monkeypatch.setattr("penstock.kernels.sparse_products.has_bfloat16_dot", lambda: False)
    case = Case("random", (8, 8), 32, torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected 'unpacked', got 'dots': this processor has no"):
        case.products(sparse(16, bfloat16="dots"))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    tokens=st.integers(1, 70),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(TYPES),
    block=st.integers(1, 70),
    band=st.one_of(st.none(), st.integers(1, 70)),
    seed=st.integers(0, 2**32),
)
def test_products_of_random_cases(shape, tokens, kind, dtype, block, band, seed):
    case = Case(kind, shape, tokens, dtype, seed)
    case.check(sparse(block, band))
    case.check(expanded(band or 60))


@pytest.mark.parametrize("bfloat16", ["float32", "unpacked", "dots"])
def test_neither_threads_nor_blocks_nor_bands_change_a_bit(bfloat16):
    if bfloat16 == "dots" and not has_bfloat16_dot():
        pytest.skip("this processor has no dot product of bfloat16")
    dtype = torch.float32 if bfloat16 == "float32" else torch.bfloat16
    method = "unpacked" if bfloat16 == "float32" else bfloat16
    case = Case("power law", (150, 90), 200, dtype)
    numba.set_num_threads(1)
    expected = case.products(sparse(1024, bfloat16=method))
    for threads in {1, min(2, numba.config.NUMBA_NUM_THREADS), numba.config.NUMBA_NUM_THREADS}:
        numba.set_num_threads(threads)
        for block, band in ((1024, None), (16, None), (5, 40)):
            found = case.products(sparse(block, band, bfloat16=method))
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b), (threads, block, band)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("tokens", [20, 64, 65, 200])
@pytest.mark.parametrize("dtype", TYPES)
def test_threads_share_panels_or_have_their_own(dtype, tokens, threads):
    """Bands keep threads busy where there are fewer panels than threads."""
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    case = Case("random", (90, 70), tokens, dtype)
    for found, expected in zip(
        case.products(sparse(32, 20, panel=64)), case.products(sparse(1024, panel=32)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-4)
    case.check(sparse(32, 20, panel=64))


def test_gradients_of_more_panels_than_are_packed_at_once(monkeypatch):
    case, choice = Case("random", (40, 50), 300, torch.float32), sparse(16)
    expected = case.products(choice)[2]
    monkeypatch.setattr("penstock.kernels.sparse_products._TOGETHER", 3 * 90 * 32 * 4)
    assert torch.equal(case.products(choice)[2], expected)


@pytest.mark.parametrize("name", [*CHOICES, "one tile"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [1, 2, 45])
def test_products_of_a_weight_that_is_stored_by_inputs(tokens, dtype, name):
    """`x W + b`, as GPT-2's Conv1D, has the sums of the inputs' gradient, and a bias."""
    choice = expanded(4096) if name == "one tile" else CHOICES[name]
    for kind in ("random", "empty rows", "no entry"):
        case = Case(kind, (37, 83), tokens, dtype)
        bias = random_tensor(9, dtype, 83)
        matrix, x, b = exact_matrix(case.mask, case.values), exact(case.dy), exact(bias)
        magnitude = (abs(matrix).T @ abs(x).T).T + abs(b)
        if dtype == torch.bfloat16:
            magnitude = magnitude * 2**15 / 40  # bias may be added to a rounded sum
        layout, values = case.layout, case.values
        y = forward(layout, values, case.dy, bias, choice=choice, transposed=True)
        assert_close(y, (matrix.T @ x.T).T + b, magnitude, 37)
        plain = forward(layout, values, case.dy, choice=choice, transposed=True)
        if tokens > 1:
            gradient = input_gradient(layout, values, case.dy, choice=choice)
            assert torch.equal(plain, gradient)
        else:
            alone = forward(layout, values, case.dy, choice=None, transposed=True)
            assert torch.equal(plain, alone)
            y = forward(layout, values, case.x, case.bias, choice=None)
            assert torch.equal(y, forward(layout, values, case.x, case.bias, choice=choice))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_expanded_and_its_entries_are_taken_back(kind, dtype):
    for shape in ((37, 83), (1, 50), (64, 32)):
        case = Case(kind, shape, 2, dtype)
        dense = to_dense(case.layout, case.values)
        expected = torch.zeros(shape, dtype=dtype)
        expected[torch.from_numpy(case.mask)] = case.values
        assert torch.equal(dense, expected)
        other = random_tensor(5, dtype, *shape)
        entries = entries_of(case.layout, other)
        assert entries.dtype == torch.float32
        assert torch.equal(entries, other[torch.from_numpy(case.mask)].float())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_keeps_at_most_the_bytes_that_are_foreseen(kind):
    orders = Choice(SparseKernel(16, 16), SparseKernel(16), SparseKernel(32))
    mixed = Choice(DenseTiles(16), DenseTiles(16), SparseKernel(16))
    for shape in ((37, 83), (300, 16), (16, 300), (1, 1), (128, 512)):
        for choice in (orders, mixed, expanded(16), expanded(4096)):
            case = Case(kind, shape, 40, torch.float32)
            case.products(choice)
            entries, rows = case.layout.entries, case.layout.rows.nbytes
            # Tiles may keep nothing more: a bitmap is made only where the processor expands by one.
            assert rows < case.layout.nbytes or isinstance(choice.forward, DenseTiles)
            assert rows <= case.layout.nbytes <= max_layout_bytes(shape, entries), (shape, choice)
            assert max_building_bytes(shape, entries) > 0


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", TYPES)
def test_non_finite_values_stay_with_their_token(dtype, value):
    case = Case("dense", (20, 30), 40, dtype)
    case.x[7, 3] = value
    y = forward(case.layout, case.values, case.x, choice=sparse(16))
    finite = torch.isfinite(y).all(dim=1)
    assert finite.tolist() == [token != 7 for token in range(40)]


def test_arguments_that_do_not_fit_are_refused():
    case, choice = Case("random", (8, 10), 5, torch.float32), sparse(16)
    layout, values, x, dy = case.layout, case.values, case.x, case.dy
    with pytest.raises(ValueError, match=r"x: expected 10 features, got 8"):
        forward(layout, values, dy, choice=choice)
    with pytest.raises(ValueError, match=r"values: expected torch.float32 \[\d+\], of the type of"):
        forward(layout, values[1:], x, choice=choice)
    with pytest.raises(ValueError, match=r"values: expected torch.float32 .* got torch.bfloat16"):
        input_gradient(layout, values.bfloat16(), dy, choice=choice)
    with pytest.raises(ValueError, match=r"x: expected float32 or bfloat16 \[tokens, features\]"):
        forward(layout, values.double(), x.double(), choice=choice)
    with pytest.raises(ValueError, match=r"bias: expected shape \[8\], one number per output"):
        forward(layout, values, x, case.bias[1:], choice=choice)
    with pytest.raises(ValueError, match=r"dy: expected torch.float32 of 5 tokens, as x has, got"):
        weight_gradient(layout, x, dy[1:], choice=choice)
    with pytest.raises(ValueError, match=r"panel_tokens: expected a multiple of 32, got 16"):
        forward(layout, values.bfloat16(), x.bfloat16(), choice=sparse(16, panel=16))
    with pytest.raises(ValueError, match=r"block_columns: expected 1 to 65536, got 0"):
        forward(layout, values, x, choice=sparse(0))
    with pytest.raises(ValueError, match=r"band_rows: expected at least 1, got 0"):
        forward(layout, values, x, choice=expanded(0))
    with pytest.raises(ValueError, match=r"x: expected 8 features, got 10"):
        forward(layout, values, x, choice=choice, transposed=True)
    with pytest.raises(ValueError, match=r"bias: expected shape \[10\], one number per output"):
        forward(layout, values, dy, case.bias, choice=choice, transposed=True)
    with pytest.raises(ValueError, match=r"choice: expected one for 5 tokens, got None"):
        forward(layout, values, x, choice=None)
    with pytest.raises(ValueError, match=r"values: expected float32 or bfloat16 \[\d+\], one per"):
        to_dense(layout, values[1:])
    with pytest.raises(
        ValueError, match=r"dense tensor: expected float32 or bfloat16 \[8, 10\], g"
    ):
        entries_of(layout, x)


def test_numbers_behind_a_view_are_not_read_or_written():
    """Columns and rows that are cut out of a larger tensor give what a copy gives."""
    case = Case("random", (30, 40), 50, torch.float32)
    wide = random_tensor(9, torch.float32, 70, 90)
    wide[10:60, 20:60] = case.x
    before = wide.clone()
    expected = forward(case.layout, case.values, case.x, choice=sparse(16))
    for choice in (sparse(16), expanded(7)):
        found = forward(case.layout, case.values, wide[10:60, 20:60], choice=choice)
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)
    assert torch.equal(wide, before)
