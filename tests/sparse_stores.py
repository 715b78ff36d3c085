"""Stores of sparse weights for tests: programs by hand, gradients that depend on seed and step."""

import dataclasses
import functools

import numpy as np
import torch
from sharded_stores import rule_of
from store_programs import CONSTANT, make_program

from penstock.sparsity import (
    Densify,
    RigL,
    SparseEvolutionaryTraining,
    StaticMasks,
    compact_bytes,
    exchanging,
    gradual_magnitude,
    max_compact_bytes,
)
from penstock.store import (
    AdamW,
    CommitRule,
    DramStore,
    GroupSettings,
    MaskRule,
    ShardedDramStore,
    ShardMap,
)
from penstock.weight_formats import format_of

LAYERS = (
    {"embed": (40, 61), "0.weight": (130, 300), "0.bias": (130,)},
    {"1.weight": (64, 640), "1.bias": (1,), "1.small": (9, 300)},
    {"2.weight": (4099, 9), "0.weight": (130, 300)},
)
"""`0.weight` is tied; of the sparse weights, `1.small` is too small to be cut."""
SPARSE = ("0.weight", "1.weight", "1.small", "2.weight")
DENSITY = 0.2
STEPS = 8


def policies():
    """Return every policy, with changes within 8 steps."""
    densities = dict.fromkeys(SPARSE, DENSITY)
    every = {"begin": 1, "end": 7, "every": 2, "fraction": 0.4}
    set_ = exchanging(SparseEvolutionaryTraining, 10, **every)
    return {
        "static": StaticMasks(),
        "gmp": gradual_magnitude(densities, 10, begin=1, end=7, every=2, initial=0.3),
        "set": set_,
        "rigl": exchanging(RigL, 10, **every),
        "densify": Densify(exchanging(RigL, 10, **every), 5),
    }


def sparse_program(policy, stream_dtype=torch.float32, layers=LAYERS, sparse=SPARSE):
    """Return a program with the sparse weights' capacities of a policy."""
    program = make_program(layers, stream_dtype=stream_dtype)
    weights = dict(program.weights)
    for name in sparse:
        spec = weights[name]
        share = {"gmp": 0.7, "densify": 1.0}.get(policy, DENSITY)
        capacity = round(share * spec.elements)
        weights[name] = dataclasses.replace(
            spec,
            format=format_of(stream_dtype, is_sparse=True),
            capacity=capacity,
            index_bytes=max_compact_bytes(capacity, spec.elements),
        )
    return dataclasses.replace(program, weights=weights)


def mask_rule(policy, initial="random", seed=3):
    """Return the rule of a policy's masks."""
    share = 0.7 if policy == "gmp" else DENSITY
    return MaskRule(policies()[policy], seed, initial, dict.fromkeys(SPARSE, share))


def sparse_store(holding, masks, precision="fp32", optimizer=None, **settings):
    """Return a store in memory, of a program or of a shard."""
    group = GroupSettings(learning_rate_scale=1.0, weight_decay=0.1, group=None)
    return DramStore(
        holding,
        precision,
        optimizer or AdamW(0.9, 0.95, 1e-8),
        dict.fromkeys(holding.weights, group),
        CommitRule(settings.get("schedule", CONSTANT), settings.get("clip_norm")),
        settings.get("gradient_dtype", torch.float32),
        masks=masks,
    )


def sharded_sparse(program, count, masks, precision="fp32", optimizer=None, **settings):
    """Return a store in memory in `count` shards, with the settings of `sparse_store`."""
    shard_map = ShardMap.of(program, count)
    make = functools.partial(sparse_store, masks=masks, precision=precision, optimizer=optimizer)
    shards = [make(part, **settings) for part in shard_map.parts(program)]
    roles = (optimizer or AdamW(0.9, 0.95, 1e-8)).roles
    return ShardedDramStore(program, shard_map, shards, roles, rule_of(settings), masks)


def step(store, seed, scale=1.0):
    """Do a step: fetch every stage, send gradients of the dense weights at the masks; return the
    commit and what streamed."""
    store.discard()
    streamed, generator = [], np.random.default_rng([seed, store.step])
    for stage in store.program.stages:
        for name, view in zip(stage.weights, store.fetch(stage.index), strict=True):
            if name in SPARSE:
                streamed.append((name, view.version, view.dense_gradient, view.index.to_bytes()))
                streamed.append(view.values.clone())
            else:
                streamed.append(view.clone())
    for stage in reversed(store.program.stages):
        views = dict(zip(stage.weights, store.fetch(stage.index), strict=True))
        sent = []
        for name in stage.weights:
            spec = store.program.weights[name]
            dense = generator.standard_normal(spec.elements, dtype=np.float32) * np.float32(scale)
            gradient = torch.from_numpy(np.asarray(dense))
            if name in SPARSE and not views[name].dense_gradient:
                sent.append(gradient[torch.from_numpy(views[name].index.positions())])
            else:
                sent.append(gradient.view(spec.shape))
        store.receive(stage.index, sent)
    return store.commit(), streamed


def assert_same_streams(ours, theirs):
    """Assert that two stores have sent the same bits."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, tuple):
            assert one == other
        else:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def assert_same_sparse_state(ours, theirs):
    """Assert that two stores agree in every bit, masks and ages included."""
    assert ours.step == theirs.step
    assert ours.mask_sizes == theirs.mask_sizes
    for name in theirs.program.weights:
        ours_master, theirs_master = ours.master(name), theirs.master(name)
        assert torch.equal(ours_master.view(torch.int32), theirs_master.view(torch.int32)), name
        assert ours.roles(name) == theirs.roles(name), name
        for role, stored in theirs.roles(name).items():
            size = int(np.prod(stored.shape))
            mine, other = (s.read(name, role, 0, size) for s in (ours, theirs))
            assert mine.tobytes() == other.tobytes(), (name, role)
        if theirs.mask(name) is not None:
            assert compact_bytes(ours.mask(name)) == compact_bytes(theirs.mask(name))
    assert ours.content_hash() == theirs.content_hash()
