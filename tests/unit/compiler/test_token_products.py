"""Products of a matrix and one token have a kernel of their own in graphs."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.compiler import token_products
from penstock.compiler.matmul_backend import choose_products
from penstock.compiler.product_libraries import PRODUCTS
from penstock.compiler.token_products import linear, scratch_bytes

aten = torch.ops.aten
INNER, COLUMNS = 300, 500


def graph_of(function, *given):
    return make_fx(function)(*given).graph


def targets(graph):
    return [node.target for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_is_rounded_once(dtype, is_transposed, has_bias):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(1, INNER, generator=generator).to(dtype)
    right = torch.randn(COLUMNS, INNER, generator=generator).to(dtype)
    bias = torch.randn(COLUMNS, generator=generator).to(dtype) if has_bias else None
    right = right.t().contiguous().t() if is_transposed else right
    found = linear(left, right, bias)
    exact = left.double() @ right.double().t() + (0 if bias is None else bias.double())
    size = left.double().abs() @ right.double().abs().t() + 1
    step = 2**-8 * exact.abs() if dtype == torch.bfloat16 else 0
    assert found.shape == (1, COLUMNS)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= 2**-20 * size + step).all()


def test_factor_with_gaps_between_its_rows_is_copied():
    left, right = torch.randn(1, INNER), torch.randn(COLUMNS, INNER + 5)[:, :INNER]
    assert torch.allclose(linear(left, right), left @ right.t(), atol=1e-4)
    left = torch.randn(INNER, 2)[:, :1].t()
    assert torch.allclose(linear(left, right), left @ right.t(), atol=1e-4)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.ones(2, 4), torch.ones(3, 4)),
        (torch.ones(1, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)),
        (torch.ones(1, 4), torch.ones(3, 4, dtype=torch.bfloat16)),
    ],
)
def test_other_operands_are_refused(left, right):
    with pytest.raises(ValueError, match="token_linear: expected one token and factors of one"):
        linear(left, right)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_products_with_one_token_are_chosen(products, dtype):
    def layer(x, weight, bias):
        return torch.addmm(bias, x, weight), torch.mm(x, weight)

    weight, bias = torch.randn(INNER, COLUMNS).to(dtype), torch.randn(COLUMNS).to(dtype)
    for tokens, is_chosen in ((1, True), (2, False)):
        x = torch.randn(tokens, INNER).to(dtype)
        graph = graph_of(layer, x, weight, bias)
        choose_products(graph, products, one_token=True)
        found = targets(graph).count(torch.ops.penstock.token_linear.default)
        assert found == (2 if is_chosen else 0)
        made = torch.fx.GraphModule(torch.nn.Module(), graph)(x, weight, bias)
        for own, plain in zip(made, layer(x, weight, bias), strict=True):
            assert torch.allclose(own, plain, atol=1e-4 if dtype == torch.float32 else 0.5)


def test_small_products_and_other_biases_stay():
    def layer(x, weight, bias):
        return torch.addmm(bias, x, weight)

    for weight, bias in (
        (torch.randn(8, 8), torch.randn(8)),
        (torch.randn(INNER, COLUMNS), torch.randn(1)),
    ):
        graph = graph_of(layer, torch.randn(1, len(weight)), weight, bias)
        choose_products(graph, "torch", one_token=True)
        assert targets(graph) == [aten.addmm.default]


def test_scratch_holds_the_parts():
    from penstock.kernels.vector_products import parts_memory

    for inner, columns in ((INNER, COLUMNS), (5, 9), (4096, 64)):
        left, right = torch.empty(1, inner), torch.empty(columns, inner)
        assert parts_memory(inner, columns).nbytes <= scratch_bytes(left, right)
    assert token_products.has_kernel(torch.empty(1, 300), torch.empty(300, 300))
