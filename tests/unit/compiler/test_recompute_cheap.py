"""What a stage keeps for its backward: not what a pass over memory makes again."""

import pytest
import torch
from sweeps import compiled
from tiny_models import LENGTH, language_model
from torch import fx, nn

from penstock.compiler.recompute_cheap import keep_costly
from penstock.planning import builders

ROWS = 2
TOKENS = ROWS * LENGTH


def middle_block(family, **changes):
    source = language_model(family, **changes).source(0)
    program = builders.compile_source(source, micro_batch=ROWS, length=LENGTH, precision="fp32")
    return program.stages[2].kind, source.hf_config


def test_gpt2_block_keeps_nine_widths():
    """Three for attention's inputs, one for its output, one between the halves, four for the MLP's
    argument of GELU; the block's own input is free, and norms and GELU are made again."""
    kind, config = middle_block("gpt2", n_layer=4, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    width, heads = config.n_embd, config.n_head
    assert kind.saved_bytes == 4 * TOKENS * (9 * width + heads)
    assert [saved.input is not None for saved in kind.saved].count(True) >= 1


@pytest.mark.long
def test_llama_mlp_keeps_only_the_two_products():
    kind, config = middle_block("llama", num_hidden_layers=4)
    inner = [s for s in kind.saved if s.tensor.shape[-1] == config.intermediate_size]
    flat = [s for s in kind.saved if s.tensor.shape == (config.intermediate_size, TOKENS)]
    assert sum(s.bytes for s in (*inner, *flat)) == 2 * 4 * TOKENS * config.intermediate_size


class Rectified(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = self.function(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("function", [torch.relu, torch.tanh, torch.sigmoid])
def test_result_is_kept_if_its_argument_is_not_needed(function):
    """Their gradients read the result: it crosses to the next stage anyway and is kept once."""
    program = compiled(Rectified(function), {"x": torch.randn(8, 16)})
    for stage in program.stages[:-1]:
        assert stage.kind.saved_bytes <= 4 * 8 * 16


def test_chain_of_cheap_operators_may_be_of_any_length():
    graph = fx.Graph()
    start = node = graph.placeholder("x")
    for _ in range(5000):
        node = graph.call_function(torch.ops.aten.relu.default, (node,))
    assert keep_costly([node], {start}) == []
    assert keep_costly([node], set()) == [node]
