"""Rewrites of the graph: each equals what it replaces, and what only looks alike is left alone."""

import inspect
import math

import pytest
import torch
from sweeps import compiled, one_step
from torch import nn
from torch.nn import functional as F


def gelu_by_hand(x):
    return (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    )


def gelu_other_order(x):
    inner = 0.7978845608028654 * x * (1 + 0.044715 * x * x)
    return (torch.tanh(inner) + 1) * x / 2


def gelu_by_sigmoid(x):
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def gelu_by_erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def silu_by_hand(x):
    return x * torch.sigmoid(x)


def silu_by_exp(x):
    return x / (1 + torch.exp(-x))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def gelu_with_a_wrong_constant(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.0447 * torch.pow(x, 3.0))))


def shifted(x):
    return x * torch.sigmoid(x + 0.01)


def mish(x):
    return x * torch.tanh(F.softplus(x))


class Activated(nn.Module):
    """Two layers with an activation between; its inner tanh may be used elsewhere too."""

    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 3)
        self.activation = activation

    def forward(self, x):
        return self.second(self.activation(self.first(x))).square().sum()


def operators(program):
    graphs = [
        kind.graphs["infer"] for kind in {s.kind.digest: s.kind for s in program.stages}.values()
    ]
    return [
        getattr(node.target, "__name__", "")
        if inspect.isfunction(node.target)
        else str(node.target)
        for graph in graphs
        for node in graph.nodes
    ]


def batch(seed=0, rows=16):
    generator = torch.Generator().manual_seed(seed)
    return {"x": 3 * torch.randn(rows, 8, generator=generator)}


def assert_as_plain(module, rows, tolerance=1e-6):
    step = one_step(module, [rows])
    module.zero_grad()
    loss = module(**rows)
    loss.backward()
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=tolerance)
    for name, parameter in module.named_parameters():
        scale = float(parameter.grad.abs().max())
        worst = float((step.gradients[name] - parameter.grad).abs().max())
        assert worst <= tolerance * scale, name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("spelling", "fused"),
    [
        (gelu_by_hand, "gelu_tanh"),
        (gelu_other_order, "gelu_tanh"),
        (gelu_by_sigmoid, "gelu_tanh"),
        (gelu_by_erf, "aten.gelu.default"),
        (silu_by_hand, "aten.silu.default"),
        (silu_by_exp, "aten.silu.default"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_form_becomes_the_fused_operator(spelling, fused, seed):
    module, rows = Activated(spelling), batch(seed)
    found = operators(compiled(module, rows))
    assert fused in found
    others = [name for name in found if name != fused]
    assert not [name for name in others if "tanh" in name or "erf" in name or "sigmoid" in name]
    assert_as_plain(module, rows, tolerance=2e-6)


@pytest.mark.parametrize("lookalike", [quick_gelu, gelu_with_a_wrong_constant, shifted, mish])
def test_similar_but_different_graphs_are_kept(lookalike):
    module, rows = Activated(lookalike), batch()
    found = operators(compiled(module, rows))
    assert not {"aten.gelu.default", "gelu_tanh", "aten.silu.default"} & set(found)
    assert_as_plain(module, rows)


def test_a_function_of_two_tensors_is_kept():
    class Gated(Activated):
        def forward(self, x):
            y = self.first(x)
            gate = torch.sigmoid(y)
            return (self.second(y * gate) + gate.mean()).square().sum()

    module, rows = Gated(None), batch()
    assert "aten.silu.default" not in operators(compiled(module, rows))  # gate is needed besides
    assert_as_plain(module, rows)


def test_a_function_of_whole_numbers_is_kept():
    class Counts(Activated):
        def forward(self, x):
            steps = torch.arange(3)
            return (self.second(self.first(x)) * (steps * torch.sigmoid(steps))).square().sum()

    assert_as_plain(Counts(None), batch())


class ReadsAndAdds(nn.Module):
    """In-place operators on values of its own, in the order that decides the result."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        before = y * 2
        y.add_(before).mul_(0.5).relu_()
        return (self.second(y) - before).square().mean()


def test_in_place_operators_keep_their_order():
    assert_as_plain(ReadsAndAdds(), batch())


class Dropped(nn.Module):
    """Five dropouts over two blocks of one kind and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(2)
        )
        self.last = nn.Dropout(0.3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x).sum()


def test_dropouts_are_numbered_within_the_model():
    program = compiled(Dropped(), batch())
    found = {
        stage.name: [
            (stage.first_dropout + node.args[2], node.args[3])
            for node in stage.kind.graphs["infer"].nodes
            if "penstock.dropout" in str(node.target)
        ]
        for stage in program.stages
    }
    assert found == {
        "blocks.0": [(0, 0.1), (1, 0.2)],
        "blocks.1": [(2, 0.1), (3, 0.2)],
        "head": [(4, 0.3)],
    }
    assert program.stages[0].kind.digest != program.stages[1].kind.digest  # x needs no gradient
    assert program.draws_dropout
    assert not compiled(Dropped().eval(), batch()).draws_dropout


class DropsChannels(nn.Module):
    """The gradient of `scale` is the mask of a dropout, times the scale of the output."""

    def __init__(self, dropout):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, 5, 2, 3))
        self.dropout = dropout

    def forward(self, x):
        return self.dropout(self.scale * (x.sum() * 0 + 1)).sum()


CHANNEL_DROPOUTS = {
    "Dropout1d": lambda p: nn.Sequential(nn.Flatten(2), nn.Dropout1d(p)),
    "Dropout2d": nn.Dropout2d,
    "in place": lambda p: nn.Dropout2d(p, inplace=True),
    "Dropout3d": lambda p: nn.Sequential(nn.Unflatten(3, (1, 3)), nn.Dropout3d(p)),
}


@pytest.mark.parametrize("name", CHANNEL_DROPOUTS)
def test_dropout_of_channels_drops_whole_channels_repeatably(name):
    module = DropsChannels(CHANNEL_DROPOUTS[name](0.5))
    steps = [one_step(module, [batch()]) for _ in range(2)]
    mask = steps[0].gradients["scale"].flatten(2)
    assert torch.equal(mask, mask[:, :, :1].expand_as(mask))
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert len({tuple(row) for row in mask[..., 0].tolist()}) > 1  # rows differ
    assert torch.equal(steps[1].gradients["scale"], steps[0].gradients["scale"])
    everything = one_step(DropsChannels(CHANNEL_DROPOUTS[name](1.0)), [batch()])
    assert everything.losses == [0.0]


@pytest.mark.parametrize(
    "dropout",
    [
        nn.Dropout2d(0.0),
        nn.Dropout2d(0.5).eval(),
        nn.AlphaDropout(0.0),
        nn.AlphaDropout(0.5).eval(),
        nn.FeatureAlphaDropout(0.0),
    ],
    ids=repr,
)
def test_dropout_of_nothing_is_its_argument(dropout):
    step = one_step(DropsChannels(dropout), [batch()])
    assert torch.equal(step.gradients["scale"], torch.ones(6, 5, 2, 3))


class Attends(nn.Module):
    """Attention, by the fused operator, whose own dropout no replay could repeat."""

    def __init__(self, dropout, causal, groups=1, scale=None):
        super().__init__()
        torch.manual_seed(2)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8 // groups)
        self.dropout, self.causal, self.groups = dropout, causal, groups
        self.scale = scale

    def forward(self, x):
        query = self.query(x).view(4, 4, 4, 2).transpose(1, 2)  # [batch, heads, tokens, width]
        keys = self.key(x).view(4, 4, 4 // self.groups, 2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            query,
            keys,
            keys,
            dropout_p=self.dropout,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=self.groups > 1,
        )
        return mixed.square().sum()


@pytest.mark.parametrize(
    ("causal", "groups", "scale"),
    [(False, 1, None), (False, 2, None), (True, 1, None), (True, 2, None), (False, 1, 0.0)],
)
def test_attention_with_small_dropout_is_close_to_attention(causal, groups, scale):
    """With a probability that drops nothing here, it must be what the fused operator computes."""
    rows = batch()
    step = one_step(Attends(1e-9, causal, groups, scale), [rows])
    plain = Attends(0.0, causal, groups, scale)
    loss = plain(**rows)
    loss.backward()
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in plain.named_parameters():
        worst = float((step.gradients[name] - parameter.grad).abs().max())
        assert worst <= 1e-5 * float(parameter.grad.abs().max()), name


def test_attention_with_dropout_is_repeatable():
    module, rows = Attends(0.5, True), batch()
    first, second = one_step(module, [rows]), one_step(module, [rows])
    assert first.losses == second.losses
    assert first.losses != one_step(Attends(0.0, True), [rows]).losses


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradient_of_an_embedding_is_dense(table):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.table = table(10, 8, sparse=True)
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(self.table(x)).square().sum()

    module, x = Looks(), torch.tensor([[1, 4, 1], [7, 0, 4]])
    step = one_step(module, [{"x": x}])
    module(x).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad.to_dense(), msg=name)
