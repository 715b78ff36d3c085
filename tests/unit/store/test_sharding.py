"""Which shard holds what: pieces make the weights up, and every stage is divided evenly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from store_programs import make_program

from penstock.kernels.blocks import GRANULE
from penstock.kernels.moments import GROUP
from penstock.store import ShardMap

SIZES = st.one_of(
    st.integers(0, 3 * GRANULE),
    st.integers(0, 200 * GRANULE),
    st.integers(1, 200).map(lambda n: n * GRANULE),
    st.integers(1, 200).map(lambda n: n * GRANULE - GRANULE + 1),  # tails that could add up
)
STAGES = st.lists(st.lists(SIZES, min_size=1, max_size=12), min_size=1, max_size=6)


def program_of(stages, dtype=torch.float32, tied=False):
    layers = [
        {f"{number}.{i}": (size,) for i, size in enumerate(sizes)}
        for number, sizes in enumerate(stages)
    ]
    if tied:
        layers.append({"0.0": (stages[0][0],), "last": (17,)})
    return make_program(layers, stream_dtype=dtype)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(STAGES, st.integers(1, 64), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_pieces_cover_every_weight_and_divide_stages_evenly(stages, count, dtype, tied):
    program = program_of(stages, dtype, tied)
    shard_map = ShardMap.of(program, count)
    assert shard_map == ShardMap.of(program, count)
    assert list(shard_map.pieces) == list(program.weights)
    for name, spec in program.weights.items():
        pieces = shard_map.pieces[name]
        ends = [piece.end for piece in pieces]
        assert [piece.begin for piece in pieces] == [0, *ends[:-1]]
        assert ends[-1] == spec.elements
        assert all(end % GRANULE == 0 for end in ends[:-1])
        assert len({piece.shard for piece in pieces}) == len(pieces) in (1, count)
    parts = list(shard_map.parts(program))
    for stage in program.stages:
        at_home = [name for name in stage.weights if program.home(name) == stage.index]
        loads = [
            sum(part.weights[name].stream_bytes for name in at_home if name in part.weights)
            for part in parts
        ]
        whole = [
            program.weights[name].stream_bytes
            for name in at_home
            if len(shard_map.pieces[name]) == 1
        ]
        assert sum(loads) == sum(program.weights[name].stream_bytes for name in at_home)
        assert max(loads) - min(loads) <= max(GRANULE * dtype.itemsize, *whole, 0)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 40 * GRANULE),
    st.integers(1, 9),
    st.sampled_from([1, GROUP]),
    st.integers(0, 2**32 - 1),
)
def test_spans_find_every_value_once(elements, count, group, seed):
    """Of the weight itself, and of a role with a value for many elements."""
    shard_map = ShardMap.of(program_of([[elements]]), count)
    values = np.arange(-(-elements // group))
    held = {
        piece.shard: values[piece.begin // group : -(-piece.end // group)]
        for piece in shard_map.pieces["0.0"]
    }
    assert sum(part.size for part in held.values()) == values.size
    generator = np.random.default_rng(seed)
    begin, end = sorted(generator.integers(0, values.size + 1, 2))
    found = np.full(end - begin, -1)
    for span in shard_map.spans("0.0", begin, end, group):
        assert (found[span.there] == -1).all()
        found[span.there] = held[span.shard][span.begin : span.end]
    np.testing.assert_array_equal(found, values[begin:end])


def test_equal_stages_give_shards_of_equal_size():
    """The small weights that stay whole go to another shard in every stage."""
    program = program_of([[100]] * 12)
    shard_map = ShardMap.of(program, 3)
    shares = [sum(w.elements for w in part.weights.values()) for part in shard_map.parts(program)]
    assert shares == [400, 400, 400]
