"""Attention of one query per head: exact to rounding, the same for any thread count."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from penstock.kernels.attention_shape import PART, Shape, Tokens
from penstock.kernels.token_attention import attend

GUARD = 64


def values_of(patterns):
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def made(seed, shape, dtype):
    """Return random keys or values `[batch, positions, heads, size]`, in a window twice as long."""
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return numbers if dtype == np.float32 else (numbers.view(np.uint32) >> 16).astype(np.uint16)


def tokens_of(window):
    _, positions, heads, size = window.shape
    return Tokens(window.reshape(-1), (positions * heads * size, size, heads * size))


def attended(query, keys, values, shape):
    batch, heads, *_, size = shape
    whole = np.full(batch * heads * size + 2 * GUARD, 77, keys.dtype)
    out = whole[GUARD:-GUARD]
    kept = [
        Tokens(t.elements[: _length(t, shape)], t.strides) for t in map(tokens_of, (keys, values))
    ]
    attend(query.reshape(-1), *kept, out, shape=shape)
    assert (whole[:GUARD] == 77).all()
    assert (whole[-GUARD:] == 77).all()
    return out.reshape(batch, heads, size)


def _length(tokens, shape):
    counts = (shape.batch, shape.key_heads, shape.keys)
    return shape.size + sum((n - 1) * s for n, s in zip(counts, tokens.strides, strict=True))


def exact(query, keys, values, shape):
    batch, heads, key_heads, _, count, _ = shape
    out = np.empty(query.shape)
    for row in range(batch):
        for head in range(heads):
            of_head = head // (heads // key_heads)
            k = keys[row, :count, of_head].astype(np.float64)
            v = values[row, :count, of_head].astype(np.float64)
            scores = k @ query[row, head].astype(np.float64)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("count", [1, 15, 17, PART, PART + 1, 3 * PART + 37])
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "size"), [(1, 4, 4, 64), (1, 6, 2, 16), (2, 3, 1, 80)]
)
def test_attention_is_exact_to_rounding(batch, heads, key_heads, size, count, dtype):
    shape = Shape(batch, heads, key_heads, 1, count, size)
    query = made(0, (batch, heads, size), np.float32) * np.float32(0.3)
    keys, values = (made(n, (batch, 2 * count, key_heads, size), dtype) for n in (1, 2))
    found = attended(query, keys, values, shape)
    if dtype == np.uint16:
        found, keys, values = values_of(found), values_of(keys), values_of(values)
    expected = exact(query, keys, values, shape)
    tolerance = 2e-6 if dtype == np.float32 else 2**-8
    assert (np.abs(found - expected) <= tolerance * np.maximum(1, np.abs(expected))).all()


def test_threads_decide_no_bit():
    shape = Shape(1, 5, 5, 1, 3 * PART, 32)
    query = made(0, (1, 5, 32), np.float32)
    keys, values = (made(n, (1, 3 * PART, 5, 32), np.uint16) for n in (1, 2))
    threads, found = numba.get_num_threads(), set()
    try:
        for count in range(1, threads + 1):
            numba.set_num_threads(count)
            found.add(attended(query, keys, values, shape).tobytes())
    finally:
        numba.set_num_threads(threads)
    assert len(found) == 1


def test_large_scores_do_not_overflow_and_a_nan_stays_one():
    shape = Shape(1, 1, 1, 1, 2 * PART, 16)
    query = np.full((1, 1, 16), 100, np.float32)
    keys, values = (
        made(1, (1, 2 * PART, 1, 16), np.float32),
        made(2, (1, 2 * PART, 1, 16), np.float32),
    )
    found = attended(query, keys * 10, values, shape)
    np.testing.assert_allclose(found, exact(query, keys * 10, values, shape), rtol=1e-5)
    keys[0, 300, 0, 3] = np.nan
    assert np.isnan(attended(query, keys, values, shape)).all()


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 2, 2, 2, 4, 16),
        Shape(1, 2, 2, 1, 4, 24),
        Shape(1, 3, 2, 1, 4, 16),
        Shape(1, 2, 2, 1, 0, 16),
    ],
)
def test_other_shapes_are_refused(shape):
    empty = Tokens(np.zeros(128, np.float32), (128, 16, 32))
    with pytest.raises(ValueError, match="attention of a token: expected one query"):
        attend(np.zeros(32, np.float32), empty, empty, np.zeros(32, np.float32), shape=shape)
