"""What a program says of sparse weights: kinds, digests, operations, bytes, refusals."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from sparse_steps import buffers_of
from tiny_models import LENGTH, language_model
from torch import nn

from penstock.compiler import CompileOptions, compile_module
from penstock.errors import ConfigError
from penstock.program import verify
from penstock.sparsity import max_compact_bytes
from penstock.weight_formats import PACKED, PACKED_SPLIT

BLOCK = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def program_of(sparse, precision="fp32"):
    """The program of a GPT-2 with three blocks, with these weights sparse; compiled once."""
    return compiled(tuple(sparse.items()), precision)


@functools.cache
def compiled(sparse, precision):
    source = language_model("gpt2", n_layer=3).source(0)
    settings = CompileOptions(
        sparse=dict(sparse), weight_prefix=source.weight_prefix, precision=precision
    )
    return verify(
        compile_module(
            source.module,
            source.example_inputs(2, LENGTH),
            settings,
            buffers=lambda: buffers_of(source),
        )
    )


def weights_in(block, share=0.25):
    """Capacities of the weights of a block, of which each keeps a share."""
    shapes = {n: w.shape for n, w in program_of({}).weights.items()}
    names = [f"transformer.h.{block}.{name}.weight" for name in BLOCK]
    return {name: int(share * math.prod(shapes[name])) for name in names}


@pytest.mark.long
def test_blocks_of_equal_capacities_share_a_kind_and_others_keep_their_digests():
    dense = program_of({})
    sparse = program_of({**weights_in(0), **weights_in(1)})
    again = program_of({**weights_in(0), **weights_in(1, share=0.5)})
    kinds = [stage.kind for stage in sparse.stages]
    assert kinds[1] is kinds[2]
    assert kinds[1].digest != kinds[3].digest
    for place in (0, 3, 4):  # the embedding, the third block, the head
        assert kinds[place].digest == dense.stages[place].kind.digest
        assert kinds[place].sparse == {}
    assert again.stages[1].kind.digest == kinds[1].digest
    assert again.stages[2].kind.digest != kinds[1].digest


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_operations_and_gradients_are_those_of_the_capacity(precision):
    share, tokens = 0.25, 2 * LENGTH
    chosen = weights_in(1, share)
    dense = program_of({}, precision=precision)
    sparse = program_of(chosen, precision=precision)
    elements = sum(math.prod(dense.weights[name].shape) for name in chosen)
    saved = 2 * tokens * (elements - sum(chosen.values()))
    before, after = dense.stages[1 + 1].kind, sparse.stages[1 + 1].kind
    assert before.forward_flops - after.forward_flops == saved
    assert before.backward_flops - after.backward_flops == 2 * saved
    assert after.saved_bytes <= before.saved_bytes
    backward = after.graphs["backward"]
    (output,) = [node for node in backward.nodes if node.op == "output"]
    shapes = [node.meta["val"].shape for node in output.args[0][1:]]
    names = sparse.stages[2].weights
    for name, shape in zip(names, shapes, strict=True):
        wanted = (chosen[name],) if name in chosen else sparse.weights[name].shape
        assert tuple(shape) == tuple(wanted), name


def test_a_weight_has_the_format_and_the_bytes_of_its_capacity():
    for precision, packed, width in (("fp32", PACKED, 4), ("bf16", PACKED_SPLIT, 2)):
        chosen = weights_in(0)
        program = program_of(chosen, precision=precision)
        for name, capacity in chosen.items():
            spec = program.weights[name]
            index = max_compact_bytes(capacity, spec.elements)
            assert (spec.format, spec.capacity, spec.index_bytes) == (packed, capacity, index)
            assert spec.stream_bytes == capacity * width + index
        assert sum(w.is_sparse for w in program.weights.values()) == len(chosen)


def test_the_table_has_one_entry_per_sparse_weight():
    chosen = {**weights_in(0), "transformer.wte.weight": 300}
    ways = {name: use.way for name, use in program_of(chosen).sparse_weights.items()}
    assert ways == {
        **dict.fromkeys(weights_in(0), "sparse product"),
        "transformer.wte.weight": "sparse product; masked dense, because aten.embedding reads it",
    }


def test_products_know_their_tokens():
    program = program_of({**weights_in(0), "transformer.wte.weight": 300})
    tokens = {name: use.product_tokens for name, use in program.sparse_weights.items()}
    assert set(tokens.values()) == {(2 * LENGTH,)}


def test_what_does_not_fit_the_model_is_refused():
    layer = nn.Linear(4, 3)
    x = {"x": torch.ones(2, 4)}

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x).sum()

    with pytest.raises(
        ConfigError, match=r"expected names of layer\.weight, layer\.bias, got weight; use"
    ):
        compile_module(Loss(), x, CompileOptions(sparse={"weight": 3}))
    with pytest.raises(ConfigError, match=r"a capacity of 'layer\.weight' from 0 to 12, .* got 13"):
        compile_module(Loss(), x, CompileOptions(sparse={"layer.weight": 13}))
