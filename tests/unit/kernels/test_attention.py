"""Attention and its gradients against their definition in float64."""

import re

import pytest
import torch

from penstock.kernels import attention as kernels
from penstock.kernels.attention import attention, attention_backward
from penstock.kernels.attention_shape import Shape, Tokens, has_kernel
from penstock.kernels.pair_code import has_bfloat16_dot

# batch, heads, heads of keys, queries, keys, size; causal
SHAPES = [
    (1, 1, 1, 1, 1, 16, True),
    (1, 2, 2, 64, 64, 64, True),
    (2, 3, 3, 100, 100, 64, True),
    (1, 2, 2, 37, 90, 32, False),
    (1, 1, 1, 130, 130, 96, True),
    (1, 2, 2, 70, 200, 128, True),
    (1, 2, 2, 200, 70, 16, True),
    (1, 2, 2, 200, 71, 80, False),
    (2, 1, 1, 129, 1, 48, False),
    (1, 2, 2, 65, 66, 112, True),
    (1, 1, 1, 66, 66, 256, True),
    (2, 6, 2, 100, 100, 32, True),
    (1, 4, 1, 70, 200, 16, True),
    (1, 4, 2, 200, 70, 64, True),
    (2, 8, 4, 37, 130, 16, False),
]
TYPES = [torch.float32, torch.bfloat16]


def case(shape, dtype, seed=0):
    """Return query, key, value and the gradient of the outputs, heads beside each other."""
    batch, heads, key_heads, queries, keys, size, _ = shape
    generator = torch.Generator().manual_seed(seed)
    of_queries, of_keys = (queries, heads), (keys, key_heads)
    tensors = [
        torch.randn(batch, *sizes, size, generator=generator)
        for sizes in (of_queries, of_keys, of_keys, of_queries)
    ]
    return [tensor.to(dtype).transpose(1, 2) for tensor in tensors]


def reference(query, key, value, gradient, is_causal, scale):
    given = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    query, key, value = given
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = scale * query @ key.transpose(-1, -2)
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~kept, -torch.inf)
    out = torch.softmax(scores, -1) @ value
    out.backward(gradient.double())
    logarithms = torch.logsumexp(scores, -1).detach()
    return out.detach(), logarithms, [tensor.grad for tensor in given]


def tokens(tensor):
    count = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((count,), (1,))
    flat = flat.view(torch.uint16) if tensor.dtype == torch.bfloat16 else flat
    return Tokens(flat.numpy(), tensor.stride()[:3])


def computed(query, key, value, gradient, is_causal, scale):
    out, *gradients = (torch.empty(t.shape, dtype=t.dtype) for t in (query, query, key, value))
    logarithms = torch.empty(query.shape[:3])
    batch, heads, queries, size = query.shape
    shape = Shape(batch, heads, key.shape[1], queries, key.shape[2], size)
    options = {"shape": shape, "is_causal": is_causal, "scale": scale}
    inputs = [tokens(tensor) for tensor in (query, key, value)]
    attention(*inputs, tokens(out), tokens(logarithms), **options)
    attention_backward(
        tokens(gradient),
        *inputs,
        tokens(out),
        tokens(logarithms),
        tuple(tokens(tensor) for tensor in gradients),
        **options,
    )
    return out, logarithms, gradients


def assert_close(actual, expected, dtype):
    """Errors are measured against the greatest element, or the inputs' 1: sums cancel."""
    error = (actual.double() - expected).abs().max()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    assert error <= tolerance * expected.abs().max().clamp(min=1), float(error)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_those_of_float64(shape, dtype, seed):
    tensors, is_causal = case(shape, dtype, seed), shape[-1]
    scale = shape[5] ** -0.5
    out, logarithms, gradients = computed(*tensors, is_causal, scale)
    exact, exact_logarithms, exact_gradients = reference(*tensors, is_causal, scale)
    assert_close(out, exact, dtype)
    assert_close(logarithms, exact_logarithms, torch.float32)
    for actual, expected in zip(gradients, exact_gradients, strict=True):
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[5], SHAPES[11]], ids=str)
def test_bfloat16_without_dot_products_is_computed_in_float32(shape, monkeypatch):
    monkeypatch.setattr(kernels, "has_bfloat16_dot", lambda: False)
    tensors, scale = case(shape, torch.bfloat16), shape[5] ** -0.5
    found = computed(*tensors, shape[-1], scale)
    in_floats = computed(*(tensor.float() for tensor in tensors), shape[-1], scale)
    assert torch.equal(found[0], in_floats[0].bfloat16())
    assert torch.equal(found[1], in_floats[1])


@pytest.mark.skipif(not has_bfloat16_dot(), reason="this processor has no dot product of bfloat16")
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[5], SHAPES[13]], ids=str)
def test_dot_products_of_pairs_are_as_near_as_float32(shape, monkeypatch):
    """Weights are rounded to bfloat16 before they are multiplied, which costs about as much as the
    rounding of the results."""
    tensors, is_causal, scale = case(shape, torch.bfloat16), shape[-1], shape[5] ** -0.5
    exact, _, exact_gradients = reference(*tensors, is_causal, scale)

    def errors():
        out, _, gradients = computed(*tensors, is_causal, scale)
        pairs = zip([out, *gradients], [exact, *exact_gradients], strict=True)
        return torch.stack(
            [(found.double() - other).norm() / other.norm() for found, other in pairs]
        )

    by_pairs = errors()
    monkeypatch.setattr(kernels, "has_bfloat16_dot", lambda: False)
    in_floats = errors()
    assert not torch.equal(by_pairs, in_floats)
    assert (by_pairs < 2 * in_floats).all()
    assert (by_pairs < 2**-7).all()


def test_large_scores_neither_overflow_nor_lose_the_greatest():
    shape = (1, 1, 1, 150, 150, 16, True)
    tensors = case(shape, torch.float32)
    out, logarithms, gradients = computed(*tensors, True, 300.0)
    exact, exact_logarithms, _ = reference(*tensors, True, 300.0)
    assert exact_logarithms.abs().max() > 1000
    torch.testing.assert_close(logarithms.double(), exact_logarithms, rtol=1e-5, atol=0)
    # Scores of thousands have errors of about 1e-3: compare where one key has all the weight.
    scores = 300.0 * tensors[0].double() @ tensors[1].double().transpose(-1, -2)
    kept = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    first, second = scores.masked_fill(~kept, -torch.inf).topk(2).values.unbind(-1)
    clear = first - second > 30
    assert clear.double().mean() > 0.9
    torch.testing.assert_close(out.double()[clear], exact[clear], rtol=1e-6, atol=1e-6)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [16, 32])
def test_backward_makes_the_scores_of_forward(size, dtype):
    """With one key all weights are 1, and the gradient of the value is that of the output."""
    query, key, value, gradient = case((1, 1, 1, 1, 1, size, True), dtype)
    query.zero_()[..., 0], key.zero_()[..., 0] = 3 * 2**14, 2**15
    out, _, gradients = computed(query, key, value, gradient, True, 0.1)
    assert torch.equal(out, value)
    assert torch.equal(gradients[2], gradient)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("dtype", TYPES)
def test_scale_may_be_zero_or_negative(dtype, scale):
    tensors = case((1, 2, 2, 100, 100, 32, True), dtype)
    out, _, gradients = computed(*tensors, True, scale)
    exact, _, exact_gradients = reference(*tensors, True, scale)
    for actual, expected in zip([out, *gradients], [exact, *exact_gradients], strict=True):
        assert_close(actual, expected, dtype)


def flattened(tensors, is_causal=True):
    out, logarithms, gradients = computed(*tensors, is_causal, 0.3)
    return [out, logarithms, *gradients]


def everything(shape, dtype):
    return flattened(case(shape, dtype), shape[-1])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape", [SHAPES[2], SHAPES[7], SHAPES[11], (1, 1, 1, 300, 300, 32, True)], ids=str
)
def test_number_of_threads_and_shape_of_tiles_change_no_bit(shape, dtype, monkeypatch):
    expected = everything(shape, dtype)
    for threads in (1, 3, 4):
        monkeypatch.setattr(kernels.numba, "get_num_threads", lambda threads=threads: threads)
        for first, second in zip(expected, everything(shape, dtype), strict=True):
            assert torch.equal(first, second)
    for width in (1, 2):
        monkeypatch.setattr(
            kernels, "tile_width", lambda vectors, width=width: width if vectors % width == 0 else 1
        )
        for first, second in zip(expected, everything(shape, dtype), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", TYPES)
def test_strides_change_no_bit(dtype):
    shape = (2, 3, 3, 100, 100, 64, True)
    tensors = case(shape, dtype)
    joined = torch.cat(tensors[:3], -1)  # the three parts of one projection
    parts = [*joined.split(64, -1), tensors[3]]
    assert not any(part.is_contiguous() for part in parts[:3])
    expected = computed(*(tensor.contiguous() for tensor in tensors), True, 0.125)
    out, logarithms, gradients = computed(*parts, True, 0.125)
    assert torch.equal(out, expected[0])
    assert torch.equal(logarithms, expected[1])
    for first, second in zip(gradients, expected[2], strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", TYPES)
def test_operands_that_repeat_in_memory_are_read_like_others(dtype):
    tensors = case((2, 3, 3, 70, 70, 32, True), dtype)
    for place in range(4):
        repeated = [tensor.clone() for tensor in tensors]
        repeated[place] = repeated[place][:, :1, :1].expand(2, 3, 70, 32)
        assert repeated[place].stride()[1:3] == (0, 0)
        written = [tensor.contiguous() for tensor in repeated]
        for first, second in zip(flattened(repeated), flattened(written), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", TYPES)
def test_scores_without_a_maximum_give_no_undefined_output(dtype):
    query, key, value, gradient = case((1, 1, 1, 200, 200, 32, True), dtype)
    key[:, :, :128], query = -torch.inf, query.abs()  # all scores of two tiles are -inf
    out, _, _ = computed(query, key, value, gradient, True, 1.0)
    assert out[:, :, 128:].isfinite().all()


@pytest.mark.parametrize("pattern", [0x7FC00000, 0x7F9A3B71, 0x7FFFFFFF], ids=hex)
@pytest.mark.parametrize("dtype", TYPES)
def test_nan_of_any_payload_in_a_query_is_in_its_outputs_and_gradients(dtype, pattern):
    query, key, value, gradient = case((1, 2, 2, 130, 130, 32, True), dtype)
    if dtype == torch.float32:
        query.view(torch.int32)[0, 1, 70, 3] = pattern
    else:
        query.view(torch.int16)[0, 1, 70, 3] = pattern >> 16
    out, logarithms, gradients = computed(query, key, value, gradient, True, 0.25)
    for found in (out, logarithms[..., None], gradients[0]):
        assert found.isnan().all(-1).nonzero().tolist() == [[0, 1, 70]]
    for found in gradients[1:]:  # those of the keys that this query attends to
        assert found[0, 1, :71].isnan().all()
        assert found[0, 0].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_later_tokens_change_no_earlier_output_of_causal_attention(dtype):
    tensors = case((1, 2, 2, 200, 200, 32, True), dtype)
    out, _, _ = computed(*tensors, True, 0.2)
    for changed in tensors[1:3]:
        changed[:, :, 130:] *= -3
    again, _, _ = computed(*tensors, True, 0.2)
    assert torch.equal(out[:, :, :130], again[:, :, :130])
    assert (out[:, :, 130:] != again[:, :, 130:]).any(-1).all()


def test_shared_heads_have_the_bits_of_repeated_ones_and_the_sum_of_their_gradients():
    query, key, value, gradient = case((2, 6, 2, 100, 130, 32, True), torch.float32)
    repeated = [tensor.repeat_interleave(3, 1) for tensor in (key, value)]
    out, logarithms, gradients = computed(query, key, value, gradient, True, 0.2)
    again, same_logarithms, whole = computed(query, *repeated, gradient, True, 0.2)
    assert torch.equal(out, again)
    assert torch.equal(logarithms, same_logarithms)
    assert torch.equal(gradients[0], whole[0])
    for shared, each in zip(gradients[1:], whole[1:], strict=True):
        torch.testing.assert_close(shared, each.unflatten(1, (2, 3)).sum(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "key_heads"), [(0, 2), (8, 2), (24, 2), (100, 2), (16, 3), (16, 4), (16, 0)]
)
def test_head_that_is_no_multiple_of_a_vector_or_shared_unequally_is_refused(size, key_heads):
    assert has_kernel(size) == (size == 16)
    tensors = case((1, 2, max(key_heads, 1), 4, 4, max(size, 1), True), torch.float32)
    shape = Shape(1, 2, key_heads, 4, 4, size)
    message = (
        "attention: expected sizes of at least 1, heads of a multiple of 16 and as many or a "
        f"multiple of the heads of keys, got {shape}"
    )
    inputs = [tokens(tensor) for tensor in tensors]
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(*inputs, tokens(torch.empty(1, 2, 4)), shape=shape, is_causal=True, scale=1)


def test_tensor_of_another_length_or_type_is_refused():
    query, key, value, out = (tokens(t) for t in case((1, 2, 2, 8, 8, 16, True), torch.float32))
    logarithms = tokens(torch.empty(1, 2, 8))
    options = {"shape": Shape(1, 2, 2, 8, 9, 16), "is_causal": True, "scale": 1.0}
    with pytest.raises(ValueError, match=r"key: expected .*288"):
        attention(query, key, value, out, logarithms, **options)
    options["shape"] = Shape(1, 2, 2, 8, 8, 16)
    narrow = Tokens(key.elements.view("uint16")[::2].copy(), key.strides)
    with pytest.raises(ValueError, match="key: expected"):
        attention(query, narrow, value, out, logarithms, **options)
    double = Tokens(query.elements.astype("float64"), query.strides)
    with pytest.raises(ValueError, match="attention: expected float32 or uint16, got float64"):
        attention(double, key, value, out, logarithms, **options)
