"""Who multiplies float32 matrices follows from the processor alone, and is part of the program."""

import pytest
import torch
from sweeps import compiled, sweep, weights_of
from torch import nn
from torch.nn import functional as F

from penstock.compiler import has_onednn, products_for
from penstock.compiler.products import choose_products
from penstock.engine import EnginePlan, TorchEngine
from penstock.kernels import processor
from penstock.kernels.processor import Processor

ROWS, WIDTH, VOCABULARY = 256, 96, 160
needs_onednn = pytest.mark.skipif(not has_onednn(), reason="this PyTorch has no oneDNN")


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
    assert not calls(plain, "_linear_pointwise")
    assert not any(node.kwargs for node in calls(plain, "linear_cross_entropy"))

    module = Net()
    chosen = compiled(module, batch, products="onednn")
    assert calls(chosen, "_linear_pointwise")
    heads = calls(chosen, "linear_cross_entropy")
    assert heads
    assert all(node.kwargs == {"onednn": True} for node in heads)
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
    assert targets.count(torch.ops.mkldnn._linear_pointwise.default) == 1
