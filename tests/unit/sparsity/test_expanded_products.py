"""The products of expanded weights: the bits of PyTorch's dense products, in memory for a band.

Every test runs on the CPU, and on a GPU where there is one.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from real_allocations import peak_allocated_bytes
from sparse_masks import KINDS, layout_of, mask_of, random_tensor

from penstock.sparsity import (
    Choice,
    DenseTiles,
    ExpandedProducts,
    MaskBitmap,
    bitmap_bytes,
    entries_of,
    expand,
    expanded_bytes,
    expanded_product_bytes,
    expanded_products,
    expansion_bytes,
    forward,
    host_bitmap,
    index_of_mask,
    input_gradient,
    selection_bytes,
    to_dense,
    weight_gradient,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DEVICES)
def device(request):
    """Return a device, in PyTorch's deterministic mode: an operator without a fixed order is an
    error."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(was)


def narrow_bands(monkeypatch, elements, rows=1):
    monkeypatch.setattr(expanded_products, "BAND_ELEMENTS", elements)
    monkeypatch.setattr(expanded_products, "BAND_ROWS", rows)


class Case:
    """A weight and activations on a device, and the dense weight."""

    def __init__(self, kind, shape, dtype, device, tokens=19, seed=0):
        rows, columns = shape
        mask = mask_of(kind, shape, seed)
        bitmap = host_bitmap(index_of_mask(mask.reshape(-1)), shape)
        self.mask = MaskBitmap(shape, bitmap.row_starts, bitmap.bits.to(device))
        self.kept = torch.from_numpy(mask).to(device)
        values = random_tensor(seed + 1, dtype, int(mask.sum()))
        if values.numel():
            values[0] = float("inf")  # which must not spread
        self.values, self.layout, self.host_values = values.to(device), layout_of(mask), values
        self.x = random_tensor(seed + 2, dtype, tokens, columns).to(device)
        self.dy = random_tensor(seed + 3, dtype, tokens, rows).to(device)
        self.bias = random_tensor(seed + 4, dtype, rows).to(device)
        self.dense = torch.zeros(shape, dtype=dtype, device=device)
        self.dense[self.kept] = self.values

    def products(self):
        return ExpandedProducts(self.mask, self.values)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("band", [1, 300, 1 << 20])
def test_expanded_weights_have_the_values_at_the_mask_and_zeros_elsewhere(
    kind, dtype, band, device, monkeypatch
):
    narrow_bands(monkeypatch, band)
    case = Case(kind, (37, 83), dtype, device)
    found = expand(case.mask, case.values)
    assert found.dtype == dtype
    assert torch.equal(found, case.dense)
    assert torch.equal(found.cpu(), to_dense(case.layout, case.host_values))
    assert case.mask.bits.nbytes == bitmap_bytes((37, 83)) == 37 * 12


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 45])
def test_products_have_the_bits_of_the_dense_product(kind, dtype, tokens, device):
    case = Case(kind, (37, 83), dtype, device, tokens)
    case.values.nan_to_num_(posinf=1)
    case.dense.nan_to_num_(posinf=1)
    products = case.products()
    for _ in range(2):  # the second time with what the first has made
        found = products.multiply(case.x, case.bias)
        assert torch.equal(found, torch.addmm(case.bias, case.x, case.dense.t()))
        assert torch.equal(products.multiply(case.x), case.x @ case.dense.t())
        assert torch.equal(products.multiply(case.dy, transposed=True), case.dy @ case.dense)
        found = products.entry_gradient(case.dy, case.x)
        assert found.dtype == torch.float32
        assert torch.equal(found, (case.dy.t() @ case.x)[case.kept].float())


@pytest.mark.parametrize("dtype", TYPES)
def test_products_have_the_bits_of_the_tiles_of_a_processor(dtype):
    """In one band, and in bands of equal rows for the gradient of the entries."""
    case = Case("random", (40, 64), dtype, "cpu")
    case.host_values[0] = case.dense[case.kept][1]
    one = Choice(*3 * [DenseTiles(40)])
    layout, values = case.layout, case.host_values
    products = ExpandedProducts(case.mask, values)
    expected = forward(layout, values, case.x, case.bias, choice=one)
    assert torch.equal(products.multiply(case.x, case.bias), expected)
    expected = input_gradient(layout, values, case.dy, choice=one)
    found = products.multiply(case.dy, transposed=True)
    assert torch.equal(found, expected)
    expected = weight_gradient(layout, case.x, case.dy, choice=one)
    assert torch.equal(products.entry_gradient(case.dy, case.x), expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("band", [64 * 9, 1])
def test_gradient_in_bands_has_the_bits_of_tiles_of_as_many_rows(dtype, band, monkeypatch):
    narrow_bands(monkeypatch, band)
    case = Case("power law", (40, 64), dtype, "cpu")
    bands = Choice(*3 * [DenseTiles(max(1, band // 64))])
    expected = weight_gradient(case.layout, case.x, case.dy, choice=bands)
    assert torch.equal(case.products().entry_gradient(case.dy, case.x), expected)


@given(
    kind=st.sampled_from(KINDS),
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    band=st.integers(1, 5000),
    rows=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_selection_undoes_expansion_for_any_mask_shape_and_band(kind, shape, band, rows, seed):
    with pytest.MonkeyPatch.context() as patch:
        narrow_bands(patch, band, rows)
        case = Case(kind, shape, torch.float32, "cpu", seed=seed)
        dense = expand(case.mask, case.values)
        assert torch.equal(dense, case.dense)
        assert torch.equal(case.products().select(dense), case.values)
        other = random_tensor(seed, torch.float32, *shape)
        assert torch.equal(case.products().select(other), entries_of(case.layout, other))


def test_bands_are_whole_tiles_of_rows_where_these_fit():
    rows_of = expanded_products._band_rows
    assert rows_of((4096, 4096)) == 2048
    assert rows_of((12288, 12288)) == 640
    assert rows_of((50257, 768)) == 10880
    assert rows_of((100, 7)) == 100
    assert rows_of((10, 1 << 26)) == 1


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["random", "dense"])
def test_allocations_stay_below_what_is_counted(kind, dtype, monkeypatch):
    narrow_bands(monkeypatch, 20_000)
    shape = (512, 257)
    case = Case(kind, shape, dtype, "cpu", tokens=40)
    capacity, dense = case.mask.entries, dtype.itemsize * 512 * 257
    kept = expanded_bytes(shape, capacity, dtype)
    product = expanded_product_bytes(shape, capacity, dtype)
    selection = selection_bytes(shape, capacity, dtype)
    places, result = kept - dense, 4 * capacity
    counted = [
        (lambda: expand(case.mask, case.values), expansion_bytes(shape) + dense),
        (lambda: case.products().multiply(case.x), kept + product + dtype.itemsize * 40 * 512),
        (lambda: case.products().select(case.dense), places + selection + result),
        (lambda: case.products().entry_gradient(case.dy, case.x), places + product + result),
    ]
    for act, size in counted:
        act()
        found = peak_allocated_bytes(act)
        assert 0.3 * size <= found <= size + 32_000  # tables of an operator on the CPU


def test_gradient_of_a_weight_is_never_whole(monkeypatch):
    """Its dense gradient is more than eight times as large as all that is allocated."""
    narrow_bands(monkeypatch, 16 * 256)
    case = Case("power law", (2048, 256), torch.float32, "cpu", tokens=8)
    dense = 4 * 2048 * 256
    assert peak_allocated_bytes(lambda: case.products().entry_gradient(case.dy, case.x)) < dense / 8


def test_arguments_of_other_shapes_are_refused():
    case = Case("random", (37, 83), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"^values: expected \[\d+\], one per entry of the mask"):
        expand(case.mask, case.values[1:])
    with pytest.raises(ValueError, match=r"^x: expected torch\.float32 \[tokens, 83\], got"):
        case.products().multiply(case.dy)
    with pytest.raises(ValueError, match=r"^x: expected torch\.float32 \[tokens, 37\], got"):
        case.products().multiply(case.dy.bfloat16(), transposed=True)
    with pytest.raises(ValueError, match=r"^gradient: expected \[tokens, 37\] and \[tokens, 83\]"):
        case.products().entry_gradient(case.x, case.dy)
    with pytest.raises(ValueError, match=r"^dense tensor: expected \[37, 83\], got \[83, 37\]"):
        case.products().select(case.dense.t())
    with pytest.raises(ValueError, match=r"^compressed rows: expected the mask of a whole weight"):
        host_bitmap(index_of_mask(mask_of("random", (3, 4), 0).reshape(-1)), (4, 4))
