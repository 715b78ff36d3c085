"""Attention in executables: by kernels on the CPU where they know it, else by PyTorch."""

import pytest
import torch
from sweeps import compiled, one_step
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from penstock.compiler import lower_attention, operator_costs
from penstock.compiler.attention_calls import attention, attention_backward, has_kernel
from penstock.compiler.peak_bytes import peak_bytes
from penstock.kernels import attention as attention_kernels
from penstock.kernels.attention_shape import Shape, memory_bytes
from penstock.kernels.pair_code import has_bfloat16_dot

needs_dots = pytest.mark.skipif(
    not has_bfloat16_dot(), reason="this processor has no dot product of bfloat16"
)
aten = torch.ops.aten
OPERATOR = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Attending(nn.Module):
    def __init__(self, size=16, key_heads=2):
        super().__init__()
        torch.manual_seed(0)
        self.size, self.counts = size, [2, key_heads, key_heads]
        self.joined = nn.Linear(8, sum(self.counts) * size)
        self.last = nn.Linear(2 * size, 1)

    def forward(self, x):
        heads = self.joined(x).view(*x.shape[:2], -1, self.size).transpose(1, 2)
        query, key, value = heads.split(self.counts, 1)
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=key.shape[1] != 2
        )
        return self.last(out.transpose(1, 2).flatten(2)).square().sum()


def targets(program, executable):
    return [n.target for stage in program.stages for n in stage.kind.graphs[executable].nodes]


def rows(seed=1):
    return {"x": torch.randn(3, 70, 8, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("key_heads", [1, 2])
def test_every_executable_calls_the_kernel_and_costs_are_those_of_the_operator(key_heads):
    program = compiled(Attending(key_heads=key_heads), rows())
    for name in ("forward", "infer", "turn"):
        assert attention in targets(program, name)
        assert OPERATOR not in targets(program, name)
    for name in ("turn", "recompute", "backward"):
        assert attention_backward in targets(program, name)
        assert BACKWARD not in targets(program, name)
    for stage in program.stages:
        for name, graph in stage.kind.graphs.items():
            before, after = (
                [cost for cost in costs if cost.work == "attention"]
                for costs in (stage.kind.costs[name], operator_costs(graph))
            )
            assert before == after, name


def assert_gradients_equal(step, module):
    for name, parameter in module.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(
            step.gradients[name], parameter.grad, rtol=1e-4, atol=1e-5 * scale
        )


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("size", [16, 12])  # with a kernel and without
def test_step_has_the_gradients_of_pytorch(size, key_heads):
    module = Attending(size, key_heads)
    assert (attention in targets(compiled(module, rows()), "turn")) == (size == 16)
    step = one_step(module, [rows()])
    loss = module(**rows())
    loss.backward()
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_gradients_equal(step, module)


class Encoding(nn.Module):
    """PyTorch's own layer, whose queries have batches beside each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)[..., :5].square().sum()


def test_layer_of_pytorch_trains_with_the_kernel():
    module, batch = Encoding(), {"x": torch.randn(3, 20, 32)}
    assert attention in targets(compiled(module, batch), "turn")
    step = one_step(module, [batch])
    loss = module(**batch)
    loss.backward()
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_gradients_equal(step, module)


def heads(dtype=torch.float32, size=16, keys=5, key_heads=2, batch=1):
    sizes = ((5, 2), (keys, key_heads), (keys, key_heads))
    return tuple(torch.randn(batch, *n, size, dtype=dtype).transpose(1, 2) for n in sizes)


def traced(tensors, **options):
    def function(query, key, value, *mask):
        return OPERATOR(query, key, value, attn_mask=mask[0] if mask else None, **options)[0]

    with FakeTensorMode() as mode:
        return make_fx(function)(*(mode.from_tensor(tensor) for tensor in tensors)).graph


LAYOUTS = {
    "heads beside each other": lambda query: query,
    "contiguous": torch.Tensor.contiguous,
    "batches beside each other": lambda query: (
        query.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    ),
    "part of a larger one": lambda query: torch.cat([query, query], 3)[..., :16],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_results_have_the_shapes_strides_and_types_of_the_operators(key_heads, layout):
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = heads(dtype, keys=7, key_heads=key_heads, batch=3)
        query = LAYOUTS[layout](query)
        expected = OPERATOR(query, key, value, 0.0, True)
        found = attention(query, key, value, True, None)
        gradient = torch.ones_like(found[0])
        expected += BACKWARD(gradient, query, key, value, *expected, 0.0, True)
        found += attention_backward(gradient, query, key, value, *found, True, None)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (
                theirs.shape,
                theirs.stride(),
                theirs.dtype,
            )
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.02, atol=0.02)


def test_query_with_scattered_rows_gives_the_same_bits_in_its_own_strides():
    query, key, value = heads(batch=3)
    scattered = query.mT.contiguous().mT
    expected, found = (attention(each, key, value, True, None) for each in (query, scattered))
    assert found[0].stride() == torch.empty_like(scattered).stride() != expected[0].stride()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_gradient_with_scattered_rows_gives_the_same_bits():
    query, key, value = heads()
    out, logarithms = attention(query, key, value, True, None)
    gradient = torch.randn(1, 2, 16, 5).transpose(2, 3)
    assert gradient.stride(-1) != 1
    given = (query, key, value, out, logarithms, True, None)
    expected = attention_backward(gradient.contiguous(), *given)
    for first, second in zip(attention_backward(gradient, *given), expected, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("tensors", "options", "products", "lowered"),
    [
        (heads(), {}, "torch", True),
        (heads(), {"is_causal": True, "scale": 0.5}, "onednn", True),
        (heads(key_heads=1), {"is_causal": True}, "torch", True),
        ((*heads(), torch.zeros(5, 5)), {}, "onednn", False),
        (heads(size=20), {}, "onednn", False),
        (heads(torch.float64), {}, "onednn", False),
        (heads(torch.bfloat16), {}, "onednn", True),
        (heads(torch.bfloat16), {}, "torch", False),
    ],
    ids=["fp32", "scaled", "grouped", "mask", "size", "double", "bf16", "bf16 of PyTorch"],
)
def test_unsupported_attention_stays_with_pytorch(tensors, options, products, lowered):
    graph = traced(tensors, **options)
    before = fx.GraphModule(nn.Module(), graph)(*tensors)
    lower_attention(graph, products)
    found = graph.find_nodes(op="call_function", target=attention)
    assert bool(found) == lowered
    after = fx.GraphModule(nn.Module(), graph)(*tensors)
    torch.testing.assert_close(after.float(), before.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("options", [(False, 0.5), (True, 0.5), (False, None)])
def test_lowered_backward_has_the_mask_and_the_scale_of_the_operator(options, key_heads):
    is_causal, scale = options
    tensors = heads(keys=7, key_heads=key_heads)
    given = (torch.randn(1, 2, 5, 16), *tensors, *OPERATOR(*tensors, 0.0, is_causal, scale=scale))

    def function(*given):
        return BACKWARD(*given, 0.0, is_causal, scale=scale)

    with FakeTensorMode() as mode:
        graph = make_fx(function)(*(mode.from_tensor(tensor) for tensor in given)).graph
    lower_attention(graph, "torch")
    assert graph.find_nodes(op="call_function", target=attention_backward)
    found = fx.GraphModule(nn.Module(), graph)(*given)
    for ours, theirs in zip(found, function(*given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def two_of_three():
    query, key, value = heads()
    return torch.cat([query, query[:, :1]], 1), key, value


def fewer_values():
    query, key, value = heads()
    return query, key, value[:, :1]


def narrow_values():
    query, key, value = heads(size=32)
    return query, key, value[..., :16]


def empty():
    return tuple(tensor[:0] for tensor in heads())


@pytest.mark.parametrize(
    ("tensors", "supported"),
    [
        (heads(), True),
        (heads(key_heads=1), True),
        (two_of_three(), False),
        (fewer_values(), False),
        (narrow_values(), False),
        (empty(), False),
    ],
)
def test_kernel_supports_heads_of_one_size_that_are_shared_equally(tensors, supported):
    graph = fx.Graph()
    places = [graph.placeholder(name) for name in ("query", "key", "value")]
    for place, tensor in zip(places, tensors, strict=True):
        place.meta["val"] = tensor
    node = graph.call_function(OPERATOR, tuple(places))
    assert has_kernel(node, "torch") == supported


def test_default_type_of_pytorch_does_not_matter():
    query, key, value = heads()
    expected = attention(query, key, value, True, None)
    torch.set_default_dtype(torch.float64)
    try:
        found = attention(query, key, value, True, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_peak_counts_what_a_kernel_takes_for_every_head():
    graph = traced(heads())
    without = peak_bytes(traced(heads(size=20)))
    held = memory_bytes(Shape(1, 2, 2, 5, 5, 16), backward=False, may_pair=False)
    assert without < held / 2
    counted = peak_bytes(graph, "onednn")
    lower_attention(graph, "onednn")
    own = 4 * 2 * 5 * (16 + 1)
    assert counted == held + own
    assert peak_bytes(graph, "onednn") == own  # a lowered graph has no operator to count
    _, key, value = heads()
    turned = torch.randn(1, 2, 16, 5).transpose(2, 3)  # is copied, and so are the outputs
    assert peak_bytes(traced((turned, key, value)), "onednn") == counted + 2 * turned.nbytes


@pytest.mark.parametrize("key_heads", [1, 2])
def test_peak_of_the_backward_counts_what_its_kernel_takes(key_heads):
    query, key, value = heads(key_heads=key_heads, batch=3)
    given = (query, query, key, value, *OPERATOR(query, key, value, 0.0, True))
    with FakeTensorMode() as mode:
        graph = make_fx(lambda *given: BACKWARD(*given, 0.0, True))(
            *(mode.from_tensor(tensor) for tensor in given)
        ).graph
    held = memory_bytes(Shape(3, 2, key_heads, 5, 5, 16), backward=True, may_pair=False)
    results = query.nbytes + key.nbytes + value.nbytes
    assert peak_bytes(graph, "onednn") == held + results


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "size", "may_pair"),
    [
        (torch.float32, 16, False),
        *((torch.bfloat16, size, False) for size in (16, 32, 64)),
        *(pytest.param(torch.bfloat16, size, True, marks=needs_dots) for size in (32, 64)),
    ],
)
def test_memory_is_what_the_kernels_allocate_with_a_thread_for_every_head(
    dtype, size, may_pair, key_heads, monkeypatch
):
    """Where pairs are possible, the greater of two forms is planned."""
    taken = []
    original = attention_kernels.cache_lines

    def counted(count, dtype):
        memory = original(count, dtype)
        taken.append(memory.base.nbytes)
        return memory

    def bytes_taken(is_paired):
        taken.clear()
        results = attention(query, key, value, False, None, is_paired)
        forward, taken[:] = sum(taken), []
        attention_backward(query, query, key, value, *results, False, None, is_paired)
        return forward, sum(taken)

    monkeypatch.setattr(attention_kernels, "cache_lines", counted)
    query, key, value = heads(keys=70, key_heads=key_heads, batch=3, size=size, dtype=dtype)
    shape = Shape(3, 2, key_heads, 5, 70, size)
    for threads in (1, 64):
        monkeypatch.setattr(
            attention_kernels.numba, "get_num_threads", lambda threads=threads: threads
        )
        forms = [bytes_taken(is_paired) for is_paired in {False, may_pair}]
        for found, backward in zip(map(max, zip(*forms, strict=True)), (False, True), strict=True):
            of_all = memory_bytes(shape, backward=backward, may_pair=may_pair)
            of_these = of_all * threads // (3 * (key_heads if backward else 2))
            expected = min(of_all, of_these)
            assert expected - 4096 <= found <= expected  # a line per array and thread
