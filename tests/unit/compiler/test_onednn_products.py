"""The copies and bands that make products by oneDNN faster change them by rounding at most."""

import pytest
import torch
from real_allocations import peak_allocated_bytes

from penstock.compiler import has_onednn, onednn_products
from penstock.compiler.onednn_products import _is_transposed, linear, scratch_bytes

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this PyTorch has no oneDNN")

ROWS, INNER, COLUMNS = 96, 500, 70
FORMS = ["rows", "transposed", "apart", "transposed apart", "overlapping"]


def matrix(form, shape, seed):
    """Random numbers in one of the forms that a factor may have."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    apart = 5 if form.endswith("apart") else 0
    if form.startswith("transposed"):
        return torch.randn(columns, rows + apart, generator=generator)[:, :rows].t()
    if form == "overlapping":  # as of patches of a signal
        return torch.randn(rows * columns, generator=generator).as_strided(shape, (columns // 2, 1))
    return torch.randn(rows, columns + apart, generator=generator)[:, :columns]


@pytest.fixture(params=["plain", "copied", "banded"])
def way(request, monkeypatch):
    """The right factor as it is, copied, and a sum in bands of which the last is short."""
    limits = {"copied": (64, 8192, 64), "banded": (64, 256, 64), "plain": (1024, 8192, 768)}
    long_sum, banded_sum, least_rows = limits[request.param]
    monkeypatch.setattr(onednn_products, "_LONG_SUM", long_sum)
    monkeypatch.setattr(onednn_products, "_BANDED_SUM", banded_sum)
    monkeypatch.setattr(onednn_products, "_LEAST_ROWS", least_rows)
    return request.param


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("right_form", FORMS)
@pytest.mark.parametrize("left_form", FORMS)
def test_product_is_exact_to_rounding(left_form, right_form, has_bias, way):
    left = matrix(left_form, (ROWS, INNER), 0)
    right = matrix(right_form, (COLUMNS, INNER), 1)
    bias = torch.randn(COLUMNS) if has_bias else None
    given = [factor.clone() for factor in (left, right)]
    found = linear(left, right, bias)
    exact = left.double() @ right.double().t() + (0 if bias is None else bias.double())
    size = left.double().abs() @ right.double().abs().t()
    assert found.is_contiguous()
    assert ((found.double() - exact).abs() <= 2**-20 * size).all()
    assert torch.equal(found, linear(left, right, bias))
    assert torch.equal(left, given[0])
    assert torch.equal(right, given[1])


@pytest.mark.parametrize("right_form", FORMS)
def test_right_factor_has_a_form_for_which_onednn_has_kernels(right_form, way, monkeypatch):
    """With gaps between its rows a product takes a thousand times as long."""
    multiply, given = onednn_products._linear, []

    def recorded(left, right, bias):
        given.append((left, right))
        return multiply(left, right, bias)

    monkeypatch.setattr(onednn_products, "_linear", recorded)
    linear(matrix("apart", (ROWS, INNER), 0), matrix(right_form, (COLUMNS, INNER), 1))
    assert len(given) == (8 if way == "banded" and right_form.startswith("transposed") else 1)
    for left, right in given:
        assert left.is_contiguous()
        assert right.is_contiguous() or right.t().is_contiguous()


@pytest.mark.parametrize("right_form", FORMS)
@pytest.mark.parametrize("left_form", FORMS)
def test_allocations_are_counted(left_form, right_form, way):
    left = matrix(left_form, (10 * ROWS, INNER), 0)
    right = matrix(right_form, (10 * COLUMNS, INNER), 1)

    def act():
        return linear(left, right)

    counted = act().nbytes + scratch_bytes(left, right)
    of_library = 200_000 * torch.get_num_threads()
    assert 0.8 * counted <= peak_allocated_bytes(act) <= counted + of_library


def test_a_large_right_factor_is_not_copied(monkeypatch):
    """The run may need the memory that a copy of a large weight takes."""
    left, right = torch.empty(1000, 2000), torch.empty(2000, 300).t()
    assert scratch_bytes(left, right) == right.nbytes
    monkeypatch.setattr(onednn_products, "_MOST_COPIED", right.nbytes - 1)
    assert scratch_bytes(left, right) == 0


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(3, 4), False),
        (torch.empty(3, 4).t(), True),
        (torch.empty(3, 8)[:, :4].t(), True),
        (torch.empty(1, 4).t(), False),
        (torch.empty(4, 1).t(), False),
        (torch.empty(4, 4, 4)[:, :, 1], False),
    ],
)
def test_transposed_views_are_recognised(tensor, expected):
    assert _is_transposed(tensor) == expected


def test_other_types_are_refused():
    """A program file may name the operator."""
    wide = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"expected float32 in host memory, got torch\.float64 on"):
        torch.ops.penstock.onednn_linear(wide, wide)
    assert torch.equal(linear(torch.ones(4, 4), torch.ones(4, 4)), torch.full((4, 4), 4.0))
