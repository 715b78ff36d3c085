"""Who hands what to whom, for every number of engines that a cluster may have."""

from __future__ import annotations

import math

import pytest

from penstock.distributed.protocol.tree_topology import children, parent, root, summing

NUMBERS = [1, 2, 3, 4, 5, 7, 8, 12, 31, 64, 192]


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("engines", NUMBERS)
def test_chunk_reaches_every_engine_once_in_logarithmic_depth(engines, shards):
    for shard in range(shards):
        for chunk in range(2):
            begin = root(shard, chunk, shards, engines)
            depth = {begin: 0}
            waiting = [begin]
            for place in waiting:
                for child in children(place, begin, engines):
                    assert child not in depth
                    assert parent(child, begin, engines) == place
                    depth[child] = depth[place] + 1
                    waiting.append(child)
            assert parent(begin, begin, engines) is None
            assert sorted(depth) == list(range(engines))
            assert max(depth.values()) <= math.log2(engines)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("engines", [8, 12, 64, 192])
def test_engines_send_about_as_much_as_they_receive(engines, shards):
    sent = [0] * engines
    for shard in range(shards):
        for chunk in range(2):
            begin = root(shard, chunk, shards, engines)
            for place in range(engines):
                sent[place] += len(children(place, begin, engines))
    assert max(sent) <= 2 * shards + 1  # of 2 * shards chunks that come


@pytest.mark.parametrize("engines", NUMBERS)
def test_every_sum_is_node_of_micro_batch_tree(engines):
    # One micro-batch each: what an engine adds is then a whole node, which travels as one sum.
    made = summing(engines)
    came = [0] * engines
    for one in made:
        for target in (one.own_target, one.target if one.adds else None):
            if target is not None:
                came[target] += 1
        if one.adds:
            width = 1 << (one.end - one.begin - 1).bit_length()
            assert one.begin % width == 0
            assert one.end == min(one.begin + width, engines)
    assert [count for count, one in zip(came, made, strict=True) if one.adds] == [2] * (engines - 1)
    assert [one.target for one in made if one.adds].count(None) == (engines > 1)
