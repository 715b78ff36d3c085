"""Which operators have positions that are computed from keys and values: modules of one's own.

Each has the logits of the whole window; those that mix positions otherwise keep nothing.
"""

import copy
import math

import pytest
import torch
from test_decoding import check
from tiny_models import LENGTH, VOCABULARY
from torch import nn
from torch.nn import functional as F

from penstock.compiler.cached_attention import _attention, attention_at_position, visible_positions
from penstock.models import ModelSource

WIDTH = 8
PLACES = torch.arange(LENGTH)
CAUSAL = PLACES[:, None] >= PLACES[None]
LOWEST = float("-inf")


class Model(nn.Module):
    """A language model of one layer, whose positions meet in `mix`."""

    def __init__(self, mix, width=WIDTH):
        super().__init__()
        self.mix = mix
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)
        self.gate = nn.Linear(width, 1)
        self.over_positions = nn.Parameter(torch.randn(LENGTH, LENGTH))
        self.conv = nn.Conv1d(width, width, 3, groups=width)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        every = self.q(x) + self.k(x) + self.v(x) + self.gate(x)  # each weight takes part
        every = every + self.over_positions.sum() + self.conv.weight.sum() + self.conv.bias
        return self.head(x + every + self.mix(self, x))


def attention(m, x, **options):
    options = options or {"is_causal": True}
    heads = (f(x)[:, None] for f in (m.q, m.k, m.v))
    return F.scaled_dot_product_attention(*heads, **options)[:, 0]


def scores(m, x):
    return m.q(x) @ m.k(x).transpose(1, 2)


def by_heads(x, heads):
    return x.view(1, LENGTH, heads, -1).transpose(1, 2)


def shared_heads(m, x, **options):
    k, v = (by_heads(f(x)[..., : WIDTH // 2], 2) for f in (m.k, m.v))
    out = F.scaled_dot_product_attention(by_heads(m.q(x), 4), k, v, enable_gqa=True, **options)
    return out.transpose(1, 2).reshape(1, LENGTH, WIDTH)


def slopes(count):
    distances = (PLACES[None] - PLACES[:, None]).float().masked_fill(~CAUSAL, LOWEST)
    return distances * torch.linspace(0.2, 1, count)[:, None, None]


def retention(m, x):
    decay = torch.where(CAUSAL, 0.9 ** (PLACES[:, None] - PLACES).clamp(min=0).float(), 0.0)
    return (scores(m, x) * decay) @ m.v(x)


def strongest(m, x):
    own = scores(m, x).masked_fill(~CAUSAL, -1e9)
    least = own.topk(4, -1).values[..., -1:]
    return own.masked_fill(own < least, -1e9).softmax(-1) @ m.v(x)


def two_dimensional_heads(m, x):
    q, k, v = (by_heads(f(x), 2)[0] for f in (m.q, m.k, m.v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(0, 1).reshape(1, LENGTH, WIDTH)


def narrow_values(m, x):
    q, k, v = (f(x)[:, None] for f in (m.q, m.k, m.v))
    out = F.scaled_dot_product_attention(q, k, v[..., :4], is_causal=True)[:, 0]
    return torch.cat([out, out], -1)


DECODED = {
    "attention": attention,
    "keys that are values": lambda m, x: F.scaled_dot_product_attention(
        m.q(x)[:, None], *[m.k(x)[:, None]] * 2, is_causal=True
    )[:, 0],
    "keys that are the input": lambda m, x: (
        (x @ x.transpose(1, 2)).masked_fill(~CAUSAL, -1e9).softmax(-1) @ x
    ),
    "scores by hand": lambda m, x: scores(m, x).masked_fill(~CAUSAL, LOWEST).softmax(-1) @ m.v(x),
    "retention": retention,
    "strongest keys": strongest,
    "heads without a batch": two_dimensional_heads,
    "narrow values": narrow_values,
    "shared heads": lambda m, x: shared_heads(m, x, is_causal=True),
    "shared heads with a mask each": lambda m, x: shared_heads(m, x, attn_mask=slopes(4)[None]),
    "learned mask": lambda m, x: attention(
        m, x, attn_mask=torch.where(CAUSAL, m.over_positions, LOWEST)[None, None]
    ),
}
WHOLE = {
    "sum so far": lambda m, x: x.cumsum(1) / (PLACES + 1)[:, None],
    "linear attention": lambda m, x: torch.einsum(
        "bti,btij->btj", m.q(x), (m.k(x)[..., :, None] * m.v(x)[..., None, :]).cumsum(1)
    ),
    "convolution": lambda m, x: m.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2),
    "token shift": lambda m, x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "token shift by index": lambda m, x: x[:, (PLACES - 1).clamp(min=0)],
    "mix of positions": lambda m, x: m.over_positions.tril() @ x,
    "mix of positions from the right": lambda m, x: (
        x.transpose(1, 2) @ m.over_positions.triu()
    ).transpose(1, 2),
    "running maximum": lambda m, x: x.cummax(1).values,
    "norm over earlier positions": lambda m, x: (
        torch.where(CAUSAL[..., None], x[:, None], 0.0).square().mean(2)
    ),
    "gate of each key": lambda m, x: attention(
        m,
        x,
        attn_mask=torch.where(CAUSAL, m.gate(x).transpose(1, 2).expand(1, LENGTH, LENGTH), LOWEST)[
            :, None
        ],
    ),
    "positions merged with heads": lambda m, x: F.layer_norm(
        attention(m, x).view(-1, 4), (4,)
    ).view(1, LENGTH, WIDTH),
    "positions divided": lambda m, x: attention(m, x.unflatten(1, (LENGTH, 1)).squeeze(2)),
    "a part of positions": lambda m, x: attention(m, x.narrow(1, 0, x.shape[1])),
    "parts of positions": lambda m, x: attention(m, x.split([x.shape[1]], 1)[0]),
    "two results by element": lambda m, x: attention(m, torch.frexp(x)[0]),
}


def checked(mix, width=WIDTH):
    torch.manual_seed(0)
    plain = Model(mix, width).eval()
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH}
    source = ModelSource.from_module(copy.deepcopy(plain), task="causal_lm", **sizes)
    return check(source, plain, tolerance=1e-5)


@pytest.mark.parametrize("name", DECODED)
def test_positions_that_are_computed_from_kept_keys(name):
    assert checked(DECODED[name]) == ["prefill", "decode"]


@pytest.mark.parametrize("name", WHOLE)
def test_positions_that_meet_otherwise(name):
    assert checked(WHOLE[name]) == ["prefill"]


@pytest.mark.parametrize("name", ["mix of positions", "mix of positions from the right"])
def test_width_that_equals_the_window(name):
    assert checked(WHOLE[name], LENGTH) == ["prefill"]


def test_attention_over_features_mixes_positions():
    def mix(m, x):
        return attention(m, x) + F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3).mT * 0

    assert checked(mix) == ["prefill"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 5, 11])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_over_the_window_is_that_over_visible_positions(position, has_mask, dtype):
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 12, 16)
    value, at = torch.randn(1, 2, 12, 16), torch.tensor([position])
    mask = None
    if has_mask:
        mask = torch.randn(1, 4, 1, 12).masked_fill(torch.arange(12) > position, LOWEST)
        mask = mask.to(dtype)
    given = (query.to(dtype), key.to(dtype), value.to(dtype), mask, at, 0.3, True)
    found = attention_at_position(*given)
    over_window = visible_positions(given[1], at) if mask is None else mask
    other = _attention(*given[:3], over_window, 0.3, True)
    repeated = (t.double().repeat_interleave(2, 1)[:, :, : position + 1] for t in (key, value))
    of_mask = None if mask is None else mask.double()[..., : position + 1]
    exact = F.scaled_dot_product_attention(query.double(), *repeated, of_mask, scale=0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    assert found.shape == other.shape == (1, 4, 1, 16)
    assert torch.allclose(found.double(), exact, atol=tolerance)
    assert torch.allclose(other.double(), exact, atol=tolerance)
    assert math.isfinite(found.float().sum())
