"""Who multiplies matrices follows from the processor alone, and is part of the program."""

import pytest
import torch
from sweeps import compiled, sweep, weights_of
from torch import fx, nn
from torch.nn import functional as F

from penstock.calibration.operator_cases import Operand, traced
from penstock.compiler import has_onednn, lower_attention, products_for
from penstock.compiler.attention_calls import attention, attention_backward
from penstock.compiler.matmul_backend import choose_products, product
from penstock.engine import EnginePlan, TorchEngine
from penstock.kernels import processor
from penstock.kernels.processor import Processor

ROWS, WIDTH, VOCABULARY = 256, 96, 160
needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this PyTorch has no oneDNN")

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def causal_attention(*given):
    """Return the output of attention over `[rows, tokens, heads, size]`, and its gradients."""
    query, key, value, gradient = (tensor.transpose(1, 2) for tensor in given)
    out, sums = ATTENTION(query, key, value, 0.0, True)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return out, *backward(gradient, query, key, value, out, sums, 0.0, True)


class Net(nn.Module):
    """A layer large enough for a library to matter, and a head with its loss."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(torch.tanh(self.body(x))).float(), labels)


def rows(seed):
    torch.manual_seed(seed)
    return {"x": torch.randn(ROWS, WIDTH), "labels": torch.randint(VOCABULARY, (ROWS,))}


def calls(program, name):
    return [
        node
        for kind in {stage.kind.digest: stage.kind for stage in program.stages}.values()
        for graph in kind.graphs.values()
        for node in graph.nodes
        if name in str(node.target)
    ]


@needs_onednn
@pytest.mark.parametrize(
    ("architecture", "vendor", "expected"),
    [
        ("x86_64", "GenuineIntel", "torch"),
        ("x86_64", "AuthenticAMD", "onednn"),
        ("AMD64", "HygonGenuine", "onednn"),
        ("x86_64", "", "onednn"),
        ("x86_64", None, "torch"),  # the system does not say
        ("aarch64", "AuthenticAMD", "torch"),
    ],
)
def test_product_library_follows_the_processor(architecture, vendor, expected):
    assert products_for(Processor(architecture, vendor)) == expected


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
@pytest.mark.parametrize(
    ("multiplies_bfloat16", "expected"), [(False, "torch+float32"), (True, "torch")]
)
def test_without_avx512_every_processor_uses_pytorchs_library(
    vendor, multiplies_bfloat16, expected
):
    processor = Processor(
        "x86_64", vendor, has_avx512=False, multiplies_bfloat16=multiplies_bfloat16
    )
    assert products_for(processor) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx avx2 fma", (False, False)),
        ("avx2 avx512f avx512bw avx512vl", (False, False)),
        ("avx2 avx512f avx512bw avx512vl avx512dq", (True, True)),
        ("avx2 avx_ne_convert", (False, True)),
        (None, (True, True)),  # not x86: PyTorch decides
    ],
)
def test_products_are_told_by_the_instruction_sets(flags, expected, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("vendor_id\t: AuthenticAMD\n" + (f"flags\t\t: {flags}\n" if flags else ""))
    assert processor._instruction_sets(cpuinfo) == expected


@pytest.mark.skipif(Processor.here().architecture != "x86_64", reason="a function of x86")
def test_processor_multiplies_bfloat16_if_pytorch_says_so():
    assert Processor.here().multiplies_bfloat16 == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_pytorch_without_onednn_uses_its_own_products(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert products_for(Processor("x86_64", "AuthenticAMD")) == "torch"


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: a\n", "AuthenticAMD"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", ""),
        (None, None),
    ],
)
def test_vendor_is_read_from_the_system(text, vendor, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    if text is not None:
        cpuinfo.write_text(text)
    assert processor._vendor(cpuinfo) == vendor


@needs_onednn
@pytest.mark.parametrize("seed", range(3))
def test_both_libraries_give_the_same_numbers_to_rounding(seed):
    module, batch = Net(), rows(seed)
    found = {}
    for products in ("torch", "onednn"):
        program = compiled(module, batch, products=products)
        weights = weights_of(module, program)
        found[products] = sweep(TorchEngine(program, EnginePlan()), EnginePlan(), weights, [batch])
    ours, reference = found["onednn"], found["torch"]
    assert ours.losses == pytest.approx(reference.losses, rel=1e-5)
    for name, gradient in reference.gradients.items():
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_product_library_is_chosen_only_in_the_program(monkeypatch):
    """A program runs as it was compiled, whatever processor the host has."""
    batch = rows(0)
    plain = compiled(Net(), batch, products="torch")
    assert not calls(plain, "onednn_linear")
    assert not any(node.kwargs for node in calls(plain, "linear_cross_entropy"))

    module = Net()
    chosen = compiled(module, batch, products="onednn")
    assert calls(chosen, "onednn_linear")
    heads = calls(chosen, "linear_cross_entropy")
    assert heads
    assert all(node.kwargs == {"products": "onednn"} for node in heads)
    first = sweep(
        TorchEngine(chosen, EnginePlan()), EnginePlan(), weights_of(module, chosen), [batch]
    )
    monkeypatch.setattr(
        Processor, "here", classmethod(lambda cls: Processor("x86_64", "GenuineIntel"))
    )
    again = sweep(
        TorchEngine(chosen, EnginePlan()), EnginePlan(), weights_of(module, chosen), [batch]
    )
    assert again.losses == first.losses
    assert all(torch.equal(again.gradients[n], g) for n, g in first.gradients.items())


@needs_onednn
def test_small_and_bfloat16_products_use_pytorch():
    graph = torch.fx.Graph()
    mm = torch.ops.aten.mm.default
    sizes = [(8, torch.float32), (512, torch.bfloat16), (512, torch.float32)]
    made = []
    for size, dtype in sizes:
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(size, size, dtype=dtype, device="cpu")
        node = graph.call_function(mm, (x, x))
        node.meta["val"] = x.meta["val"]
        made.append(node)
    graph.output(tuple(made))
    choose_products(graph, "onednn")
    graph.lint()
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets.count(mm) == 2
    assert targets.count(torch.ops.penstock.onednn_linear.default) == 1


@pytest.mark.parametrize("library", ["torch", pytest.param("onednn", marks=needs_onednn)])
def test_widened_products_are_those_of_bfloat16_to_rounding(library, monkeypatch):
    monkeypatch.setattr("penstock.compiler.matmul_backend._BAND_ELEMENTS", 3000)
    module, batch = Net(), rows(0)
    found = {}
    for products in (library, f"{library}+float32"):
        program = compiled(module, batch, products=products, precision="bf16")
        assert bool(calls(program, "_to_copy")) == products.endswith("float32")
        weights = weights_of(module, program)
        found[products] = sweep(TorchEngine(program, EnginePlan()), EnginePlan(), weights, [batch])
    reference, ours = found.values()
    assert ours.losses == pytest.approx(reference.losses, rel=1e-2)
    for name, gradient in reference.gradients.items():
        size = gradient.float().abs().max().item()
        torch.testing.assert_close(ours.gradients[name], gradient, rtol=0, atol=2**-6 * size)


@pytest.mark.parametrize(
    ("shape", "bands"),
    [((20, 7, 300), [(7, 80), (7, 80), (7, 80), (7, 60)]), ((300, 20, 7), [(20, 7)] * 10)],
)
def test_bands_of_a_widened_product_begin_at_aligned_columns(shape, bands, monkeypatch):
    monkeypatch.setattr(
        "penstock.compiler.matmul_backend._BAND_ELEMENTS", 1700 if shape[0] == 20 else 640
    )
    multiplied = []

    def recorded(left, right):
        multiplied.append(tuple(right.shape))
        return left @ right

    monkeypatch.setattr(torch, "mm", recorded)
    rows, inner, columns = shape
    product(
        torch.ones(rows, inner).bfloat16(), torch.ones(inner, columns).bfloat16(), "torch+float32"
    )
    assert multiplied == bands


@pytest.mark.parametrize("shape", [(300, 20, 7), (7, 300, 20), (20, 7, 300), (1, 1, 1), (0, 4, 3)])
def test_widened_product_is_rounded_once(shape, monkeypatch):
    monkeypatch.setattr("penstock.compiler.matmul_backend._BAND_ELEMENTS", 640)
    torch.manual_seed(0)
    left, right = (torch.randn(size).bfloat16() for size in (shape[:2], shape[1:]))
    exact = left.double() @ right.double()
    found = product(left, right, "torch+float32")
    assert found.dtype == torch.bfloat16
    # Half a unit in the last place of bfloat16, and the rounding of sums in float32.
    bound = exact.abs() * 2**-8 + (left.double().abs() @ right.double().abs()) * 2**-20
    assert ((found.double() - exact).abs() <= bound).all()


def test_attention_without_kernels_is_widened_and_its_results_are_rounded_once():
    operands = (Operand((2, 64, 3, 24), torch.bfloat16),) * 4
    torch.manual_seed(0)
    tensors = [torch.randn(operand.shape).bfloat16() for operand in operands]
    narrow = traced(causal_attention, operands, "torch")
    widened = traced(causal_attention, operands, "torch+float32")
    widened.lint()
    (attention,) = [n for n in widened.nodes if n.target is ATTENTION]
    assert all(query.meta["val"].dtype == torch.float32 for query in attention.args[:3])
    reference = fx.GraphModule(torch.nn.Module(), narrow)(*(t.double() for t in tensors))
    found = fx.GraphModule(torch.nn.Module(), widened)(*tensors)
    for exact, ours in zip(reference, found, strict=True):
        assert ours.dtype == torch.bfloat16
        # The backward pass reads the rounded output.
        atol = 2**-8 * exact.abs().max().item()
        torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=atol)


@pytest.mark.parametrize("size", [16, 64])
def test_attention_of_kernels_is_not_widened_and_has_the_bits_of_float32(size):
    """The kernels widen tiles, and multiply no pairs, whatever the processor."""
    operands = (Operand((2, 70, 3, size), torch.bfloat16),) * 4
    torch.manual_seed(0)
    tensors = [torch.randn(operand.shape).bfloat16() for operand in operands]
    graph = traced(causal_attention, operands, "torch+float32")
    (node,) = graph.find_nodes(op="call_function", target=ATTENTION)
    assert all(operand.meta["val"].dtype == torch.bfloat16 for operand in node.args[:3])
    lower_attention(graph, "torch+float32")
    assert not graph.find_nodes(op="call_function", target=ATTENTION)
    found = fx.GraphModule(torch.nn.Module(), graph)(*tensors)
    query, key, value, gradient = (tensor.float().transpose(1, 2) for tensor in tensors)
    out, logarithms = attention(query, key, value, True, None)
    rounded = out.bfloat16()
    of_wide = attention_backward(
        gradient, query, key, value, rounded.float(), logarithms, True, None
    )
    for ours, exact in zip(found, (rounded, *of_wide), strict=True):
        assert torch.equal(ours, exact.bfloat16())


def test_no_bfloat16_product_is_left_where_they_are_widened():
    program = compiled(Net(), rows(0), products="torch+float32", precision="bf16")
    products = [node for name in ("aten.mm", "aten.addmm") for node in calls(program, name)]
    assert products
    assert all(node.meta["val"].dtype == torch.float32 for node in products)
    heads = calls(program, "linear_cross_entropy")
    assert heads
    assert all(node.kwargs == {"products": "torch+float32"} for node in heads)
